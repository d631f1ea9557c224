"""Does the kernel path compute the model? Logits and masks beside plain JAX, in float32 and bf16.

    python -m eval.engine_check --shape llama-3.1-8b --layers 4 --tokens 1024 --json OUT

float32: the same masks and logits, in one pass and in pieces with a cache. bf16, with the float32
masks forced: no further from float32 than 1.5 times what the dense model in plain bf16 is from its
own float32; plain bf16 with the same masks beside it. And, by itself, how many decisions bf16
flips: its residual stream differs, so routers see other inputs.

Two rows and one, whose steps have a routing operation of their own. Where something is wrong, the
exit status is 1. Where it is the pieces, they run again in plain JAX, with every operation by its
reference, and with one after the other: those that mend them tell which is at fault. (To name the
rotation or decode attention takes a step's fused attention apart, so it mends that too.)
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Float, Int

from eval import records
from eval.e2e_runs import random_model
from wide_jax.batch import TokenBatch
from wide_jax.cache import KVCache
from wide_jax.config import WideConfig
from wide_jax.engine import split_on
from wide_jax.generate import decode_step, prefill
from wide_jax.hf.mapping import is_router
from wide_jax.hf.pretrained import build, tensors_of
from wide_jax.kernels import Kernels
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Argmax, Forced, Masks, Routing
from wide_jax.shapes import shape

STEPS = 4  # single steps at the end of each row
FLOAT32_LIMIT = 1e-4  # of logits: the most that they may differ from plain JAX's
BF16_LIMIT = 1.5  # times dense bf16's error: the most that the kernels' may be
OPERATIONS = tuple(field.name for field in dataclasses.fields(Kernels) if field.name != "hints")


@dataclasses.dataclass(frozen=True)
class Args:
    """Compare the kernel path with plain JAX on random weights of an architecture."""

    shape: str = "llama-3.1-8b"
    layers: int = 4
    tokens: int = 1024
    batch: int = 2
    ffn_group_size: int = 128
    json: Path | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found; errors are norm(x - reference) / norm(reference) of the logits."""

    decisions: int
    float32_max_difference: float  # of logits
    float32_flipped: int  # decisions that differ from plain JAX's
    # The same tokens in two prefills and single steps: after each of these, and the largest; and
    # of the first row by itself.
    float32_cached_differences: tuple[float, ...]
    float32_cached_max_difference: float
    float32_alone_differences: tuple[float, ...]
    bf16_error: float  # kernels, masks forced, against plain float32
    bf16_plain_error: float  # plain JAX, the same masks and reference
    bf16_dense_error: float  # plain JAX with everything on, against plain float32 with it too
    bf16_flipped: float  # fraction of decisions that differ from float32's

    @property
    def bf16_ratio(self) -> float:
        """The kernels' error by dense bf16's: at most `BF16_LIMIT` where they compute right."""
        return self.bf16_error / self.bf16_dense_error

    @property
    def pieces_wrong(self) -> bool:
        """Whether logits in pieces, of all rows or of one, are beyond their limit."""
        found = (*self.float32_cached_differences, *self.float32_alone_differences)
        return not all(difference <= FLOAT32_LIMIT for difference in found)

    def problems(self) -> list[str]:
        """What is beyond its limit, in words; empty where the kernels compute the model."""
        found = []
        if self.float32_flipped:
            found.append(f"{self.float32_flipped} decisions differ in float32")
        for where, difference in (
            ("logits", self.float32_max_difference),
            ("logits in pieces", self.float32_cached_max_difference),
            ("logits of one row in pieces", float(np.max(self.float32_alone_differences))),
        ):
            if not difference <= FLOAT32_LIMIT:
                found.append(f"float32 {where} differ by {difference:.2e}, limit {FLOAT32_LIMIT}")
        if not self.bf16_ratio <= BF16_LIMIT:
            found.append(f"bf16 error is {self.bf16_ratio:.2f} of dense's, limit {BF16_LIMIT}")
        return found


