"""`wide bench train`: tokens per second, MFU and memory of the real step on random weights."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from eval.records import append_record, common_fields
from train.bench import (
    DType,
    PreparedStage,
    TrainTiming,
    measure,
    prepare,
    record_fields,
)
from train.bench import start as start_stage
from train.config import TrainConfig
from train.parts import Params
from wide_jax.cli.files import check_writable_file
from wide_jax.cli.progress import progress
from wide_jax.cli.start import Platform, start
from wide_jax.config import WideConfig
from wide_jax.shapes import shape


@dataclasses.dataclass(frozen=True)
class Args:
    """Time training updates on random weights and tokens, after printing the memory they need.

    Options that take several values are combined; every combination is a row and a record.
    """

    shape: str = "llama-3.1-8b"
    """Architecture: llama-3.1-8b or smollm2-135m."""
    layers: int | None = None
    """Fewer layers than the shape has, to compare settings quickly."""
    stage: tuple[Literal[1, 2], ...] = (1, 2)
    """1 trains routers, 2 LoRA and routers."""
    sequence_length: int = 4096
    sequences: tuple[int, ...] = (4,)
    """Sequences per micro-batch, over all devices."""
    accumulation: int = 1
    """Micro-batches an update."""
    attention: tuple[Literal["mask", "cudnn"], ...] = ("cudnn",)
    remat: tuple[bool, ...] = (False,)
    """Recompute each layer in the backward pass."""
    logits_chunk: tuple[int, ...] = (512,)
    ffn_group_size: int = 128
    dtype: DType = "bfloat16"
    data_parallel: int = 1
    fsdp: int = 1
    tensor_parallel: int = 1
    updates: int = 8
    """Timed updates; the median counts."""
    warm_up: int = 2
    json: Path | None = None
    """Append a record (suite `train`) of every row to this file."""
    platform: Annotated[Platform, tyro.conf.arg(metavar="{auto,cpu,gpu}")] = "auto"
    """Where to compute; `gpu` fails where there is none."""


def main(args: Args) -> None:
    """Measure every combination; a row that the device cannot run says why."""
    console = Console()
    architecture = shape(args.shape)
    if args.layers is not None:
        architecture = dataclasses.replace(architecture, num_hidden_layers=args.layers)
    wide = WideConfig.for_model(architecture, ffn_group_size=args.ffn_group_size)
    settings = list(_settings(args))
    if args.json is not None:
        check_writable_file(args.json)
    start(args.platform, console)
    table = Table(
        "stage", "sequences", "attention", "remat", "chunk", "ms", "tokens/s", "MFU", "GiB"
    )
    frozen: Params | None = None
    measured = 0
    for stage, config in settings:
        row = [str(stage), str(config.micro_batch), config.attention]
        row += ["on" if config.remat else "off", str(config.logits_chunk)]
        try:
            prepared = prepare(architecture, wide, config, stage=stage, dtype=args.dtype)
            plan = "memory unknown" if prepared.memory is None else prepared.memory.line()
            console.print(
                f"stage {stage}, {config.micro_batch} x {config.sequence_length} tokens, "
                f"compiled in {prepared.compile_seconds:.0f} s. {plan}",
                highlight=False,
                soft_wrap=True,
            )
            with progress(console, "updates") as advance:
                state, frozen = start_stage(prepared, frozen=frozen)
                timing, _ = measure(
                    prepared,
                    state,
                    frozen,
                    updates=args.updates,
                    warm_up=args.warm_up,
                    progress=lambda done, total: advance(done, total, ""),
                )
        except jax.errors.JaxRuntimeError as error:  # out of memory, or nothing that computes it
            table.add_row(*row, f"failed: {str(error).strip().splitlines()[0][:80]}")
            continue
        measured += 1
        table.add_row(*row, *_figures(prepared, timing))
        if args.json is not None:
            record = common_fields("train") | record_fields(prepared, timing, model=args.shape)
            append_record(args.json, record)
    console.print(table)
    if not measured:
        raise RuntimeError("nothing could be measured: the table says why")


def _settings(args: Args) -> Iterator[tuple[Literal[1, 2], TrainConfig]]:
    """Every combination of the options, each checked before anything runs."""
    options = (args.stage, args.sequences, args.attention, args.remat, args.logits_chunk)
    for stage, sequences, attention, remat, chunk in itertools.product(*options):
        yield (
            stage,
            TrainConfig(
                updates=max(args.warm_up + args.updates, 1),
                sequences_per_update=sequences * args.accumulation,
                accumulation=args.accumulation,
                sequence_length=args.sequence_length,
                attention=attention,
                remat=remat,
                logits_chunk=chunk,
                learning_rate=2e-3 if stage == 1 else 2e-4,
                data_parallel=args.data_parallel,
                fsdp=args.fsdp,
                tensor_parallel=args.tensor_parallel,
            ),
        )


def _figures(prepared: PreparedStage, timing: TrainTiming) -> list[str]:
    milliseconds = 1e3 * prepared.config.tokens_per_update / timing.tokens_per_second
    return [
        f"{milliseconds:.1f}",
        f"{timing.tokens_per_second:,.0f}",
        "-" if timing.mfu is None else f"{timing.mfu:.1%}",
        "-" if timing.peak_gib is None else f"{timing.peak_gib:.1f}",
    ]
