"""Flash attention over gathered queries, in Triton.

One program computes one tile: `BLOCK_M` active tokens of one row (sequence) for one head.

    program id -> (turn, row, head), heads fastest: heads of one kv head find its k and v in L2
    turn 0 is the row's last tile, which sees the most keys: long tiles start first
    tokens:  order[group, before[group, row] + tile * BLOCK_M + 0 .. BLOCK_M - 1]

Compaction is stable, so a tile's tokens are in order and every one sees slots low .. high of its
own. The loop over keys has three parts; only the outer two compare slots:

    keys      min low        max low               min high       max high
               |--- masked ---|------ unmasked ------|--- masked ---|

Turns past the row's last tile return at once. Skipped pairs are written by `zero_kernel`.
"""

import triton.language as tl

from pallas_kernels._common.jit import jit


@jit
def flash_step(
    q,
    acc,
    peak,
    total,
    k,
    v,
    start,
    low,
    high,
    first,
    end,
    SCALE: tl.constexpr,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One block of keys: online softmax in powers of two. `k`, `v` point at slot 0 of the head."""
    offset = start * tl.full((), STRIDE, tl.int64)
    keys = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    slots = start + keys
    k_tile = (k + offset) + (keys[None, :] * STRIDE + columns[:, None])
    v_tile = (v + offset) + (keys[:, None] * STRIDE + columns[None, :])
    if MASKED:
        held = (slots >= first) & (slots < end)
        k_block = tl.load(k_tile, mask=held[None, :] & (columns < D)[:, None], other=0.0)
        v_block = tl.load(v_tile, mask=held[:, None] & (columns < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        k_block = tl.load(k_tile)
        v_block = tl.load(v_tile)
    else:
        k_block = tl.load(k_tile, mask=(columns < D)[:, None], other=0.0)
        v_block = tl.load(v_tile, mask=(columns < D)[None, :], other=0.0)
    logits = tl.dot(q, k_block, input_precision=PRECISION)
    if MASKED:
        visible = (slots[None, :] >= low[:, None]) & (slots[None, :] <= high[:, None])
        logits = tl.where(visible, logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, axis=1) * SCALE)
    weights = tl.exp2(logits * SCALE - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v_block.dtype), v_block, acc, input_precision=PRECISION)
    return acc, new_peak, total


@jit
def flash_kernel(
    q,  # [B, T, HQ, D]
    k,  # [B, S, HK, D]
    v,  # [B, S, HK, D]
    order,  # [GROUPS, B T] int32
    before,  # [GROUPS, B] int32: active tokens of earlier rows
    count,  # [GROUPS, B] int32: active tokens of the row
    low,  # [B T] int32
    high,  # [B T] int32
    T,
    S,
    rows,  # B
    out,  # [B, T, HQ, D]
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE: tl.constexpr,  # of the logits, times log2(e)
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute one tile of the drawing above."""
    pid = tl.program_id(0)
    head = pid % HQ
    row = (pid // HQ) % rows
    turn = pid // (HQ * rows)
    group = head // (HQ // GROUPS)
    active = tl.load(count + group * rows + row)
    tile = (active + BLOCK_M - 1) // BLOCK_M - 1 - turn
    if tile >= 0:
        lanes = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        is_active = lanes < active
        slot = tl.load(before + group * rows + row) + lanes
        group_order = order + group.to(tl.int64) * (rows * T)
        token = tl.load(group_order + slot, mask=is_active, other=0)
        first_visible = tl.load(low + token, mask=is_active, other=0)
        last_visible = tl.load(high + token, mask=is_active, other=-1)
        begin = tl.min(tl.where(is_active, first_visible, S), axis=0)
        end = tl.max(last_visible, axis=0) + 1
        from_all = tl.max(first_visible, axis=0)
        to_all = tl.min(tl.where(is_active, last_visible, S), axis=0) + 1

        columns = tl.arange(0, BLOCK_D)
        place = (token.to(tl.int64) * (HQ * D) + head * D)[:, None] + columns[None, :]
        held = is_active[:, None] & (columns < D)[None, :]
        queries = tl.load(q + place, mask=held, other=0.0)
        STRIDE: tl.constexpr = HK * D
        first_key = row.to(tl.int64) * S * STRIDE + head // (HQ // HK) * D
        keys = k + first_key
        values = v + first_key

        peak = tl.full((BLOCK_M,), -1e30, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        aligned = begin // BLOCK_N * BLOCK_N
        full_begin = tl.minimum((from_all + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
        full_begin = tl.maximum(full_begin, aligned)
        full_end = tl.maximum(to_all // BLOCK_N * BLOCK_N, full_begin)
        for start in range(aligned, full_begin, BLOCK_N):
            acc, peak, total = flash_step(
                queries, acc, peak, total, keys, values, start,
                first_visible, last_visible, begin, end,
                SCALE, STRIDE, D, BLOCK_N, BLOCK_D, PRECISION, True,
            )  # fmt: skip
        for start in range(full_begin, full_end, BLOCK_N):
            acc, peak, total = flash_step(
                queries, acc, peak, total, keys, values, start,
                first_visible, last_visible, begin, end,
                SCALE, STRIDE, D, BLOCK_N, BLOCK_D, PRECISION, False,
            )  # fmt: skip
        for start in range(full_end, end, BLOCK_N):
            acc, peak, total = flash_step(
                queries, acc, peak, total, keys, values, start,
                first_visible, last_visible, begin, end,
                SCALE, STRIDE, D, BLOCK_N, BLOCK_D, PRECISION, True,
            )  # fmt: skip
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=held)
