"""The persistent form of the output-pruned GEMMs on Hopper: one Gluon body for both ops.

`PROGRAMS` programs (one a multiprocessor) each compute tiles `t = pid, pid + PROGRAMS, ...` of
`BLOCK_M` tokens x `BLOCK_N` channels. What that buys over `tile_kernel` (one tile a program): the
loads of a tile's first steps are in flight while the tile before it is finished and stored.

    step            0    1   ...            K/BK - 2   K/BK - 1 | 0 of the next tile
    load into smem  2    3   ...  K/BK - 1  0 of next  1 of next  2 of next
    wgmma           0    1   ...            K/BK - 2   K/BK - 1 | result -> out     (STAGES = 3)

`COMPACT` (skip): tile t is the t-th *computing* tile of the list below, so that every program has
the same work whatever the mask. A group with c active tokens has ceil(c / BLOCK_M) of them.

    bands of BAND token tiles:  band 0: group 0 (channel tiles x its token tiles of the band), group
    1, ...; band 1: ...         inside: token tiles fastest, as in `tile_kernel`

Not `COMPACT` (mask): all tiles of the dense product, tokens in their own order, and the mask
applied on the way out. For groups too small to compact, and where little is skipped: it costs what
a dense product costs.

Zeros of the compact form: as in `tile_kernel`, tile i of a group that has c computing tiles clears
the group's tiles c + i, 2 c + i, ... (its first a few rows a step of the loop). Groups that compute
fewer than a quarter of their tiles are cleared by all programs together, at the end.

Offsets are 32 bit, K is a multiple of BLOCK_K, G and N are multiples of 8 (16-byte stores).
"""

# pyrefly: ignore-errors
# (Gluon types a compile-time value as its wrapper, and its own library takes plain ones.)
import inspect

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)


def jit(function):
    """`gluon.jit` of the function itself (see `_common/jit.py`)."""
    return gluon.jit(inspect.unwrap(function))


@jit
def add(a, b):
    return a + b


@jit
def locate(tiles, index, t, band, base, TILES_G: gl.constexpr, BAND: gl.constexpr):
    """Where tile t of the compact list is. `band` and `base` (its first tile) only ever grow."""
    width = gl.minimum(gl.maximum(tiles - band * BAND, 0), BAND)
    total = gl.sum(width, 0) * TILES_G
    while (t >= base + total) & (total > 0):
        base += total
        band += 1
        width = gl.minimum(gl.maximum(tiles - band * BAND, 0), BAND)
        total = gl.sum(width, 0) * TILES_G
    ends = gl.associative_scan(width * TILES_G, 0, add)
    before = ends <= t - base
    group = gl.sum(before.to(gl.int32), 0)
    rest = t - base - gl.max(gl.where(before, ends, 0), 0)
    own = gl.max(gl.where(index == group, width, 1), 0)
    computing = gl.sum(gl.where(index == group, tiles, 0), 0)
    return band, base, total > 0, group, rest // own, band * BAND + rest % own, computing


@jit
def locate_dense(tiles_m, t, TILES_N: gl.constexpr, BAND: gl.constexpr):
    """Where tile t of the dense product is."""
    band = t // (BAND * TILES_N)
    rest = t - band * (BAND * TILES_N)
    own = gl.maximum(gl.minimum(tiles_m - band * BAND, BAND), 1)
    return t < tiles_m * TILES_N, rest // own, band * BAND + rest % own


@jit
def fetch(a_smem, b_smem, x_tile, w_tile, stage, live):
    """Start copying one step's operands; nothing, but still a group of copies, if not `live`."""
    every: gl.constexpr = x_tile.type.layout
    mask_a = gl.full(x_tile.shape, 1, gl.int1, every) & live
    mask_b = gl.full(w_tile.shape, 1, gl.int1, every) & live
    async_copy.async_copy_global_to_shared(a_smem.index(stage), x_tile, mask=mask_a)
    async_copy.async_copy_global_to_shared(b_smem.index(stage), w_tile, mask=mask_b)
    async_copy.commit_group()


