"""`norm_route` in Triton: one pass over x for many tokens, two short kernels for few.

Many tokens (`rows_kernel`): a program takes BLOCK_M tokens through all of D twice. The first pass
adds up squares and the compressor's sums, the second, from the L2 cache, writes the normed values.

    16-bit x:  x w = x hi + x mid + x low, with w = hi + mid + low in bfloat16: three products on
               the tensor cores that are exact before their float32 sum (24 bits of w)
    float32 x: float32 products on the ordinary units

Few tokens: the compressor's 16 KB a row would keep one multiprocessor busy for microseconds, so
`compress_kernel` gives each of the R rows a program of its own (which also writes 1/R of the
normed values), and `decide_kernel` turns the R sums into decisions.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float

from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels._common.jit import jit
from pallas_kernels.norm_route.api import RouterWeights

SMALL_TOKENS = 64
BLOCK_G = 32
NUM_WARPS = 4


@jit
def _margins(z, router, router_bias, groups, GROUPS: tl.constexpr, R: tl.constexpr, RANKS):
    """Execute minus skip logits `[tokens, groups]` of the compressed tokens z `[tokens, RANKS]`."""
    ranks = tl.arange(0, RANKS)
    ok = (ranks < R)[:, None] & (groups < GROUPS)[None, :]
    row = router + 2 * groups[None, :] * R + ranks[:, None]
    difference = tl.load(row, mask=ok, other=0.0) - tl.load(row + R, mask=ok, other=0.0)
    bias = router_bias + 2 * groups
    group_ok = groups < GROUPS
    shift = tl.load(bias, mask=group_ok, other=0.0) - tl.load(bias + 1, mask=group_ok, other=0.0)
    return tl.dot(z, difference, input_precision="ieee") + shift[None, :]


@jit
def rows_kernel(
    x,  # [M, D]
    norm_weight,  # [D]
    compressor,  # [R, D]
    compressor_bias,  # [R]
    router,  # [2 GROUPS, R]
    router_bias,  # [2 GROUPS]
    M,
    normed,  # [M, D]
    mask,  # [M, GROUPS] bool
    D: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SPLIT: tl.constexpr,  # bfloat16 x: products of three bfloat16 parts of the weight
    RANKS: tl.constexpr,  # R rounded up to a power of two of at least 16
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """BLOCK_M tokens: normed values and decisions."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_ok = tokens < M
    x_row = x + tokens.to(tl.int64)[:, None] * D
    ranks = tl.arange(0, RANKS)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    z = tl.zeros((BLOCK_M, RANKS), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        a = tl.load(x_row + d[None, :], mask=token_ok[:, None] & (d < D)[None, :], other=0.0)
        w = tl.load(
            compressor + ranks[None, :] * D + d[:, None],
            mask=(ranks < R)[None, :] & (d < D)[:, None],
            other=0.0,
        )
        a32 = a.to(tl.float32)
        squares += tl.sum(a32 * a32, axis=1)
        if SPLIT:
            high = w.to(a.dtype)
            rest = w - high.to(tl.float32)
            middle = rest.to(a.dtype)
            low = (rest - middle.to(tl.float32)).to(a.dtype)
            z = tl.dot(a, low, z)
            z = tl.dot(a, middle, z)
            z = tl.dot(a, high, z)
        else:
            z = tl.dot(a32, w, z, input_precision="ieee")
    z += tl.load(compressor_bias + ranks, mask=ranks < R, other=0.0)[None, :]

    for first in range(0, GROUPS, BLOCK_G):
        groups = first + tl.arange(0, BLOCK_G)
        margin = _margins(z, router, router_bias, groups, GROUPS, R, RANKS)
        tl.store(
            mask + tokens.to(tl.int64)[:, None] * GROUPS + groups[None, :],
            margin >= THRESHOLD,
            mask=token_ok[:, None] & (groups < GROUPS)[None, :],
        )

    scale = 1.0 / tl.sqrt_rn(squares / D + EPS)
    out_row = normed + tokens.to(tl.int64)[:, None] * D
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        ok = token_ok[:, None] & (d < D)[None, :]
        a = tl.load(x_row + d[None, :], mask=ok, other=0.0).to(tl.float32)
        weight = tl.load(norm_weight + d, mask=d < D, other=0.0)
        unit = (a * scale[:, None]).to(x.dtype.element_ty)
        result = weight.to(tl.float32)[None, :] * unit.to(tl.float32)
        tl.store(out_row + d[None, :], result.to(x.dtype.element_ty), mask=ok)


@jit
def compress_kernel(
    x,  # [M, D]
    norm_weight,  # [D]
    compressor,  # [R, D]
    compressor_bias,  # [R]
    M,
    normed,  # [M, D]
    z,  # [M, R]
    D: tl.constexpr,
    R: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,  # M rounded up to a power of two
    BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr,  # ceil(D / R) rounded up to a power of two
):
    """One row of the compressor for all tokens, and 1/R of the normed values."""
    rank = tl.program_id(0)
    tokens = tl.arange(0, TOKENS)
    token_ok = tokens < M
    x_row = x + tokens[:, None] * D
    squares = tl.zeros((TOKENS, BLOCK_D), tl.float32)
    products = tl.zeros((TOKENS, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        a = tl.load(x_row + d[None, :], mask=token_ok[:, None] & (d < D)[None, :], other=0.0)
        a = a.to(tl.float32)
        w = tl.load(compressor + rank * D + d, mask=d < D, other=0.0)
        squares += a * a
        products += a * w[None, :]
    total = tl.sum(products, axis=1) + tl.load(compressor_bias + rank)
    tl.store(z + tokens * R + rank, total, mask=token_ok)

    PIECE: tl.constexpr = (D + R - 1) // R
    scale = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / D + EPS)
    offset = tl.arange(0, SLICE)
    d = rank * PIECE + offset
    d_ok = (offset < PIECE) & (d < D)
    ok = token_ok[:, None] & d_ok[None, :]
    a = tl.load(x_row + d[None, :], mask=ok, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + d, mask=d_ok, other=0.0)
    unit = (a * scale[:, None]).to(x.dtype.element_ty)
    result = weight.to(tl.float32)[None, :] * unit.to(tl.float32)
    tl.store(normed + tokens[:, None] * D + d[None, :], result.to(x.dtype.element_ty), mask=ok)


@jit
def decide_kernel(
    z,  # [M, R]
    router,  # [2 GROUPS, R]
    router_bias,  # [2 GROUPS]
    M,
    mask,  # [M, GROUPS] bool
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RANKS: tl.constexpr,
    TOKENS: tl.constexpr,  # M rounded up to a power of two of at least 16
    BLOCK_G: tl.constexpr,
):
    """BLOCK_G groups' decisions for all tokens."""
    groups = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    tokens = tl.arange(0, TOKENS)
    ranks = tl.arange(0, RANKS)
    token_ok = tokens < M
    compressed = tl.load(
        z + tokens[:, None] * R + ranks[None, :],
        mask=token_ok[:, None] & (ranks < R)[None, :],
        other=0.0,
    )
    margin = _margins(compressed, router, router_bias, groups, GROUPS, R, RANKS)
    tl.store(
        mask + tokens[:, None] * GROUPS + groups[None, :],
        margin >= THRESHOLD,
        mask=token_ok[:, None] & (groups < GROUPS)[None, :],
    )


def norm_route(
    x: Float[Array, "M D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    eps: float,
    threshold: float,
) -> tuple[Float[Array, "M D"], Bool[Array, "M groups"]]:
    """See `pallas_kernels.norm_route`."""
    triton_support.require_device("norm_route", current_device().capability)
    m = x.shape[0]
    normed = jax.ShapeDtypeStruct(x.shape, x.dtype)
    mask = jax.ShapeDtypeStruct((m, weights.groups), jnp.bool_)
    constants = launch_constants(m, x.shape[1], x.dtype.name, weights, eps, threshold)
    if "rows" in constants:
        normed, mask = triton_support.launch(
            rows_kernel,
            [x, norm_weight, *weights],
            [m],
            [normed, mask],
            grid=math.ceil(m / constants["rows"]["BLOCK_M"]),
            constants=constants["rows"],
            num_warps=NUM_WARPS,
            num_stages=3,
        )
        return normed, mask
    normed, z = triton_support.launch(
        compress_kernel,
        [x, norm_weight, weights.compressor, weights.compressor_bias],
        [m],
        [normed, jax.ShapeDtypeStruct((m, weights.compressor.shape[0]), jnp.float32)],
        grid=weights.compressor.shape[0],
        constants=constants["compress"],
        num_warps=NUM_WARPS,
        num_stages=2,
    )
    (mask,) = triton_support.launch(
        decide_kernel,
        [z, weights.router, weights.router_bias],
        [m],
        [mask],
        grid=math.ceil(weights.groups / BLOCK_G),
        constants=constants["decide"],
        num_warps=NUM_WARPS,
        num_stages=1,
    )
    return normed, mask


def launch_constants(
    m: int, hidden: int, dtype: str, weights: RouterWeights, eps: float, threshold: float
) -> dict[str, dict[str, Any]]:
    """Compile-time constants of the kernels that run for m tokens, by name.

    Either `rows`, or `compress` and `decide`.
    """
    rank = weights.compressor.shape[0]
    ranks = max(16, triton.next_power_of_2(rank))
    shared: dict[str, Any] = dict(R=rank, GROUPS=weights.groups, THRESHOLD=threshold, RANKS=ranks)
    if m <= SMALL_TOKENS:
        tokens = triton.next_power_of_2(m)
        return {
            "compress": dict(
                D=hidden,
                R=rank,
                EPS=eps,
                TOKENS=tokens,
                BLOCK_D=max(64, 2048 // tokens),
                SLICE=triton.next_power_of_2(math.ceil(hidden / rank)),
            ),
            "decide": shared | dict(TOKENS=max(16, tokens), BLOCK_G=BLOCK_G),
        }
    split = dtype == "bfloat16"
    rows = dict(
        D=hidden,
        EPS=eps,
        SPLIT=split,
        BLOCK_M=32 if split else 16,
        BLOCK_D=64 if split else 32,
        BLOCK_G=BLOCK_G,
    )
    return {"rows": shared | rows}
