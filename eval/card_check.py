"""`wide check kernels`: does every operation compute what it should on this very card?

Each operation as dispatch runs it here, on the layers of two real models, against its reference in
float32: relative error at most 1.5 times what the plain dense operation has (for those without
one, a bound of the dtype's own). New compilers, drivers and cards are what it is for: some minutes,
most of it compiling, before a benchmark or a long job.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    MaskLayout,
    RouterWeights,
    attention_decode,
    attention_prefill,
    attention_step,
    gemm_k,
    gemm_mn,
    mask_layout,
    norm_route,
    project_qkv,
    rms_norm,
    rope_cache,
    route_kv,
    step_counter,
    swiglu_up,
)
from pallas_kernels._common.shapes import MODELS, ModelShape
from pallas_kernels._common.testing import PATTERNS, relative_error
from pallas_kernels.rope_cache import Rotation

ALLOWED = 1.5  # times the dense operation's own error
ROUNDING = 4e-3  # of bfloat16, where an operation has no dense form: half a unit is 2^-9

Outputs = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class CardCase:
    """One call: `run(implementation)` with None for what dispatch takes."""

    op: str
    model: str
    tokens: int
    pattern: str
    run: Callable[[str | None], Outputs]
    has_dense: bool = True

    def __str__(self) -> str:
        return f"{self.op}, {self.model}, {self.tokens} tokens, {self.pattern}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The largest error over a case's outputs, and the most it may be; `problem` if it raised."""

    case: CardCase
    error: float
    bound: float
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the operation ran and is right. A NaN error fails."""
        return self.problem is None and self.error <= self.bound


def check_card(
    tokens: Sequence[int] = (1, 9, 37, 600, 4096),
    models: Sequence[str] = ("llama-3.1-8b", "smollm2-135m"),
    patterns: Sequence[str] = ("half", "ragged"),
    *,
    workers: int = 4,
) -> Iterator[Verdict]:
    """Check every operation; verdicts come as they are ready, compiling side by side.

    The default token counts lie on both sides of the few-token forms; 37 and 600 fill no tile.
    """
    for model in models:
        for m in tokens:
            found = [case for pattern in patterns for case in cases(model, m, pattern)]
            with ThreadPoolExecutor(workers) as pool:
                yield from pool.map(judge, found)


def judge(case: CardCase) -> Verdict:
    """Run one case and compare. Whatever it raises is its verdict."""
    try:
        wanted = case.run("reference")
        bound = ROUNDING
        if case.has_dense:
            bound = ALLOWED * max(_error(case.run("dense"), wanted), 2.0**-10)
        return Verdict(case, _error(case.run(None), wanted), bound)
    except Exception as error:  # a compiler's or driver's failure is the finding here
        return Verdict(case, float("nan"), 0.0, f"{type(error).__name__}: {error}")


def _error(got: Outputs, wanted: Outputs) -> float:
    """The largest of the outputs' errors; of bool outputs, the fraction that differs."""
    errors = [
        float((g != w).mean()) if g.dtype == jnp.bool_ else relative_error(g, w)
        for g, w in zip(got, wanted, strict=True)
    ]
    return float(np.max(errors))


