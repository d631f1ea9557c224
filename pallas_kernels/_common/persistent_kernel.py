"""The persistent form of the output-pruned GEMMs on Hopper: one Gluon body for both ops.

`PROGRAMS` programs (one a multiprocessor) each compute tiles `t = pid, pid + PROGRAMS, ...` of
`BLOCK_M` tokens x `BLOCK_N` channels, in warps that do one thing each:

    load     2 warps  waits until a stage is empty, fills it: weights by the copy engine (TMA),
                      gathered tokens by cp.async, tokens in their own order by TMA
    compute  8 warps  waits until a stage is full, wgmma, says that the stage before is empty;
                      at a tile's end stores it, while `load` is already filling for the next tile
    clear    2 warps  writes the zeros of skipped tiles beside that (compact form only)

Compact form: tile t is the t-th *computing* tile of this list, so that every program has the same
work whatever the mask. A group with c active tokens has ceil(c / BLOCK_M) of them, T channel tiles
each; the last of them writes zeros past the active tokens, `clear` the tiles after it.

    bands of BAND token tiles: band 0: group 0 (its T x tiles of the band), group 1, ...; band 1 ...
                               inside a group: token tiles fastest, as in `tile_kernel`

Masked form: all tiles of the dense product, tokens in their own order, and the mask applied on the
way out. For groups too small to compact, and where little is skipped: the dense product, with its
zeros for nothing.

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
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HELPERS = 2  # warps of `load`, and of `clear`


def jit(function):
    """`gluon.jit` of the function itself (see `_common/jit.py`)."""
    return gluon.jit(inspect.unwrap(function))


@jit
def add(a, b):
    return a + b


@jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage, and the phase of its barriers: it changes from round to round."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, 1 - phase, phase)


@jit
def locate(
    count,
    M,
    t,
    band,
    base,
    N: gl.constexpr,
    G: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BAND: gl.constexpr,
    COMPACT: gl.constexpr,
    POWER: gl.constexpr,  # GROUPS rounded up to a power of two
    WARPS: gl.constexpr,
):
    """Tile t: whether there is one, its group, first column and token tile.

    `band` and `base` (the first tile of the band) only ever grow: pass them on from call to call.
    """
    if COMPACT:
        TILES_G: gl.constexpr = (G + BLOCK_N - 1) // BLOCK_N
        index = gl.arange(0, POWER, gl.BlockedLayout([1], [32], [WARPS], [0]))
        tiles = (gl.load(count + index, mask=index < GROUPS, other=0) + BLOCK_M - 1) // BLOCK_M
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
        column = group * G + rest // own * BLOCK_N
        return band, base, total > 0, group, column, band * BAND + rest % own
    else:
        TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
        tiles_m = (M + BLOCK_M - 1) // BLOCK_M
        band = t // (BAND * TILES_N)
        rest = t - band * (BAND * TILES_N)
        own = gl.maximum(gl.minimum(tiles_m - band * BAND, BAND), 1)
        live = t < tiles_m * TILES_N
        return band, base, live, 0 * band, rest // own * BLOCK_N, band * BAND + rest % own


@jit
def load(
    x,
    x_desc,
    w_desc,
    w_up_desc,
    order,
    count,
    M,
    a_smem,
    b_smem,
    full,
    empty,
    N: gl.constexpr,
    K: gl.constexpr,
    G: gl.constexpr,
    GROUPS: gl.constexpr,
    GLU: gl.constexpr,
    COMPACT: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
    POWER: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Fill stage after stage with the operands of this program's tiles."""
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_shape[1]
    WEIGHTS: gl.constexpr = w_desc.nbytes_per_cta * (2 if GLU else 1)
    BYTES: gl.constexpr = WEIGHTS if COMPACT else WEIGHTS + x_desc.nbytes_per_cta
    # 8 threads copy 128 bytes of a row.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    lane = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))
    inputs = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))[None, :]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    t = gl.program_id(0)
    band, base, live, group, column, tile_m = locate(
        count,
        M,
        t,
        gl.to_tensor(0),
        gl.to_tensor(0),
        N,
        G,
        GROUPS,
        BLOCK_M,
        BLOCK_N,
        BAND,
        COMPACT,
        POWER,
        WARPS,
    )
    while live:
        row = tile_m * BLOCK_M
        if COMPACT:
            rows = gl.load(order + group * M + row + lane, mask=row + lane < M, other=0)
            x_tile = x + (rows[:, None] * K + inputs)
        for start in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), 1 - phase)
            arrived = full.index(stage)
            b_stage = b_smem.index(stage)
            mbarrier.expect(arrived, BYTES)
            if GLU:
                gate = b_stage.slice(0, BLOCK_N)
                up = b_stage.slice(BLOCK_N, BLOCK_N)
                tma.async_copy_global_to_shared(w_desc, [column, start], arrived, gate)
                tma.async_copy_global_to_shared(w_up_desc, [column, start], arrived, up)
            else:
                tma.async_copy_global_to_shared(w_desc, [column, start], arrived, b_stage)
            a_stage = a_smem.index(stage)
            if COMPACT:
                async_copy.async_copy_global_to_shared(a_stage, x_tile)
                async_copy.mbarrier_arrive(arrived, increment_count=False)  # when they are done
                x_tile += BLOCK_K
            else:
                tma.async_copy_global_to_shared(x_desc, [row, start], arrived, a_stage)
            stage, phase = advance(stage, phase, STAGES)
        t += PROGRAMS
        band, base, live, group, column, tile_m = locate(
            count,
            M,
            t,
            band,
            base,
            N,
            G,
            GROUPS,
            BLOCK_M,
            BLOCK_N,
            BAND,
            COMPACT,
            POWER,
            WARPS,
        )
    if COMPACT:
        async_copy.wait_group(0)


