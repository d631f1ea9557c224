"""Tasks of lm-evaluation-harness, by its own definitions, with the masks accounted.

`run_tasks` runs one task after the other through the harness and writes, into its output folder,
`tasks.json` (everything), `eval.jsonl` (one record a metric), `requests-TASK.jsonl` (answers, to
go on after an interruption) and, on request, `samples-TASK.jsonl`. With a data folder nothing is
downloaded: only the data under the harness's definition is swapped.
"""

import dataclasses
import difflib
import functools
import importlib.metadata
import json
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval import evaluator, simple_evaluate
from lm_eval.tasks import TaskManager

from eval import mbpp
from eval.harness import WideLM
from eval.records import append_record, commit, common_fields, eval_record, read_records
from eval.speed import SpeedMeter, Speedup, worth_timing
from eval.store import RequestStore
from wide_jax.accounting import Accounting
from wide_jax.routing import Argmax

SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
ACCEPTED_CODE = "mbpp_plus"  # the one task that runs a model's code: in the sandbox


@dataclasses.dataclass(frozen=True)
class LocalTask:
    """A harness task whose data lies in the data folder."""

    harness: str  # the harness's own task name
    files: Mapping[str, str]  # split -> file in the folder
    splits: Mapping[str, str]  # the task's `..._split` settings; the others are emptied
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def override(self, data_dir: Path) -> dict[str, Any]:
        """The harness's task dictionary.

        Raises:
            FileNotFoundError: names every file that is missing.
        """
        paths = {split: data_dir / name for split, name in self.files.items()}
        missing = [str(path) for path in paths.values() if not path.exists()]
        if missing:
            raise FileNotFoundError(f"task {self.harness}: no {', '.join(missing)}")
        return {
            "task": self.harness,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {split: str(path.resolve()) for split, path in paths.items()}
            },
            **{name: self.splits.get(name) for name in SPLITS},
            **self.more,
        }


def _validation(harness: str, file: str) -> LocalTask:
    return LocalTask(harness, {"validation": file}, {"validation_split": "validation"})


def _test(harness: str, file: str, **more: Any) -> LocalTask:
    return LocalTask(harness, {"test": file}, {"test_split": "test"}, more)


LOCAL_TASKS: Mapping[str, LocalTask] = {
    "wikitext": _test("wikitext", "wikitext2/wikitext2_raw_test.jsonl.gz"),
    "arc_easy": _test("arc_easy", "tasks/arc_easy_test.jsonl.gz"),
    "arc_challenge": _test("arc_challenge", "tasks/arc_challenge_test.jsonl.gz"),
    "boolq": _validation("boolq", "tasks/boolq_validation.jsonl.gz"),
    "winogrande": _validation("winogrande", "tasks/winogrande_xl_validation.jsonl.gz"),
    "piqa": _validation("piqa", "tasks/piqa_validation.jsonl.gz"),
    "openbookqa": _test("openbookqa", "tasks/openbookqa_test.jsonl"),
    "hellaswag": _validation("hellaswag", "tasks/hellaswag_validation.jsonl.gz"),
    "gsm8k": LocalTask(
        "gsm8k",
        {"train": "tasks/gsm8k_train500.jsonl.gz", "test": "tasks/gsm8k_test.jsonl.gz"},
        {"training_split": "train", "fewshot_split": "train", "test_split": "test"},
    ),
    "ifeval": LocalTask("ifeval", {"train": "tasks/ifeval.jsonl.gz"}, {"test_split": "train"}),
    "mbpp_plus": _test(
        "mbpp_plus",
        "tasks/mbppplus_test.jsonl.gz",
        process_results=mbpp.process_results,
        metric_list=[
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("pass_at_1", "plus_pass_at_1")
        ],
    ),
}
HARNESS_FOLDERS = (  # where the harness defines them
    *("arc", "gsm8k", "hellaswag", "ifeval", "mbpp", "mmlu/default", "openbookqa", "piqa"),
    *("super_glue/boolq", "wikitext", "winogrande"),
)
MMLU_FILES = {"test": "tasks/mmlu_test.jsonl.gz", "dev": "tasks/mmlu_dev.jsonl"}
# As the field reports them; the harness's own default for MMLU is zero examples.
FEWSHOT = {"mmlu": 5}
TASKS = (*LOCAL_TASKS, "mmlu")


