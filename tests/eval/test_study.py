"""The study: what is planned, what is left of it, and tiny rows made, measured and recorded."""

import collections
import dataclasses
import functools
import gzip
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

from eval import bench_e2e
from eval.bench_e2e import E2EConfig
from eval.e2e_runs import dense_variants
from eval.records import ACCOUNTING, append_record, read_records
from eval.study import document, schedule, speed
from eval.study.__main__ import main
from eval.study.expectations import expectations
from eval.study.figures import figures
from eval.study.findings import Result, bootstrap, difference, planned, read
from eval.study.locks import Lock
from eval.study.make import make, rehearse
from eval.study.measure import measure
from eval.study.plan import TASKS, Recipe, Row, plan
from eval.study.schedule import Job, is_ready, jobs_of, missing, with_parents
from eval.study.settings import CONTENTS, Measured, Settings, check_contents, parts_of
from eval.study.trainings import trainings
from tests.eval.conftest import TINY, tiny_model
from train.evaluate import make_skips
from train.records import to_record
from wide_jax.hf.pretrained import tensors_of
from wide_jax.hf.save import save_model
from wide_jax.shapes import SHAPES, shape

RECIPE = Recipe(updates=2, long_updates=3, group=8, groups=(16,), heads=2, head_groups=(1,))
ROWS = {row.id: row for row in plan(RECIPE)}
WIDE = "wide-g8-h2-separate-50-s1-u2"
STAGE2 = "wide-g8-h2-separate-50-s2-u2"
CUT = "threshold-g8-h2-50"
DEPTH = "depth-separate-50-s1-u2"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("model") / "dense"
    model = tiny_model(num_hidden_layers=1)
    save_model(folder, model.config, tensors_of(model))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Calibration text, a text to score and one task, of a few words."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)

    def words(count):
        return " ".join(rng.choice(["a cat", "the sea", "old", "top hat"]) for _ in range(count))

    choices = {"text": [words(n) for n in (1, 2, 3, 2)], "label": list("ABCD")}
    files = {
        "calib.jsonl.gz": [{"text": words(30)} for _ in range(12)],
        "text.jsonl.gz": [{"page": words(60)} for _ in range(3)],
        "tasks/arc_easy_test.jsonl.gz": [
            {"id": str(n), "question": words(4), "choices": choices, "answerKey": "ABCD"[n % 4]}
            for n in range(4)
        ],
    }
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory, model_folder, data_dir):
    out = tmp_path_factory.mktemp("study")
    return Settings(
        out=out,
        record=out / "study.jsonl",
        model=str(model_folder),
        data_dir=data_dir,
        calibration=Path("calib.jsonl.gz"),
        text=Path("text.jsonl.gz"),
        dtype="float32",
        sequence_length=32,
        sequences_per_update=2,
        router_rank=4,
        threshold_rows=2,
        window=64,
        max_windows=3,
        error_windows=2,
        batch_size=2,
        tasks=("arc_easy",),
        limit=3,
    )


@pytest.fixture(scope="module", autouse=True)
def compile_cache(tmp_path_factory):
    """What is compiled once is found again, as in the processes of a study."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for values in (options, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is options:
            jax.clear_caches()  # what other tests have compiled in this process is not on disk
            yield


@pytest.fixture(autouse=True)
def caches(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WIDE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def shapes_unchecked():
    """Compiling without running makes trees of what is no array."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def console():
    return Console(quiet=True)


def records(settings):
    return [record for _, record in read_records(settings.record)]


def speed_table_of(found):
    """The document's table of records of rows that are in no plan of its own."""
    results = {}
    for record in found:
        result = results.setdefault(record["row"], Result(ROWS[record["row"]], {}, {}))
        result.records[record["part"], record["task"], record["metric"]] = record
    return document.speed_table(results)


def test_the_plan_is_issue_10s():
    rows = plan()
    ids = [row.id for row in rows]
    assert len(set(ids)) == len(ids)
    assert ids[0] == "dense"
    assert {row.method for row in rows} == {
        "dense",
        "threshold",
        "wide",
        "depth",
        "layer",
        "static",
    }
    assert {row.ffn_group for row in rows if row.method == "wide"} == {16, 32, 64, 128, 256, 512}
    assert {row.attn_group for row in rows if row.method == "wide"} == {1, 3, 9}
    assert {row.budget for row in rows if row.budget} == {"paper", "separate", "flops"}
    assert {row.target for row in rows if row.target} == {0.1, 0.25, 0.3, 0.5, 0.7}
    headline = [r for r in rows if r.method == "wide" and (r.ffn_group, r.attn_group) == (64, 3)]
    for target in (0.25, 0.5):
        for stage in (1, 2):
            same = [r for r in headline if (r.target, r.stage) == (target, stage)]
            assert {r.seed for r in same} == {0, 1, 2}
            assert {r.distill for r in same} == {"off", "beside"}
    assert max(row.updates or 0 for row in rows) == Recipe().long_updates


def test_a_stage_2_row_comes_after_the_stage_1_row_it_starts_from():
    seen = set()
    for row in plan():
        assert row.parent is None or row.parent.id in seen
        seen.add(row.id)


def test_rows_of_other_lengths_are_other_rows():
    assert not {r.id for r in plan() if r.stage} & {r.id for r in plan(RECIPE) if r.stage}


