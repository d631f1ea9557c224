"""Making a row: its training by `train.run`, or the thresholds of the untrained baseline."""

import contextlib
import dataclasses
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from eval.scoring import full_precision
from eval.study.locks import Lock
from eval.study.plan import Row
from eval.study.settings import THRESHOLDS, Settings, name_model
from train.corpus import Recipe, token_cache
from train.data import PackedRows
from train.records import UpdateRecord
from train.run import RunEvents, calibrate_main, recover_main
from train.run_config import CalibrateConfig, Method, RecoverConfig
from train.threshold import SpreadRows
from train.variants import wide_config
from wide_jax.cli.models import LoadedModel
from wide_jax.cli.progress import progress
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.engine import EngineChoice
from wide_jax.hf.cache import cache_dir
from wide_jax.hf.config import read_config, read_json
from wide_jax.hf.pretrained import from_pretrained, new_routers
from wide_jax.hf.resolve import resolve_model
from wide_jax.hf.save import write_json
from wide_jax.hf.tokenizer import load_tokenizer
from wide_jax.hf.wide_folder import WIDE_CONFIG, load_wide_info, save_wide_model, verify_base
from wide_jax.magnitude import by_magnitude, calibrate_thresholds
from wide_jax.model import WideForCausalLM

Compile = Callable[[], None]


def make(row: Row, settings: Settings, console: Console) -> None:
    """Train the row, or set its thresholds; a training that was cut short goes on.

    Of several processes one trains at a time, so that rows are finished one after the other: the
    others wait before their first update, by which they have compiled.
    """
    if settings.is_made(row):
        return
    name_model(row, settings, "")
    if row.method == "threshold":
        _set_thresholds(row, settings, console)
        return
    stage1 = None if row.parent is None else settings.folder(row.parent)
    with Lock(settings.locks, "training") as training:

        def begin(compile_step: Compile) -> None:
            _compile(row, settings, compile_step)
            training.hold()

        def end_turn(record: UpdateRecord) -> None:
            if record.update + 1 == row.updates:
                training.release()

        out = settings.folder(row)
        train(row, settings, console, out, starting=begin, on_record=end_turn, stage1=stage1)


def rehearse(row: Row, settings: Settings, console: Console) -> None:
    """Compile the row's training step into the compile cache; nothing is run or kept.

    A stage-2 row is rehearsed on new routers, so that it need not wait for its stage 1.
    """

    def stop(compile_step: Compile) -> None:
        _compile(row, settings, compile_step)
        raise _RehearsedError

    with tempfile.TemporaryDirectory(prefix="rehearsal-", dir=settings.out) as scratch:
        stage1 = None
        if row.parent is not None:
            stage1 = Path(scratch) / "stage1"
            _untrained(row.parent, settings, stage1)
        out = Path(scratch) / "run"
        with contextlib.suppress(_RehearsedError):
            train(row, settings, console, out, starting=stop, stage1=stage1)


def _compile(row: Row, settings: Settings, compile_step: Compile) -> None:
    """Of several processes with one program one compiles it: the others find it in the cache."""
    with Lock(settings.locks, row.program) as compiling:
        compiling.hold()
        compile_step()


def train(
    row: Row,
    settings: Settings,
    console: Console,
    out: Path,
    *,
    stage1: Path | None,
    starting: Callable[[Compile], None],
    on_record: Callable[[UpdateRecord], None] = lambda record: None,
) -> None:
    """The row's run in the folder `out`, from the run `stage1` for a stage-2 row."""
    with progress(console, f"training {row.id}") as advance:

        def record(latest: UpdateRecord, config: CalibrateConfig) -> None:
            skipped = f"FLOPs {latest.hard_skip['flops']:.1%} skipped"
            advance(latest.update + 1, config.updates, f"loss {latest.lm_loss:.3f}, {skipped}")
            on_record(latest)

        events = RunEvents(
            message=lambda text: console.print(text, highlight=False, soft_wrap=True),
            starting=starting,
            record=record,
        )
        if stage1 is None:
            calibrate_main(calibrate_config(row, settings, out), events)
        else:
            _rebase(stage1 / "model", resolve_model(settings.model))
            recover_main(recover_config(row, settings, out, stage1), events)


def calibrate_config(row: Row, settings: Settings, out: Path) -> CalibrateConfig:
    """The run of a stage-1 row."""
    return CalibrateConfig(model=settings.model, **_common(row, settings, out))


def recover_config(row: Row, settings: Settings, out: Path, stage1: Path) -> RecoverConfig:
    """The run of a stage-2 row."""
    return RecoverConfig(run=stage1, **_common(row, settings, out))


