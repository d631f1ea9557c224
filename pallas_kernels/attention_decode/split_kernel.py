"""Decode attention in two Triton kernels: every split of the slots by itself, then a merge.

    split_kernel   program id -> (split, row, kv head), kv heads fastest
                   all query heads of the kv head are rows of one tile: k and v are read once
                   writes peak, total and the unnormalised sum of its slots, float32
    merge_kernel   program id -> (row, query head, BLOCK_C of the head's columns)
                   reads the splits that hold visible slots, no others, BLOCK_S at a time

Both are short: what they wait for, one read after another, is much of their time. So the queries
are under way with the mask and the ranges, and all that the merge needs of a split with its peak.

A step (STEP: `attention_step`) begins before the rotation: `step.py`.

A split without visible slots, and a kv head that no active group reads, return before they read
keys or values; the merge knows the same ranges and masks and does not look at them either. The
merge adds splits in order: reruns are bit-identical.
"""

# pyrefly: ignore-errors
# (What only a step defines only a step uses: STEP is known when the kernel is compiled.)
import triton.language as tl

from pallas_kernels._common.jit import jit
from pallas_kernels.attention_decode.step import (
    ask_entry,
    ask_queries,
    turned_queries,
    write_entry,
)


@jit
def split_kernel(
    k,  # [B, S, HK, D], updated in place if STEP
    v,  # [B, S, HK, D], updated in place if STEP
    q,  # [B, HQ, D]
    mask,  # [B, GROUPS] bool
    low,  # [B] int32
    high,  # [B] int32, the new token's slot; -1: there is none
    new_k,  # [B, HK, D], read if STEP, as is all down to k_norm
    new_v,  # [B, HK, D]
    cos,  # [B, D / 2] float32
    sin,  # [B, D / 2] float32
    q_norm,  # [D], read if HAS_NORM
    k_norm,  # [D], read if HAS_NORM
    S,
    rows,  # B
    splits,
    peaks,  # [B, HQ, splits] float32
    totals,  # [B, HQ, splits] float32
    sums,  # [B, HQ, splits, D] float32
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE: tl.constexpr,  # of the logits, times log2(e)
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,  # HQ / HK rounded up to a tile of the tensor cores
    ROWS: tl.constexpr,  # HQ / HK rounded up to a power of two
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
):
    """One split of one kv head, for all query heads that read it."""
    PER_KV: tl.constexpr = HQ // HK
    PER_GROUP: tl.constexpr = HQ // GROUPS
    pid = tl.program_id(0)
    kv_head = pid % HK
    row = (pid // HK) % rows
    split = pid // (HK * rows)
    lanes = tl.arange(0, HEADS)
    head = kv_head * PER_KV + tl.minimum(lanes, PER_KV - 1)
    on = tl.load(mask + row * GROUPS + head // PER_GROUP).to(tl.int32)
    newest = tl.load(high + row)
    first = tl.maximum(tl.load(low + row), split * SPLIT)
    end = tl.minimum(newest + 1, split * SPLIT + SPLIT)
    columns = tl.arange(0, BLOCK_D)
    column_ok = columns < D
    query_row = row.to(tl.int64) * HQ + head
    STRIDE: tl.constexpr = HK * D
    base = row.to(tl.int64) * S * STRIDE + kv_head * D
    if STEP:
        HALF: tl.constexpr = BLOCK_D // 2
        if BLOCK_D > D:  # a head's halves lie apart in a tile of turned queries, each padded
            column_ok = columns % HALF < D // 2
            columns = columns // HALF * (D // 2) + columns % HALF
        entry = row.to(tl.int64) * HK + kv_head
        asked = ask_queries(
            q + entry * (PER_KV * D), cos + row * (D // 2), sin + row * (D // 2), q_norm, D, PER_KV,
            ROWS, HALF, HAS_NORM,
        )  # fmt: skip
        asked_entry = ask_entry(
            new_k + entry * D, new_v + entry * D, cos + row * (D // 2), sin + row * (D // 2),
            k_norm, D, BLOCK_D, HAS_NORM,
        )  # fmt: skip
        tl.debug_barrier()  # the compiler moves no load across: none is to wait for a decision
        if (newest >= split * SPLIT) & (newest < split * SPLIT + SPLIT):
            place = base + newest.to(tl.int64) * STRIDE
            write_entry(k + place, v + place, asked_entry, D, BLOCK_D, HAS_NORM, EPS)
    else:
        queries = tl.load(
            q + (query_row * D)[:, None] + columns[None, :], mask=column_ok[None, :], other=0.0
        )
    if (tl.max(on, axis=0) != 0) & (first < end):
        if STEP:
            queries = turned_queries(asked, D, HEADS, ROWS, HALF, HAS_NORM, EPS)
        keys = tl.arange(0, BLOCK_N)
        peak = tl.full((HEADS,), -1e30, tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        acc = tl.zeros((HEADS, BLOCK_D), tl.float32)
        for start in range(first // BLOCK_N * BLOCK_N, end, BLOCK_N):
            slots = start + keys
            held = (slots >= first) & (slots < end)
            offset = base + start * tl.full((), STRIDE, tl.int64)
            tile = keys[:, None] * STRIDE + columns[None, :]
            tile_ok = held[:, None] & column_ok[None, :]
            k_block = tl.load((k + offset) + tile, mask=tile_ok, other=0.0)
            v_block = tl.load((v + offset) + tile, mask=tile_ok, other=0.0)
            logits = tl.dot(queries, tl.trans(k_block), input_precision=PRECISION)
            logits = tl.where(held[None, :], logits, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logits, axis=1) * SCALE)
            weights = tl.exp2(logits * SCALE - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v_block.dtype), v_block, acc, input_precision=PRECISION)
            peak = new_peak
        place = query_row * splits + split
        mine = lanes < PER_KV
        tl.store(peaks + place, peak, mask=mine)
        tl.store(totals + place, total, mask=mine)
        tl.store(
            sums + (place * D)[:, None] + columns[None, :],
            acc,
            mask=mine[:, None] & column_ok[None, :],
        )


@jit
def merge_kernel(
    peaks,  # [B, HQ, splits] float32
    totals,  # [B, HQ, splits] float32
    sums,  # [B, HQ, splits, D] float32
    mask,  # [B, GROUPS] bool
    low,  # [B] int32
    high,  # [B] int32
    splits,
    out,  # [B, HQ, D]
    HQ: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The softmax over all slots from the splits; 0 for a head that is off or sees none."""
    PARTS: tl.constexpr = (D + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    row_head = pid // PARTS
    row = row_head // HQ
    on = tl.load(mask + row * GROUPS + row_head % HQ // (HQ // GROUPS)).to(tl.int32)
    first_slot = tl.load(low + row)
    end_slot = tl.load(high + row) + 1
    columns = pid % PARTS * BLOCK_C + tl.arange(0, BLOCK_C)
    column_ok = columns < D
    acc = tl.zeros((BLOCK_C,), tl.float32)
    total = 0.0
    if (on != 0) & (first_slot < end_slot):
        first = first_slot // SPLIT
        end = (end_slot + SPLIT - 1) // SPLIT
        base = row_head.to(tl.int64) * splits
        peak = -1e30
        for start in range(first // BLOCK_S * BLOCK_S, end, BLOCK_S):
            split = start + tl.arange(0, BLOCK_S)
            used = (split >= first) & (split < end)
            split_peaks = tl.load(peaks + base + split, mask=used, other=-1e30)
            split_totals = tl.load(totals + base + split, mask=used, other=0.0)
            split_sums = tl.load(
                sums + ((base + split) * D)[:, None] + columns[None, :],
                mask=used[:, None] & column_ok[None, :],
                other=0.0,
            )
            new_peak = tl.maximum(peak, tl.max(split_peaks, axis=0))
            weight = tl.exp2(split_peaks - new_peak)
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(weight * split_totals, axis=0)
            acc = acc * shrink + tl.sum(split_sums * weight[:, None], axis=0)
            peak = new_peak
    result = acc / tl.where(total > 0, total, 1.0)
    tl.store(
        out + row_head.to(tl.int64) * D + columns, result.to(out.dtype.element_ty), mask=column_ok
    )