def test_the_first_wave_comes_whole_before_the_second():
    jobs = jobs_of(plan())
    waves = [job.row.wave for job in jobs if job.part in ("perplexity", "tasks", "errors")]
    assert waves == sorted(waves)
    late = [job.part in ("whole_tasks", "generation") for job in jobs]
    assert late == sorted(late)
    models = [job.row.id for job in jobs if job.part == "model"]
    assert models == [row.id for row in plan() if row.method != "dense"]
    assert len(set(jobs)) == len(models) + sum(len(parts_of(row)) for row in plan())


def test_choosing_a_stage_2_row_brings_its_stage_1():
    found = with_parents([ROWS[STAGE2]], plan(RECIPE))
    assert [row.id for row in found] == [WIDE, STAGE2]
    assert ["generation" in parts_of(row) for row in found] == [False, True]


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_trained_row_is_made_measured_and_known(settings, console):
    row = ROWS[WIDE]
    parts = ("perplexity", "tasks", "errors")
    jobs = [Job(row, part) for part in ("model", *parts)]
    assert missing(jobs, settings) == tuple(jobs)
    make(row, settings, console)
    assert settings.is_made(row)
    assert missing(jobs, settings) == tuple(jobs[1:])
    for part in parts:
        measure(row, part, settings, console)
    assert missing(jobs, settings) == ()
    count = len(records(settings))
    measure(row, "perplexity", settings, console)  # known: nothing is measured again
    assert len(records(settings)) == count
    found = {r["part"]: r for r in records(settings) if r["row"] == WIDE}
    assert found.keys() == {"perplexity", "tasks", "errors"}
    perplexity = found["perplexity"]
    assert perplexity["recipe"]["method"] == "wide"
    assert perplexity["settings"]["tokens_per_update"] == 64
    assert perplexity["n"] == 3 * 63
    for module in ("attention", "ffn"):
        rates = perplexity["layers"][module]
        assert len(rates) == 1
        assert np.mean(rates) == pytest.approx(perplexity["accounting"][module])
    assert found["tasks"]["task"] == "arc_easy"
    assert found["tasks"]["n"] == 3
    assert found["errors"]["value"] == found["errors"]["errors"]["stream"][-1]


@pytest.mark.usefixtures("shapes_unchecked")
def test_one_row_trains_at_a_time(settings, console, tmp_path, monkeypatch):
    """Another waits before its first update, compiled; its turn ends with its last update."""
    row, other = ROWS[WIDE], dataclasses.replace(settings, out=tmp_path)
    happened, waits = [], threading.Event()
    hold, absorb, cut = Lock.hold, to_record, make_skips

    def holding(self):
        name = Path(self._file.name).name
        if threading.current_thread() is trainer and name == "training":
            happened.append("waits")
            waits.set()
        hold(self)

    def recording(metrics, *args, **options):
        happened.append(f"update {int(metrics.update)}")
        return absorb(metrics, *args, **options)

    def cutting(*args):
        with Lock(other.locks, "training") as free:
            hold(free)  # the training has let go of it
            happened.append("cut")
        return cut(*args)

    monkeypatch.setattr(Lock, "hold", holding)
    monkeypatch.setattr("train.run.to_record", recording)
    monkeypatch.setattr("train.run.make_skips", cutting)
    trainer = threading.Thread(target=make, args=(row, other, console), daemon=True)
    with Lock(other.locks, "training") as training:
        training.hold()
        trainer.start()
        assert waits.wait(timeout=120)
        time.sleep(0.2)  # for an update that does not wait
        happened.append("released")
    trainer.join(timeout=120)
    assert happened == ["waits", "released", "update 0", "update 1", "cut"]


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_repeated_training_takes_the_rows_place_when_as_much_is_measured(
    settings, console, tmp_path
):
    """A row of the default plan, so that its figures can be read: of one model, never of both."""
    row = {row.id: row for row in plan()}["wide-g16-h3-separate-50-s1-u500"]
    first, again = (
        dataclasses.replace(settings, out=tmp_path / name, record=tmp_path / "study.jsonl")
        for name in ("first", "again")
    )
    for one, trained in ((first, WIDE), (again, WIDE.replace("50", "70"))):
        make(ROWS[trained], settings, console)
        shutil.copytree(settings.folder(ROWS[trained]), one.folder(row))
    measure(row, "perplexity", first, console)
    measure(row, "tasks", first, console)
    assert read(first.record)[row.id].part("tasks") is not None
    log = {"part": "training", "task": "training", "metric": "lm_loss"}  # the repetition has none
    append_record(first.record, records(first)[0] | log)
    measure(row, "perplexity", again, console)
    one, other = (r for r in records(again) if r["part"] == "perplexity")
    assert one["model"] != other["model"]
    assert missing([Job(row, part) for part in ("perplexity", "tasks")], again) == (
        Job(row, "tasks"),
    )
    found = read(again.record)[row.id]
    assert {r["model"] for r in found.records.values()} == {one["model"]}
    assert found.part("tasks") is not None
    measure(row, "tasks", again, console)
    found = read(again.record)[row.id]
    assert {r["model"] for r in found.records.values()} == {other["model"]}
    assert found.part("tasks") is not None
    count = len(records(again))
    measure(row, "perplexity", again, console)  # known
    assert len(records(again)) == count


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_measured_rows_training_log_is_recorded_once(settings, console, tmp_path):
    row, own = ROWS[WIDE], dataclasses.replace(settings, record=tmp_path / "study.jsonl")
    make(row, own, console)
    assert list(trainings(own, [row])) == []  # nothing is measured
    measure(row, "perplexity", own, console)
    [found] = trainings(own, [row])
    [measured] = records(own)
    assert found["model"] == measured["model"]
    lines = (settings.folder(row) / "metrics.jsonl").read_text().splitlines()
    [last] = [json.loads(line) for line in lines if '"train"' in line]
    assert found["log"] == {name: [last[name]] for name in ("update", "lm_loss", "gradient_norm")}
    assert "| `wide` | 1 | 1 |" in document.training_table(
        {WIDE: Result(row, {("training", "training", "lm_loss"): found}, {})}
    )
    append_record(own.record, found)
    assert list(trainings(own, [row])) == []
    # The log beside another model than the one whose figures count says nothing of it.
    for part in ("perplexity", "errors"):
        append_record(own.record, measured | {"model": "another", "part": part})
    assert list(trainings(own, [row])) == []


