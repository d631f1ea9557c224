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
        # Not TF32 for float32. Set here: a thread has settings of its own.
        with jax.default_matmul_precision("float32" if args.dtype == "float32" else None):
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

    layouts = [config] if args.fsdp == 1 else [dataclasses.replace(config, fsdp=args.fsdp), config]
    with ThreadPoolExecutor() as threads:  # compiling is most of a short comparison
        *on_many, on_one = threads.map(compiled, layouts)
    many, written, gaps = None, None, None
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        for prepared in on_many:
            state, frozen = start(prepared)
            say(f"fsdp={args.fsdp}: weights drawn")
            many, state = run(prepared, state, frozen)
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
        after_one, _ = measure(on_one, state, frozen, updates=1, warm_up=0)
        del state
        if many is not None:
            checkpoints = Checkpoints(folder, {"updates": config.updates})
            restored = checkpoints.restore(like_one)
            checkpoints.close()
            same = jax.tree.map(
                lambda a, b: np.asarray(a).tobytes() == b.tobytes(),
                (restored.trainable, restored.opt_state),
                written,
            )
            equal = all(jax.tree.leaves(same))
            after_many, _ = measure(on_one, restored, frozen, updates=1, warm_up=0)
            ratio = many.tokens_per_second / one.tokens_per_second
            gaps = _gaps(_joined(one, after_one), _joined(many, after_many))
            say(
                f"fsdp={args.fsdp} against fsdp=1, the update after the restore on one device "
                f"included: {gaps}; tokens/s {ratio:.2f}x; restored bit for bit: {equal}"
            )
            compared = {"fsdp": args.fsdp, "speedup": ratio, "restored_bit_for_bit": equal}
            compared |= dataclasses.asdict(gaps)
            record(on_one, after_many, restored_from=args.fsdp, compared=compared)
            if not equal:
                problems.append("restored arrays are not those that were written")

    state, _ = start(on_one, frozen=frozen)
    embedding = "model.embed_tokens.weight"
    moved = frozen | {embedding: neighbours(frozen[embedding])}
    del frozen
    control, state = run(on_one, state, moved, control="embedding moved by one rounding")
    after_control, _ = measure(on_one, state, moved, updates=1, warm_up=0)
    rounding = _gaps(_joined(one, after_one), _joined(control, after_control))
    say(f"fsdp=1 with its embedding moved by one rounding: {rounding}")
    if gaps is not None:
        for what, gap, most in (
            ("losses", gaps.loss, rounding.loss),
            ("gradient norms", gaps.gradient, rounding.gradient),
        ):
            if not gap <= max(2 * most, args.tolerance):
                problems.append(f"{what} differ by {gap:.3g}, rounding alone by {most:.3g}")
    if problems:
        raise RuntimeError("; ".join(problems))


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