@dataclasses.dataclass(frozen=True)
class TasksConfig:
    """What to run.

    Attributes:
        tasks: names of the harness (`TASKS` can also run from `data_dir`).
        data_dir: folder of local data; None: the harness downloads its own.
        limit: only the first so many documents of each task (MMLU: of each subject); None: all.
        num_fewshot: examples before each question; None: the task's own (5 for MMLU).
        chat: put the prompt through the tokenizer's chat template.
        system: system prompt, with `chat`.
        samples: also write every document with its answers.
        seed: of few-shot sampling.
        timing: on a GPU, also measure a routed model's speedup (`eval.speed`) for every task.
    """

    tasks: tuple[str, ...]
    data_dir: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = False
    system: str | None = None
    samples: bool = False
    seed: int = 1234
    timing: bool = True

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(f"no tasks given; known: {', '.join(TASKS)}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1, or None for all")
        if self.system is not None and not self.chat:
            raise ValueError("a system prompt is a part of the chat template: ask for chat too")


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """One task's metrics, each with its standard error, and what was skipped to get them."""

    task: str
    metrics: Mapping[str, float]  # "acc", "acc_norm", "exact_match,strict-match" ...
    stderr: Mapping[str, float | None]
    n: int  # documents
    version: str | None  # of the harness's task definition
    num_fewshot: int | None
    prefill: Accounting
    decode: Accounting | None  # None: nothing was generated
    settings: Mapping[str, Any]  # what the answers depend on: the model, the harness, limits
    speedup: Speedup | None = None  # on a GPU

    def line(self) -> str:
        """One line for people; the accounting has its own."""
        parts = []
        for name, value in self.metrics.items():
            error = self.stderr[name]
            parts.append(f"{name} {value:.4f}" + ("" if error is None else f" ±{error:.4f}"))
        return f"{self.task} ({self.n} documents): " + " | ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Every figure, as plain JSON types."""
        return dataclasses.asdict(self) | {
            "prefill": self.prefill.to_json(),
            "decode": None if self.decode is None else self.decode.to_json(),
            "speedup": None if self.speedup is None else self.speedup.to_json(),
        }


