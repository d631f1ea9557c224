"""`norm_route` in Triton: two kernels for many tokens, a short one for a step.

    sum_rows_kernel      (block of tokens, slice of D)    squares and the compressor's sums
    finish_rows_kernel   (block of tokens)                adds up those of all slices, and decides
                         (block of tokens, piece of D)    normed values

The second kernel reads x again, from the L2 cache as long as it fits. One kernel that takes blocks
of tokens through all of D twice has too few programs to keep a card's memory busy, at 16,384 tokens
still (169 us on an H200, of which the bytes explain 65; 129 in two).

    bfloat16 x:  x w = x high + x middle + x low, w = high + middle + low in bfloat16: three
                 products on the tensor cores, exact before their float32 sum (24 bits of w)
    other x:     float32 products on the ordinary units

Up to 16 tokens and 1,024 programs (`step_kernel`): the compressor's 16 KB a row would keep one
multiprocessor busy for microseconds, so each of the R rows has a program of its own for every
token, which also writes 1/R of its normed values; the program that finishes a token last turns its
R sums into decisions. Tokens share no program: four in one took 8.0 us on an H200, one 3.3.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._common import triton_support
from pallas_kernels._common.bfloat16_parts import bfloat16_parts
from pallas_kernels._common.device import current_device
from pallas_kernels._common.forms import next_power_of_two
from pallas_kernels._common.jit import jit
from pallas_kernels._common.rms import rms_normed, rms_scale
from pallas_kernels.norm_route.api import RouterWeights

WIDE_TOKENS = 512  # from here on blocks of 64 tokens: each reads all weights
WIDE_RANKS = 64  # sums of higher ranks would take such a block's registers
PROGRAMS = 512  # of the first kernel: the channels are split until there are so many
MOST_SLICES = 16
WEIGHTS = 2048  # of one part that a program of the first kernel multiplies at a time
BLOCK_TOKENS = 16  # of the second kernel's programs
PIECE = 256  # channels that a program norms
BLOCK_R = 32  # ranks that they take at a time
BLOCK_G = 128  # groups decided at a time: a round trip to memory is what they cost
STEP_CHANNELS = 4096  # that a program of a step asks for at once
MAP = 4096  # numbers of the second map that a program holds at once: of higher ranks fewer groups
NUM_WARPS = 4
NUM_STAGES = 3


@jit
def _second_map(router, ranks, groups, GROUPS: tl.constexpr, R: tl.constexpr):
    """Execute and skip rows of the second map, `[ranks, groups]`."""
    ok = (ranks < R)[:, None] & (groups < GROUPS)[None, :]
    row = router + 2 * groups[None, :] * R + ranks[:, None]
    return tl.load(row, mask=ok, other=0.0), tl.load(row + R, mask=ok, other=0.0)


@jit
def _shift(router_bias, groups, GROUPS: tl.constexpr):
    """Execute bias less skip bias, `[groups]`."""
    bias = router_bias + 2 * groups
    ok = groups < GROUPS
    return tl.load(bias, mask=ok, other=0.0) - tl.load(bias + 1, mask=ok, other=0.0)


@jit
def sum_rows_kernel(
    x,  # [M, D]
    compressor,  # [R, D]; if AHEAD [PARTS, R, D], parts that add up to it
    M,
    squares,  # [SLICES, M]
    z,  # [SLICES, M, R], without the compressor's bias
    D: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,  # 3 for bfloat16 x (small parts first), else 1
    AHEAD: tl.constexpr,  # whether the weight comes in parts
    RANKS: tl.constexpr,  # R rounded up to a power of two of at least 16
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,  # channels, a multiple of BLOCK_D
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_M tokens: squares and the compressor's sums of one slice of the channels."""
    pid = tl.program_id(0)
    tokens = pid // SLICES * BLOCK_M + tl.arange(0, BLOCK_M)
    token_ok = tokens < M
    x_row = x + tokens.to(tl.int64)[:, None] * D
    ranks = tl.arange(0, RANKS)
    start = pid % SLICES * SLICE
    some = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, RANKS), tl.float32)
    for first in range(start, tl.minimum(start + SLICE, D), BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        a = tl.load(x_row + d[None, :], mask=token_ok[:, None] & (d < D)[None, :], other=0.0)
        a32 = a.to(tl.float32)
        some += tl.sum(a32 * a32, axis=1)
        w_tile = compressor + ranks[None, :] * D + d[:, None]
        w_ok = (ranks < R)[None, :] & (d < D)[:, None]
        # Tensor cores cut off what they add to a large sum: short sums there, the long one here.
        step = tl.zeros((BLOCK_M, RANKS), tl.float32)
        if PARTS == 1:
            w = tl.load(w_tile, mask=w_ok, other=0.0)
            step = tl.dot(a32, w, step, input_precision="ieee")
        elif not AHEAD:
            w = tl.load(w_tile, mask=w_ok, other=0.0)
            high = w.to(a.dtype)
            w -= high.to(tl.float32)
            middle = w.to(a.dtype)
            low = (w - middle.to(tl.float32)).to(a.dtype)
            step = tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low, step)))
        else:
            for part in tl.static_range(PARTS):
                step = tl.dot(a, tl.load(w_tile + part * R * D, mask=w_ok, other=0.0), step)
        sums += step
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
    z,  # [SLICES, M, R], without the compressor's bias
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
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PIECE: tl.constexpr,
):
    """BLOCK_TOKENS tokens: their decisions, which begin first as they take longest, or a PIECE."""
    PIECES: tl.constexpr = (D + PIECE - 1) // PIECE
    pid = tl.program_id(0)
    blocks = tl.num_programs(0) // (1 + PIECES)
    piece = pid - blocks
    block = tl.where(piece < 0, pid, piece // PIECES)
    tokens = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_ok = tokens < M
    row = tokens.to(tl.int64)
    if piece < 0:
        for first in range(0, GROUPS, BLOCK_G):
            groups = first + tl.arange(0, BLOCK_G)
            margin = tl.zeros((BLOCK_TOKENS, BLOCK_G), tl.float32)
            margin += _shift(router_bias, groups, GROUPS)[None, :]
            for first_rank in tl.static_range(0, RANKS, BLOCK_R):
                ranks = first_rank + tl.arange(0, BLOCK_R)
                sum_ok = token_ok[:, None] & (ranks < R)[None, :]
                execute, skip = _second_map(router, ranks, groups, GROUPS, R)
                bias = tl.load(compressor_bias + ranks, mask=ranks < R, other=0.0)
                compressed = tl.zeros((BLOCK_TOKENS, BLOCK_R), tl.float32) + bias[None, :]
                for a_slice in tl.static_range(SLICES):
                    one = (row + a_slice * M)[:, None] * R + ranks[None, :]
                    compressed += tl.load(z + one, mask=sum_ok, other=0.0)
                margin = tl.dot(compressed, execute - skip, margin, input_precision="ieee")
            tl.store(
                mask + row[:, None] * GROUPS + groups[None, :],
                margin >= THRESHOLD,
                mask=token_ok[:, None] & (groups < GROUPS)[None, :],
            )
    else:
        d = piece % PIECES * PIECE + tl.arange(0, PIECE)
        at = row[:, None] * D + d[None, :]
        ok = token_ok[:, None] & (d < D)[None, :]
        a = tl.load(x + at, mask=ok, other=0.0)
        weight = tl.load(norm_weight + d, mask=d < D, other=0.0)
        total = tl.zeros((BLOCK_TOKENS,), tl.float32)
        for a_slice in tl.static_range(SLICES):
            total += tl.load(squares + row + a_slice * M, mask=token_ok, other=0.0)
        scale = rms_scale(total, D, EPS)
        tl.store(normed + at, rms_normed(a, scale[:, None], weight[None, :], a.dtype), mask=ok)


@jit
def step_kernel(
    arrived,  # [STEP_TOKENS], a token's programs that have finished: 0 before and after
    x,  # [M, D]
    norm_weight,  # [D]
    compressor,  # [R, D]
    compressor_bias,  # [R]
    router,  # [2 GROUPS, R]
    router_bias,  # [2 GROUPS]
    normed,  # [M, D]
    mask,  # [M, GROUPS] bool
    z,  # [M, R], the compressed tokens without their bias
    D: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SLICE: tl.constexpr,
):
    """One program: one token and one row of the compressor."""
    pid = tl.program_id(0)
    route_row(
        pid // R, pid % R, arrived, x, norm_weight, compressor, compressor_bias, router,
        router_bias, normed, mask, z, D, R, GROUPS, EPS, THRESHOLD, RANKS, BLOCK_D, BLOCK_G,
        SLICE,
    )  # fmt: skip


@jit
def route_row(
    token,
    rank,  # which row
    arrived,  # [STEP_TOKENS], a token's programs that have finished: 0 before and after
    x,  # [M, D]
    norm_weight,  # [D]
    compressor,  # [R, D]
    compressor_bias,  # [R]
    router,  # [2 GROUPS, R]
    router_bias,  # [2 GROUPS]
    normed,  # [M, D]
    mask,  # [M, GROUPS] bool
    z,  # [M, R], the compressed tokens without their bias
    D: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SLICE: tl.constexpr,  # ceil(D / R) rounded up to a power of two
):
    """One row of the compressor for a token and 1/R of its normed values; its last one decides.

    What a step takes is the chain of its waits for memory: x and the row; the sums to arrive; the
    count; the sums again. What else is read is asked for while the sums are under way.
    """
    x += token * D
    squares = tl.zeros((BLOCK_D,), tl.float32)
    products = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        a = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)
        w = tl.load(compressor + rank * D + d, mask=d < D, other=0.0)
        squares += a * a
        products += a * w
    tl.store(z + token * R + rank, tl.sum(products, axis=0))

    ranks = tl.arange(0, RANKS)
    bias = tl.load(compressor_bias + ranks, mask=ranks < R, other=0.0)
    groups = tl.arange(0, BLOCK_G)
    execute, skip = _second_map(router, ranks, groups, GROUPS, R)
    shift = _shift(router_bias, groups, GROUPS)
    PIECE: tl.constexpr = (D + R - 1) // R
    offset = tl.arange(0, SLICE)
    own = rank * PIECE + offset
    own_ok = (offset < PIECE) & (own < D)
    weight = tl.load(norm_weight + own, mask=own_ok, other=0.0)
    a = tl.load(x + own, mask=own_ok, other=0.0)
    scale = rms_scale(tl.sum(squares, axis=0), D, EPS)
    tl.debug_barrier()  # all threads' sums are written before the program says so
    before = tl.atomic_add(arrived + token, 1, sem="acq_rel")

    tl.store(normed + token * D + own, rms_normed(a, scale, weight, a.dtype), mask=own_ok)
    if before == R - 1:
        # Read past the L1: other programs wrote it.
        sums = tl.load(z + token * R + ranks, mask=ranks < R, other=0.0, volatile=True) + bias
        for first in tl.static_range(0, GROUPS, BLOCK_G):
            if first > 0:
                groups = first + tl.arange(0, BLOCK_G)
                execute, skip = _second_map(router, ranks, groups, GROUPS, R)
                shift = _shift(router_bias, groups, GROUPS)
            margin = tl.sum(sums[:, None] * (execute - skip), axis=0) + shift
            tl.store(mask + token * GROUPS + groups, margin >= THRESHOLD, mask=groups < GROUPS)
        tl.store(arrived + token, 0)


