"""The report: every figure made of records, every point traceable to its line."""

import json
import re

import pytest

from eval.records import append_record, common_fields, eval_record
from eval.report import figures, label, load_runs, with_error, write_report
from train.run_config import CalibrateConfig, dump


def accounting(flops):
    return {"attention": flops, "ffn": flops} | dict.fromkeys(
        ("paper", "parameters", "flops", "bytes"), flops
    )


def wide(value, flops, *, group=128, task="wikitext", metric="word_perplexity", **more):
    recipe = {
        "method": "wide",
        "stage": 1,
        "ffn_group": group,
        "budget": "separate",
        "target": flops,
    }
    settings = {
        "model": "sha256:" + "a" * 64,
        "task": task,
        "metric": metric,
        "value": value,
        "stderr": 0.5,
        "n": 62,
        "accounting": accounting(flops),
        "recipe": recipe,
        "seed": 0,
    }
    return eval_record(**(settings | more))


@pytest.fixture
def runs(tmp_path):
    """Two run folders: WIDE at two targets and two group sizes, dense, speeds, layer errors."""
    first, second = tmp_path / "run-a", tmp_path / "run-b"
    layers = {"attention": [0.1, 0.4], "ffn": [0.3, 0.2]}
    append_record(first / "eval.jsonl", wide(20.0, 0.5, layers=layers))
    append_record(first / "eval.jsonl", wide(15.0, 0.25))
    append_record(first / "eval.jsonl", wide(17.0, 0.5, group=32))
    append_record(
        first / "eval.jsonl",
        wide(
            0.6,
            0.5,
            task="arc_easy",
            metric="acc",
            speedup={"prefill": {"measured": 1.4, "ideal": 1.7}},
        ),
    )
    (first / "requests-arc_easy.jsonl").write_text('{"settings": {}}\n{"answers": {}}\n')
    append_record(
        second / "eval.jsonl",
        wide(12.0, 0.0, recipe={"method": "dense"}, model="base", stderr=None),
    )
    speed = common_fields("e2e") | {
        "model": "sha256:" + "a" * 64,
        "phase": "decode",
        "batch": 1,
        "tokens": 16384,
        "sparsity": 0.5,
        "mask": "trained",
        "variant": "wide",
        "ms": 12.0,
        "speedup": 1.5,
    }
    append_record(second / "e2e.jsonl", speed)
    append_record(second / "e2e.jsonl", speed | {"variant": "dense", "speedup": None})
    part = {"error": [0.1, 0.2], "cosine": [0.9, 0.8]}
    append_record(
        second / "errors.jsonl",
        common_fields("errors")
        | {
            "model": "m",
            "task": "wikitext2",
            "tokens": 48,
            "layers": {"attention": part, "ffn": part, "stream": part},
            "accounting": accounting(0.5),
            "recipe": {"method": "wide"},
        },
    )
    return [first, second]


def test_figures_are_the_records(runs):
    found = {figure.key: figure for figure in figures(load_runs(runs))}
    assert set(found) == {
        "sparsity-wikitext-word_perplexity",
        "groups-wikitext-word_perplexity",
        "speed-decode-wikitext-word_perplexity",
        "speed-prefill-arc_easy-acc",
        "speed-decode-arc_easy-acc",
        "allocation",
        "layers-error-0",
        "layers-cosine-0",
    }
    lines = {s.name: s.points for s in found["sparsity-wikitext-word_perplexity"].series}
    assert [(p.x, p.y, p.source, p.error) for p in lines["wide, stage 1, G 128, separate"]] == [
        (0.25, 15.0, "run-a/eval.jsonl:2", 0.5),
        (0.5, 20.0, "run-a/eval.jsonl:1", 0.5),
    ]
    assert [(p.x, p.y) for p in lines["dense"]] == [(0.0, 12.0)]
    groups = found["groups-wikitext-word_perplexity"]
    assert groups.log_x
    half = next(s for s in groups.series if s.name == "wide, stage 1, separate, 50 %")
    assert [(p.x, p.y) for p in half.points] == [(32, 17.0), (128, 20.0)]
    [own] = found["speed-prefill-arc_easy-acc"].series
    assert [(p.x, p.y, p.source) for p in own.points] == [(1.4, 0.6, "run-a/eval.jsonl:4")]
    [joined] = found["speed-decode-arc_easy-acc"].series
    assert joined.points[0].source == "run-a/eval.jsonl:4 + run-b/e2e.jsonl:1"
    assert joined.name == "wide, stage 1, G 128, separate; batch 1, 16384 tokens"
    assert {
        s.name.rpartition(": ")[2]: [p.y for p in s.points] for s in found["allocation"].series
    } == {
        "attention": [0.1, 0.4],
        "ffn": [0.3, 0.2],
    }


