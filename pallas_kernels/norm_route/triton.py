"""`norm_route` in Triton: one kernel for many tokens, two for fewer, a short one for a step.

Many tokens (`rows_kernel`): a program takes BLOCK_M tokens through all of D twice. The first pass
adds up squares and the compressor's sums, the second, from the L2 cache, writes the normed values.
Where that would be few programs, each of them slow, the channels are split too:

    sum_rows_kernel      (block of tokens, slice of D)         squares and sums of the slice
    finish_rows_kernel   (block of tokens, 0 or 1 + slice)     0: adds the sums up and decides
                                                               else: normed values of the slice

    bfloat16 x:  x w = x high + x middle + x low, w = high + middle + low in bfloat16: three
                 products on the tensor cores, exact before their float32 sum (24 bits of w)
    other x:     float32 products on the ordinary units

Up to 4 tokens (`step_kernel`): the compressor's 16 KB a row would keep one multiprocessor busy for
microseconds, so each of the R rows has a program of its own, which also writes 1/R of the normed
values; the program that finishes last turns the R sums into decisions.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._common import triton_support
from pallas_kernels._common.bfloat16_parts import bfloat16_parts
from pallas_kernels._common.device import current_device
from pallas_kernels._common.forms import next_power_of_two
from pallas_kernels._common.jit import jit
from pallas_kernels.norm_route.api import RouterWeights

MANY_TOKENS = 8192  # from here on tiles of 64 tokens fill a card
PROGRAMS = 1024  # of fewer tokens the channels are split until there are so many programs
MOST_SLICES = 16
BLOCK_G = 32  # groups decided at a time
STEP_BLOCK_G = 128  # the same in a step, where a round trip to memory is what a group costs
STEP_MAP = 4096  # numbers of the second map that a step holds at once: of higher ranks fewer groups
NUM_WARPS = 4


@jit
def _second_map(router, router_bias, groups, GROUPS: tl.constexpr, R: tl.constexpr, RANKS):
    """Execute and skip rows of the second map `[RANKS, groups]`; their biases' difference."""
    ranks = tl.arange(0, RANKS)
    ok = (ranks < R)[:, None] & (groups < GROUPS)[None, :]
    row = router + 2 * groups[None, :] * R + ranks[:, None]
    execute, skip = tl.load(row, mask=ok, other=0.0), tl.load(row + R, mask=ok, other=0.0)
    bias = router_bias + 2 * groups
    group_ok = groups < GROUPS
    shift = tl.load(bias, mask=group_ok, other=0.0) - tl.load(bias + 1, mask=group_ok, other=0.0)
    return execute, skip, shift