@pytest.mark.usefixtures("shapes_unchecked")
def test_stage_2_goes_on_from_its_stage_1(settings, console):
    make(ROWS[WIDE], settings, console)  # made already, unless this test runs alone
    make(ROWS[STAGE2], settings, console)
    measure(ROWS[STAGE2], "perplexity", settings, console)
    [record] = [r for r in records(settings) if r["row"] == STAGE2]
    assert record["recipe"]["stage"] == 2
    folder = settings.folder(ROWS[STAGE2])
    assert (folder / "model" / "adapter_model.safetensors").exists()
    assert f"run: {settings.folder(ROWS[WIDE])}" in (folder / "config.yaml").read_text()


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_untrained_baseline_meets_its_target_and_says_what_it_can_save(settings, console):
    make(ROWS[CUT], settings, console)
    measure(ROWS[CUT], "perplexity", settings, console)
    [record] = [r for r in records(settings) if r["row"] == CUT]
    assert 0.3 < record["accounting"]["ffn"] < 0.7  # of another text and longer windows
    assert 0 < record["savable_flops"] < record["accounting"]["flops"]
    assert record["recipe"]["stage"] is None


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU to measure on")
@pytest.mark.usefixtures("shapes_unchecked")
def test_without_a_gpu_speed_says_so_and_records_nothing(settings, console):
    make(ROWS[WIDE], settings, console)
    with pytest.raises(RuntimeError, match=r"--parts .*,whole_tasks,generation$"):
        measure(ROWS[WIDE], "speed", settings, console)
    assert not any(part == "speed" for _, part, *_ in Measured.read(settings).found)


@pytest.mark.usefixtures("shapes_unchecked")
def test_speed_is_recorded_of_both_shapes_and_goes_on_after_the_first(
    settings, console, monkeypatch
):
    """All but the device, whose times mean nothing here: the large shape is a tiny one."""
    row = ROWS[WIDE]
    make(row, settings, console)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    dense = dense_variants()[:1]  # without cuDNN's attention
    monkeypatch.setattr(bench_e2e, "dense_variants", lambda: dense)
    large = dataclasses.replace(TINY, num_hidden_layers=3, intermediate_size=64)
    monkeypatch.setitem(SHAPES, "llama-3.1-8b", large)
    monkeypatch.setattr(speed, "TOKENS", 48)
    monkeypatch.setattr(
        speed, "E2EConfig", functools.partial(E2EConfig, steps=2, rounds=3, phases=("prefill",))
    )
    own = speed.speeds(row, ("own_shape",), settings, console)
    kept = {"suite": "study", "row": row.id, "part": "speed", "settings": settings.recorded()}
    append_record(settings.record, next(own) | kept)
    assert missing([Job(row, "speed")], settings) == (Job(row, "speed"),)
    measure(row, "speed", settings, console)
    assert missing([Job(row, "speed")], settings) == ()
    found = {r["task"]: r for r in records(settings) if r["part"] == "speed"}
    assert found.keys() == {"own_shape", "llama-3.1-8b"}
    assert len({r["model"] for r in found.values()}) == 1
    own = found["own_shape"]["speeds"]
    assert [(one["phase"], one["mask"]) for one in own] == [
        ("prefill", "trained"),
        ("decode", "trained"),
    ]
    assert own[0]["speedup"] == pytest.approx(own[0]["dense_ms"] / own[0]["ms"])
    assert found["own_shape"]["value"] == own[0]["speedup"]
    assert found["own_shape"]["accounting"] == own[0]["accounting"]
    carried = found["llama-3.1-8b"]["speeds"]
    assert [one["mask"] for one in carried] == ["trained_statistics", "random_same_rates"]
    assert {(one["ffn_group"], one["tokens"]) for one in carried} == {(16, 48)}
    assert carried[0]["rates"] == carried[1]["rates"]
    assert carried[0]["masks_of"]["places"] == {"layers": 1, "attention": 2, "ffn": 4}
    assert "| llama-3.1-8b | prefill, 48 | 16 |" in speed_table_of(records(settings))


def test_a_large_shapes_groups_are_the_same_share_of_its_ffn():
    small, large = shape("smollm2-135m"), shape("llama-3.1-8b")
    rows = {row.ffn_group: row for row in plan() if row.method == "wide"}
    found = {g: speed.large_group(row, small, large) for g, row in rows.items()}
    assert (found[16], found[64], found[512]) == (128, 512, 4096)


