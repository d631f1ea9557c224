"""Does the kernel path compute the model? Logits and masks beside plain JAX, in float32 and bf16.

    python -m eval.engine_check --shape llama-3.1-8b --layers 4 --tokens 1024 --json OUT

float32: plain JAX runs once over the whole text, and its masks are given to everyone, whose routers
are asked all the same. So every decision and every logit is compared on equal terms. Left to
themselves, one decision in a million lies within rounding of its threshold and falls the other way;
it moves the logits of all later tokens by a hundredth, and some of their decisions with them. A
decision may differ where plain JAX's is within `TIE` of its threshold, nowhere else; logits by
`FLOAT32_LIMIT`. In one pass, and in pieces with a cache, of two rows and of one, whose steps have a
routing operation of their own.

bf16, with the float32 masks given: no further from float32 than 1.5 times what the dense model in
plain bf16 is from its own float32; plain bf16 with the same masks beside it. And, by itself, how
many decisions bf16 flips where it follows its own: its residual stream differs, so routers see
other inputs.

Where something is wrong, the exit status is 1. Where it is the pieces, they run again in plain JAX,
with every operation by its reference, and with one after the other: those that mend them tell which
is at fault. (To name the rotation or decode attention takes a step's fused attention apart, so it
mends that too.)
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
from wide_jax.hf.mapping import is_router
from wide_jax.hf.pretrained import build, tensors_of
from wide_jax.kernels import Kernels
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Argmax, Forced, Masks, Routing
from wide_jax.shapes import shape

STEPS = 4  # single steps at the end of each row
FLOAT32_LIMIT = 1e-4  # of logits: the most that they may differ from plain JAX's
TIE = 1e-4  # of a decision's margin: closer to its threshold than this, either answer is right
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Expected:
    """A text by plain JAX in float32."""

    ids: Int[Array, "B T"]
    logits: Float[Array, "B T V"]
    masks: Masks
    ties: Masks  # which decisions are within `TIE` of their threshold

    def rows(self, count: int) -> "Expected":
        """The first rows of it."""
        return jax.tree.map(lambda x: x[:count], self)


@dataclasses.dataclass(frozen=True)
class Found:
    """How a way to run differs from what is expected, given the expected masks."""

    differences: tuple[float, ...]  # of logits, the largest of each pass
    flipped: int  # decisions that differ
    apart: int  # of these, decisions that are no ties

    @property
    def wrong(self) -> bool:
        """Whether anything is beyond its limit."""
        return bool(self.problems("it"))

    def problems(self, where: str) -> list[str]:
        """What is beyond its limit, in words."""
        found, largest = [], float(np.max(self.differences))
        if self.apart:
            found.append(f"{self.apart} decisions of {where} differ that are no ties")
        if not largest <= FLOAT32_LIMIT:
            found.append(f"logits of {where} differ by {largest:.2e}, limit {FLOAT32_LIMIT}")
        return found

    def line(self) -> str:
        """Logits' differences, and how many decisions."""
        listed = " ".join(f"{difference:.1e}" for difference in self.differences)
        return f"{listed}; {self.flipped} decisions, {self.apart} of them no ties"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found; errors are norm(x - reference) / norm(reference) of the logits."""

    decisions: int
    ties: int  # of these, within `TIE` of their threshold in plain JAX
    float32: Found  # one pass
    pieces: Found  # two prefills and single steps on a cache
    alone: Found  # the first row's, by itself
    bf16_error: float  # kernels, masks given, against plain float32
    bf16_plain_error: float  # plain JAX, the same masks and reference
    bf16_dense_error: float  # plain JAX with everything on, against plain float32 with it too
    bf16_flipped: float  # fraction of decisions that differ from float32's

    @property
    def bf16_ratio(self) -> float:
        """The kernels' error by dense bf16's: at most `BF16_LIMIT` where they compute right."""
        return self.bf16_error / self.bf16_dense_error

    def problems(self) -> list[str]:
        """What is beyond its limit, in words; empty where the kernels compute the model."""
        found = self.float32.problems("one pass")
        found += self.pieces.problems("pieces") + self.alone.problems("one row's pieces")
        if not self.bf16_ratio <= BF16_LIMIT:
            found.append(f"bf16 error is {self.bf16_ratio:.2f} of dense's, limit {BF16_LIMIT}")
        return found

    def record(self) -> dict[str, Any]:
        """Its figures by name, in one level."""
        fields = {"decisions": self.decisions, "ties": self.ties}
        for name in ("float32", "pieces", "alone"):
            found: Found = getattr(self, name)
            fields |= {f"{name}_{key}": value for key, value in dataclasses.asdict(found).items()}
        names = ("bf16_error", "bf16_plain_error", "bf16_dense_error", "bf16_flipped")
        return fields | {name: getattr(self, name) for name in names}


def compare(model: WideForCausalLM, ids: Int[Array, "B T"]) -> Comparison:
    """Run a float32 model with routers both ways, and its bf16 cast."""
    batch = TokenBatch.from_lengths(ids)
    with jax.default_matmul_precision("float32"):
        expected = _expected(model, ids)
        given = Forced(expected.masks, ask_routers=True)
        got, _, asked = _run(model, batch, given, Kernels())
        largest = (float(jnp.abs(got - expected.logits).max()),)
        float32 = Found(largest, *_differing(asked, expected))
        pieces = _in_pieces(model, expected, Kernels())
        alone = _in_pieces(model, expected.rows(1), Kernels())
        wanted_dense = _dense(model, batch)
    half, forced = _cast(model), Forced(expected.masks)
    bf16, _, _ = _run(half, batch, forced, Kernels())
    plain, _, _ = _run(half, batch, forced, None)
    dense = _dense(half, batch)
    _, rounded, _ = _run(half, batch, Argmax(), Kernels())
    decisions = sum(mask.size for mask in jax.tree.leaves(expected.masks))
    return Comparison(
        decisions=decisions,
        ties=sum(int(tie.sum()) for tie in jax.tree.leaves(expected.ties)),
        float32=float32,
        pieces=pieces,
        alone=alone,
        bf16_error=_error(bf16, expected.logits),
        bf16_plain_error=_error(plain, expected.logits),
        bf16_dense_error=_error(dense, wanted_dense),
        bf16_flipped=_differing(rounded, expected)[0] / decisions,
    )


def by_operation(
    model: WideForCausalLM, ids: Int[Array, "B T"]
) -> Iterator[tuple[str, Found, Found]]:
    """What runs by its reference, and what is found of the pieces then, of all rows and of one.

    First plain JAX, then every operation of the kernel path, then one at a time.
    """
    apart = [name for name in OPERATIONS if name != "attention_step"]  # it is these or that
    ways: dict[str, Kernels | None] = {"plain JAX": None, "all": _by_reference(apart)}
    ways |= {name: _by_reference([name]) for name in OPERATIONS}
    with jax.default_matmul_precision("float32"):
        expected = _expected(model, ids)
        for name, kernels in ways.items():
            rows = _in_pieces(model, expected, kernels)
            yield name, rows, _in_pieces(model, expected.rows(1), kernels)


def _by_reference(names: Sequence[str]) -> Kernels:
    settings: dict[str, Any] = dict.fromkeys(names, "reference")
    return Kernels(**settings)


def _expected(model: WideForCausalLM, ids: Int[Array, "B T"]) -> Expected:
    """By plain JAX; ties are what thresholds a little higher and lower decide otherwise."""
    batch = TokenBatch.from_lengths(ids)
    logits, masks, _ = _run(model, batch, Argmax(), None)
    given = Forced(masks, ask_routers=True)
    lower, upper = (_run(_moved(model, by), batch, given, None)[2] for by in (-TIE, TIE))
    return Expected(ids, logits, masks, jax.tree.map(jnp.not_equal, lower, upper))


def _moved(model: WideForCausalLM, by: float) -> WideForCausalLM:
    """The same arrays with both thresholds moved."""
    wide = model.wide
    assert wide is not None  # `compare` is for models with routers
    moved = dataclasses.replace(
        wide,
        attention_threshold=wide.attention_threshold + by,
        ffn_threshold=wide.ffn_threshold + by,
    )
    return build(model.config, moved, tensors_of(model, lambda name: True), dtype=jnp.float32)


def _run(
    model: WideForCausalLM, batch: TokenBatch, routing: Routing, kernels: Kernels | None
) -> tuple[Float[Array, "B T V"], Masks, Masks | None]:
    """Logits, the masks that ran, and what the routers say if they are asked."""
    logits, masks, asked = _forward(*split_on(model, kernels), batch, routing)
    return logits.astype(jnp.float32), masks, asked


def _dense(model: WideForCausalLM, batch: TokenBatch) -> Float[Array, "B T V"]:
    """Logits of plain JAX with everything on: no mask, no router."""
    logits, _, _ = _forward(*split_on(model, None), batch, AllOn())
    return logits.astype(jnp.float32)


def _in_pieces(model: WideForCausalLM, expected: Expected, kernels: Kernels | None) -> Found:
    """As a generation runs: two prefills, then single tokens in a loop on the device."""
    rows, tokens = expected.ids.shape
    half, steps = tokens // 2, min(STEPS, tokens // 4)
    cache = KVCache.empty(model.config, rows, tokens + 3, jnp.float32)  # no round number
    graphdef, state = split_on(model, kernels)
    logits, asked = [], []
    for start, end in ((0, half), (half, tokens - steps)):
        ids, masks = _part((expected.ids, expected.masks), start, end)
        after, cache, decided = _prefill(graphdef, state, ids, masks, cache, fresh=start == 0)
        logits.append(after[None])
        asked.append(decided)
    ids, masks = _part((expected.ids, expected.masks), tokens - steps, tokens)
    after, decided = _steps(graphdef, state, ids, masks, cache)
    got = jnp.concatenate([*logits, after])
    positions = [half - 1, *range(tokens - steps - 1, tokens)]
    asked = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *asked, decided)
    difference = np.abs(np.asarray(got - expected.logits[:, jnp.array(positions)].swapaxes(0, 1)))
    return Found(tuple(difference.max(axis=(1, 2)).tolist()), *_differing(asked, expected))


def _part(tree, start: int, end: int):
    """Tokens `start` to `end` of arrays `[B, T, ...]`."""
    return jax.tree.map(lambda x: x[:, start:end], tree)


@functools.partial(jax.jit, static_argnames=("graphdef", "fresh"), donate_argnames="cache")
def _prefill(graphdef, state, ids: Int[Array, "B T"], masks: Masks, cache: KVCache, *, fresh: bool):
    """Logits after the last token `[B, V]`, the cache, and what the routers say."""
    model = nnx.merge(graphdef, state)
    positions = cache.lengths[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)
    batch = TokenBatch(ids, positions, jnp.ones_like(ids))
    output = model(batch, Forced(masks, ask_routers=True), cache=cache, fresh=fresh)
    return model.logits(output.hidden[:, -1]), output.cache, output.argmax


@functools.partial(jax.jit, static_argnames="graphdef")
def _steps(graphdef, state, ids: Int[Array, "B P"], masks: Masks, cache: KVCache):
    """Logits after each token `[P, B, V]`, and what the routers say, as `_prefill`."""

    def step(cache, column):
        one = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, column, 1, axis=1), (ids, masks)
        )
        logits, cache, asked = _prefill(graphdef, state, *one, cache, fresh=False)
        return cache, (logits, jax.tree.leaves(asked))

    _, (logits, asked) = jax.lax.scan(step, cache, jnp.arange(ids.shape[1]))
    decisions = [x[:, :, 0].swapaxes(0, 1) for x in asked]  # from [P, B, 1, groups]
    return logits, jax.tree.unflatten(jax.tree.structure(masks), decisions)


@functools.partial(jax.jit, static_argnames="graphdef")
def _forward(graphdef, state, batch, routing):
    model = nnx.merge(graphdef, state)
    output = model(batch, routing)
    return model.logits(output.hidden), output.masks, output.argmax


def _cast(model: WideForCausalLM) -> WideForCausalLM:
    tensors = tensors_of(model, lambda name: True)
    cast = {n: a if is_router(n) else a.astype(jnp.bfloat16) for n, a in tensors.items()}
    return build(model.config, model.wide, cast, dtype=jnp.bfloat16)


def _differing(masks: Masks | None, expected: Expected) -> tuple[int, int]:
    """Decisions that differ from the expected ones, and those of them that are no ties."""
    trees = (masks, expected.masks, expected.ties)
    flipped = apart = 0
    for found, wanted, tie in zip(*map(jax.tree.leaves, trees), strict=True):
        differs = np.asarray(found) != np.asarray(wanted)
        flipped += int(differs.sum())
        apart += int((differs & ~np.asarray(tie)).sum())
    return flipped, apart


def _error(x, reference) -> float:
    return float(jnp.linalg.norm(x - reference) / jnp.linalg.norm(reference))


def main(args: Args) -> int:
    """Compare, print and record; 1 where something is wrong, after showing where."""
    architecture = dataclasses.replace(shape(args.shape), num_hidden_layers=args.layers)
    wide = WideConfig.for_model(architecture, ffn_group_size=args.ffn_group_size)
    model = random_model(architecture, wide, dtype=jnp.float32)
    ids = jax.random.randint(jax.random.key(5), (args.batch, args.tokens), 0, 1000)
    found = compare(model, ids)
    print(f"{found.decisions} decisions, {found.ties} within {TIE} of their threshold")
    print("float32, masks given, each router asked: logits' largest differences, and decisions")
    _show("one pass", found.float32)
    _show("pieces", found.pieces, found.alone)
    print(f"bf16, masks given: error {found.bf16_error:.2e}, plain {found.bf16_plain_error:.2e}")
    print(f"bf16, dense and plain: error {found.bf16_dense_error:.2e}; ", end="")
    print(f"the kernels' is {found.bf16_ratio:.2f} of it, at most {BF16_LIMIT} expected")
    print(f"bf16: {found.bf16_flipped:.3%} of the decisions differ from float32's")
    if found.problems():
        print("wrong:", "; ".join(found.problems()))
    if found.pieces.wrong or found.alone.wrong:
        print("pieces with operations by their references:")
        for name, rows, alone in by_operation(model, ids):
            _show(name, rows, alone)
    if args.json is not None:
        record = records.common_fields("engine") | {
            "model": f"{args.shape}-shape",
            "layers": args.layers,
            "batch": args.batch,
            "tokens": args.tokens,
            "ffn_group": args.ffn_group_size,
            **found.record(),
        }
        records.append_record(args.json, _finite(record))
    return 1 if found.problems() else 0


def _show(name: str, *found: Found) -> None:
    """A line: all rows, and one by itself."""
    print(f"  {name:19}", " | one row: ".join(one.line() for one in found))


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