@jit
def rows_kernel(
    x,  # [M, D]
    norm_weight,  # [D]
    compressor,  # [PARTS, R, D], parts that add up to the weight
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
    PARTS: tl.constexpr,  # 3 for bfloat16 x (small parts first), else 1
    RANKS: tl.constexpr,  # R rounded up to a power of two of at least 16
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """BLOCK_M tokens: normed values and decisions."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_ok = tokens < M
    x_row = x + tokens.to(tl.int64)[:, None] * D
    squares, z = _sums(x_row, token_ok, compressor, 0, D, D, R, PARTS, RANKS, BLOCK_M, BLOCK_D)
    _decide_rows(
        z, compressor_bias, router, router_bias, mask, tokens, token_ok, R, GROUPS, THRESHOLD,
        RANKS, BLOCK_G,
    )  # fmt: skip
    out_row = normed + tokens.to(tl.int64)[:, None] * D
    _write_normed(x_row, out_row, token_ok, squares, norm_weight, 0, D, D, EPS, BLOCK_D)


@jit
def sum_rows_kernel(
    x,  # [M, D]
    compressor,  # [PARTS, R, D], parts that add up to the weight
    M,
    squares,  # [SLICES, M]
    z,  # [SLICES, M, R], without the compressor's bias
    D: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,  # channels, a multiple of BLOCK_D
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_M tokens: squares and the compressor's sums of one slice of the channels."""
    pid = tl.program_id(0)
    tokens = pid // SLICES * BLOCK_M + tl.arange(0, BLOCK_M)
    token_ok = tokens < M
    ranks = tl.arange(0, RANKS)
    start = pid % SLICES * SLICE
    some, sums = _sums(
        x + tokens.to(tl.int64)[:, None] * D, token_ok, compressor, start,
        tl.minimum(start + SLICE, D), D, R, PARTS, RANKS, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    row = (pid % SLICES).to(tl.int64) * M + tokens
    tl.store(squares + row, some, mask=token_ok)
    ok = token_ok[:, None] & (ranks < R)[None, :]
    tl.store(z + row[:, None] * R + ranks[None, :], sums, mask=ok)


@jit
def finish_rows_kernel(
    x,  # [M, D]
    norm_weight,  # [D]
    compressor_bias,  # [R]
    router,  # [2 GROUPS, R]
    router_bias,  # [2 GROUPS]
    squares,  # [SLICES, M]
    z,  # [SLICES, M, R]
    M,
    normed,  # [M, D]
    mask,  # [M, GROUPS] bool
    D: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RANKS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    ALL_SLICES: tl.constexpr,  # SLICES rounded up to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """BLOCK_M tokens: their decisions, or the normed values of one slice of the channels."""
    pid = tl.program_id(0)
    piece = pid % (SLICES + 1)
    tokens = pid // (SLICES + 1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_ok = tokens < M
    slices = tl.arange(0, ALL_SLICES)
    row = slices.to(tl.int64)[:, None] * M + tokens[None, :]
    row_ok = (slices < SLICES)[:, None] & token_ok[None, :]
    if piece == 0:
        ranks = tl.arange(0, RANKS)
        every = tl.load(
            z + row[:, :, None] * R + ranks[None, None, :],
            mask=row_ok[:, :, None] & (ranks < R)[None, None, :],
            other=0.0,
        )
        _decide_rows(
            tl.sum(every, axis=0), compressor_bias, router, router_bias, mask, tokens, token_ok,
            R, GROUPS, THRESHOLD, RANKS, BLOCK_G,
        )  # fmt: skip
    else:
        some = tl.sum(tl.load(squares + row, mask=row_ok, other=0.0), axis=0)
        at = tokens.to(tl.int64)[:, None] * D
        start = (piece - 1) * SLICE
        end = tl.minimum(start + SLICE, D)
        _write_normed(x + at, normed + at, token_ok, some, norm_weight, start, end, D, EPS, BLOCK_D)


@jit
def _sums(
    x_row,
    token_ok,
    compressor,
    start,
    end,
    D: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Squares `[BLOCK_M]` and the compressor's sums `[BLOCK_M, RANKS]` of channels start to end."""
    ranks = tl.arange(0, RANKS)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    z = tl.zeros((BLOCK_M, RANKS), tl.float32)
    for first in range(start, end, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        a = tl.load(x_row + d[None, :], mask=token_ok[:, None] & (d < D)[None, :], other=0.0)
        a32 = a.to(tl.float32)
        squares += tl.sum(a32 * a32, axis=1)
        w_tile = compressor + ranks[None, :] * D + d[:, None]
        w_ok = (ranks < R)[None, :] & (d < D)[:, None]
        # Tensor cores cut off what they add to a large sum: short sums there, the long one here.
        step = tl.zeros((BLOCK_M, RANKS), tl.float32)
        for part in tl.static_range(PARTS):
            w = tl.load(w_tile + part * R * D, mask=w_ok, other=0.0)
            if PARTS == 1:
                step = tl.dot(a32, w, step, input_precision="ieee")
            else:
                step = tl.dot(a, w, step)
        z += step
    return squares, z


@jit
def _decide_rows(
    z,  # [BLOCK_M, RANKS], without the compressor's bias
    compressor_bias,
    router,
    router_bias,
    mask,
    tokens,
    token_ok,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write the decisions of a block of tokens."""
    ranks = tl.arange(0, RANKS)
    z += tl.load(compressor_bias + ranks, mask=ranks < R, other=0.0)[None, :]
    for first in range(0, GROUPS, BLOCK_G):
        groups = first + tl.arange(0, BLOCK_G)
        execute, skip, shift = _second_map(router, router_bias, groups, GROUPS, R, RANKS)
        margin = tl.dot(z, execute - skip, input_precision="ieee") + shift[None, :]
        tl.store(
            mask + tokens.to(tl.int64)[:, None] * GROUPS + groups[None, :],
            margin >= THRESHOLD,
            mask=token_ok[:, None] & (groups < GROUPS)[None, :],
        )


@jit
def _write_normed(
    x_row,
    out_row,
    token_ok,
    squares,  # [BLOCK_M], of all channels
    norm_weight,
    start,
    end,
    D: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write channels start to end of the normed tokens."""
    scale = 1.0 / tl.sqrt_rn(squares / D + EPS)
    for first in range(start, end, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        ok = token_ok[:, None] & (d < D)[None, :]
        a = tl.load(x_row + d[None, :], mask=ok, other=0.0)
        weight = tl.load(norm_weight + d, mask=d < D, other=0.0)
        tl.store(out_row + d[None, :], normed_values(a, scale[:, None], weight[None, :]), mask=ok)


@jit
def step_kernel(
    arrived,  # [1], programs that have finished: 0 before and after
    x,  # [M, D]
    norm_weight,  # [D]
    compressor,  # [R, D]
    compressor_bias,  # [R]
    router,  # [2 GROUPS, R]
    router_bias,  # [2 GROUPS]
    M,
    normed,  # [M, D]
    mask,  # [M, GROUPS] bool
    z,  # [M, R], the compressed tokens without their bias
    D: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RANKS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SLICE: tl.constexpr,
):
    """One program: one row of the compressor."""
    route_row(
        tl.program_id(0), arrived, x, norm_weight, compressor, compressor_bias, router,
        router_bias, M, normed, mask, z, D, R, GROUPS, EPS, THRESHOLD, RANKS, TOKENS, ROWS,
        BLOCK_D, BLOCK_G, SLICE,
    )  # fmt: skip


@jit
def route_row(
    rank,  # which row
    arrived,  # [1], programs that have finished: 0 before and after
    x,  # [M, D]
    norm_weight,  # [D]
    compressor,  # [R, D]
    compressor_bias,  # [R]
    router,  # [2 GROUPS, R]
    router_bias,  # [2 GROUPS]
    M,
    normed,  # [M, D]
    mask,  # [M, GROUPS] bool
    z,  # [M, R], the compressed tokens without their bias
    D: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RANKS: tl.constexpr,
    TOKENS: tl.constexpr,  # M rounded up to a power of two
    ROWS: tl.constexpr,  # 1 for one token, else the same, at least 16
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SLICE: tl.constexpr,  # ceil(D / R) rounded up to a power of two
):
    """One row of the compressor for all tokens and 1/R of the normed values; the last decides.

    What a step takes is the chain of its waits for memory: x and the row; the sums to arrive; the
    count; the sums again. What else is read is asked for while the sums are under way.
    """
    tokens = tl.arange(0, TOKENS)
    token_ok = tokens < M
    x_row = x + tokens[:, None] * D
    squares = tl.zeros((TOKENS, BLOCK_D), tl.float32)
    products = tl.zeros((TOKENS, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        a = tl.load(x_row + d, mask=token_ok[:, None] & (d < D), other=0.0).to(tl.float32)
        w = tl.load(compressor + rank * D + d, mask=d < D, other=0.0)
        squares += a * a
        products += a * w
    tl.store(z + tokens * R + rank, tl.sum(products, axis=1), mask=token_ok)

    ranks = tl.arange(0, RANKS)
    bias = tl.load(compressor_bias + ranks, mask=ranks < R, other=0.0)
    groups = tl.arange(0, BLOCK_G)
    execute, skip, shift = _second_map(router, router_bias, groups, GROUPS, R, RANKS)
    PIECE: tl.constexpr = (D + R - 1) // R
    offset = tl.arange(0, SLICE)
    own = rank * PIECE + offset
    own_ok = ((offset < PIECE) & (own < D))[None, :]
    weight = tl.load(norm_weight + own[None, :], mask=own_ok, other=0.0)
    own_ok = token_ok[:, None] & own_ok
    a = tl.load(x_row + own[None, :], mask=own_ok, other=0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / D + EPS)
    tl.debug_barrier()  # all threads' sums are written before the program says so
    before = tl.atomic_add(arrived, 1, sem="acq_rel")

    result = normed_values(a, scale[:, None], weight)
    tl.store(normed + tokens[:, None] * D + own[None, :], result, mask=own_ok)
    if before == R - 1:
        for first in tl.static_range(0, GROUPS, BLOCK_G):
            if first > 0:
                groups = first + tl.arange(0, BLOCK_G)
                execute, skip, shift = _second_map(router, router_bias, groups, GROUPS, R, RANKS)
            _decide(
                z, bias, execute - skip, shift, groups, mask, M, R, GROUPS, THRESHOLD, RANKS, ROWS
            )
        tl.store(arrived, 0)


@jit
def normed_values(a, scale, weight):
    """`weight * (a * scale)` in the dtype of a, rounded to it in between as well."""
    unit = (a.to(tl.float32) * scale).to(a.dtype)
    return (weight.to(tl.float32) * unit.to(tl.float32)).to(a.dtype)


@jit
def _decide(
    z,  # [M, R]
    bias,  # [RANKS], the compressor's
    difference,  # [RANKS, groups]
    shift,  # [groups]
    groups,
    mask,  # [M, GROUPS] bool
    M,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decisions of all tokens for some groups. z is read past the L1: other programs wrote it."""
    ranks = tl.arange(0, RANKS)
    rank_ok = ranks < R
    if ROWS == 1:
        compressed = bias + tl.load(z + ranks, mask=rank_ok, other=0.0, volatile=True)
        margin = tl.sum(compressed[:, None] * difference, axis=0) + shift
        tl.store(mask + groups, margin >= THRESHOLD, mask=groups < GROUPS)
    else:
        rows = tl.arange(0, ROWS)
        row_ok = rows < M
        compressed = tl.load(
            z + rows[:, None] * R + ranks[None, :],
            mask=row_ok[:, None] & rank_ok[None, :],
            other=0.0,
            volatile=True,
        )
        compressed += bias[None, :]
        margin = tl.dot(compressed, difference, input_precision="ieee") + shift[None, :]
        tl.store(
            mask + rows[:, None] * GROUPS + groups[None, :],
            margin >= THRESHOLD,
            mask=row_ok[:, None] & (groups < GROUPS)[None, :],
        )


def few_tokens(
    x: Float[Array, "M D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    counter: Int32[Array, "1"],
    eps: float,
    threshold: float,
) -> tuple[Float[Array, "M D"], Bool[Array, "M groups"], Int32[Array, "1"]]:
    """See `pallas_kernels.norm_route_step`; up to `STEP_TOKENS` tokens."""
    triton_support.require_device("norm_route", current_device().capability)
    m, rank = x.shape[0], weights.compressor.shape[0]
    counter, normed, mask, _ = triton_support.launch(
        step_kernel,
        [x, norm_weight, *weights],
        [m],
        [*_outputs(x, weights), jax.ShapeDtypeStruct((m, rank), jnp.float32)],
        grid=rank,
        constants=step_constants(m, x.shape[1], weights, eps, threshold),
        num_warps=NUM_WARPS,
        num_stages=2,
        in_place=[counter],
    )
    return normed, mask, counter


def many_tokens(
    x: Float[Array, "M D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    eps: float,
    threshold: float,
) -> tuple[Float[Array, "M D"], Bool[Array, "M groups"]]:
    """See `pallas_kernels.norm_route`."""
    triton_support.require_device("norm_route", current_device().capability)
    (m, hidden), rank = x.shape, weights.compressor.shape[0]
    constants = rows_constants(m, hidden, x.dtype.name, weights, eps, threshold)
    parts = split(weights.compressor) if constants["PARTS"] == 3 else weights.compressor
    blocks = math.ceil(m / constants["BLOCK_M"])
    slices, sizes = slicing(m, hidden, constants)
    settings: dict[str, Any] = dict(num_warps=NUM_WARPS, num_stages=3)
    if slices == 1:
        normed, mask = triton_support.launch(
            rows_kernel,
            [x, norm_weight, parts, *weights[1:]],
            [m],
            _outputs(x, weights),
            grid=blocks,
            constants=constants,
            **settings,
        )
        return normed, mask
    squares, z = triton_support.launch(
        sum_rows_kernel,
        [x, parts],
        [m],
        [
            jax.ShapeDtypeStruct((slices, m), jnp.float32),
            jax.ShapeDtypeStruct((slices, m, rank), jnp.float32),
        ],
        grid=blocks * slices,
        constants=taken_by(sum_rows_kernel, constants | sizes),
        **settings,
    )
    normed, mask = triton_support.launch(
        finish_rows_kernel,
        [x, norm_weight, *weights[1:], squares, z],
        [m],
        _outputs(x, weights),
        grid=blocks * (slices + 1),
        constants=taken_by(finish_rows_kernel, constants | sizes),
        **settings,
    )
    return normed, mask


def slicing(m: int, hidden: int, constants: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    """Slices of the channels, and the constants that say so; 1: the blocks of tokens are enough."""
    block_d = constants["BLOCK_D"]
    steps = math.ceil(hidden / block_d)
    wanted = min(MOST_SLICES, PROGRAMS // math.ceil(m / constants["BLOCK_M"]), steps)
    if m >= MANY_TOKENS or wanted < 2:
        return 1, {}
    a_slice = math.ceil(steps / wanted)
    slices = math.ceil(steps / a_slice)
    return slices, dict(
        SLICES=slices, SLICE=a_slice * block_d, ALL_SLICES=next_power_of_two(slices)
    )


def taken_by(kernel: Any, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the constants that the kernel has."""
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def _outputs(x: Float[Array, "M D"], weights: RouterWeights) -> list[jax.ShapeDtypeStruct]:
    """Of normed values and mask."""
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((x.shape[0], weights.groups), jnp.bool_),
    ]


def split(w: Float[Array, "R D"]) -> Float[Array, "3 R D"]:
    """Three bfloat16 parts that add up to a float32 weight, the small one first."""
    return jnp.stack(bfloat16_parts(w, 3)[::-1])


def step_constants(
    m: int,
    hidden: int,
    weights: RouterWeights,
    eps: float,
    threshold: float,
    held: int = STEP_MAP,
) -> dict[str, Any]:
    """Compile-time constants of `step_kernel`; `held`: numbers of the second map held at once."""
    rank, tokens = weights.compressor.shape[0], triton.next_power_of_2(m)
    ranks, groups = (max(16, triton.next_power_of_2(n)) for n in (rank, weights.groups))
    return dict(
        D=hidden,
        R=rank,
        GROUPS=weights.groups,
        EPS=eps,
        THRESHOLD=threshold,
        RANKS=ranks,
        TOKENS=tokens,
        ROWS=1 if m == 1 else max(16, tokens),
        BLOCK_D=max(64, 4096 // tokens),
        BLOCK_G=min(STEP_BLOCK_G, groups, max(16, held // ranks)),
        SLICE=triton.next_power_of_2(math.ceil(hidden / rank)),
    )


def rows_constants(
    m: int, hidden: int, dtype: str, weights: RouterWeights, eps: float, threshold: float
) -> dict[str, Any]:
    """Compile-time constants of `rows_kernel`."""
    rank = weights.compressor.shape[0]
    parts = 3 if dtype == "bfloat16" else 1
    return dict(
        D=hidden,
        R=rank,
        GROUPS=weights.groups,
        EPS=eps,
        THRESHOLD=threshold,
        PARTS=parts,
        RANKS=max(16, triton.next_power_of_2(rank)),
        # Enough programs for the card before enough work for each.
        BLOCK_M=64 if parts == 3 and m >= MANY_TOKENS else 16,
        BLOCK_D=64 if parts == 3 else 32,
        BLOCK_G=BLOCK_G,
    )