def compare(model: WideForCausalLM, ids) -> Comparison:
    """Run a float32 model with routers both ways, and its bf16 cast."""
    batch = TokenBatch.from_lengths(ids)
    with jax.default_matmul_precision("float32"):
        wanted, masks = _run(model, batch, Argmax(), None)
        got, ours = _run(model, batch, Argmax(), Kernels())
        cached = _cached_differences(model, ids, wanted, Kernels())
        alone = _cached_differences(model, ids[:1], wanted[:1], Kernels())
        # Ties apart, what follows compares arithmetic at one and the same set of masks.
        forced = Forced(masks)
        wanted_forced, _ = _run(model, batch, forced, None)
        wanted_dense = _dense(model, batch)
    half = _cast(model)
    bf16, _ = _run(half, batch, forced, Kernels())
    plain, _ = _run(half, batch, forced, None)
    dense = _dense(half, batch)
    _, rounded = _run(half, batch, Argmax(), Kernels())
    decisions = sum(mask.size for mask in jax.tree.leaves(masks))
    return Comparison(
        decisions=decisions,
        float32_max_difference=float(jnp.abs(got - wanted).max()),
        float32_flipped=_differing(ours, masks),
        float32_cached_differences=cached,
        float32_cached_max_difference=float(np.max(cached)),
        float32_alone_differences=alone,
        bf16_error=_error(bf16, wanted_forced),
        bf16_plain_error=_error(plain, wanted_forced),
        bf16_dense_error=_error(dense, wanted_dense),
        bf16_flipped=_differing(rounded, masks) / decisions,
    )


def by_operation(
    model: WideForCausalLM, ids: Int[Array, "B T"]
) -> Iterator[tuple[str, tuple[float, ...], tuple[float, ...]]]:
    """What runs by its reference, and the differences of the pieces then, of all rows and of one.

    First plain JAX, then every operation of the kernel path, then one at a time.
    """
    apart = [name for name in OPERATIONS if name != "attention_step"]  # it is these or that
    ways: dict[str, Kernels | None] = {"plain JAX": None, "all": _by_reference(apart)}
    ways |= {name: _by_reference([name]) for name in OPERATIONS}
    with jax.default_matmul_precision("float32"):
        wanted, _ = _run(model, TokenBatch.from_lengths(ids), Argmax(), None)
        for name, kernels in ways.items():
            rows = _cached_differences(model, ids, wanted, kernels)
            yield name, rows, _cached_differences(model, ids[:1], wanted[:1], kernels)


def _by_reference(names: Sequence[str]) -> Kernels:
    settings: dict[str, Any] = dict.fromkeys(names, "reference")
    return Kernels(**settings)


def _cached_differences(
    model: WideForCausalLM,
    ids: Int[Array, "B T"],
    wanted: Float[Array, "B T V"],
    kernels: Kernels | None,
) -> tuple[float, ...]:
    cached, positions = _piecewise(model, ids, kernels)
    return tuple(np.abs(np.asarray(cached - wanted[:, positions])).max(axis=(0, 2)).tolist())


def _run(
    model: WideForCausalLM, batch: TokenBatch, routing: Routing, kernels: Kernels | None
) -> tuple[Float[Array, "B T V"], Masks]:
    logits, masks = _forward(*split_on(model, kernels), batch, routing)
    return logits.astype(jnp.float32), masks


def _dense(model: WideForCausalLM, batch: TokenBatch) -> Float[Array, "B T V"]:
    """Logits of plain JAX with everything on: no mask, no router."""
    logits, _ = _forward(*split_on(model, None), batch, AllOn())
    return logits.astype(jnp.float32)


def _piecewise(
    model: WideForCausalLM, ids: Int[Array, "B T"], kernels: Kernels | None
) -> tuple[Float[Array, "B P V"], np.ndarray]:
    """Logits where a generation would draw: after each of two prefills, and after every step."""
    batch, tokens = ids.shape
    half, steps = tokens // 2, min(STEPS, tokens // 4)
    cache = KVCache.empty(model.config, batch, tokens + 3, jnp.float32)  # no round number
    graphdef, state = split_on(model, kernels)
    logits = []
    for start, end in ((0, half), (half, tokens - steps)):
        lengths = jnp.full((batch,), end - start, jnp.int32)
        piece, cache, _ = prefill(
            graphdef, state, ids[:, start:end], lengths, cache, Argmax(), fresh=start == 0
        )
        logits.append(piece)
    logits += list(_steps(graphdef, state, ids[:, tokens - steps :].T, cache))
    positions = np.array([half - 1, *range(tokens - steps - 1, tokens)])
    return jnp.stack(logits, axis=1).astype(jnp.float32), positions


