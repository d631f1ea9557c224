"""`python -m train.check_layouts`: do several devices train what one does, and how much faster?

On random weights of a shape: updates on one device, the same updates with fsdp over several, and a
checkpoint written by the many and restored on one. Every run is a `train` record; losses must
agree within the tolerance, restored arrays bit for bit.
"""

import dataclasses
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console

from eval.records import append_record, common_fields
from train.bench import DType, PreparedStage, measure, prepare, record_fields, start
from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.loop import TrainState
from wide_jax.config import WideConfig
from wide_jax.shapes import shape


@dataclasses.dataclass(frozen=True)
class Args:
    """Compare one device with several: losses, speed, and a checkpoint that crosses over."""

    shape: str = "llama-3.1-8b"
    layers: int | None = None
    stage: Literal[1, 2] = 1
    sequence_length: int = 4096
    sequences: int = 4
    """Sequences an update: the same for both layouts."""
    accumulation: int = 1
    """Micro-batches an update on one device; the many split the rows instead where they can."""
    ffn_group_size: int = 128
    fsdp: int = 2
    updates: int = 20
    attention: Literal["mask", "cudnn"] = "cudnn"
    dtype: DType = "bfloat16"
    tolerance: float = 0.01
    """Largest difference of an update's loss, in nats. bf16 sums in another order differ in the
    third digit, and a sampled mask near its tie then turns."""
    json: Path | None = None
    """Append both records to this file."""


def main(args: Args) -> None:
    """Run both layouts and the restore.

    Raises:
        ValueError: too few updates, or a shape that does not fit the mesh.
        RuntimeError: losses or restored arrays differ.
    """
    if args.updates < 3:
        raise ValueError(f"updates={args.updates} must be at least 3: the first two are not timed")
    console = Console(highlight=False, soft_wrap=True)
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
    many = dataclasses.replace(config, fsdp=args.fsdp)
    losses: list[np.ndarray] = []
    speeds: list[float] = []

    def compiled(config: TrainConfig) -> PreparedStage:
        return prepare(model, wide, config, stage=args.stage, dtype=args.dtype)

    def run(prepared: PreparedStage) -> tuple[TrainState, Any]:
        config = prepared.config
        state, frozen = start(prepared)
        timing, state = measure(prepared, state, frozen, updates=args.updates - 2, warm_up=2)
        losses.append(np.array(timing.losses))
        speeds.append(timing.tokens_per_second)
        console.print(
            f"fsdp={config.fsdp}: {timing.tokens_per_second:,.0f} tokens/s, MFU "
            f"{timing.mfu or float('nan'):.1%}, losses {timing.losses[0]:.5f} ... "
            f"{timing.losses[-1]:.5f}, compiled in {prepared.compile_seconds:.0f} s"
        )
        if args.json is not None:
            record = common_fields("train") | record_fields(prepared, timing, model=args.shape)
            append_record(args.json, record)
        return state, frozen

    with ThreadPoolExecutor() as threads:  # compiling is most of a short comparison
        on_one, on_many = threads.map(compiled, (config, many))
    for prepared in (on_one, on_many):
        plan = "memory unknown" if prepared.memory is None else prepared.memory.line()
        console.print(f"fsdp={prepared.config.fsdp}: {plan}")
    state, frozen = run(on_one)
    like_one = TrainState(*jax.tree.map(_shape, (state.trainable, state.opt_state)), update=0)
    after_one, _ = measure(on_one, state, frozen, updates=1, warm_up=0)
    del state, frozen
    state, frozen = run(on_many)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder, {"updates": config.updates})
        checkpoints.save(state)
        checkpoints.close()
        written = jax.tree.map(np.asarray, (state.trainable, state.opt_state))
        del state, frozen
        checkpoints = Checkpoints(folder, {"updates": config.updates})
        restored = checkpoints.restore(like_one)
        checkpoints.close()
    same = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == b.tobytes(),
        (restored.trainable, restored.opt_state),
        written,
    )
    _, frozen = start(on_one)
    after_many, _ = measure(on_one, restored, frozen, updates=1, warm_up=0)
    gap = float(np.abs(losses[0] - losses[1]).max())
    next_gap = abs(after_one.losses[0] - after_many.losses[0])
    console.print(
        f"largest difference of {len(losses[0])} losses: {gap:.2g} nats; of the next update after "
        f"the restore: {next_gap:.2g}; tokens/s {speeds[1] / speeds[0]:.2f}x"
    )
    problems = []
    if not all(jax.tree.leaves(same)):
        problems.append("restored arrays are not those that were written")
    if not max(gap, next_gap) <= args.tolerance:
        problems.append(f"losses differ by {max(gap, next_gap):.3g}, tolerance {args.tolerance}")
    if problems:
        raise RuntimeError("; ".join(problems))
    console.print(f"restored on one device bit for bit; losses within {args.tolerance}")


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