def run_tasks(
    lm: WideLM,
    config: TasksConfig,
    *,
    out: Path | None = None,
    fingerprint: str | None = None,
    recipe: Mapping[str, Any] | None = None,
    on_result: Callable[[TaskResult], None] = lambda result: None,
) -> list[TaskResult]:
    """Run every task, write its results, return them.

    Args:
        lm: the model.
        config: the tasks.
        out: folder of the results; a run that was cut short goes on from it. None: write nothing.
        fingerprint: of the model's weights and routers, for the records.
        recipe: how the model was made (`results` records; at least `method`).
        on_result: called with each task's result, once it is written.

    Raises:
        ValueError, FileNotFoundError: see `check_tasks`; an output folder of other settings, or
            `chat` with a tokenizer that has no chat template.
        ConnectionError: the harness cannot download a task's data.
    """
    commit()  # before anything runs
    check_tasks(config)
    if config.chat and not lm.tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {lm.name} has no chat template: leave out chat")
    settings = {task: _settings(lm, config, task, fingerprint) for task in config.tasks}
    stores = {
        task: RequestStore(None if out is None else out / f"requests-{task}.jsonl", settings[task])
        for task in config.tasks
    }
    timed = config.timing and worth_timing(lm.routing)
    meter = SpeedMeter(lm.model, routing=lm.routing) if timed else None
    plain = "wide" if isinstance(lm.routing, Argmax) else "dense"
    recipe = {"method": plain} | dict(recipe or {})
    results: list[TaskResult] = []
    with _quiet_harness(config):
        for task in config.tasks:
            lm.store, lm.text = stores[task], []
            found = _evaluate(lm, task, config)
            result = _result(lm, task, found, settings[task])
            if meter is not None:
                result = dataclasses.replace(result, speedup=meter.measure(lm.text))
            results.append(result)
            if out is not None:
                records = result_records(lm, result, fingerprint=fingerprint, recipe=recipe)
                _append_new(out / "eval.jsonl", records)
                if config.samples:
                    _write_samples(out, task, found)
            on_result(result)
    if out is not None:
        report = common_fields("eval") | {
            "model": lm.name,
            "fingerprint": fingerprint,
            "recipe": recipe,
            "architecture": dataclasses.asdict(lm.model.config),
            "wide": None if lm.model.wide is None else dataclasses.asdict(lm.model.wide),
            "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
            "harness": {"lm_eval": importlib.metadata.version("lm_eval")},
            "run": dataclasses.asdict(lm.settings),
            "results": [result.to_json() for result in results],
        }
        report["config"]["data_dir"] = None if config.data_dir is None else config.data_dir.name
        (out / "tasks.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return results


def check_tasks(config: TasksConfig) -> None:
    """Find now what would stop the run at one of its later tasks.

    Raises:
        ValueError: a task that the harness does not know, or that has no local data where a data
            folder was given.
        FileNotFoundError: missing local data.
    """
    for task in config.tasks:
        task_spec(task, config.data_dir)
    if config.data_dir is not None:
        return
    manager = _task_manager(False)
    for task in config.tasks:
        if task in manager.all_tags:
            raise ValueError(f"{task!r} is the harness's tag for several tasks: name the tasks")
        if task not in manager.all_tasks and not Path(task).is_file():
            near = difflib.get_close_matches(task, manager.all_tasks)
            hint = f"; similar: {', '.join(near)}" if near else ""
            raise ValueError(f"the harness has no task {task!r}{hint}")


def task_spec(task: str, data_dir: Path | None) -> str | dict[str, Any]:
    """What the harness is asked to run: its own task, or the same with local data.

    Raises:
        ValueError: a task without local data, where a data folder was given.
        FileNotFoundError: missing local data.
    """
    if data_dir is None:
        return task
    if task == "mmlu":
        return _mmlu(data_dir)
    if task not in LOCAL_TASKS:
        raise ValueError(f"task {task!r} has no local data; with a data folder: {', '.join(TASKS)}")
    # A group: the harness merges an override with the registered task only inside one.
    return {"group": f"{task}_local", "task": [LOCAL_TASKS[task].override(data_dir)]}


def _mmlu(data_dir: Path) -> dict[str, Any]:
    """The 57 subjects, each filtered from one file; the mean is weighted by size, as MMLU's is."""
    missing = [name for name in MMLU_FILES.values() if not (data_dir / name).exists()]
    if missing:
        raise FileNotFoundError(f"task mmlu: no {', '.join(missing)} in {data_dir}")
    with _open(data_dir / MMLU_FILES["dev"]) as stream:
        subjects = sorted({json.loads(line)["subject"] for line in stream if line.strip()})
    splits = {"test_split": "test", "fewshot_split": "dev"}
    tasks = [
        LocalTask(
            f"mmlu_{subject}", MMLU_FILES, splits, {"process_docs": _of_subject(subject)}
        ).override(data_dir)
        for subject in subjects
    ]
    weighted = [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]
    # The outer group is there because the harness hands its settings down to tasks.
    inner = {"group": "mmlu_local", "task": tasks, "aggregate_metric_list": weighted}
    return {"group": "local", "task": [inner]}


def _of_subject(subject: str):
    def keep(docs):
        return docs.filter(lambda doc: doc["subject"] == subject)

    return keep


def _open(path: Path):
    import gzip

    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open()


@functools.cache
def _task_manager(local: bool) -> TaskManager:
    """The harness's index of task definitions; with local data only the folders that have some.

    Reading all of its thousands of files takes many seconds.
    """
    if not local:
        return TaskManager()
    home = Path(lm_eval.tasks.__file__).parent
    folders: list[str | Path] = [home / name for name in HARNESS_FOLDERS]
    return TaskManager(include_path=folders, include_defaults=False)


def _evaluate(lm: WideLM, task: str, config: TasksConfig) -> dict[str, Any]:
    with mbpp.sandboxed_code_eval(), _downloads(task, config):
        found = simple_evaluate(
            lm,
            tasks=[task_spec(task, config.data_dir)],
            num_fewshot=FEWSHOT.get(task) if config.num_fewshot is None else config.num_fewshot,
            limit=config.limit,
            log_samples=config.samples,
            apply_chat_template=config.chat,
            fewshot_as_multiturn=config.chat,
            system_instruction=config.system,
            random_seed=config.seed,
            numpy_random_seed=config.seed,
            torch_random_seed=config.seed,
            fewshot_random_seed=config.seed,
            bootstrap_iters=1000,
            confirm_run_unsafe_code=task == ACCEPTED_CODE,
            task_manager=_task_manager(config.data_dir is not None),
        )
    assert found is not None  # None is for other ranks; this is one process
    return found


@contextmanager
def _downloads(task: str, config: TasksConfig) -> Generator[None]:
    """Say what to do where there is no network."""
    try:
        yield
    except ConnectionError as error:
        if config.data_dir is not None:
            raise
        raise ConnectionError(
            f"task {task}: {error}; without a network, give a folder of local data (--data-dir)"
        ) from error


def _result(
    lm: WideLM, task: str, found: Mapping[str, Any], settings: Mapping[str, Any]
) -> TaskResult:
    rows = found["results"]
    name = task if task in rows else next(n for n in rows if n.endswith(f"{task}_local"))
    row = rows[name]
    metrics, stderr = {}, {}
    for key, value in row.items():
        metric, _, chosen = key.partition(",")
        if not chosen or metric.endswith("_stderr"):
            continue
        label = metric if chosen == "none" else f"{metric},{chosen}"
        error = row.get(f"{metric}_stderr,{chosen}")
        metrics[label] = float(value)
        stderr[label] = float(error) if isinstance(error, float) else None
    counts = [n["effective"] for n in found["n-samples"].values()]
    prefill, decode = lm.store.ran()
    return TaskResult(
        task=task,
        metrics=metrics,
        stderr=stderr,
        n=sum(counts),
        version=str(found["versions"].get(name, "")) or None,
        num_fewshot=found["n-shot"].get(task, next(iter(found["n-shot"].values()), None)),
        prefill=prefill.accounting(lm.model),
        decode=decode.accounting(lm.model) if decode.tokens else None,
        settings=settings,
    )


def result_records(
    lm: WideLM, result: TaskResult, *, fingerprint: str | None, recipe: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The result as records of the `eval` suite, one a metric."""
    return [
        eval_record(
            model=fingerprint or lm.name,
            task=result.task,
            metric=metric,
            value=value,
            stderr=result.stderr[metric],
            n=result.n,
            accounting=result.prefill.summary(),
            recipe=recipe,
            seed=recipe.get("seed"),
            updates=recipe.get("updates"),
            name=lm.name,
            num_fewshot=result.num_fewshot,
            accounting_decode=None if result.decode is None else result.decode.summary(),
            layers=result.prefill.by_layer(),
            layers_decode=None if result.decode is None else result.decode.by_layer(),
            settings=result.settings,
            speedup=None if result.speedup is None else result.speedup.to_json(),
        )
        for metric, value in result.metrics.items()
    ]


def _append_new(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Add the records but those of a task that had been finished: a folder has one run's settings.

    A speedup that was not measured then makes a record new.
    """
    known = [record for _, record in read_records(path)] if path.exists() else []

    def is_known(record: Mapping[str, Any]) -> bool:
        return any(
            all(old[name] == record[name] for name in ("model", "task", "metric", "value"))
            and (old.get("speedup") is not None or record["speedup"] is None)
            for old in known
            if old["suite"] == "eval"
        )

    for record in records:
        if not is_known(record):
            append_record(path, record)


def _write_samples(out: Path, task: str, found: Mapping[str, Any]) -> None:
    with (out / f"samples-{task}.jsonl").open("w", encoding="utf-8") as stream:
        for samples in found["samples"].values():
            for sample in samples:
                stream.write(json.dumps(sample, default=str, ensure_ascii=False) + "\n")


def _settings(
    lm: WideLM, config: TasksConfig, task: str, fingerprint: str | None
) -> dict[str, Any]:
    """What an answer or the account of a run depends on."""
    return {
        "model": fingerprint or lm.name,
        "routing": type(lm.routing).__name__,
        "dtype": lm.model.dtype.name,
        "lm_eval": importlib.metadata.version("lm_eval"),
        "max_length": lm.max_length,
        "task": task,
        "limit": config.limit,
        "num_fewshot": config.num_fewshot,
        "chat": config.chat,
        "system": config.system,
        "seed": config.seed,
    }


@contextmanager
def _quiet_harness(config: TasksConfig) -> Generator[None]:
    """Environment of the harness: offline with local data, its punkt data found, few warnings."""
    # The harness would bootstrap standard errors in forked processes; JAX's threads do not fork.
    settings: dict[str, str] = {"DISABLE_MULTIPROC": "1"}
    if config.data_dir is not None:
        settings |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        nltk_data = config.data_dir / "nltk_data"
        if nltk_data.exists():
            settings["NLTK_DATA"] = str(nltk_data.resolve())
    before = {name: os.environ.get(name) for name in settings}
    with ExitStack() as stack:
        # It would ask git about the working folder, for every task, and print git's complaints.
        stack.callback(setattr, evaluator, "get_git_commit_hash", evaluator.get_git_commit_hash)
        evaluator.get_git_commit_hash = lambda: None
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the harness's and the datasets' own; ours are raised
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
