"""Queries into compact order and results back, in Triton: what TMA cannot do on Hopper.

    program id -> (block of BLOCK slots, row, group), groups fastest; then every head of the group
    slot i of (group, row) = the row's i-th active token:  order[group, before + i]

`gather_kernel` turns the queries on the way where they are not rotated yet. `scatter_kernel` also
writes the zeros: slots past the active ones are the row's skipped tokens.
"""

import triton.language as tl

from pallas_kernels._common.jit import jit
from pallas_kernels.rope_cache.triton import rotated


@jit
def gather_kernel(
    q,  # [B, T, HQ, D]
    cos,  # [B T, D / 2] float32, read if ROTATED
    sin,  # [B T, D / 2] float32, read if ROTATED
    norm,  # [D], read if HAS_NORM
    order,  # [GROUPS, B T] int32
    before,  # [GROUPS, B] int32
    count,  # [GROUPS, B] int32
    low,  # [B T] int32
    high,  # [B T] int32
    T,
    rows,  # B
    padded,  # slots of a row, a multiple of 2 BLOCK
    out,  # [HQ, B, padded, D]
    low_out,  # [GROUPS, B, padded] int32
    high_out,  # [GROUPS, B, padded] int32
    bounds,  # [GROUPS, B, padded / BLOCK, 4] int32
    HQ: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,  # slots of a block of keys
    ROTATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
):
    """Copy a block of queries and their ranges; work out which blocks of keys they need."""
    PER_GROUP: tl.constexpr = HQ // GROUPS
    pid = tl.program_id(0)
    group = pid % GROUPS
    row = (pid // GROUPS) % rows
    block = pid // (GROUPS * rows)
    active = tl.load(count + group * rows + row)
    if block // 2 * 2 * BLOCK < active:  # a tile is two blocks: its second one may be empty
        slots = block * BLOCK + tl.arange(0, BLOCK)
        lanes = tl.minimum(slots, active - 1)  # repeats of the last token stand for the missing
        group_order = order + group.to(tl.int64) * (rows * T)
        token = tl.load(group_order + tl.load(before + group * rows + row) + lanes)
        lowest = tl.load(low + token)
        highest = tl.load(high + token)
        place = (group * rows + row).to(tl.int64) * padded + slots
        tl.store(low_out + place, lowest)
        tl.store(high_out + place, highest)
        end = (tl.max(highest, axis=0) + KEYS) // KEYS
        begin = tl.minimum(tl.min(lowest, axis=0) // KEYS, end)
        from_all = tl.max(tl.where(highest >= 0, lowest, 0), axis=0)
        full_begin = tl.maximum((from_all + KEYS - 1) // KEYS, begin)
        full_begin = tl.minimum(full_begin, end)
        full_end = tl.maximum((tl.min(highest, axis=0) + 1) // KEYS, full_begin)
        four = bounds + ((group * rows + row).to(tl.int64) * (padded // BLOCK) + block) * 4
        tl.store(four, begin)
        tl.store(four + 1, full_begin)
        tl.store(four + 2, full_end)
        tl.store(four + 3, end)
        if ROTATED:
            columns = tl.arange(0, BLOCK_D // 2)
            held = (slots >= 0)[:, None] & (columns < D // 2)[None, :]
            angle = token.to(tl.int64)[:, None] * (D // 2) + columns[None, :]
            c = tl.load(cos + angle, mask=held, other=0.0)
            s = tl.load(sin + angle, mask=held, other=0.0)
            for i in range(PER_GROUP):
                head = group * PER_GROUP + i
                source = (token.to(tl.int64) * HQ + head)[:, None] * D + columns[None, :]
                target = ((head * rows + row).to(tl.int64) * padded + slots)[:, None] * D + columns
                first, second = rotated(
                    q + source, norm, c, s, columns, held, D, HAS_NORM, EPS, q.dtype.element_ty
                )
                tl.store(out + target, first, mask=held)
                tl.store(out + target + D // 2, second, mask=held)
        else:
            columns = tl.arange(0, BLOCK_D)
            held = (slots >= 0)[:, None] & (columns < D)[None, :]
            for i in range(PER_GROUP):
                head = group * PER_GROUP + i
                source = (token.to(tl.int64) * HQ + head)[:, None] * D + columns[None, :]
                target = ((head * rows + row).to(tl.int64) * padded + slots)[:, None] * D + columns
                tl.store(out + target, tl.load(q + source, mask=held, other=0.0), mask=held)


@jit
def scatter_kernel(
    compact,  # [HQ, B, padded, D]
    order,  # [GROUPS, B T] int32
    before,  # [GROUPS, B] int32
    count,  # [GROUPS, B] int32
    total,  # [GROUPS] int32: active tokens of all rows
    T,
    rows,  # B
    padded,
    out,  # [B, T, HQ, D]
    HQ: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write a block of the row's tokens: results where active, zeros where skipped."""
    PER_GROUP: tl.constexpr = HQ // GROUPS
    pid = tl.program_id(0)
    group = pid % GROUPS
    row = (pid // GROUPS) % rows
    block = pid // (GROUPS * rows)
    active = tl.load(count + group * rows + row)
    earlier = tl.load(before + group * rows + row)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    inside = slots < T
    on = slots < active
    skipped = tl.load(total + group) + row * T - earlier + slots - active
    group_order = order + group.to(tl.int64) * (rows * T)
    token = tl.load(group_order + tl.where(on, earlier + slots, skipped), mask=inside, other=0)
    columns = tl.arange(0, BLOCK_D)
    column_ok = (columns < D)[None, :]
    for i in range(PER_GROUP):
        head = group * PER_GROUP + i
        source = ((head * rows + row).to(tl.int64) * padded + slots)[:, None] * D + columns
        value = tl.load(compact + source, mask=on[:, None] & column_ok, other=0.0)
        target = (token.to(tl.int64) * HQ + head)[:, None] * D + columns[None, :]
        tl.store(out + target, value, mask=inside[:, None] & column_ok)