def _common(row: Row, settings: Settings, out: Path) -> dict[str, Any]:
    flash = jax.default_backend() == "gpu" and settings.dtype == "bfloat16"
    return {
        "out": out,
        "method": _method(row),
        "ffn_group_size": row.ffn_group or CalibrateConfig.ffn_group_size,
        "attn_group_size": row.attn_group,
        "router_rank": settings.router_rank,
        "dtype": settings.dtype,
        "data": (str(settings.data_dir / settings.calibration),),
        "sparsity": row.target,
        "budget": row.budget,
        "distill": row.distill,
        "seed": row.seed,
        "updates": row.updates,
        "sequence_length": settings.sequence_length,
        "sequences_per_update": settings.sequences_per_update,
        "accumulation": settings.accumulation,
        "threshold_rows": settings.threshold_rows,
        "save_every": settings.save_every,
        "keep_checkpoints": 1,
        "attention": "cudnn" if flash else "mask",
    }


def _method(row: Row) -> Method:
    assert row.method not in ("dense", "threshold")  # nothing of them is trained
    return row.method


class _RehearsedError(Exception):
    """Ends a rehearsal."""


def _untrained(row: Row, settings: Settings, out: Path) -> None:
    """What a stage-1 run leaves, with new routers."""
    base = resolve_model(settings.model)
    config = read_config(base)
    wide = group_sizes(row, settings, config)
    assert row.budget is not None
    assert row.target is not None
    save_wide_model(
        out / "model",
        base=base,
        config=config,
        wide=wide,
        routers=new_routers(config, wide),
        budget=row.budget,
        targets={"attention": row.target, "ffn": row.target},
        training={"method": row.method, "target": "all"},
        include_base=False,
    )


def group_sizes(row: Row, settings: Settings, config: ModelConfig) -> WideConfig:
    """The row's groups; a method without a choice has its own."""
    return wide_config(
        config,
        "wide" if row.method == "threshold" else _method(row),
        attn_group_size=row.attn_group,
        ffn_group_size=row.ffn_group or config.intermediate_size,
        router_rank=settings.router_rank,
    )


def _set_thresholds(row: Row, settings: Settings, console: Console) -> None:
    """Of the baseline without training, on as many rows as one update has."""
    base = resolve_model(settings.model)
    tokenizer = load_tokenizer(base)
    data = (str(settings.data_dir / settings.calibration),)
    cache = token_cache(
        Recipe(data, end_token=tokenizer.eos_token_id), tokenizer, cache_dir() / "tokens"
    )
    rows = SpreadRows(PackedRows(cache, settings.sequence_length), settings.sequences_per_update)
    ids = np.stack([rows[index][0] for index in range(len(rows))])
    model = from_pretrained(base, dtype="float32", kernels=None)
    model = by_magnitude(model, group_sizes(row, settings, model.config))
    assert row.target is not None
    with full_precision(model):  # as it is measured
        thresholds = calibrate_thresholds(model, ids, row.target)
    folder = settings.folder(row)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{THRESHOLDS}"
    with unfinished.open("wb") as stream:
        np.save(stream, thresholds)
    unfinished.replace(folder / THRESHOLDS)
    console.print(f"{row.id}: thresholds set on {ids.size:,} tokens", highlight=False)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A row's model in float32 and plain JAX."""

    model: WideForCausalLM
    tokenizer: Any
    fingerprint: str  # of the base, and of the routers or thresholds


def load(row: Row, settings: Settings) -> Loaded:
    """The model of a row that is made; a LoRA is merged into it."""
    base, folder = resolve_model(settings.model), model_folder(row, settings)
    model = from_pretrained(folder, dtype="float32", kernels=None)
    tokenizer = load_tokenizer(base)
    plain = EngineChoice(None, "plain JAX was asked for")
    fingerprint = LoadedModel(row.id, folder, model, tokenizer, plain).fingerprint()
    if row.method == "threshold":
        thresholds = np.load(settings.folder(row) / THRESHOLDS)
        model = by_magnitude(model, group_sizes(row, settings, model.config), thresholds)
        digest = hashlib.sha256(fingerprint.encode() + thresholds.tobytes())
        fingerprint = f"sha256:{digest.hexdigest()}"
    return Loaded(model, tokenizer, fingerprint)


def model_folder(row: Row, settings: Settings) -> Path:
    """Where the model of a row that is made lies; its base is found from there."""
    base = resolve_model(settings.model)
    if not row.stage:
        return base
    folder = settings.folder(row) / "model"
    _rebase(folder, base)
    return folder


def _rebase(folder: Path, base: Path) -> None:
    """Let routers that were trained on another machine find their base on this one.

    Raises:
        WideConfigError: it is another model than they were trained for.
    """
    raw = read_json(folder / WIDE_CONFIG)
    if (Path(raw["base"]["path"]) / "config.json").exists():
        return
    raw["base"]["path"] = str(base.resolve())
    unfinished = folder / f".{WIDE_CONFIG}"
    write_json(unfinished, raw)
    unfinished.replace(folder / WIDE_CONFIG)
    config = read_config(base)
    verify_base(folder, config, load_wide_info(folder, config))
