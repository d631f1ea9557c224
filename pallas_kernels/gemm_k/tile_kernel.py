"""The tile of an input-pruned product: TILE tokens that skip about the same groups.

One program computes one token tile x `COLUMN_TILES` tiles of `BLOCK_N` outputs, one after another
in a single loop, so that the first operands of the next are on their way while one is written.

    program id -> (super-group, band, column block, tile in band)
    launch order in a super-group, BAND = 2, 4 token tiles, 2 column blocks (numbers are programs):

                   column block 0   1       rows of a tile: entries of `rows`, token and pattern
    band 0  tile 0              0   2       K loop of a tile: its groups, each G / BLOCK_K steps
            tile 1              1   3         groups 5 1 0 -> k = 0 .. G-1, G .. 2G-1, 5G .. 6G-1
    band 1  tile 2              4   6       a row whose pattern lacks the group: loads nothing,
            tile 3              5   7         its A row is 0

With one super-group the result is written where it belongs, bias and residual added. With several,
every super-group writes a partial sum, `partial[super-group, token, :]`, which `sum_kernel` adds up
in order: no atomics, and the same bits every time. Partial sums of 16-bit products are float16
values times a power of two, one for a row of the tile (`scale`): 11 bits whatever the magnitude,
where bfloat16 would keep 8 and float16 alone could overflow. Tokens that skip the whole super-group
write nothing, and nothing is read for them.
"""

# pyrefly: ignore-errors
# (Triton types a compile-time value as its wrapper, and plain operators do not know it.)
import triton.language as tl

from pallas_kernels._common.jit import jit