@jit
def weight_rows(w, w_up, first_column, lane, N: gl.constexpr, K: gl.constexpr, GLU: gl.constexpr):
    """Pointers to the rows of the weight tile; for GLU gate 0, up 0, gate 1, up 1, ..."""
    if GLU:
        channel = gl.minimum(first_column + lane // 2, N - 1)
        return gl.where(lane % 2 == 0, w + channel * K, w_up + channel * K)
    else:
        return w + gl.minimum(first_column + lane, N - 1) * K


@jit
def advance(stage, STAGES: gl.constexpr):
    return gl.where(stage == STAGES - 1, 0, stage + 1)


@jit
def multiply(a_smem, b_smem, acc, stage, use_acc, AHEAD: gl.constexpr):
    """Wait for a step's operands and start its product; the product before it is done after."""
    async_copy.wait_group(AHEAD - 1)
    fence_async_shared()
    b = b_smem.index(stage).permute((1, 0))
    pending = warpgroup_mma(a_smem.index(stage), b, acc, use_acc=use_acc, is_async=True)
    return warpgroup_mma_wait(1, deps=(pending,))


@jit
def clear_rows(out, rows, row_ok, columns, column_ok, N: gl.constexpr, layout: gl.constexpr):
    """Zeros in the given rows and columns; `columns` are runs of 8 of which the first is given."""
    eight = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    column = columns[None, :, None] + eight
    at = rows.to(gl.int64)[:, None, None] * N + column
    zeros = gl.zeros([rows.shape[0], columns.shape[0], 8], out.dtype.element_ty, layout)
    gl.store(out + at, zeros, mask=(row_ok[:, None] & column_ok[None, :])[:, :, None])


@jit
def persistent_kernel(
    x,  # [M, K]
    w,  # [N, K]
    w_up,  # [N, K], read if GLU
    bias,  # [N], read if HAS_BIAS
    order,  # [GROUPS, M] int32, read if COMPACT
    count,  # [GROUPS] int32, read if COMPACT
    mask,  # [M, GROUPS] bool, read if not COMPACT
    M,
    out,  # [M, N]
    N: gl.constexpr,
    K: gl.constexpr,
    G: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUPS_POWER: gl.constexpr,  # GROUPS rounded up to a power of two
    GLU: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    COMPACT: gl.constexpr,
    ZERO_ROWS: gl.constexpr,  # BLOCK_M rows over the loop's steps, a power of two
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Compute this program's tiles of the list above, and its share of the zeros."""
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = 2 * BLOCK_N if GLU else BLOCK_N
    TILES_G: gl.constexpr = (G + BLOCK_N - 1) // BLOCK_N
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = K // BLOCK_K
    AHEAD: gl.constexpr = STAGES - 1
    RUNS: gl.constexpr = BLOCK_N // 8
    dtype: gl.constexpr = x.dtype.element_ty
    GROUP_LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    # 8 threads copy 128 bytes of a row; a thread stores 16 bytes, a warp one or more whole rows.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    STORE: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [max(32 // RUNS, 1), min(RUNS, 32), 1], [WARPS, 1, 1], [2, 1, 0]
    )
    CLEAR: gl.constexpr = gl.BlockedLayout(
        [1, 2], [1, 32], [min(ZERO_ROWS, WARPS), max(WARPS // ZERO_ROWS, 1)], [1, 0]
    )
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    A_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], dtype)
    B_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, BLOCK_K], dtype)
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], A_SHARED)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, BLOCK_K], B_SHARED)

    index = gl.arange(0, GROUPS_POWER, GROUP_LAYOUT)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    inputs = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))[None, :]
    a_lane = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))
    b_lane = gl.arange(0, COLUMNS, gl.SliceLayout(1, COPY))
    out_lane = gl.arange(0, BLOCK_M, gl.SliceLayout(1, gl.SliceLayout(2, STORE)))
    out_run = gl.arange(0, RUNS, gl.SliceLayout(0, gl.SliceLayout(2, STORE))) * 8
    eight = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STORE)))[None, None, :]
    clear_lane = gl.arange(0, ZERO_ROWS, gl.SliceLayout(1, CLEAR))
    clear_column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, CLEAR))

    t = gl.program_id(0)
    band = gl.to_tensor(0)
    base = gl.to_tensor(0)
    group = gl.to_tensor(0)
    computing = gl.to_tensor(0)
    if COMPACT:
        tiles = (gl.load(count + index, mask=index < GROUPS, other=0) + BLOCK_M - 1) // BLOCK_M
        band, base, live, group, part, tile_m, computing = locate(
            tiles, index, t, band, base, TILES_G, BAND
        )
        slots = tile_m * BLOCK_M + a_lane
        rows = gl.load(order + group * M + slots, mask=(slots < M) & live, other=0)
    else:
        live, part, tile_m = locate_dense(tiles_m, t, TILES_N, BAND)
        rows = gl.minimum(tile_m * BLOCK_M + a_lane, M - 1)
    x_tile = x + (rows[:, None] * K + inputs)
    w_tile = weight_rows(w, w_up, group * G + part * BLOCK_N, b_lane, N, K, GLU)[:, None] + inputs
    for ahead in gl.static_range(AHEAD):
        fetch(a_smem, b_smem, x_tile, w_tile, ahead, live)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    stage = gl.to_tensor(0)  # to be multiplied next
    free = gl.to_tensor(AHEAD)  # to be filled next

    while live:
        t += PROGRAMS
        next_group = group
        next_computing = computing
        if COMPACT:
            band, base, next_live, next_group, next_part, next_tile_m, next_computing = locate(
                tiles, index, t, band, base, TILES_G, BAND
            )
            slots = next_tile_m * BLOCK_M + a_lane
            rows = gl.load(order + next_group * M + slots, mask=(slots < M) & next_live, other=0)
            active = gl.load(count + group)
            end_column = gl.minimum(group * G + G, N)
        else:
            next_live, next_part, next_tile_m = locate_dense(tiles_m, t, TILES_N, BAND)
            rows = gl.minimum(next_tile_m * BLOCK_M + a_lane, M - 1)
            end_column = N
        group_order = order + group * M
        first_column = group * G + part * BLOCK_N
        # Rows to clear in the loop, from the group's tile `computing + tile_m`.
        share = computing * 4 >= tiles_m
        clear_slots = (computing + tile_m) * BLOCK_M + clear_lane
        clear_limit = gl.where(share, M, 0)
        clear_ok = (first_column + clear_column < end_column)[None, :]
        clear_at = out + (first_column + clear_column)[None, :]
        if COMPACT and not GLU:
            cleared = gl.load(group_order + clear_slots, mask=clear_slots < clear_limit, other=0)

        acc = gl.zeros([BLOCK_M, COLUMNS], gl.float32, PRODUCT)
        for step in range(STEPS - AHEAD):
            acc = multiply(a_smem, b_smem, acc, stage, step > 0, AHEAD)
            fetch(a_smem, b_smem, x_tile, w_tile, free, True)
            x_tile += BLOCK_K
            w_tile += BLOCK_K
            stage = advance(stage, STAGES)
            free = advance(free, STAGES)
            if COMPACT and not GLU:
                gl.store(
                    clear_at + cleared.to(gl.int64)[:, None] * N,
                    gl.zeros([ZERO_ROWS, BLOCK_N], dtype, CLEAR),
                    mask=(clear_slots < clear_limit)[:, None] & clear_ok,
                )
                clear_slots += ZERO_ROWS
                cleared = gl.load(
                    group_order + clear_slots, mask=clear_slots < clear_limit, other=0
                )
        next_column = next_group * G + next_part * BLOCK_N
        x_tile = x + (rows[:, None] * K + inputs)
        w_tile = weight_rows(w, w_up, next_column, b_lane, N, K, GLU)[:, None] + inputs
        out_slots = tile_m * BLOCK_M + out_lane
        out_rows = out_slots
        if COMPACT:
            out_rows = gl.load(group_order + out_slots, mask=out_slots < M, other=0)
        for _ahead in gl.static_range(AHEAD):
            acc = multiply(a_smem, b_smem, acc, stage, True, AHEAD)
            fetch(a_smem, b_smem, x_tile, w_tile, free, next_live)
            x_tile += BLOCK_K
            w_tile += BLOCK_K
            stage = advance(stage, STAGES)
            free = advance(free, STAGES)
            if COMPACT and not GLU:
                gl.store(
                    clear_at + cleared.to(gl.int64)[:, None] * N,
                    gl.zeros([ZERO_ROWS, BLOCK_N], dtype, CLEAR),
                    mask=(clear_slots < clear_limit)[:, None] & clear_ok,
                )
                clear_slots += ZERO_ROWS
                cleared = gl.load(
                    group_order + clear_slots, mask=clear_slots < clear_limit, other=0
                )
        acc = warpgroup_mma_wait(0, deps=(acc,))

        if GLU:
            gate, up = gl.split(gl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
            result = gate / (1.0 + gl.exp(-gate)) * up
        else:
            result = acc
            if HAS_BIAS:
                channel = first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PRODUCT))
                added = gl.load(bias + channel, mask=channel < end_column, other=0.0)
                result += added.to(gl.float32)[None, :]
        y = gl.convert_layout(gl.reshape(result.to(dtype), [BLOCK_M, RUNS, 8]), STORE)
        columns = first_column + out_run
        column_ok = columns < end_column
        if COMPACT:
            on = (out_slots < active)[:, None]
        else:
            on_at = mask + out_rows.to(gl.int64)[:, None] * GROUPS + (columns // G)[None, :]
            within = (out_slots < M)[:, None] & column_ok[None, :]
            on = gl.load(on_at, mask=within, other=0).to(gl.int32) != 0
        y = gl.where(on[:, :, None], y, gl.zeros([BLOCK_M, RUNS, 8], dtype, STORE))
        gl.store(
            out + (out_rows.to(gl.int64)[:, None, None] * N + (columns[None, :, None] + eight)),
            y,
            mask=((out_slots < M)[:, None] & column_ok[None, :])[:, :, None],
        )
        if COMPACT:
            clear_tile = tile_m + (computing if GLU else 2 * computing)
            while share & (clear_tile < tiles_m):
                slots_z = clear_tile * BLOCK_M + out_lane
                rows_z = gl.load(group_order + slots_z, mask=slots_z < M, other=0)
                clear_rows(out, rows_z, slots_z < M, columns, column_ok, N, STORE)
                clear_tile += computing
        live = next_live
        group = next_group
        part = next_part
        tile_m = next_tile_m
        computing = next_computing
    async_copy.wait_group(0)

    if COMPACT:
        few = (tiles * 4 < tiles_m) & (index < GROUPS)
        if gl.sum(few.to(gl.int32), 0) > 0:
            for unit in range(gl.program_id(0), GROUPS * TILES_G * tiles_m, PROGRAMS):
                tile_n = unit // tiles_m
                clear_tile = unit % tiles_m
                group = tile_n // TILES_G
                computing = (gl.load(count + group) + BLOCK_M - 1) // BLOCK_M
                if (computing * 4 < tiles_m) & (clear_tile >= computing):
                    slots_z = clear_tile * BLOCK_M + out_lane
                    rows_z = gl.load(order + group * M + slots_z, mask=slots_z < M, other=0)
                    columns = group * G + (tile_n % TILES_G) * BLOCK_N + out_run
                    column_ok = columns < gl.minimum(group * G + G, N)
                    clear_rows(out, rows_z, slots_z < M, columns, column_ok, N, STORE)