def test_the_dense_row_needs_nothing_made(settings, console):
    assert settings.is_made(ROWS["dense"])
    measure(ROWS["dense"], "perplexity", settings, console)
    [record] = [r for r in records(settings) if r["row"] == "dense"]
    assert record["accounting"]["flops"] == 0
    assert not any(job.part == "errors" for job in jobs_of([ROWS["dense"]]))


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_rehearsal_leaves_nothing(settings, console):
    row = ROWS["depth-separate-50-s2-u2"]
    before = {path.name for path in settings.out.iterdir()} | {"locks"}
    rehearse(row, settings, console)
    assert {path.name for path in settings.out.iterdir()} == before
    assert not settings.is_made(row)
    assert not settings.is_made(row.parent)


@pytest.mark.usefixtures("shapes_unchecked")
def test_results_of_other_settings_are_refused_with_what_differs(settings, console):
    make(ROWS[CUT], settings, console)
    measure(ROWS[CUT], "perplexity", settings, console)
    with pytest.raises(ValueError, match=r"max_windows 3, not None"):
        Measured.read(dataclasses.replace(settings, max_windows=None))


def test_the_projects_own_results_are_of_the_default_settings(tmp_path):
    """Lines of before base and texts were written down are read as ever."""
    own = Path(document.__file__).parents[2] / "eval" / "results" / "study.jsonl"
    found = Measured.read(Settings(out=tmp_path, record=own))
    assert ("dense", "perplexity") in {(row, part) for row, part, *_ in found.found}


@pytest.mark.usefixtures("shapes_unchecked")
def test_results_of_another_model_or_text_are_refused(settings, console, tmp_path, data_dir):
    make(ROWS["dense"], settings, console)
    measure(ROWS["dense"], "perplexity", settings, console)
    check_contents(settings)
    for name in ("calib", "text"):  # another compression of the same text is the same text
        content = gzip.decompress((data_dir / f"{name}.jsonl.gz").read_bytes())
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(content, 1))
    check_contents(dataclasses.replace(settings, data_dir=tmp_path))
    (tmp_path / "calib.jsonl").write_bytes(content)
    other = dataclasses.replace(settings, data_dir=tmp_path, calibration=Path("calib.jsonl"))
    with pytest.raises(ValueError, match=r"row .*: calibration 'sha256:"):
        check_contents(other)

    model = tiny_model(num_hidden_layers=1, seed=1)
    save_model(tmp_path / "model", model.config, tensors_of(model))
    other = dataclasses.replace(settings, model=str(tmp_path / "model"))
    with pytest.raises(ValueError, match=r"base 'sha256:.*', not 'sha256:"):
        check_contents(other)
    # Records of before base and texts were written down: the dense row's model is the base.
    old = dataclasses.replace(other, record=tmp_path / "old.jsonl")
    for record in records(settings):
        kept = {k: v for k, v in record["settings"].items() if k not in CONTENTS}
        append_record(old.record, record | {"settings": kept})
    with pytest.raises(ValueError, match=r"row dense: base 'sha256:"):
        check_contents(old)
    check_contents(dataclasses.replace(settings, record=old.record))


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_second_row_of_a_program_compiles_nothing(settings, console):
    """Targets are no constants of training, cut or measurements: all come from the cache."""
    row, other = ROWS[WIDE], ROWS[WIDE.replace("50", "25")]
    assert row.program == other.program
    parts = ("perplexity", "errors", "tasks")
    events = collections.Counter()

    def note(event, **_):
        events[event.rpartition("/")[2]] += 1

    jax.monitoring.register_event_listener(note)
    try:
        for one in (row, other):
            events.clear()
            jax.clear_caches()  # as a new process
            make(one, settings, console)
            for part in parts:
                measure(one, part, settings, console)
    finally:
        jax.monitoring.unregister_event_listener(note)
    assert settings.is_made(other)
    assert events["cache_hits"] > 4
    assert events["cache_misses"] == 0


class Process:
    """A process that ends after a few looks, or only when told."""

    def __init__(self, looks, end):
        self.looks, self.end, self.terminated = looks, end, False

    def poll(self):
        self.looks -= 1
        return self.end() if self.looks == 0 else None

    def terminate(self):
        self.terminated = True

    def wait(self, timeout=None):
        return 0

    def kill(self):
        raise AssertionError("it ended by itself")


class Machine:
    """Starts what it is asked to, and keeps what it was; each process takes three looks."""

    def __init__(self, settings, codes=None, looks=3):
        self.settings, self.codes, self.looks = settings, codes or {}, looks
        self.running, self.events, self.most, self.now = {}, [], 0, 0.0

    def start(self, job, rehearsal):
        def end():
            del self.running[job.name, rehearsal]
            code = self.codes.get(job.name, 0)
            if job.part == "model" and not rehearsal and code == 0:
                folder = self.settings.folder(job.row)
                (folder / "model").mkdir(parents=True)
                (folder / "model" / "wide_config.json").touch()
                (folder / "thresholds.npy").touch()
            return code

        process = self.running[job.name, rehearsal] = Process(self.looks, end)
        self.events.append(("rehearse " if rehearsal else "") + job.name)
        self.most = max(self.most, len(self.running))
        return process

    def clock(self):
        self.now += 1.0
        return self.now


def run(settings, jobs, machine, *, making=2, **options):
    times = {"pause": 0.0, "clock": machine.clock}
    return schedule.run(
        jobs, settings, machine.start, making=making, say=lambda x: None, **times, **options
    )


