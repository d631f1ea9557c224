"""`python -m train.check_layouts`: do several devices train what one does, and how much faster?

On random weights of a shape: updates with fsdp over several devices, a checkpoint, the same updates
on one device, and the checkpoint restored there. Every step is a `train` record, written as soon as
it is measured. Losses and gradient norms must agree within the tolerances, restored arrays bit for
bit.
"""

import dataclasses
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console

from eval.records import append_record, common_fields
from train.bench import (
    DType,
    PreparedStage,
    TrainTiming,
    measure,
    prepare,
    record_fields,
    start,
)
from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.loop import TrainState
from wide_jax.config import WideConfig
from wide_jax.shapes import shape

EVERY = 5  # updates between two lines


@dataclasses.dataclass(frozen=True)
class Args:
    """Compare one device with several: losses, speed, and a checkpoint that crosses over."""

    shape: str = "llama-3.1-8b"
    layers: int | None = None
    stage: Literal[1, 2] = 1
    sequence_length: int = 4096
    sequences: int = 4
    """Sequences an update: the same for both layouts, so one device must hold them."""
    accumulation: int = 1
    """Micro-batches an update, on both layouts."""
    ffn_group_size: int = 128
    fsdp: int = 2
    updates: int = 20
    attention: Literal["mask", "cudnn"] = "cudnn"
    dtype: DType = "bfloat16"
    tolerance: float = 0.01
    """Largest difference of an update's loss, in nats. bf16 sums in another order differ in the
    third digit, and a sampled mask near its tie then turns."""
    gradient_tolerance: float = 0.05
    """Largest relative difference of an update's gradient norm."""
    json: Path | None = None
    """Append the records to this file."""


def main(args: Args) -> None:
    """Run both layouts and the restore.

    Raises:
        ValueError: too few updates, or a shape that does not fit the mesh.
        RuntimeError: losses, gradients or restored arrays differ.
    """
    if args.updates < 3:
        raise ValueError(f"updates={args.updates} must be at least 3: the first two are not timed")
    console = Console(highlight=False, soft_wrap=True)
    started = time.perf_counter()

    def say(text: str) -> None:
        console.print(f"{time.perf_counter() - started:6.1f} s  {text}")

    model = shape(args.shape)
    if args.layers is not None:
        model = dataclasses.replace(model, num_hidden_layers=args.layers)
    wide = WideConfig.for_model(model, ffn_group_size=args.ffn_group_size)
    config = TrainConfig(
        updates=args.updates + 1,
        sequences_per_update=args.sequences,
        sequence_length=args.sequence_length,
        accumulation=args.accumulation,
        attention=args.attention,
    )

    def compiled(config: TrainConfig) -> PreparedStage:
        prepared = prepare(model, wide, config, stage=args.stage, dtype=args.dtype)
        plan = "memory unknown" if prepared.memory is None else prepared.memory.line()
        say(f"fsdp={config.fsdp}: compiled in {prepared.compile_seconds:.0f} s. {plan}")
        return prepared

    def run(
        prepared: PreparedStage, state: TrainState, frozen: Any, **more: Any
    ) -> tuple[TrainTiming, TrainState]:
        """The updates, as a record; `more` are further fields of it."""
        fsdp = prepared.config.fsdp

        def progress(done: int, total: int) -> None:
            if done == 1 or done % EVERY == 0:
                say(f"fsdp={fsdp}: {done} of {total} updates")

        timing, state = measure(
            prepared, state, frozen, updates=args.updates - 2, warm_up=2, progress=progress
        )
        mfu = "unknown" if timing.mfu is None else f"{timing.mfu:.1%}"
        say(
            f"fsdp={fsdp}: {timing.tokens_per_second:,.0f} tokens/s, MFU {mfu}, losses "
            f"{timing.losses[0]:.5f} ... {timing.losses[-1]:.5f}"
        )
        record(prepared, timing, **more)
        return timing, state

    def record(prepared: PreparedStage, timing: TrainTiming, **more: Any) -> None:
        if args.json is not None:
            fields = record_fields(prepared, timing, model=args.shape)
            append_record(args.json, common_fields("train") | fields | more)

    with ThreadPoolExecutor() as threads:  # compiling is most of a short comparison
        many_config = dataclasses.replace(config, fsdp=args.fsdp)
        on_many, on_one = threads.map(compiled, (many_config, config))
    with tempfile.TemporaryDirectory() as folder:
        state, frozen = start(on_many)
        say(f"fsdp={args.fsdp}: weights drawn")
        many, state = run(on_many, state, frozen)
        checkpoints = Checkpoints(folder, {"updates": config.updates})
        checkpoints.save(state)
        written = jax.tree.map(np.asarray, (state.trainable, state.opt_state))
        checkpoints.close()
        say(f"fsdp={args.fsdp}: checkpoint written")
        del state, frozen  # one device needs the room

        state, frozen = start(on_one)
        like_one = TrainState(*jax.tree.map(_shape, (state.trainable, state.opt_state)), update=0)
        say("fsdp=1: weights drawn")
        one, state = run(on_one, state, frozen)
        gaps = _gaps(one, many)
        ratio = many.tokens_per_second / one.tokens_per_second
        say(f"fsdp={args.fsdp} against fsdp=1: {gaps}; tokens/s {ratio:.2f}x")
        next_one, _ = measure(on_one, state, frozen, updates=1, warm_up=0)
        del state

        checkpoints = Checkpoints(folder, {"updates": config.updates})
        restored = checkpoints.restore(like_one)
        checkpoints.close()
    same = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == b.tobytes(),
        (restored.trainable, restored.opt_state),
        written,
    )
    bitwise = all(jax.tree.leaves(same))
    after, _ = measure(on_one, restored, frozen, updates=1, warm_up=0)
    next_gaps = _gaps(next_one, after)
    say(f"the update after the restore on one device: {next_gaps}; {bitwise=}")
    compared = {
        "fsdp": args.fsdp,
        "losses": gaps.loss,
        "gradient_norms": gaps.gradient,
        "speedup": ratio,
        "restored_bit_for_bit": bitwise,
        "next_loss": next_gaps.loss,
        "next_gradient_norm": next_gaps.gradient,
    }
    record(on_one, after, restored_from=args.fsdp, compared=compared)
    problems = [] if bitwise else ["restored arrays are not those that were written"]
    for what, gap, tolerance in (
        ("losses", max(gaps.loss, next_gaps.loss), args.tolerance),
        ("gradient norms", max(gaps.gradient, next_gaps.gradient), args.gradient_tolerance),
    ):
        if not gap <= tolerance:
            problems.append(f"{what} differ by {gap:.3g}, tolerance {tolerance}")
    if problems:
        raise RuntimeError("; ".join(problems))
    say(
        f"restored on one device bit for bit; losses within {args.tolerance}, gradient norms "
        f"within {args.gradient_tolerance:.0%}"
    )


@dataclasses.dataclass(frozen=True)
class _Gaps:
    """Largest differences between the updates of two runs."""

    loss: float  # nats
    gradient: float  # of the norms, relative

    def __str__(self) -> str:
        return (
            f"largest difference of a loss {self.loss:.2g} nats, of a gradient norm "
            f"{self.gradient:.2g} of it"
        )


def _gaps(one: TrainTiming, other: TrainTiming) -> _Gaps:
    loss = np.abs(np.subtract(one.losses, other.losses))
    gradient = np.abs(np.subtract(one.gradient_norms, other.gradient_norms))
    return _Gaps(float(loss.max()), float((gradient / np.array(one.gradient_norms)).max()))


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