def few_tokens(
    x: Float[Array, "M D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    counter: Int32[Array, " C"],
    eps: float,
    threshold: float,
) -> tuple[Float[Array, "M D"], Bool[Array, "M groups"], Int32[Array, " C"]]:
    """See `pallas_kernels.norm_route_step`; what `is_step` says yes to."""
    triton_support.require_device("norm_route", current_device().capability)
    m, rank = x.shape[0], weights.compressor.shape[0]
    counter, normed, mask, _ = triton_support.launch(
        step_kernel,
        [x, norm_weight, *weights],
        [],
        [*_outputs(x, weights), jax.ShapeDtypeStruct((m, rank), jnp.float32)],
        grid=m * rank,
        constants=step_constants(x.shape[1], weights, eps, threshold),
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
    sums = sum_constants(m, hidden, x.dtype.name, rank)
    slices = sums["SLICES"]
    squares, z = triton_support.launch(
        sum_rows_kernel,
        [x, split(weights.compressor) if sums["AHEAD"] else weights.compressor],
        [m],
        [
            jax.ShapeDtypeStruct((slices, m), jnp.float32),
            jax.ShapeDtypeStruct((slices, m, rank), jnp.float32),
        ],
        grid=math.ceil(m / sums["BLOCK_M"]) * slices,
        constants=sums,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    normed, mask = triton_support.launch(
        finish_rows_kernel,
        [x, norm_weight, *weights[1:], squares, z],
        [m],
        _outputs(x, weights),
        grid=math.ceil(m / BLOCK_TOKENS) * (1 + math.ceil(hidden / PIECE)),
        constants=finish_constants(hidden, slices, weights, eps, threshold),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return normed, mask


def _outputs(x: Float[Array, "M D"], weights: RouterWeights) -> list[jax.ShapeDtypeStruct]:
    """Of normed values and mask."""
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((x.shape[0], weights.groups), jnp.bool_),
    ]


def split(w: Float[Array, "R D"]) -> Float[Array, "3 R D"]:
    """Three bfloat16 parts that add up to a float32 weight, the small one first."""
    return jnp.stack(bfloat16_parts(w, 3)[::-1])


def held_groups(groups: int, ranks: int, held: int) -> int:
    """Groups decided at a time, where `held` numbers of the second map fit the registers."""
    return min(BLOCK_G, padded(groups), max(16, held // ranks))


def padded(n: int) -> int:
    """`n` rounded up to a power of two that a tile of the tensor cores takes."""
    return max(16, next_power_of_two(n))


def router_constants(
    hidden: int, weights: RouterWeights, eps: float, threshold: float
) -> dict[str, Any]:
    """Compile-time constants of every kernel that decides."""
    rank = weights.compressor.shape[0]
    return dict(
        D=hidden,
        R=rank,
        GROUPS=weights.groups,
        EPS=eps,
        THRESHOLD=threshold,
        RANKS=padded(rank),
    )


def step_constants(
    hidden: int,
    weights: RouterWeights,
    eps: float,
    threshold: float,
    held: int = MAP,
) -> dict[str, Any]:
    """Compile-time constants of `step_kernel`; `held`: numbers of the second map held at once."""
    shared = router_constants(hidden, weights, eps, threshold)
    return shared | dict(
        BLOCK_D=min(STEP_CHANNELS, next_power_of_two(hidden)),
        BLOCK_G=held_groups(weights.groups, shared["RANKS"], held),
        SLICE=next_power_of_two(math.ceil(hidden / shared["R"])),
    )


def sum_constants(m: int, hidden: int, dtype: str, rank: int) -> dict[str, Any]:
    """Compile-time constants of `sum_rows_kernel`."""
    parts = 3 if dtype == "bfloat16" else 1
    ranks = padded(rank)
    block_m = 64 if parts == 3 and m >= WIDE_TOKENS and ranks <= WIDE_RANKS else 16
    # Stages of three parts of the weights share a multiprocessor's memory, 100 KB on some cards.
    block_d = max(16, min(64, WEIGHTS // ranks)) if parts == 3 else 32
    steps = math.ceil(hidden / block_d)
    wanted = min(MOST_SLICES, max(2, PROGRAMS // math.ceil(m / block_m)), steps)
    a_slice = math.ceil(steps / wanted)
    return dict(
        D=hidden,
        R=rank,
        PARTS=parts,
        AHEAD=parts == 3 and m >= WIDE_TOKENS,  # for few programs that is a launch too many
        RANKS=ranks,
        SLICES=math.ceil(steps / a_slice),
        SLICE=a_slice * block_d,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
    )


def finish_constants(
    hidden: int, slices: int, weights: RouterWeights, eps: float, threshold: float
) -> dict[str, Any]:
    """Compile-time constants of `finish_rows_kernel`."""
    shared = router_constants(hidden, weights, eps, threshold)
    return shared | dict(
        SLICES=slices,
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_G=held_groups(weights.groups, BLOCK_R, MAP),
        BLOCK_R=min(BLOCK_R, shared["RANKS"]),
        PIECE=PIECE,
    )
