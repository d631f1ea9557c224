"""The report: every figure made of records, every point traceable to its line."""

import json
import re

import pytest

from eval.records import append_record, common_fields, eval_record
from eval.report import figures, label, load_runs, write_report


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
    found = {figure.key: figure for figure in figures(load_runs(runs).records)}
    assert set(found) == {
        "sparsity-wikitext-word_perplexity",
        "groups-wikitext-word_perplexity",
        "speed-decode-wikitext-word_perplexity",
        "sparsity-arc_easy-acc",
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
    for cell in ("wikitext", "20 ± 0.5", "50.0%", "sha256:aaaaaaaaaaaa", "62"):
        assert cell in row
    assert "1.50x" in text
    assert "Files without result records: run-a/requests-arc_easy.jsonl" in text
    assert str(tmp_path) not in text + page
    before = {p.name: p.read_bytes() for p in (out / "figures").iterdir()}
    write_report(runs, out)
    assert {p.name: p.read_bytes() for p in (out / "figures").iterdir()} == before


def test_text_from_records_is_escaped(tmp_path):
    append_record(tmp_path / "eval.jsonl", wide(1.0, 0.1, task="<b>|x"))
    write_report([tmp_path], tmp_path / "out")
    assert "<b>" not in (tmp_path / "out" / "report.html").read_text()
    assert "<b>\\|x" in (tmp_path / "out" / "report.md").read_text()


def test_broken_runs_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run at .*absent"):
        load_runs([tmp_path / "absent"])
    with pytest.raises(ValueError, match="no result records in"):
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