def test_speed_is_measured_alone_after_its_waves_tasks_and_errors(empty):
    machine = Machine(empty)
    beside = []
    jobs = jobs_of([ROWS["dense"], ROWS[WIDE], ROWS[DEPTH]])
    start = machine.start

    def watching(job, rehearsal):
        beside.append((job, [name for name, _ in machine.running]))
        return start(job, rehearsal)

    machine.start = watching
    outcome = run(empty, jobs, machine, slots=3)
    assert {job.name for job in outcome.finished} == {job.name for job in jobs}
    assert machine.most == 3
    names = [job.name for job, _ in beside]
    alone = f"{WIDE}.speed"
    assert dict(zip(names, (others for _, others in beside), strict=True))[alone] == []
    assert all(alone not in others for _, others in beside)
    # Its own wave's tasks and errors are before it, and lanes that it emptied go on after it.
    own = {job.name for job in jobs if job.part in ("perplexity", "tasks", "errors")}
    assert own <= set(names[: names.index(alone)])
    assert names[-1] != alone


def test_a_speed_whose_row_failed_keeps_nobody_waiting(empty):
    machine = Machine(empty, codes={f"{WIDE}.model": 1})
    jobs = jobs_of([ROWS["dense"], ROWS[WIDE]])
    outcome = run(empty, jobs, machine, slots=2)
    assert {job.row.id for job in outcome.finished} == {"dense"}
    assert f"{WIDE}.speed" in {job.name for job in outcome.left}


