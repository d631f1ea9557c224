"""The compacted form of the output-pruned GEMMs: one Triton body for `gemm_mn` and `swiglu_up`.

One program computes one tile: `BLOCK_M` active tokens of a group x `BLOCK_N` of its channels.

    program id -> (band, tile in band) -> (tile_m, group, tile in group) -> rows, columns
    launch order, BAND = 2, 4 token tiles, 3 channel tiles (numbers are program ids):

                 channel tile 0   1   2          rows of tile_m for group g:
    band 0  tile_m 0          0   2   4            order[g, tile_m * BLOCK_M + 0 .. BLOCK_M - 1]
            tile_m 1          1   3   5          columns of the tile:
    band 1  tile_m 2          6   8  10            g * G + tile * BLOCK_N + 0 .. BLOCK_N - 1
            tile_m 3          7   9  11

Compaction is stable, so a band's tiles gather from about the same window of tokens whatever the
group: x's rows and w's tiles of a band are read from L2, not from memory.

Slots at or past `count[g]` are skipped tokens. Of a group with c = count[g] active tokens,
ceil(c / BLOCK_M) programs a channel tile compute. With SHARE_ZEROS they also write the group's
zeros, an equal share each: `gemm_mn` stores its first tile of zeros a few rows an iteration of its
loop, where the stores cost nothing (4 % of the whole if they wait for the end); with two weights
the loop has no registers to spare, and they go out with the result. Without SHARE_ZEROS, and where
fewer than a quarter of the programs compute, each of the others writes the zeros of its own slots
instead: better where there are fewer tiles than multiprocessors. So every output is written exactly
once, and no output has to be cleared first.

With HALVES a group's last tile, if it has no more than BLOCK_M / 2 active tokens, is computed as a
tile of half the height: half the loads, half the products.

Offsets are 32-bit unless an array passes 2^31 elements (WIDE): 64-bit ones cost a fifth of the
speed, as every thread then does its address arithmetic in two halves, in the inner loop.

For `swiglu_up` (GLU), rows of w_gate and w_up alternate in the weight tile, so that gate and up
of a channel land in one thread, next to each other: one MMA of 2 BLOCK_N columns, no shuffle.
"""

import triton.language as tl

from pallas_kernels._common.jit import jit