def cases(model: str, m: int, pattern: str) -> Iterator[CardCase]:
    """Every operation of a layer of `model` on m tokens, with one pattern of mask."""
    shape = MODELS[model]
    draw = _Draw(m)
    attention = _layout(pattern, m, shape.kv_heads, seed=1)
    channels = 128 if shape.intermediate % 128 == 0 else shape.intermediate
    ffn = _layout(pattern, m, shape.intermediate // channels, seed=2)
    x, residual = draw(m, shape.hidden), draw(m, shape.hidden)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    w_q, w_k, w_v = (draw.weight(n, shape.hidden) for n in (queries, keys, keys))
    w_gate, w_up = (draw.weight(shape.intermediate, shape.hidden) for _ in range(2))
    w_o, w_down = draw.weight(shape.hidden, queries), draw.weight(shape.hidden, shape.intermediate)
    heads = _zeroed(draw(m, queries), attention)
    inner = _zeroed(draw(m, shape.intermediate), ffn)

    def case(op: str, run: Callable[[Any], Any], has_dense: bool = True) -> CardCase:
        def outputs(implementation: str | None) -> Outputs:
            out = run(implementation)
            return out if isinstance(out, tuple) else (out,)

        return CardCase(op, model, m, pattern, outputs, has_dense)

    yield case("gemm_mn", lambda i: gemm_mn(x, w_q, attention, implementation=i))
    yield case("swiglu_up", lambda i: swiglu_up(x, w_gate, w_up, ffn, implementation=i))
    for part, h, w, layout in (("o", heads, w_o, attention), ("down", inner, w_down, ffn)):
        yield case(
            f"gemm_k ({part})",
            lambda i, h=h, w=w, layout=layout: gemm_k(
                h, w, layout, residual=residual, implementation=i
            ),
        )
    yield case("project_qkv", lambda i: project_qkv(x, w_q, w_k, w_v, attention, implementation=i))
    yield from _attention_cases(case, shape, m, attention, draw)
    yield from _routing_cases(case, shape, ffn.groups, x, (w_k, w_v), draw)
    norm = draw(shape.hidden)
    yield case("rms_norm", lambda i: rms_norm(x, norm, eps=1e-5, implementation=i), has_dense=False)


def _attention_cases(case, shape: ModelShape, m: int, layout: MaskLayout, draw: "_Draw"):
    """Attention over new tokens, over a cache, and the rotation in front of it."""
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (draw(1, m, heads, shape.head_dim) for heads in sizes)
    angles = draw(1, m, shape.head_dim // 2).astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    keys, values = (draw(1, m + 5, shape.kv_heads, shape.head_dim) for _ in range(2))
    slots = jnp.arange(m, dtype=jnp.int32)[None] + 3
    normed = Rotation(cos, sin, draw(shape.head_dim), 1e-6)
    if m == 1:
        lengths = jnp.array([5], jnp.int32)
        yield case(
            "attention_decode",
            lambda i: attention_decode(
                q[:, 0], keys, values, layout.mask, lengths, implementation=i
            ),
        )
        for name, turn, k_norm in (
            ("", Rotation(cos, sin), None),
            (" (normed)", normed, normed.norm),
        ):
            yield case(
                f"attention_step{name}",
                lambda i, turn=turn, k_norm=k_norm: attention_step(
                    q[:, 0],
                    k[:, 0],
                    v[:, 0],
                    keys,
                    values,
                    layout.mask,
                    lengths,
                    turn,
                    k_norm=k_norm,
                    implementation=i,
                ),
                has_dense=False,
            )
    else:
        # cuDNN alone would be judged by itself: bf16 rounding is the bound.
        yield case(
            "attention_prefill",
            lambda i: attention_prefill(q, k, v, layout, implementation=i),
            has_dense=False,
        )
        for name, rotation in {"rotated": Rotation(cos, sin), "normed": normed}.items():
            yield case(
                f"attention_prefill ({name})",
                lambda i, rotation=rotation: attention_prefill(
                    q, k, v, layout, rotation=rotation, implementation=i
                ),
                has_dense=False,
            )
    yield case(
        "rope_cache",
        lambda i: rope_cache(q, k, v, cos, sin, keys, values, slots, implementation=i),
        has_dense=False,
    )
    yield case(
        "rope_cache (no queries)",
        lambda i: rope_cache(None, k, v, cos, sin, keys, values, slots, implementation=i)[1:],
        has_dense=False,
    )


def _routing_cases(
    case,
    shape: ModelShape,
    groups: int,
    x: jax.Array,
    w_kv: tuple[jax.Array, jax.Array],
    draw: "_Draw",
):
    """The decision, and for one token the decision with keys and values."""
    rank = 32
    weights = RouterWeights(
        draw.weight(rank, shape.hidden).astype(jnp.float32),
        jnp.zeros(rank),
        draw.weight(2 * groups, rank).astype(jnp.float32),
        jnp.zeros(2 * groups),
    )
    norm = jnp.ones(shape.hidden, x.dtype)
    yield case(
        "norm_route",
        lambda i: norm_route(x, norm, weights, eps=1e-5, implementation=i),
        has_dense=False,
    )
    if x.shape[0] == 1:
        counter = step_counter()
        yield case(
            "route_kv",
            lambda i: route_kv(x, norm, weights, *w_kv, counter, eps=1e-5, implementation=i),
            has_dense=False,
        )


class _Draw:
    """Fresh bf16 numbers: activations of variance 1, weights of variance 1 / inputs."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape, np.float32), jnp.bfloat16)

    def weight(self, n: int, k: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal((n, k), np.float32) * k**-0.5, jnp.bfloat16)


def _layout(pattern: str, m: int, groups: int, *, seed: int) -> MaskLayout:
    return mask_layout(PATTERNS[pattern](jax.random.key(seed), m, groups), expected_sparsity=0.5)


def _zeroed(h: jax.Array, layout: MaskLayout) -> jax.Array:
    """As the producing operation leaves it: zeros in skipped pairs."""
    return jnp.where(jnp.repeat(layout.mask, h.shape[1] // layout.groups, axis=1), h, 0)