@jit
def store_tile(
    result,  # [TILE, BLOCK_N] float32
    columns,
    token,
    row_ok,
    bias,
    residual,
    out,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Write a tile at its tokens' rows, with bias and residual."""
    column_ok = columns < N
    ok = row_ok[:, None] & column_ok[None, :]
    offsets = token.to(tl.int64)[:, None] * N + columns[None, :]
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        result += tl.load(residual + offsets, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=ok)


@jit
def store_in_pieces(
    result,
    first_column,
    token,
    row_ok,
    bias,
    residual,
    out,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PIECES: tl.constexpr,
):
    """`store_tile` by halves of halves: the whole tile's offsets would not fit the registers."""
    ROWS: tl.constexpr = result.shape[0]
    HALF: tl.constexpr = result.shape[1] // 2
    if PIECES == 1:
        columns = first_column + tl.arange(0, 2 * HALF)
        store_tile(result, columns, token, row_ok, bias, residual, out, N, HAS_BIAS, HAS_RESIDUAL)
    else:
        left, right = tl.split(tl.permute(tl.reshape(result, (ROWS, 2, HALF)), (0, 2, 1)))
        store_in_pieces(
            left,
            first_column,
            token,
            row_ok,
            bias,
            residual,
            out,
            N,
            HAS_BIAS,
            HAS_RESIDUAL,
            PIECES // 2,
        )
        store_in_pieces(
            right,
            first_column + HALF,
            token,
            row_ok,
            bias,
            residual,
            out,
            N,
            HAS_BIAS,
            HAS_RESIDUAL,
            PIECES // 2,
        )


@jit
def k_tile_kernel(
    h,  # [M, K]
    w,  # [N, K]
    bias,  # [N], read if HAS_BIAS
    residual,  # [M, N], read if HAS_RESIDUAL
    rows,  # [SUPERS, tiles * TILE] int32: token + (pattern << 24)
    tiles,  # [SUPERS, tiles, 2] int32: groups, 4 bits each; number of groups + (of rows << 8)
    M,
    tiles_m,
    out,  # [M, N], or partial sums [SUPERS, M, N]
    scale,  # [SUPERS, column tiles, M] float32, written if SCALED
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    SUPERS: tl.constexpr,
    SIZE: tl.constexpr,  # groups of a super-group
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,  # h passes 2^31 elements: 64-bit offsets
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BAND: tl.constexpr,
    PIECES: tl.constexpr,  # the result is written in so many parts
):
    """Compute one tile of the drawing above."""
    STEPS_A_GROUP: tl.constexpr = (G + BLOCK_K - 1) // BLOCK_K
    RAGGED: tl.constexpr = (G % BLOCK_K != 0) or (K % G != 0) or (N % BLOCK_N != 0)
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    BLOCKS_N: tl.constexpr = (TILES_N + COLUMN_TILES - 1) // COLUMN_TILES
    pid = tl.program_id(0)
    super_group = pid // (tiles_m * BLOCKS_N)
    in_super = pid - super_group * (tiles_m * BLOCKS_N)
    band = in_super // (BAND * BLOCKS_N)
    in_band = in_super - band * (BAND * BLOCKS_N)
    width = tl.minimum(tiles_m - band * BAND, BAND)
    tile = super_group * tiles_m + band * BAND + in_band % width
    tile_n = in_band // width * COLUMN_TILES

    groups = tl.load(tiles + tile * 2)
    counts = tl.load(tiles + tile * 2 + 1)
    lanes = tl.arange(0, TILE)
    entries = tl.load(rows + tile.to(tl.int64) * TILE + lanes)
    row_ok = lanes < (counts >> 8)
    token = tl.where(row_ok, entries & 0xFFFFFF, 0)
    pattern = tl.where(row_ok, (entries >> 24) & 0xFF, 0)
    if WIDE:
        token = token.to(tl.int64)
    steps = (counts & 0xFF) * STEPS_A_GROUP
    if SUPERS > 1:
        row_ok = pattern != 0

    first_column = tile_n * BLOCK_N
    k = tl.arange(0, BLOCK_K)
    h_row = token * K
    first_k = super_group * (SIZE * G)
    here = tl.minimum(COLUMN_TILES, TILES_N - tile_n)
    partial = out + super_group.to(tl.int64) * M * N
    if steps == 0:
        if SUPERS == 1:
            zeros = tl.zeros((TILE, BLOCK_N), tl.float32)
            for i in range(here):
                store_in_pieces(
                    zeros,
                    first_column + i * BLOCK_N,
                    token,
                    row_ok,
                    bias,
                    residual,
                    out,
                    N,
                    HAS_BIAS,
                    HAS_RESIDUAL,
                    PIECES,
                )
    else:
        # What does not change in the loop: offsets within a tile, and each row's pattern.
        h_offsets = h_row[:, None] + k[None, :]
        patterns = tl.broadcast_to(pattern[:, None], (TILE, BLOCK_K))
        w_offsets = tl.arange(0, BLOCK_N)[None, :] * K + k[:, None]
        acc = tl.zeros((TILE, BLOCK_N), tl.float32)
        step = 0
        for _ in range(0, steps * here):
            group = (groups >> (4 * (step // STEPS_A_GROUP))) & 15
            in_group = (step % STEPS_A_GROUP) * BLOCK_K
            start = first_k + group * G + in_group
            on = ((patterns >> group) & 1) != 0
            h_tile = h + start + h_offsets
            w_tile = w + (first_column.to(tl.int64) * K + start) + w_offsets
            if RAGGED:
                k_ok = (in_group + k < G) & (start + k < K)
                n_ok = first_column + tl.arange(0, BLOCK_N) < N
                a = tl.load(h_tile, mask=on & k_ok[None, :], other=0.0)
                b = tl.load(w_tile, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
            else:
                a = tl.load(h_tile, mask=on, other=0.0)
                b = tl.load(w_tile)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            last = step == steps - 1
            if last:
                result = acc
                if SCALED:
                    # 2 ** exponent of the row's largest value, from its bits.
                    largest = tl.max(tl.abs(result), axis=1)
                    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
                    bits = tl.minimum(tl.maximum(bits, 20 << 23), 234 << 23)
                    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
                    result = result * inverse[:, None]
                    at = super_group.to(tl.int64) * TILES_N + first_column // BLOCK_N
                    tl.store(scale + at * M + token, bits.to(tl.float32, bitcast=True), mask=row_ok)
                store_in_pieces(
                    result,
                    first_column,
                    token,
                    row_ok,
                    bias,
                    residual,
                    partial,
                    N,
                    HAS_BIAS,
                    HAS_RESIDUAL,
                    PIECES,
                )
                acc = tl.zeros((TILE, BLOCK_N), tl.float32)
            # Outside of the branch: the loads of coming steps must not wait for the result.
            step = tl.where(last, 0, step + 1)
            first_column += tl.where(last, BLOCK_N, 0)
