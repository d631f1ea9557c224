"""`rope_cache` in Triton: one program a token and block of heads.

program id -> (token, block);   blocks of a token: query heads | key heads | value heads
"""

import math
from typing import Any

import jax
import triton
import triton.language as tl

from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels._common.jit import jit
from pallas_kernels._common.rms import rms_normed, rms_scale

HEADS = 8  # of a program
NUM_WARPS = 4


@jit
def rope_kernel(
    keys,  # [B, S, HK, D], updated in place
    values,  # [B, S, HK, D], updated in place
    q,  # [M, HQ, D], read if HQ > 0
    k,  # [M, HK, D]
    v,  # [M, HK, D]
    cos,  # [M, D / 2]
    sin,  # [M, D / 2]
    slots,  # [M]
    q_norm,  # [D], read if HAS_NORM
    k_norm,  # [D], read if HAS_NORM
    q_out,  # [M, HQ, D], written if HQ > 0
    k_out,  # [M, HK, D]
    T: tl.constexpr,
    S: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D / 2 rounded up to a power of two
):
    """One token's block of heads: normed, rotated, stored, and put into the cache."""
    Q_BLOCKS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (HK + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + 2 * K_BLOCKS
    pid = tl.program_id(0)
    token = (pid // BLOCKS).to(tl.int64)
    block = pid % BLOCKS
    i = tl.arange(0, HALF)
    i_ok = i < D // 2
    slot = tl.load(slots + token)
    inside = (slot >= 0) & (slot < S)
    row = (token // T) * S + tl.where(inside, slot, 0)
    angle = token * (D // 2) + i[None, :]
    turned = i_ok[None, :] & (block < Q_BLOCKS + K_BLOCKS)
    c = tl.load(cos + angle, mask=turned, other=0.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)

    if block < Q_BLOCKS:
        heads = block * HEADS + tl.arange(0, HEADS)
        ok = (heads < HQ)[:, None] & i_ok[None, :]
        offset = (token * HQ + heads[:, None]) * D + i[None, :]
        first, second = rotated(
            q + offset, q_norm, c, s, i, ok, D, HAS_NORM, EPS, q.dtype.element_ty
        )
        tl.store(q_out + offset, first, mask=ok)
        tl.store(q_out + offset + D // 2, second, mask=ok)
    elif block < Q_BLOCKS + K_BLOCKS:
        heads = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
        ok = (heads < HK)[:, None] & i_ok[None, :]
        offset = (token * HK + heads[:, None]) * D + i[None, :]
        first, second = rotated(
            k + offset, k_norm, c, s, i, ok, D, HAS_NORM, EPS, k.dtype.element_ty
        )
        tl.store(k_out + offset, first, mask=ok)
        tl.store(k_out + offset + D // 2, second, mask=ok)
        entry = keys + (row * HK + heads[:, None]) * D + i[None, :]
        tl.store(entry, first.to(keys.dtype.element_ty), mask=ok & inside)
        tl.store(entry + D // 2, second.to(keys.dtype.element_ty), mask=ok & inside)
    else:
        heads = (block - Q_BLOCKS - K_BLOCKS) * HEADS + tl.arange(0, HEADS)
        ok = (heads < HK)[:, None] & i_ok[None, :]
        offset = (token * HK + heads[:, None]) * D + i[None, :]
        entry = values + (row * HK + heads[:, None]) * D + i[None, :]
        first = tl.load(v + offset, mask=ok, other=0.0)
        second = tl.load(v + offset + D // 2, mask=ok, other=0.0)
        tl.store(entry, first.to(values.dtype.element_ty), mask=ok & inside)
        tl.store(entry + D // 2, second.to(values.dtype.element_ty), mask=ok & inside)


@jit
def rotated(
    x,  # pointers to the first halves of heads, [heads, HALF]
    norm,  # [D], read if HAS_NORM
    c,  # cos, [heads, HALF] or one row for all
    s,  # sin, likewise
    i,
    ok,
    D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Both halves of the heads, normed and turned, in x's dtype."""
    first = tl.load(x, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(x + D // 2, mask=ok, other=0.0).to(tl.float32)
    if HAS_NORM:
        i_ok = i < D // 2
        squares = tl.sum(first * first + second * second, axis=1)
        scale = rms_scale(squares, D, EPS)
        w_first = tl.load(norm + i, mask=i_ok, other=0.0)[None, :]
        w_second = tl.load(norm + D // 2 + i, mask=i_ok, other=0.0)[None, :]
        first = rms_normed(first, scale[:, None], w_first, DTYPE).to(tl.float32)
        second = rms_normed(second, scale[:, None], w_second, DTYPE).to(tl.float32)
    return (first * c - second * s).to(DTYPE), (second * c + first * s).to(DTYPE)


def rope_cache(q, k, v, cos, sin, keys, values, slots, q_norm, k_norm, eps):
    """See `pallas_kernels.rope_cache`."""
    triton_support.require_device("rope_cache", current_device().capability)
    batch, tokens, hk, d = k.shape
    hq, capacity = 0 if q is None else q.shape[2], keys.shape[1]
    if k.size == 0:
        return q, k, keys, values
    blocks = math.ceil(hq / HEADS) + 2 * math.ceil(hk / HEADS)
    # What is not read or written still takes its place in the kernel's signature.
    queries = k if q is None else q
    norms = [k if norm is None else norm for norm in (q_norm, k_norm)]
    q_shape = (1,) if q is None else q.shape
    keys, values, q_out, k = triton_support.launch(
        rope_kernel,
        [queries, k, v, cos, sin, slots, *norms],
        [],
        [jax.ShapeDtypeStruct(q_shape, k.dtype), jax.ShapeDtypeStruct(k.shape, k.dtype)],
        grid=batch * tokens * blocks,
        constants=launch_constants(tokens, capacity, hq, hk, d, k_norm is not None, eps),
        num_warps=NUM_WARPS,
        num_stages=1,
        in_place=[keys, values],
    )
    return None if q is None else q_out, k, keys, values


def launch_constants(
    tokens: int, capacity: int, hq: int, hk: int, d: int, has_norm: bool, eps: float
) -> dict[str, Any]:
    """Compile-time constants of the kernel; hq is 0 without queries."""
    return dict(
        T=tokens,
        S=capacity,
        HQ=hq,
        HK=hk,
        D=d,
        HAS_NORM=has_norm,
        EPS=eps,
        HEADS=HEADS,
        HALF=triton.next_power_of_2(d // 2),
    )