@jit
def compute(
    bias,
    order,
    count,
    mask,
    M,
    out,
    a_smem,
    b_smem,
    full,
    empty,
    N: gl.constexpr,
    K: gl.constexpr,
    G: gl.constexpr,
    GROUPS: gl.constexpr,
    GLU: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    COMPACT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
    POWER: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Multiply stage after stage, and store this program's tiles."""
    COLUMNS: gl.constexpr = 2 * BLOCK_N if GLU else BLOCK_N
    RUNS: gl.constexpr = BLOCK_N // 8
    dtype: gl.constexpr = a_smem.dtype
    # A thread stores 16 bytes, a warp one or more whole rows of the tile.
    STORE: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [max(32 // RUNS, 1), min(RUNS, 32), 1], [WARPS, 1, 1], [2, 1, 0]
    )
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    lane = gl.arange(0, BLOCK_M, gl.SliceLayout(1, gl.SliceLayout(2, STORE)))
    run = gl.arange(0, RUNS, gl.SliceLayout(0, gl.SliceLayout(2, STORE))) * 8
    eight = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STORE)))[None, None, :]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    t = gl.program_id(0)
    band, base, live, group, column, tile_m = locate(
        count,
        M,
        t,
        gl.to_tensor(0),
        gl.to_tensor(0),
        N,
        G,
        GROUPS,
        BLOCK_M,
        BLOCK_N,
        BAND,
        COMPACT,
        POWER,
        WARPS,
    )
    while live:
        acc = gl.zeros([BLOCK_M, COLUMNS], gl.float32, PRODUCT)
        done = stage
        for start in range(0, K, BLOCK_K):
            mbarrier.wait(full.index(stage), phase)
            if COMPACT:
                fence_async_shared()  # wgmma reads what cp.async wrote
            b = b_smem.index(stage).permute((1, 0))
            pending = warpgroup_mma(a_smem.index(stage), b, acc, use_acc=start > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(pending,))
            mbarrier.arrive(empty.index(done), pred=start > 0)
            done = stage
            stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(done))

        slots = tile_m * BLOCK_M + lane
        rows = slots
        if COMPACT:
            rows = gl.load(order + group * M + slots, mask=slots < M, other=0)
            active = gl.load(count + group)
        end_column = gl.minimum(group * G + G, N) if COMPACT else N
        if GLU:
            halves = gl.permute(gl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1))
            gate, up = gl.split(halves)
            result = gate * up / (1.0 + gl.exp(-gate))
        else:
            result = acc
            if HAS_BIAS:
                channel = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PRODUCT))
                added = gl.load(bias + channel, mask=channel < end_column, other=0.0)
                result += added.to(gl.float32)[None, :]
        y = gl.convert_layout(gl.reshape(result.to(dtype), [BLOCK_M, RUNS, 8]), STORE)
        columns = column + run
        within = (slots < M)[:, None] & (columns < end_column)[None, :]
        if COMPACT:
            on = (slots < active)[:, None]
        else:
            on_at = mask + rows.to(gl.int64)[:, None] * GROUPS + (columns // G)[None, :]
            on = gl.load(on_at, mask=within, other=0).to(gl.int32) != 0
        y = gl.where(on[:, :, None], y, gl.zeros([BLOCK_M, RUNS, 8], dtype, STORE))
        at = rows.to(gl.int64)[:, None, None] * N + (columns[None, :, None] + eight)
        gl.store(out + at, y, mask=within[:, :, None])
        t += PROGRAMS
        band, base, live, group, column, tile_m = locate(
            count,
            M,
            t,
            band,
            base,
            N,
            G,
            GROUPS,
            BLOCK_M,
            BLOCK_N,
            BAND,
            COMPACT,
            POWER,
            WARPS,
        )


@jit
def clear(
    order,
    count,
    M,
    out,
    N: gl.constexpr,
    G: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PROGRAMS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Zeros past every group's last computing tile: strips of 16 tokens, dealt to the programs."""
    STRIP: gl.constexpr = 16
    TILES_G: gl.constexpr = (G + BLOCK_N - 1) // BLOCK_N
    RUNS: gl.constexpr = BLOCK_N // 8
    STORE: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [max(32 // RUNS, 1), min(RUNS, 32), 1], [WARPS, 1, 1], [2, 1, 0]
    )
    lane = gl.arange(0, STRIP, gl.SliceLayout(1, gl.SliceLayout(2, STORE)))
    run = gl.arange(0, RUNS, gl.SliceLayout(0, gl.SliceLayout(2, STORE))) * 8
    eight = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STORE)))[None, None, :]
    zeros = gl.zeros([STRIP, RUNS, 8], out.dtype.element_ty, STORE)
    strips = (M + STRIP - 1) // STRIP
    dealt = gl.program_id(0)  # this program's first strip of the group
    for group in range(0, GROUPS):
        first = (gl.load(count + group) + BLOCK_M - 1) // BLOCK_M * (BLOCK_M // STRIP)
        units = gl.maximum(strips - first, 0) * TILES_G
        for unit in range(dealt, units, PROGRAMS):
            slots = (first + unit // TILES_G) * STRIP + lane
            rows = gl.load(order + group * M + slots, mask=slots < M, other=0)
            columns = group * G + unit % TILES_G * BLOCK_N + run
            within = (slots < M)[:, None] & (columns < gl.minimum(group * G + G, N))[None, :]
            at = rows.to(gl.int64)[:, None, None] * N + (columns[None, :, None] + eight)
            gl.store(out + at, zeros, mask=within[:, :, None])
        dealt = (dealt + PROGRAMS - units % PROGRAMS) % PROGRAMS


@jit
def persistent_kernel(
    x,  # [M, K], read if COMPACT
    x_desc,  # of x in blocks [BLOCK_M, BLOCK_K], read if not COMPACT
    w_desc,  # of w[N, K] in blocks [BLOCK_N, BLOCK_K]
    w_up_desc,  # the same of w_up, read if GLU
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
    POWER: gl.constexpr,  # GROUPS rounded up to a power of two
    GLU: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    COMPACT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
    HELPERS: gl.constexpr,
):
    """Deal this program's work to its warps, as said above."""
    COLUMNS: gl.constexpr = 2 * BLOCK_N if GLU else BLOCK_N
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = x.dtype.element_ty
    A_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], dtype)
    B_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, BLOCK_K], dtype)
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], A_SHARED)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, BLOCK_K], B_SHARED)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        # Filled when the copy engine's bytes are there, and every loading thread's own copies.
        mbarrier.init(full.index(i), count=1 + 32 * HELPERS if COMPACT else 1)
        mbarrier.init(empty.index(i), count=1)
    if COMPACT:
        gl.warp_specialize(
            [
                (
                    compute,
                    (
                        bias,
                        order,
                        count,
                        mask,
                        M,
                        out,
                        a_smem,
                        b_smem,
                        full,
                        empty,
                        N,
                        K,
                        G,
                        GROUPS,
                        GLU,
                        HAS_BIAS,
                        COMPACT,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        BAND,
                        STAGES,
                        PROGRAMS,
                        POWER,
                        WARPS,
                    ),
                ),
                (
                    load,
                    (
                        x,
                        x_desc,
                        w_desc,
                        w_up_desc,
                        order,
                        count,
                        M,
                        a_smem,
                        b_smem,
                        full,
                        empty,
                        N,
                        K,
                        G,
                        GROUPS,
                        GLU,
                        COMPACT,
                        BAND,
                        STAGES,
                        PROGRAMS,
                        POWER,
                        HELPERS,
                    ),
                ),
                (clear, (order, count, M, out, N, G, GROUPS, BLOCK_M, BLOCK_N, PROGRAMS, HELPERS)),
            ],
            [2, 2],
            [80, 80],
        )
    else:
        gl.warp_specialize(
            [
                (
                    compute,
                    (
                        bias,
                        order,
                        count,
                        mask,
                        M,
                        out,
                        a_smem,
                        b_smem,
                        full,
                        empty,
                        N,
                        K,
                        G,
                        GROUPS,
                        GLU,
                        HAS_BIAS,
                        COMPACT,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        BAND,
                        STAGES,
                        PROGRAMS,
                        POWER,
                        WARPS,
                    ),
                ),
                (
                    load,
                    (
                        x,
                        x_desc,
                        w_desc,
                        w_up_desc,
                        order,
                        count,
                        M,
                        a_smem,
                        b_smem,
                        full,
                        empty,
                        N,
                        K,
                        G,
                        GROUPS,
                        GLU,
                        COMPACT,
                        BAND,
                        STAGES,
                        PROGRAMS,
                        POWER,
                        HELPERS,
                    ),
                ),
            ],
            [2],
            [40],
        )