def test_files_say_what_they_show(runs, tmp_path):
    out = tmp_path / "out"
    path = write_report(runs, out)
    text, page = path.read_text(), (out / "report.html").read_text()
    for figure in re.findall(r"figures/([\w-]+)\.svg", text):
        data = json.loads((out / "figures" / f"{figure}.json").read_text())
        assert (out / "figures" / f"{figure}.svg").read_text().startswith("<?xml")
        for series in data["series"]:
            for point in series["points"]:
                assert point["source"] in page
        assert f"figures/{figure}.svg" in page
    row = next(line for line in text.splitlines() if "run-a/eval.jsonl:1 " in line)
    for cell in ("wikitext", "20.00 ± 0.50", "50.0%", "sha256:aaaaaaaaaaaa", "62"):
        assert cell in row
    assert "1.50x" in text
    assert "Files without result records: run-a/requests-arc_easy.jsonl" in text
    assert str(tmp_path) not in text + page
    before = {p.name: p.read_bytes() for p in (out / "figures").iterdir()}
    write_report(runs, out)
    assert {p.name: p.read_bytes() for p in (out / "figures").iterdir()} == before


def test_a_speed_measured_with_the_quality_is_in_its_row(runs, tmp_path):
    text = write_report(runs, tmp_path / "out").read_text()
    row = next(line for line in text.splitlines() if "run-a/eval.jsonl:4 " in line)
    assert "1.40x (ideal 1.70x)" in row
    assert "prefill speedup" in text
    assert "decode speedup" not in text  # none was measured


