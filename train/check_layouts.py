"""`python -m train.check_layouts`: do several devices train what one does, and how much faster?

On random weights of a shape: updates with fsdp over several devices, a checkpoint, the same updates
on one device, and the checkpoint restored there. Every step is a `train` record, written as soon as
it is measured. Restored arrays must be equal bit for bit.

Losses need a scale: a deep random network with sampled masks is chaotic, so sums in another order
turn a mask near its tie, and with it everything after. The control says how much that is: one
device again, with every embedding weight moved to a neighbouring number of its type. Layouts must
differ by no more than twice what the control differs by, root mean square over the updates. In
bfloat16 the control itself is large; float32 is where an error could not hide.
"""

import dataclasses
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
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
from train.parts import Params
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
    """Devices of the other layout; 1: only the control is compared."""
    updates: int = 20
    attention: Literal["mask", "cudnn"] = "cudnn"
    dtype: DType = "bfloat16"
    tolerance: float = 1e-5
    """Difference of the losses, in nats, and of the gradient norms, relative, that is always within
    what rounding does."""
    json: Path | None = None
    """Append the records to this file."""


def main(args: Args) -> None:
    """Run both layouts, the restore and the control.

    Raises:
        ValueError: too few updates, or a shape that does not fit the mesh.
        RuntimeError: losses or gradients differ by more than rounding explains, or restored arrays
            differ.
    """
    if args.updates < 3:
        raise ValueError(f"updates={args.updates} must be at least 3: the first two are not timed")
    bench = _Bench(args, Console(highlight=False, soft_wrap=True), time.perf_counter())
    layouts = [1] if args.fsdp == 1 else [args.fsdp, 1]
    with ThreadPoolExecutor() as threads:  # compiling is most of a short comparison
        *on_many, on_one = threads.map(bench.compiled, layouts)
    with tempfile.TemporaryDirectory() as folder:
        # Before the weights of one device are there: it needs the room.
        written = [_write(bench, prepared, folder) for prepared in on_many]
        state, frozen = start(on_one)
        like = TrainState(*jax.tree.map(_shape, (state.trainable, state.opt_state)), update=0)
        one, state = bench.run(on_one, state, frozen)
        one_after, _ = measure(on_one, state, frozen, updates=1, warm_up=0)
        del state
        alone = _joined(one, one_after)
        found = [_restore(bench, on_one, like, frozen, folder, w, one, alone) for w in written]
    rounding = _control(bench, on_one, frozen, alone)
    problems = []
    for gaps, equal in found:
        if not equal:
            problems.append("restored arrays are not those that were written")
        for what, gap, most in (
            ("losses", gaps.loss, rounding.loss),
            ("gradient norms", gaps.gradient, rounding.gradient),
        ):
            if not gap <= max(2 * most, args.tolerance):
                problems.append(f"{what} differ by {gap:.3g}, rounding alone by {most:.3g}")
    if problems:
        raise RuntimeError("; ".join(problems))


@dataclasses.dataclass(frozen=True)
class _Bench:
    """The comparison's settings, and where its lines and records go."""

    args: Args
    console: Console
    started: float

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        self.console.print(f"{time.perf_counter() - self.started:6.1f} s  {text}")

    def compiled(self, fsdp: int) -> PreparedStage:
        """The step on a layout."""
        args = self.args
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
            fsdp=fsdp,
        )
        # Not TF32 for float32. Set here: a thread has settings of its own.
        with jax.default_matmul_precision("float32" if args.dtype == "float32" else None):
            prepared = prepare(model, wide, config, stage=args.stage, dtype=args.dtype)
        plan = "memory unknown" if prepared.memory is None else prepared.memory.line()
        self.say(f"fsdp={fsdp}: compiled in {prepared.compile_seconds:.0f} s. {plan}")
        return prepared

    def run(
        self, prepared: PreparedStage, state: TrainState, frozen: Params, **more: Any
    ) -> tuple[TrainTiming, TrainState]:
        """All updates but the last, as a record with the fields `more`."""
        fsdp = prepared.config.fsdp
        self.say(f"fsdp={fsdp}: weights drawn")

        def progress(done: int, total: int) -> None:
            if done == 1 or done % EVERY == 0:
                self.say(f"fsdp={fsdp}: {done} of {total} updates")

        updates = self.args.updates - 2
        timing, state = measure(
            prepared, state, frozen, updates=updates, warm_up=2, progress=progress
        )
        mfu = "unknown" if timing.mfu is None else f"{timing.mfu:.1%}"
        self.say(
            f"fsdp={fsdp}: {timing.tokens_per_second:,.0f} tokens/s, MFU {mfu}, losses "
            f"{timing.losses[0]:.5f} ... {timing.losses[-1]:.5f}"
        )
        self.record(prepared, timing, **more)
        return timing, state

    def record(self, prepared: PreparedStage, timing: TrainTiming, **more: Any) -> None:
        """Append a record, if there is a file for it."""
        if self.args.json is not None:
            fields = record_fields(prepared, timing, model=self.args.shape)
            append_record(self.args.json, common_fields("train") | fields | more)