@jit
def tile_product(
    x,
    w,
    w_up,
    rows,
    first_column,
    columns,
    column_ok,
    out,
    group_order,
    zero_slots,
    zero_rows,
    zero_limit,
    N: tl.constexpr,
    K: tl.constexpr,
    GLU: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    CLEAR: tl.constexpr,  # write zeros to zero_rows, those of zero_slots + ZERO_ROWS, ...
    ZERO_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The product of the tile's rows and columns in float32; for GLU silu(gate) * up of it."""
    COLUMNS: tl.constexpr = 2 * BLOCK_N if GLU else BLOCK_N
    channel = tl.minimum(columns, N - 1)
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        rows = rows.to(tl.int64)
        channel = channel.to(tl.int64)
    x_tile = x + (rows[:, None] * K + k[None, :])
    if GLU:
        # Rows of the weight tile: gate 0, up 0, gate 1, up 1, ...
        pair = tl.arange(0, COLUMNS)
        channel = tl.minimum(first_column + pair // 2, N - 1)
        if WIDE:
            channel = channel.to(tl.int64)
        w_row = tl.where(pair % 2 == 0, w + channel * K, w_up + channel * K)
        w_tile = w_row[None, :] + k[:, None]
    else:
        w_tile = w + (channel[None, :] * K + k[:, None])
    acc = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(x_tile)
        else:
            a = tl.load(x_tile, mask=(start + k < K)[None, :], other=0.0)
        if K % BLOCK_K == 0:
            b = tl.load(w_tile)
        else:
            b = tl.load(w_tile, mask=(start + k < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
        if CLEAR:
            tl.store(
                out + (zero_rows.to(tl.int64)[:, None] * N + columns[None, :]),
                tl.zeros((ZERO_ROWS, BLOCK_N), out.dtype.element_ty),
                mask=(zero_slots < zero_limit)[:, None] & column_ok[None, :],
            )
            zero_slots += ZERO_ROWS
            zero_rows = tl.load(group_order + zero_slots, mask=zero_slots < zero_limit, other=0)
    if GLU:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        return gate / (1.0 + tl.exp(-gate)) * up
    else:
        return acc


@jit
def store_rows(out, rows, row_ok, columns, column_ok, result, N: tl.constexpr):
    """`out[rows, columns] = result` where both are ok."""
    tl.store(
        out + (rows.to(tl.int64)[:, None] * N + columns[None, :]),
        result.to(out.dtype.element_ty),
        mask=row_ok[:, None] & column_ok[None, :],
    )


@jit
def tile_kernel(
    x,  # [M, K]
    w,  # [N, K]
    w_up,  # [N, K], read if GLU
    bias,  # [N], read if HAS_BIAS
    order,  # [GROUPS, M] int32
    count,  # [GROUPS] int32
    M,
    out,  # [M, N]
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    GLU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    SHARE_ZEROS: tl.constexpr,
    HALVES: tl.constexpr,
    ZERO_ROWS: tl.constexpr,  # BLOCK_M rows over the loop's steps, a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    """Compute one tile of the drawing above, and write its share of the zeros."""
    TILES_G: tl.constexpr = (G + BLOCK_N - 1) // BLOCK_N
    TILES_N: tl.constexpr = GROUPS * TILES_G
    CLEAR_IN_LOOP: tl.constexpr = SHARE_ZEROS & (not GLU)
    tile = tl.program_id(0)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    band = tile // (BAND * TILES_N)
    in_band = tile - band * (BAND * TILES_N)
    width = tl.minimum(tiles_m - band * BAND, BAND)
    tile_m = band * BAND + in_band % width
    tile_n = in_band // width
    group = tile_n // TILES_G

    active = tl.load(count + group)
    group_order = order + group.to(tl.int64) * M if WIDE else order + group * M
    first_column = group * G + (tile_n % TILES_G) * BLOCK_N
    end_column = tl.minimum(group * G + G, N)
    columns = first_column + tl.arange(0, BLOCK_N)
    column_ok = columns < end_column
    lanes = tl.arange(0, BLOCK_M)

    slots = tile_m * BLOCK_M + lanes
    rows = tl.load(group_order + slots, mask=slots < M, other=0)

    # Tiles of zeros this program writes: [zero_tile, zero_end) in steps of the computing programs.
    computing = (active + BLOCK_M - 1) // BLOCK_M
    computes = tile_m < computing
    share = SHARE_ZEROS & (computing * 4 >= tiles_m)
    zero_tile = tl.where(computes, computing + tile_m, tile_m)
    zero_end = tl.where(computes & share, tiles_m, tl.where(computes | share, 0, tile_m + 1))
    zero_limit = tl.where(zero_tile < zero_end, M, 0)
    FIRST_ROWS: tl.constexpr = ZERO_ROWS if CLEAR_IN_LOOP else BLOCK_M
    zero_slots = zero_tile * BLOCK_M + tl.arange(0, FIRST_ROWS)
    zero_rows = tl.load(group_order + zero_slots, mask=zero_slots < zero_limit, other=0)

    if computes:
        if HALVES and active - tile_m * BLOCK_M <= BLOCK_M // 2:
            HALF: tl.constexpr = BLOCK_M // 2
            upper = tile_m * BLOCK_M + tl.arange(0, HALF)
            upper_rows = tl.load(group_order + upper, mask=upper < M, other=0)
            half = tile_product(
                x,
                w,
                w_up,
                upper_rows,
                first_column,
                columns,
                column_ok,
                out,
                group_order,
                upper,
                upper,
                0,
                N,
                K,
                GLU,
                PRECISION,
                WIDE,
                False,
                HALF,
                HALF,
                BLOCK_N,
                BLOCK_K,
            )
            if HAS_BIAS:
                half += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
            half = tl.where((upper < active)[:, None], half, 0.0)
            store_rows(out, upper_rows, upper < M, columns, column_ok, half, N)
            lower = upper + HALF
            lower_rows = tl.load(group_order + lower, mask=lower < M, other=0)
            store_rows(
                out,
                lower_rows,
                lower < M,
                columns,
                column_ok,
                tl.zeros((HALF, BLOCK_N), tl.float32),
                N,
            )
        else:
            result = tile_product(
                x,
                w,
                w_up,
                rows,
                first_column,
                columns,
                column_ok,
                out,
                group_order,
                zero_slots,
                zero_rows,
                zero_limit,
                N,
                K,
                GLU,
                PRECISION,
                WIDE,
                CLEAR_IN_LOOP,
                ZERO_ROWS,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            if HAS_BIAS:
                result += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
            result = tl.where((slots < active)[:, None], result, 0.0)
            store_rows(out, rows, slots < M, columns, column_ok, result, N)

    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    step = tl.maximum(computing, 1)
    if not CLEAR_IN_LOOP:
        store_rows(out, zero_rows, zero_slots < zero_limit, columns, column_ok, zeros, N)
        zero_tile += step
    elif computes:
        zero_tile += step
    for tile in range(zero_tile, zero_end, step):
        more_slots = tile * BLOCK_M + lanes
        more_rows = tl.load(group_order + more_slots, mask=more_slots < M, other=0)
        store_rows(out, more_rows, more_slots < M, columns, column_ok, zeros, N)
