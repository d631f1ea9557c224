"""`route_kv` in Triton: keys and values stream in while the router decides.

    program id -> rows of the compressor | key tiles | value tiles

The first programs are those of `norm_route`'s step, whose time is a chain of waits for memory.
The others need the norm and nothing of the decision: each norms the token for itself, from x, while
its weights are on the way.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels._common.forms import next_power_of_two
from pallas_kernels._common.jit import jit
from pallas_kernels._common.rms import rms_normed, rms_scale
from pallas_kernels.norm_route.api import RouterWeights
from pallas_kernels.norm_route.triton import route_row, step_constants
from pallas_kernels.project_qkv.api import KVBiases

TILE_BYTES = 16384  # of weights a program, all asked for at once: 64 a thread where D is 4096
HELD = 2048  # numbers of the router's second map at once: all programs have the same registers


@jit
def route_kv_kernel(
    arrived,  # [STEP_TOKENS], the first: routing programs that have finished; 0 before and after
    x,  # [1, D]
    norm_weight,  # [D]
    compressor,  # [R, D]
    compressor_bias,  # [R]
    router,  # [2 GROUPS, R]
    router_bias,  # [2 GROUPS]
    w_k,  # [NK, D]
    w_v,  # [NK, D]
    b_k,  # [NK], read if HAS_BIAS
    b_v,  # [NK]
    normed,  # [1, D]
    mask,  # [1, GROUPS] bool
    k,  # [1, NK]
    v,  # [1, NK]
    z,  # [1, R], the compressed token without its bias
    D: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_D: tl.constexpr,  # of the compressor at once
    BLOCK_G: tl.constexpr,
    SLICE: tl.constexpr,
    NK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # D rounded up to a power of two
):
    """One program: a row of the compressor, or BLOCK_N channels of the keys or of the values."""
    pid = tl.program_id(0)
    if pid < R:  # first in the grid: nothing else takes as long
        route_row(
            0, pid, arrived, x, norm_weight, compressor, compressor_bias, router, router_bias,
            normed, mask, z, D, R, GROUPS, EPS, THRESHOLD, RANKS, BLOCK_D, BLOCK_G, SLICE,
        )  # fmt: skip
    else:
        TILES: tl.constexpr = (NK + BLOCK_N - 1) // BLOCK_N
        tile = pid - R
        if tile < TILES:
            w, bias, out = w_k, b_k, k
        else:
            w, bias, out = w_v, b_v, v
        _channels(
            tile % TILES * BLOCK_N, x, norm_weight, w, bias, out, D, EPS, NK, HAS_BIAS, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip


@jit
def _channels(
    first,
    x,  # [1, D]
    norm_weight,  # [D]
    w,  # [NK, D]
    bias,  # [NK], read if HAS_BIAS
    out,  # [1, NK]
    D: tl.constexpr,
    EPS: tl.constexpr,
    NK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N channels from `first` on of the normed token's product with w."""
    columns = first + tl.arange(0, BLOCK_N)
    channel = tl.minimum(columns, NK - 1).to(tl.int64)
    # Products are added up by eights, the 16 bytes that a thread loads at once.
    EIGHT: tl.constexpr = 1 + 7 * (D % 8 == 0)
    d = (tl.arange(0, BLOCK_K // EIGHT) * EIGHT)[None, :, None]
    ok = d < D
    d = d + tl.arange(0, EIGHT)[None, None, :]
    rows = tl.load(w + channel[:, None, None] * D + d, mask=ok, other=0.0)
    weight = tl.load(norm_weight + d, mask=ok, other=0.0)
    shift = tl.load(bias + channel).to(tl.float32) if HAS_BIAS else 0.0
    tl.debug_barrier()  # the compiler moves no load across: these are not to wait for x
    a = tl.load(x + d, mask=ok, other=0.0)
    a32 = a.to(tl.float32)
    squares = tl.sum(tl.sum(a32 * a32, axis=2), axis=1)
    scale = rms_scale(squares, D, EPS)
    a = rms_normed(a, scale[:, None, None], weight, a.dtype)
    result = shift + tl.sum(tl.sum(rows.to(tl.float32) * a.to(tl.float32), axis=2), axis=1)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=columns < NK)


def route_kv(
    x: Float[Array, "1 D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    w_k: Float[Array, "Nk D"],
    w_v: Float[Array, "Nk D"],
    counter: Int32[Array, " C"],
    biases: KVBiases | None,
    eps: float,
    threshold: float,
) -> tuple[
    Float[Array, "1 D"],
    Bool[Array, "1 groups"],
    Float[Array, "1 Nk"],
    Float[Array, "1 Nk"],
    Int32[Array, " C"],
]:
    """See `pallas_kernels.route_kv`."""
    triton_support.require_device("route_kv", current_device().capability)
    rank, channels = weights.compressor.shape[0], w_k.shape[0]
    constants = kernel_constants(x, weights, channels, biases is not None, eps, threshold)
    # A bias that is not read still takes its place in the kernel's signature.
    read = (w_k, w_v) if biases is None else biases
    counter, normed, mask, keys, values, _ = triton_support.launch(
        route_kv_kernel,
        [x, norm_weight, *weights, w_k, w_v, *read],
        [],
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((1, weights.groups), jnp.bool_),
            jax.ShapeDtypeStruct((1, channels), x.dtype),
            jax.ShapeDtypeStruct((1, channels), x.dtype),
            jax.ShapeDtypeStruct((1, rank), jnp.float32),
        ],
        grid=rank + 2 * math.ceil(channels / constants["BLOCK_N"]),
        constants=constants,
        num_warps=num_warps(x.shape[1]),
        num_stages=1,
        in_place=[counter],
    )
    return normed, mask, keys, values, counter


def kernel_constants(
    x: Float[Array, "1 D"],
    weights: RouterWeights,
    channels: int,
    biased: bool,
    eps: float,
    threshold: float,
) -> dict[str, Any]:
    """Compile-time constants of `route_kv_kernel`."""
    hidden = x.shape[1]
    block_k = next_power_of_two(hidden)
    return step_constants(hidden, weights, eps, threshold, HELD) | dict(
        NK=channels,
        HAS_BIAS=biased,
        BLOCK_N=min(16, max(1, TILE_BYTES // (block_k * x.dtype.itemsize))),
        BLOCK_K=block_k,
    )


def num_warps(hidden: int) -> int:
    """So that the threads lie along a channel, eight numbers each."""
    return min(8, max(4, next_power_of_two(hidden) // 256))