@functools.partial(jax.jit, static_argnames="graphdef")
def _steps(graphdef, state, tokens: Int[Array, "P B"], cache: KVCache) -> Float[Array, "P B V"]:
    """Logits after each token, in a loop on the device, as a generation runs."""

    def step(cache, token):
        active = jnp.ones(token.shape, bool)
        logits, cache, _ = decode_step(graphdef, state, token, active, cache, Argmax())
        return cache, logits

    return jax.lax.scan(step, cache, tokens)[1]


@functools.partial(jax.jit, static_argnames="graphdef")
def _forward(graphdef, state, batch, routing):
    model = nnx.merge(graphdef, state)
    output = model(batch, routing)
    return model.logits(output.hidden), output.masks


def _cast(model: WideForCausalLM) -> WideForCausalLM:
    tensors = tensors_of(model, lambda name: True)
    cast = {n: a if is_router(n) else a.astype(jnp.bfloat16) for n, a in tensors.items()}
    return build(model.config, model.wide, cast, dtype=jnp.bfloat16)


def _differing(masks: Masks, others: Masks) -> int:
    pairs = zip(jax.tree.leaves(masks), jax.tree.leaves(others), strict=True)
    return sum(int((np.asarray(a) != np.asarray(b)).sum()) for a, b in pairs)


def _error(x, reference) -> float:
    return float(jnp.linalg.norm(x - reference) / jnp.linalg.norm(reference))


def main(args: Args) -> int:
    """Compare, print and record; 1 where something is wrong, after showing where."""
    architecture = dataclasses.replace(shape(args.shape), num_hidden_layers=args.layers)
    wide = WideConfig.for_model(architecture, ffn_group_size=args.ffn_group_size)
    model = random_model(architecture, wide, dtype=jnp.float32)
    ids = jax.random.randint(jax.random.key(5), (args.batch, args.tokens), 0, 1000)
    found = compare(model, ids)
    print(f"float32: logits differ by at most {found.float32_max_difference:.2e}, ", end="")
    print(f"{found.float32_flipped} of {found.decisions} decisions")
    print(f"float32, in pieces: logits differ by {found.float32_cached_max_difference:.2e}")
    print(f"bf16, masks forced: error {found.bf16_error:.2e}, plain {found.bf16_plain_error:.2e}")
    print(f"bf16, dense and plain: error {found.bf16_dense_error:.2e}; ", end="")
    print(f"the kernels' is {found.bf16_ratio:.2f} of it, at most {BF16_LIMIT} expected")
    print(f"bf16: {found.bf16_flipped:.3%} of the decisions differ from float32's")
    _show("float32, in pieces", found.float32_cached_differences, found.float32_alone_differences)
    if found.problems():
        print("wrong:", "; ".join(found.problems()))
    if found.pieces_wrong:
        print("with operations by their references:")
        for name, rows, alone in by_operation(model, ids):
            _show(name, rows, alone)
    if args.json is not None:
        record = records.common_fields("engine") | {
            "model": f"{args.shape}-shape",
            "layers": args.layers,
            "batch": args.batch,
            "tokens": args.tokens,
            "ffn_group": args.ffn_group_size,
            **dataclasses.asdict(found),
        }
        records.append_record(args.json, _finite(record))
    return 1 if found.problems() else 0


def _show(name: str, rows: Sequence[float], alone: Sequence[float]) -> None:
    """A line: the differences after every piece and step, of all rows and of one by itself."""
    listed = (" ".join(f"{difference:.1e}" for difference in found) for found in (rows, alone))
    print(f"  {name:19}", " | one row: ".join(listed))


def _finite(value: Any) -> Any:
    """The same, with None for numbers that JSON has not."""
    match value:
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case tuple() | list():
            return [_finite(item) for item in value]
        case float() if not np.isfinite(value):
            return None
    return value


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