@pytest.mark.parametrize(
    ("options", "parts"),
    [((), True), (("--parts", "tasks,errors"), False), (("--parts", "speed"), True)],
)
def test_speed_is_planned_for_headline_rows_and_the_finest_groups(options, parts, tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--record", str(tmp_path / "none.jsonl"), "--dry-run"]
    assert main([*arguments, *options]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    timed = {line[1] for line in lines if "speed" in line}
    names = [f"wide-g64-h3-separate-{t}-s{s}-u500" for t in (25, 50) for s in (1, 2)]
    names += [f"wide-g16-h3-separate-50-s{s}-u500" for s in (1, 2)]
    assert timed == (set(names) if parts else set())


@pytest.fixture
def empty(settings, tmp_path):
    return dataclasses.replace(settings, out=tmp_path, record=tmp_path / "study.jsonl")


def test_jobs_run_side_by_side_and_stage_2_after_stage_1(empty):
    machine = Machine(empty)
    jobs = jobs_of([ROWS[WIDE], ROWS[STAGE2]])
    outcome = run(empty, jobs, machine, slots=2)
    assert sorted(job.name for job in outcome.finished) == sorted(job.name for job in jobs)
    assert machine.most == 2
    order = machine.events
    assert order[0] == f"{WIDE}.model"
    assert order.index(f"{STAGE2}.model") > order.index(f"{WIDE}.model")
    assert collections.Counter(order).most_common(1)[0][1] == 1


def test_trainings_wait_for_their_programs_and_others_do_not(empty):
    machine = Machine(empty)
    jobs = jobs_of([ROWS["dense"], ROWS[WIDE], ROWS[STAGE2]])
    outcome = run(empty, jobs, machine, slots=2, ahead=2)
    assert len(outcome.finished) == len(jobs)
    order = machine.events
    assert order[:3] == [
        "dense.perplexity",
        f"rehearse {WIDE}.model",
        f"rehearse {STAGE2}.model",
    ]
    for name in (WIDE, STAGE2):
        assert order.index(f"{name}.model") > order.index(f"rehearse {name}.model")
    assert collections.Counter(order).most_common(1)[0][1] == 1


@pytest.mark.parametrize(("making", "ahead"), [(2, 0), (2, 1), (1, 1)])
def test_few_trainings_hold_memory_at_once(empty, making, ahead):
    machine = Machine(empty)
    names = [WIDE, *(WIDE.replace("50", target) for target in ("25", "10", "30", "70"))]
    jobs = [Job(ROWS[name], "model") for name in names]
    most, start = [], machine.start

    def watching(job, rehearsal):
        process = start(job, rehearsal)
        most.append(sum(not rehearsed for _, rehearsed in machine.running))
        return process

    machine.start = watching
    outcome = run(empty, jobs, machine, slots=8, making=making, ahead=ahead)
    assert len(outcome.finished) == len(jobs)
    assert max(most) == making


def test_one_rehearsal_serves_all_rows_of_its_program(empty):
    machine = Machine(empty, looks=5)
    other = STAGE2.replace("50", "25")
    rows = [ROWS[name] for name in (WIDE, WIDE.replace("50", "25"), STAGE2, other)]
    jobs = [Job(row, "model") for row in rows]
    outcome = run(empty, jobs, machine, slots=4, ahead=4)
    assert len(outcome.finished) == 4
    rehearsed = [name for name in machine.events if name.startswith("rehearse")]
    assert rehearsed == [f"rehearse {WIDE}.model", f"rehearse {STAGE2}.model"]


def test_a_failed_job_stops_only_what_needs_it(empty):
    machine = Machine(empty, codes={f"{WIDE}.model": 1})
    jobs = jobs_of([ROWS["dense"], ROWS[WIDE], ROWS[STAGE2]])
    outcome = run(empty, jobs, machine, slots=1)
    assert [job.name for job in outcome.failed] == [f"{WIDE}.model"]
    assert {job.row.id for job in outcome.finished} == {"dense"}
    assert {job.row.id for job in outcome.left} == {WIDE, STAGE2}


def test_the_deadline_ends_what_runs(empty):
    machine = Machine(empty, looks=1_000_000)
    outcome = run(empty, jobs_of([ROWS["dense"]]), machine, slots=1, deadline=20.0)
    [process] = machine.running.values()
    assert process.terminated
    assert outcome.left[0].name == "dense.perplexity"
    assert not outcome.finished


@pytest.mark.usefixtures("shapes_unchecked")
def test_models_that_are_gone_are_made_and_measured_again(settings, console, empty):
    """The results came home and the runs did not: a stage 2 needs its stage 1 once more."""
    row, later = ROWS[WIDE], ROWS[STAGE2]
    make(row, settings, console)
    measure(row, "perplexity", settings, console)
    for record in records(settings):
        if record["row"] == WIDE:
            append_record(empty.record, record)
    jobs = [Job(one, part) for part in ("model", "perplexity") for one in (row, later)]
    assert not is_ready(Job(later, "model"), empty)
    assert missing(jobs, empty) == tuple(jobs)
    assert missing([jobs[0], jobs[2]], empty) == ()  # nobody needs it
    folder = empty.folder(later) / "model"
    folder.mkdir(parents=True)
    (folder / "wide_config.json").touch()
    assert missing(jobs, empty) == (jobs[3],)  # stage 1 is not needed by a stage 2 that is there
    shutil.rmtree(empty.folder(later))
    # A kill between making a model anew and measuring it leaves its row to be measured.
    make(row, empty, console)
    assert missing([jobs[0], jobs[2]], empty) == (jobs[2],)
    measure(row, "perplexity", empty, console)
    assert missing([jobs[0], jobs[2]], empty) == ()


def test_a_task_killed_between_its_metrics_is_measured_again(empty):
    settings = dataclasses.replace(empty, tasks=("arc_challenge", "boolq"))
    found = {(WIDE, "tasks", "arc_challenge", "acc"), (WIDE, "tasks", "boolq", "acc")}
    measured = Measured(frozenset(found))
    assert measured.missing_tasks(ROWS[WIDE], "tasks", settings) == ("arc_challenge",)
    whole = Measured(frozenset(found | {(WIDE, "tasks", "arc_challenge", "acc_norm")}))
    assert whole.has(ROWS[WIDE], "tasks", settings)


def test_the_command_starts_jobs_and_says_what_is_left(settings, tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--record", str(tmp_path / "study.jsonl")]
    arguments += ["--only", "dense", "--parts", "perplexity"]
    for name in ("model", "data_dir", "calibration", "text", "window", "max_windows"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    assert main([*arguments, "--dry-run"]) == 0
    assert "1 of 1 jobs are left" in capsys.readouterr().out
    command = [sys.executable, "-m", "eval.study", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "dense.perplexity done" in done.stdout
    assert "token perplexity" in (tmp_path / "logs" / "dense.perplexity.log").read_text()
    [(_, record)] = read_records(tmp_path / "study.jsonl")
    assert record["row"] == "dense"
    assert record["command"].endswith("--job dense.perplexity")
    assert main(arguments) == 0
    assert "0 of 1 jobs are left" in capsys.readouterr().out


def test_the_command_hands_its_numbers_of_processes_on(settings, tmp_path, monkeypatch):
    arguments = ["--out", str(tmp_path), "--record", str(tmp_path / "study.jsonl")]
    for name in ("model", "data_dir", "calibration", "text"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    given = []

    def running(jobs, settings, start, **options):
        given.append({name: options[name] for name in ("slots", "making", "ahead")})
        return schedule.Outcome([], [], list(jobs))

    monkeypatch.setattr("eval.study.__main__.run", running)
    assert main([*arguments, "--jobs", "5", "--making", "1", "--ahead", "3"]) == 0
    assert main([*arguments, "--jobs", "5"]) == 0
    assert given == [dict(slots=5, making=1, ahead=3), dict(slots=5, making=2, ahead=0)]


def test_rows_of_every_length_stand_wave_by_wave(study_file):
    waves = [row.wave for row in planned(record for _, record in read_records(study_file))]
    assert waves == sorted(waves)
    assert len(waves) > len(plan())  # 500 updates and 300


def test_a_row_says_how_it_was_made():
    row = Row(wave=1, method="wide", ffn_group=64, attn_group=3, budget="flops", target=0.5)
    assert row.recipe()["budget"] == "flops"


def entry(row, part, task, metric, value, stderr=0.01, **more):
    """A record as the study writes it, with made-up figures."""
    return {
        "suite": "study", "time": "", "commit": "c" * 40, "command": "", "device": "card",
        "device_count": 1, "versions": {"jax": "1"}, "model": row.id, "task": task,
        "metric": metric, "value": value, "stderr": stderr, "n": 500,
        "accounting": dict.fromkeys(ACCOUNTING, row.target or 0.0), "recipe": row.recipe(),
        "seed": row.seed, "updates": row.updates, "row": row.id, "part": part, "settings": {},
        "layers": {"attention": [0.4, 0.6], "ffn": [0.5, 0.5]}, **more,
    }  # fmt: skip


@pytest.fixture
def study_file(tmp_path):
    """Results of five rows: dense, one WIDE row of three seeds, and a shorter run of it."""
    rows = {row.id: row for row in (*plan(), *plan(Recipe(updates=300)))}
    wide = "wide-g64-h3-separate-50-s1-u"
    lines = []
    for name, perplexity in (
        ("dense", 20.0),
        (wide + "500", 40.0),
        (wide + "500-seed1", 44.0),
        (wide + "500-seed2", 36.0),
        (wide + "300", 60.0),
    ):
        hard = 500 * np.log(perplexity) / 4 + np.array([30.0, 10.0, -10.0, -30.0])
        lines.append(
            entry(
                *(rows[name], "perplexity", "wikitext2", "token_perplexity", perplexity, 0.5),
                window_losses=hard.tolist(),
                windows=4,
            )
        )
    for name, accuracy in (("dense", 0.5), (wide + "500", 0.4)):
        lines += [entry(rows[name], "tasks", t, m, accuracy, 0.02) for t, m in TASKS.items()]
    file = tmp_path / "study.jsonl"
    for line in lines:
        append_record(file, line)
    return file


def test_the_document_says_what_the_records_say(study_file, tmp_path):
    template = "# T\n\n" + "\n\n".join(
        f"<!-- {name} -->" for name in ("headline", "groups", "seeds", "not_run", "figure_loss")
    )
    (tmp_path / "t.md").write_text(template)
    document.main(
        document.Args(record=study_file, template=tmp_path / "t.md", out=tmp_path / "study.md")
    )
    text = (tmp_path / "study.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    headline = text.partition("| row | seeds")[0]
    [wide] = [line for line in headline.splitlines() if "50-s1-u500`" in line and "|" in line]
    cells = [cell.strip() for cell in wide.split("|")[1:-1]]
    mean_error = 1.96 * 0.02 / 7**0.5
    retained = 1.96 * 0.8 * ((0.02 / 7**0.5 / 0.4) ** 2 + (0.02 / 7**0.5 / 0.5) ** 2) ** 0.5
    # Windows at ±0.24 and ±0.08 nats: their mean's deviation is 0.0894.
    value, low, high = (float(n) for n in re.findall(r"[0-9.]+", cells[1]))
    assert value == 40.0
    assert (low, high) == pytest.approx([40 * np.exp(s * 1.96 * 0.0894) for s in (-1, 1)], abs=1)
    assert "The 3 runs of `wide` together have a deviation of 0.100 nats" in text
    assert "2 degrees of freedom" in text
    assert "less than 0.61 nats (95 %)" in text
    assert cells[2:5] == [
        "2.00",
        f"40.0 ± {100 * mean_error:.1f}",
        f"80.0 ± {100 * retained:.1f}",
    ]
    assert "`wide-g64-h3-separate-50-s1-u300`" in rows  # a shorter run is a row of its own
    assert document.NOTHING in text  # no group sizes
    assert "0, 1, 2 | 40.00, 44.00, 36.00" in text
    assert "- `wide-g64-h3-separate-50-s1-u500`: errors, whole_tasks" in text
    assert "- `dense`: whole_tasks, generation" in text
    assert "- `depth-separate-50-s1-u500`: perplexity, tasks, errors" in text
    assert "![WikiText-2: loss and sparsity](study/loss.svg)" in text
    assert (tmp_path / "study" / "loss.svg").exists()


def test_what_sets_a_row_apart_is_compared_with_the_row_without(study_file):
    """Of distillation and of length: what else is alike, and no other stage, target or seed."""
    wide = "`wide-g64-h3-separate-50-s1-u500"
    rows = {row.id: row for row in plan()}
    fields = ("perplexity", "wikitext2", "token_perplexity", 30.0)
    windows = {"window_losses": [1.0, 2.0, 3.0, 4.0], "windows": 4}
    append_record(study_file, entry(rows[wide[1:] + "-distill_beside"], *fields, **windows))
    append_record(study_file, entry(rows["wide-g64-h3-separate-25-s1-u500"], *fields, **windows))
    pairs = [
        line.split(" | ")[:2] for line in document.comparison_table(read(study_file)).split("\n")
    ]
    assert pairs[2:] == [
        [f"| {wide}`", "`wide-g64-h3-separate-50-s1-u300`"],
        [f"| {wide}-distill_beside`", f"{wide}`"],
    ]


def test_both_stages_are_compared_with_the_baseline_without_training(study_file):
    rows = {row.id: row for row in plan()}
    fields = ("perplexity", "wikitext2", "token_perplexity", 30.0)
    windows = {"window_losses": [1.0, 2.0, 3.0, 4.0], "windows": 4}
    both = [f"wide-g64-h3-separate-50-s{stage}-u500" for stage in (1, 2)]
    for name in (both[1], "threshold-g64-h3-50"):
        append_record(study_file, entry(rows[name], *fields, **windows))
    table = document.comparison_table(read(study_file))
    for name in both:
        assert f"| `{name}` | `threshold-g64-h3-50` |" in table


def test_an_answer_never_right_is_not_known_to_be_impossible(study_file):
    """Wilson's interval of 0 of 500 ends at 1.96² / (500 + 1.96²)."""
    [dense] = [row for row in plan() if row.method == "dense"]
    append_record(study_file, entry(dense, "generation", "gsm8k", "strict-match", 0.0, 0.0))
    table = document.generation_table(read(study_file))
    assert table.splitlines()[2:] == ["| `dense` | strict-match | 0.0 (0.0 to 0.8) |"]


def test_the_speed_table_has_a_line_a_shape_and_phase(study_file):
    assert document.speed_table(read(study_file)) == document.NOTHING
    rows = {row.id: row for row in plan()}
    name = "wide-g64-h3-separate-50-s1-u500"
    skipped = dict.fromkeys(ACCOUNTING, 0.5)

    def timed(phase, mask, ms, **more):
        return {
            "phase": phase, "mask": mask, "tokens": 16_384, "ms": ms, "dense_ms": 300.0,
            "dense": "dense", "speedup": 300.0 / ms, "ideal_speedup": 1.9, "accounting": skipped,
            **more,
        }  # fmt: skip

    def add(shape, speeds):
        record = entry(rows[name], "speed", shape, "prefill_speedup", speeds[0]["speedup"], None)
        append_record(study_file, record | {"speeds": speeds})

    add("own_shape", [timed("prefill", "trained", 400.0)])
    assert f"- `{name}`: errors, whole_tasks, speed" in document.not_run(read(study_file))
    own, random = ("trained_statistics", 200.0), ("random_same_rates", 250.0)
    add("llama-3.1-8b", [timed("prefill", *kind, ffn_group=512) for kind in (own, random)])
    assert f"- `{name}`: errors, whole_tasks\n" in document.not_run(read(study_file))
    lines = document.speed_table(read(study_file)).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines] == [
        ["own_shape", "prefill, 16,384", "64", "50.0 / 50.0", "400.000", "300.000 (dense)",
         "0.75", "1.90", ""],
        ["llama-3.1-8b", "prefill, 16,384", "512", "50.0 / 50.0", "200.000", "300.000 (dense)",
         "1.50", "1.90", "1.20"],
    ]  # fmt: skip


def test_a_part_with_some_of_its_tasks_is_not_run(study_file):
    dense = {row.id: row for row in plan()}["dense"]
    append_record(study_file, entry(dense, "whole_tasks", "piqa", TASKS["piqa"], 0.5))
    assert "- `dense`: whole_tasks, generation" in document.not_run(read(study_file))


def test_what_is_expected_stands_beside_what_the_rows_say(study_file):
    """Depth routing at the same target, stage and length; a budget's shares; all sizes or none."""
    rows = {row.id: row for row in plan()}
    assert expectations(read(study_file)) == []

    def add(name, perplexity, **accounting):
        skipped = dict.fromkeys(ACCOUNTING, 0.5) | accounting
        losses = 500 * np.log(perplexity) / 4 + np.array([30.0, 10.0, -10.0, -30.0])
        found = entry(rows[name], "perplexity", "wikitext2", "token_perplexity", perplexity)
        more = {"window_losses": losses.tolist(), "windows": 4, "accounting": skipped}
        append_record(study_file, found | more)

    add("depth-separate-50-s1-u500", 60.0, flops=0.48)
    add("wide-g64-h3-paper-50-s1-u500", 40.0, attention=0.6, ffn=0.4)
    for name, end in (("wide-g64-h3", 0.25), ("depth", 0.75)):
        row = rows[f"{name}-separate-50-s1-u500"]
        append_record(study_file, entry(row, "errors", "text", "stream_relative_l2_error", end))
    depth, budget, stream = expectations(read(study_file))
    gap = f"{np.log(40 / 60):+.2f}"
    assert depth[1:] == (
        "50 %, stage 1, 500 updates",
        f"{gap} nats ({gap} to {gap}) at 50.0 % and 48.0 %",
    )
    assert budget[1] == "50 %, stage 1, 500 updates, budget `paper`"
    assert budget[2] == "60.0 % of attention, 40.0 % of the FFN"
    assert stream[2] == "the stream's error at the end is 0.25, of depth routing 0.75"
    for size in (16, 32, 128, 256, 512):
        add(f"wide-g{size}-h3-separate-50-s1-u500", 20.0 + size)
    [sizes] = [line for line in expectations(read(study_file)) if line[0].startswith("finer")]
    assert "perplexity 36.0, 52.0, 40.0, 148.0, 276.0, 532.0" in sizes[2]
    assert sizes[2].endswith(f"{532 / 36:.2f} times the best")


def test_every_figures_points_name_their_lines(study_file):
    found = {figure.key: figure for figure in figures(read(study_file))}
    assert found.keys() == {"loss", "tasks", "allocation"}
    dense = next(s for s in found["loss"].series if s.name == "dense")
    assert dense.points[0].source == "study.jsonl:1"
    assert dense.points[0].y == pytest.approx(np.log(20.0))
    assert {s.name for s in found["allocation"].series} == {
        f"wide, stage 1{length}: {module}"
        for length in ("", ", 300 updates")
        for module in ("attention", "ffn")
    }


def test_a_mark_that_nothing_belongs_to_is_refused(study_file):
    with pytest.raises(ValueError, match="asks for 'nothing'"):
        document.render("<!-- nothing -->", read(study_file), {})


def test_the_documents_own_template_is_whole(study_file):
    template = (Path(document.__file__).parents[2] / "docs" / "study.in.md").read_text()
    assert "<!--" not in document.render(template, read(study_file), {}).replace("<!-- Made by", "")


def test_rows_are_compared_window_by_window(study_file):
    """The windows differ by far more than the rows do, and by the same for both."""
    results = read(study_file)
    wide = results["wide-g64-h3-separate-50-s1-u500"]
    found = difference(wide, results["dense"])
    assert found.value == pytest.approx(np.log(2.0))
    assert found.high - found.low == pytest.approx(0.0, abs=1e-9)
    low, high = bootstrap(wide.window_losses)
    assert low < np.log(40.0) < high
    assert bootstrap(wide.window_losses) == (low, high)  # the same every time
