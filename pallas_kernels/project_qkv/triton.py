"""`project_qkv` for few tokens: one launch over the channels of all three projections.

program id -> query tiles, group by group | key tiles | value tiles
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels._common import triton_support
from pallas_kernels._common.config import SmallConfig
from pallas_kernels._common.device import current_device
from pallas_kernels._common.jit import jit
from pallas_kernels._common.small_kernel import small_tile
from pallas_kernels.layout import MaskLayout
from pallas_kernels.project_qkv.api import Biases


@jit
def qkv_kernel(
    x,  # [M, K]
    w_q,  # [N, K]
    w_k,  # [NK, K]
    w_v,  # [NK, K]
    b_q,  # [N], read if HAS_BIAS
    b_k,  # [NK]
    b_v,  # [NK]
    mask,  # [M, GROUPS] bool
    M,
    q,  # [M, N]
    k,  # [M, NK]
    v,  # [M, NK]
    N: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,  # 1, or M rounded up to 16, 32, 64
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_N channels of one query group, or of the keys, or of the values."""
    TILES_G: tl.constexpr = (G + BLOCK_N - 1) // BLOCK_N
    TILES_K: tl.constexpr = (NK + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    tile = pid - GROUPS * TILES_G
    tokens = tl.arange(0, TOKENS)
    if tile < 0:
        w, bias, out, channels = w_q, b_q, q, N
        group = pid // TILES_G
        first = group * G + (pid % TILES_G) * BLOCK_N
        end = tl.minimum(group * G + G, N)
    else:
        group = 0
        first = tile % TILES_K * BLOCK_N
        channels = NK
        end = NK
        if tile < TILES_K:
            w, bias, out = w_k, b_k, k
        else:
            w, bias, out = w_v, b_v, v
    # Keys and values run for every token there is.
    if TOKENS == 1:
        on = tl.where(tile < 0, tl.load(mask + group).to(tl.int32), 1)
    else:
        real = tokens < M
        on = tl.load(mask + tokens * GROUPS + group, mask=real, other=0).to(tl.int32)
        on = tl.where(tile < 0, on, real.to(tl.int32))
    small_tile(
        x, w, w, bias, on, first, end, M, out, channels, K, False, HAS_BIAS, PRECISION, TOKENS,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip


def project_qkv(
    x: jax.Array,
    w_q: jax.Array,
    w_k: jax.Array,
    w_v: jax.Array,
    layout: MaskLayout,
    biases: Biases | None,
    group_size: int,
    config: SmallConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.project_qkv`; up to 64 tokens."""
    triton_support.require_device("project_qkv", current_device().capability)
    (m, k), n, nk = x.shape, w_q.shape[0], w_k.shape[0]
    weights = (w_q, w_k, w_v)
    # A bias that is not read still takes its place in the kernel's signature.
    read = weights if biases is None else biases
    tiles = layout.groups * math.ceil(group_size / config.block_n)
    q, keys, values = triton_support.launch(
        qkv_kernel,
        [x, *weights, *read, layout.mask],
        [m],
        [jax.ShapeDtypeStruct((m, size), x.dtype) for size in (n, nk, nk)],
        grid=tiles + 2 * math.ceil(nk / config.block_n),
        constants=dict(
            N=n,
            NK=nk,
            K=k,
            G=group_size,
            GROUPS=layout.groups,
            HAS_BIAS=biases is not None,
            PRECISION="ieee" if x.dtype == jnp.float32 else "tf32",
            TOKENS=1 if m == 1 else max(16, triton.next_power_of_2(m)),
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return q, keys, values