@dataclasses.dataclass(frozen=True)
class _Written:
    """What several devices measured, and the arrays of their checkpoint."""

    fsdp: int
    timing: TrainTiming
    arrays: Any


def _write(bench: _Bench, prepared: PreparedStage, folder: str) -> _Written:
    """Train on several devices and leave a checkpoint in the folder."""
    state, frozen = start(prepared)
    timing, state = bench.run(prepared, state, frozen)
    checkpoints = _checkpoints(folder)
    checkpoints.save(state)
    arrays = jax.tree.map(np.asarray, (state.trainable, state.opt_state))
    checkpoints.close()
    bench.say(f"fsdp={prepared.config.fsdp}: checkpoint written")
    return _Written(prepared.config.fsdp, timing, arrays)


def _restore(
    bench: _Bench,
    on_one: PreparedStage,
    like: TrainState,
    frozen: Params,
    folder: str,
    written: _Written,
    one: TrainTiming,
    alone: np.ndarray,
) -> tuple["_Gaps", bool]:
    """Go on from the checkpoint on one device: differences, and whether it came back bit for bit.

    `one` and `alone` are what one device measured by itself.
    """
    checkpoints = _checkpoints(folder)
    restored = checkpoints.restore(like)
    checkpoints.close()
    same = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == b.tobytes(),
        (restored.trainable, restored.opt_state),
        written.arrays,
    )
    equal = all(jax.tree.leaves(same))
    after, _ = measure(on_one, restored, frozen, updates=1, warm_up=0)
    speedup = written.timing.tokens_per_second / one.tokens_per_second
    gaps = _gaps(alone, _joined(written.timing, after))
    bench.say(
        f"fsdp={written.fsdp} against fsdp=1, the update after the restore on one device "
        f"included: {gaps}; tokens/s {speedup:.2f}x; restored bit for bit: {equal}"
    )
    compared = {"fsdp": written.fsdp, "speedup": speedup, "restored_bit_for_bit": equal}
    compared |= dataclasses.asdict(gaps)
    bench.record(on_one, after, restored_from=written.fsdp, compared=compared)
    return gaps, equal


def _control(bench: _Bench, on_one: PreparedStage, frozen: Params, alone: np.ndarray) -> "_Gaps":
    """What one rounding of the embedding changes on one device."""
    state, _ = start(on_one, frozen=frozen)
    embedding = "model.embed_tokens.weight"
    moved = frozen | {embedding: neighbours(frozen[embedding])}
    control, state = bench.run(on_one, state, moved, control="embedding moved by one rounding")
    after, _ = measure(on_one, state, moved, updates=1, warm_up=0)
    rounding = _gaps(alone, _joined(control, after))
    bench.say(f"fsdp=1 with its embedding moved by one rounding: {rounding}")
    return rounding


def _checkpoints(folder: str) -> Checkpoints:
    return Checkpoints(folder, {"settings of": "the comparison"})


@dataclasses.dataclass(frozen=True)
class _Gaps:
    """Differences between the updates of two runs: root mean squares, and the largest."""

    loss: float  # nats
    loss_largest: float
    gradient: float  # of the norms, relative
    gradient_largest: float

    def __str__(self) -> str:
        return (
            f"losses differ by {self.loss:.2g} nats (at most {self.loss_largest:.2g}), gradient "
            f"norms by {self.gradient:.2%} (at most {self.gradient_largest:.2%})"
        )


def _joined(first: TrainTiming, then: TrainTiming) -> np.ndarray:
    """Losses and gradient norms of both, in order: `[2, updates]`."""
    losses = first.losses + then.losses
    return np.array([losses, first.gradient_norms + then.gradient_norms])


def _gaps(one: np.ndarray, other: np.ndarray) -> _Gaps:
    loss = np.abs(one[0] - other[0])
    gradient = np.abs(one[1] - other[1]) / one[1]
    loss_rms, gradient_rms = (float(np.sqrt(np.mean(x**2))) for x in (loss, gradient))
    return _Gaps(loss_rms, float(loss.max()), gradient_rms, float(gradient.max()))


@jax.jit
def neighbours(x: jax.Array) -> jax.Array:
    """Every number moved to the next one of its type, up or down at random."""
    up = jax.random.bernoulli(jax.random.key(0), shape=x.shape)
    return jnp.nextafter(x, jnp.where(up, jnp.inf, -jnp.inf).astype(x.dtype))


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