def test_a_record_met_twice_counts_once(runs, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((runs[0] / "eval.jsonl").read_bytes())
    once, twice = load_runs(runs), load_runs([*runs, copy])
    assert twice.records == once.records


def test_a_record_says_its_models_name_without_the_way_to_it(tmp_path):
    append_record(tmp_path / "eval.jsonl", wide(1.0, 0.1, name="/runs/s1/model"))
    text = write_report([tmp_path], tmp_path / "out").read_text()
    assert "| s1/model (sha256:aaaaaaaaaaaa) |" in text


def training_run(folder, *, updates=4, sparsity=0.25, loss=5.0):
    """What `wide calibrate` leaves while it goes on (`tests/train/test_run.py` makes real ones)."""
    config = CalibrateConfig(
        sparsity=sparsity, updates=updates, sequences_per_update=2, sequence_length=8,
        data=("train.txt",), evaluation_data=("some/where/held.txt",),
    )  # fmt: skip
    folder.mkdir()
    dump(config, folder / "config.yaml")
    skip = dict.fromkeys(("attention", "ffn", "paper", "parameters", "flops", "bytes"), sparsity)
    lines = [
        {"kind": "train", "update": u, "lm_loss": loss - u, "hard_skip": skip | {"ffn": u / 10}}
        for u in range(updates)
    ]
    evaluated = {"update": updates - 1, "tokens": 1400, "skip": skip}
    lines.append(evaluated | {"kind": "held_out", "token_perplexity": 99.0})
    lines.append({"kind": "threshold", "update": updates - 1})
    lines.append(evaluated | {"kind": "final", "token_perplexity": 1000 * sparsity})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_training_runs_are_reported_from_their_metrics(tmp_path):
    runs = [training_run(tmp_path / "a"), training_run(tmp_path / "b", sparsity=0.5)]
    found = {figure.key: figure for figure in figures(load_runs(runs))}
    assert set(found) == {"held-out-held-txt", "training-loss", "training-skip"}
    [quality] = found["held-out-held-txt"].series
    assert quality.name == "wide, stage 1, G 128, separate, 4 updates"
    assert [(p.x, p.y, p.source) for p in quality.points] == [
        (0.25, 250.0, "a/metrics.jsonl:7"),  # after the cut was set, not before
        (0.5, 500.0, "b/metrics.jsonl:7"),
    ]
    losses = {s.name: s.points for s in found["training-loss"].series}
    assert [(p.x, p.y, p.source) for p in losses["a"]][1] == (1, 4.0, "a/metrics.jsonl:2")
    rates = {s.name: [p.y for p in s.points] for s in found["training-skip"].series}
    assert rates["b: ffn"] == [0.0, 0.1, 0.2, 0.3]
    alone = figures(load_runs(runs[:1]))
    assert [figure.key for figure in alone] == ["training-loss", "training-skip"]
    text = write_report(runs, tmp_path / "out").read_text()
    row = next(line for line in text.splitlines() if "a/metrics.jsonl:7" in line)
    recipe = "wide, stage 1, G 128, separate, 25 %, 4 updates"
    for cell in ("a", recipe, "64", "held.txt", "250", "25.0%"):
        assert f" {cell} |" in row
    assert "Measured on" not in text  # metrics do not say
    assert "some/where" not in text
    with (tmp_path / "a" / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "tr')  # as a kill leaves it, or a run that goes on
    assert len(load_runs(runs).trained[0].lines) == 7
    with (tmp_path / "a" / "metrics.jsonl").open("a") as stream:
        stream.write("\n")
    with pytest.raises(ValueError, match=r"a/metrics\.jsonl:8: not a line of training metrics"):
        load_runs(runs)


def test_what_was_measured_on_less_text_is_drawn_apart(tmp_path):
    for value, flops, n in ((20.0, 0.5, 62), (12.0, 0.0, 62), (30.0, 0.5, 8), (18.0, 0.0, 8)):
        append_record(tmp_path / "eval.jsonl", wide(value, flops, n=n))
    found = {figure.key: figure for figure in figures(load_runs([tmp_path]))}
    assert set(found) == {
        "sparsity-wikitext--n-62-word_perplexity",
        "sparsity-wikitext--n-8-word_perplexity",
    }
    [line] = found["sparsity-wikitext--n-8-word_perplexity"].series
    assert [p.y for p in line.points] == [18.0, 30.0]


def test_a_studys_records_are_shown_and_other_suites_counted(tmp_path):
    more = {"suite": "study", "row": "a", "part": "perplexity", "settings": {}}
    append_record(tmp_path / "study.jsonl", wide(20.0, 0.5) | more)
    append_record(tmp_path / "study.jsonl", wide(12.0, 0.0) | more)
    other = {"decisions": 1, "float32_flipped": 0, "bf16_error": 0.0, "bf16_plain_error": 0.0}
    append_record(tmp_path / "engine.jsonl", common_fields("engine") | {"model": "m"} | other)
    text = write_report([tmp_path], tmp_path / "out").read_text()
    assert "figures/sparsity-wikitext-word_perplexity.svg" in text
    assert "study.jsonl:2 |" in text
    assert "Records of suites that this report does not show: engine 1" in text
    assert "does not show: engine 1" in (tmp_path / "out" / "report.html").read_text()


def test_folders_of_the_same_name_are_told_apart(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    runs = [training_run(tmp_path / "one" / "stage1"), training_run(tmp_path / "two" / "stage1")]
    [losses] = [f for f in figures(load_runs(runs)) if f.key == "training-loss"]
    assert [s.name for s in losses.series] == ["one/stage1", "two/stage1"]
    assert losses.series[1].points[0].source == "two/stage1/metrics.jsonl:1"


def test_perplexities_of_different_magnitudes_get_a_logarithmic_axis(tmp_path):
    for value in (20.0, 2000.0):
        append_record(tmp_path / "eval.jsonl", wide(value, 0.5))
        append_record(tmp_path / "eval.jsonl", wide(value / 1e4, 0.5, metric="acc", task="t"))
    found = {figure.key: figure for figure in figures(load_runs([tmp_path]))}
    assert found["sparsity-wikitext-word_perplexity"].log_y
    assert not found["sparsity-t-acc"].log_y
    write_report([tmp_path], tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (95.736, 11.567, "96 ± 12"),
        (103.96, 9.39, "104.0 ± 9.4"),
        (2004.7, 215.6, "2,005 ± 216"),
        (0.636, 0.0305, "0.636 ± 0.030"),
        (21.7654, None, "21.77"),
        (0.5, 0.0, "0.5"),
    ],
)
def test_values_have_the_places_their_errors_allow(value, error, text):
    assert with_error(value, error) == text


def test_text_from_records_is_escaped(tmp_path):
    append_record(tmp_path / "eval.jsonl", wide(1.0, 0.1, task="<b>|x"))
    write_report([tmp_path], tmp_path / "out")
    assert "<b>" not in (tmp_path / "out" / "report.html").read_text()
    assert "<b>\\|x" in (tmp_path / "out" / "report.md").read_text()


def test_broken_runs_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run at .*absent"):
        load_runs([tmp_path / "absent"])
    with pytest.raises(ValueError, match="nothing to report in"):
        load_runs([tmp_path])
    path = tmp_path / "eval.jsonl"
    append_record(path, wide(1.0, 0.1))
    with path.open("a") as stream:
        stream.write('{"suite": "eval"}\n')
    with pytest.raises(ValueError, match=r"eval\.jsonl:2: a record of suite 'eval' lacks time"):
        load_runs([tmp_path])


def test_labels():
    assert label({"method": "dense"}) == "dense"
    recipe = {"method": "wide", "stage": 2, "ffn_group": 64, "budget": "paper", "target": 0.25}
    assert label(recipe) == "wide, stage 2, G 64, paper, 25 %"
    assert label(recipe, without=["target", "ffn_group"]) == "wide, stage 2, paper"
    # What a WIDE folder says: a target a module.
    assert label(recipe | {"target": {"attention": 0.5, "ffn": 0.5}}).endswith("paper, 50 %")
    apart = label(recipe | {"target": {"attention": 0.5, "ffn": 0.25}})
    assert apart.endswith("paper, attention 50 %, ffn 25 %")
    assert label(recipe | {"target": {"ffn": 0.25}}).endswith("paper, ffn 25 %")
    # What makes another model is in its name.
    more = {"attn_group": 3, "updates": 10_000, "distill": "only", "seed": 1}
    assert label(recipe | more) == (
        "wide, stage 2, G 64, heads 3, paper, 25 %, distill only, 10,000 updates"
    )
    assert label(recipe | {"distill": "off"}) == label(recipe)
