"""Measuring one part of a row that is made, and the records of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from eval.errors import PARTS, layer_errors
from eval.perplexity import PerplexityConfig, evaluate_perplexity
from eval.records import append_record, eval_record
from eval.study.make import Loaded, load
from eval.study.plan import Row
from eval.study.settings import Measured, Part, Settings, name_model
from eval.study.speed import speeds
from eval.text import TokenizedText, read_text, tokenize
from wide_jax.accounting import Accounting
from wide_jax.cli.progress import progress
from wide_jax.hf.tokenizer import text_encoder
from wide_jax.magnitude import savable_flops

Record = dict[str, Any]


def measure(row: Row, part: Part, settings: Settings, console: Console) -> None:
    """Append what is missing of a part of this model to the results, as soon as it is known."""
    loaded = load(row, settings)
    name_model(row, settings, loaded.fingerprint)
    measured = Measured.read(settings, {row.id: loaded.fingerprint})
    missing = measured.missing_tasks(row, part, settings)
    if not missing:
        return
    match part:
        case "perplexity":
            found = _perplexity(row, loaded, settings, console)
        case "errors":
            found = _errors(row, loaded, settings, console)
        case "speed":
            del loaded  # it loads its own
            found = speeds(row, missing, settings, console)
        case _:
            found = _tasks(row, part, missing, loaded, settings, console)
    for record in found:
        named = {"suite": "study", "row": row.id, "part": part, "settings": settings.recorded()}
        append_record(settings.record, record | named)


def _perplexity(row: Row, loaded: Loaded, settings: Settings, console: Console) -> Iterator[Record]:
    config = PerplexityConfig(
        window=settings.window, max_windows=settings.max_windows, batch_size=settings.batch_size
    )
    with progress(console, f"perplexity of {row.id}") as advance:
        result = evaluate_perplexity(
            loaded.model,
            _text(loaded, settings, config),
            config,
            progress=lambda done, total, value: advance(done, total, f"perplexity {value:.2f}"),
        )
    console.print(result.line(), highlight=False, soft_wrap=True)
    console.print(result.accounting.line(), highlight=False, soft_wrap=True)
    yield _record(
        row,
        loaded,
        task=_name(settings.text),
        metric="token_perplexity",
        value=result.token_perplexity,
        stderr=result.token_perplexity_stderr,
        n=result.scored_tokens,
        accounting=result.accounting,
        word_perplexity=result.word_perplexity,
        windows=result.windows,
        window_losses=list(result.window_losses),
    )


def _errors(row: Row, loaded: Loaded, settings: Settings, console: Console) -> Iterator[Record]:
    config = PerplexityConfig(
        window=settings.window, max_windows=settings.error_windows, batch_size=1
    )
    with progress(console, f"layer errors of {row.id}") as advance:
        result = layer_errors(
            loaded.model,
            _text(loaded, settings, config),
            config,
            progress=lambda done, total: advance(done, total, ""),
        )
    console.print(result.line(), highlight=False, soft_wrap=True)
    yield _record(
        row,
        loaded,
        task=_name(settings.text),
        metric="stream_relative_l2_error",
        value=result.error["stream"][-1],
        stderr=None,
        n=result.tokens,
        accounting=result.accounting,
        errors={part: list(result.error[part]) for part in PARTS},
        cosines={part: list(result.cosine[part]) for part in PARTS},
    )


def _tasks(
    row: Row,
    part: Part,
    tasks: tuple[str, ...],
    loaded: Loaded,
    settings: Settings,
    console: Console,
) -> Iterator[Record]:
    from eval.harness import HarnessConfig, WideLM  # needs the `eval` extra
    from eval.tasks import TasksConfig, result_records, run_tasks

    # Questions are short; with its examples a prompt of GSM8K is as long as half a window.
    rows = settings.batch_size * (2 if part == "generation" else 4)
    lm = WideLM(
        loaded.model,
        loaded.tokenizer,
        config=HarnessConfig(batch_size=rows, progress=console.is_terminal),
        name=row.id,
    )
    for task in tasks:
        config = TasksConfig(
            (task,),
            data_dir=settings.data_dir,
            limit=settings.limit if part == "tasks" else None,
            timing=False,
        )
        out = settings.out / "answers" / row.id / part
        [result] = run_tasks(lm, config, out=out, fingerprint=loaded.fingerprint)
        console.print(result.line(), highlight=False, soft_wrap=True)
        yield from result_records(lm, result, fingerprint=loaded.fingerprint, recipe=row.recipe())


def _record(row: Row, loaded: Loaded, *, accounting: Accounting, **fields: Any) -> Record:
    savable = None
    if row.method == "threshold":
        savable = savable_flops(accounting, loaded.model.config)
    return eval_record(
        model=loaded.fingerprint,
        accounting=accounting.summary(),
        recipe=row.recipe(),
        seed=row.seed,
        updates=row.updates,
        layers=accounting.by_layer(),
        savable_flops=savable,
        **fields,
    )


def _text(loaded: Loaded, settings: Settings, config: PerplexityConfig) -> TokenizedText:
    text = read_text(settings.data_dir / settings.text)
    return tokenize(text, text_encoder(loaded.tokenizer), join=config.joined)


def _name(path: Path) -> str:
    return path.name.partition(".")[0]
