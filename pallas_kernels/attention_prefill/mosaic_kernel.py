"""Flash attention for Hopper in Pallas' Mosaic GPU: compact queries against dense keys.

One block computes one tile, 128 active tokens of one row (sequence) for one head:

    program -> (turn, row, head), heads fastest;  turn 0 is the row's last tile: long tiles first

    warpgroup 0   queries  0 ..  63   S = Q K^T | softmax | O += P V     the two take turns on the
    warpgroup 1   queries 64 .. 127             |         |              tensor cores
    warpgroup 2   copies blocks of k and v into a ring of `stages` buffers (TMA)

While one warpgroup is in its softmax, the other's products run (the schedule barrier). Queries
and results are compact, `[Hq, B, padded tokens, d]`: TMA cannot gather rows on Hopper. The loop
over blocks of keys has up to five parts, from `bounds` (in blocks, per 64 queries):

    block of keys    tile begin   begin      full begin     full end     end    tile end
                          |--skip--|--masked--|----all see----|--masked--|--skip--|

Skipped blocks only keep the ring and the turns going. Without windows, segments and left padding
(`from_start`) the first two parts are empty and not compiled.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._attention.config import MosaicConfig

LOG2_E = math.log2(math.e)
HALF = 64  # queries of a warpgroup
TILE = MosaicConfig.BLOCK_M


# Jitted, so that the layers of a model share one lowering: it takes more than a second.
@functools.partial(jax.jit, static_argnames=("scale", "config", "from_start", "interpret"))
def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    low: jax.Array,
    high: jax.Array,
    bounds: jax.Array,
    count: jax.Array,
    edges: tuple[jax.Array, jax.Array] | None,
    *,
    scale: float,
    config: MosaicConfig,
    from_start: bool,
    interpret: object = None,
) -> jax.Array:
    """Attention of compact queries; rows at or past a group's count hold arbitrary values.

    Args:
        q: `[Hq, B, Tp, d]`, Tp a multiple of 128.
        k: `[B, S, Hk, d]`.
        v: like k.
        low: `[Ga, B, Tp]` int32, the first slot each compact query sees.
        high: `[Ga, B, Tp]` int32, the last one.
        bounds: `[Ga, B, Tp / 64, 4]` int32, for each 64 queries: begin, full begin, full end and
            end of the drawing, in blocks of `config.block_n`.
        count: `[Ga, B]` int32, active tokens.
        edges: `[B, 2]` int32, the first and the last block of the row that anybody sees, and
            `[2 B, block_n, Hk, d]`, what to read in their place: v with zeros in slots that
            nobody sees, which may be NaN (a weight of 0 does not make that harmless). None: v
            is finite everywhere.
        scale: of the logits.
        config: block of keys and depth of the ring.
        from_start: every query sees from slot 0 on.
        interpret: Pallas' interpreter parameters, for tests without a GPU.
    """
    (hq, rows, padded, d), hk = q.shape, k.shape[2]
    groups = low.shape[0]
    block_n, stages = config.block_n, config.stages
    factor = scale * LOG2_E

    def body(q_ref, k_ref, v_ref, low_ref, high_ref, bounds_ref, count_ref, *rest):
        edge_refs, (out_ref, *scratch) = rest[:-10], rest[-10:]
        q_smem, k_smem, v_smem, q_bar, k_bar, v_bar, k_free, v_free, turn_bar = scratch
        warpgroup = lax.axis_index("warpgroup")
        program = lax.axis_index("program")
        head = lax.rem(program, jnp.int32(hq))
        rest = lax.div(program, jnp.int32(hq))
        row = lax.rem(rest, jnp.int32(rows))
        turn = lax.div(rest, jnp.int32(rows))
        group = lax.div(head, jnp.int32(hq // groups))
        kv_head = lax.div(head, jnp.int32(hq // hk))
        active = count_ref[group, row]
        tile = lax.div(active + (TILE - 1), jnp.int32(TILE)) - 1 - turn

        def bound(half, which):
            return bounds_ref[group, row, tile * 2 + half, which]

        def slot_of(step):
            return lax.rem(step, jnp.int32(stages))

        def produce(tile_begin, tile_end):
            @pl.loop(0, tile_end - tile_begin)
            def _(step):
                slot = slot_of(step)
                keys = pl.ds((tile_begin + step) * block_n, block_n)
                source = (row, keys, kv_head)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(k_free.at[slot])

                plgpu.copy_gmem_to_smem(k_ref.at[source], k_smem.at[slot], k_bar.at[slot])

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(v_free.at[slot])

                fill_v(tile_begin + step, source, slot)

            # Nothing follows the last blocks; the interpreter wants every arrival seen.
            @pl.loop(jnp.maximum(tile_end - tile_begin - stages, 0), tile_end - tile_begin)
            def _(step):
                plgpu.barrier_wait(k_free.at[slot_of(step)])
                plgpu.barrier_wait(v_free.at[slot_of(step)])

        def fill_v(block, source, slot):
            copy = functools.partial(
                plgpu.copy_gmem_to_smem, dst=v_smem.at[slot], barrier=v_bar.at[slot]
            )
            if not edge_refs:
                copy(v_ref.at[source])
                return
            edge_block_ref, edge_ref = edge_refs
            at_end = block == edge_block_ref[row, 1]
            at_begin = (block == edge_block_ref[row, 0]) & ~at_end
            pl.when(at_end)(lambda: copy(edge_ref.at[row * 2 + 1, :, kv_head]))
            pl.when(at_begin)(lambda: copy(edge_ref.at[row * 2, :, kv_head]))
            pl.when(~at_begin & ~at_end)(lambda: copy(v_ref.at[source]))

        def consume(tile_begin, tile_end):
            queries = q_smem.at[warpgroup]
            place = (head, row, pl.ds(tile * TILE + warpgroup * HALF, HALF))
            plgpu.copy_gmem_to_smem(q_ref.at[place], queries, q_bar.at[warpgroup])
            in_group = (group, row, pl.ds(tile * TILE + warpgroup * HALF, HALF))
            row_layout = plgpu.Layout.WGMMA.reduce(1)
            last = plgpu.load(high_ref.at[in_group], layout=row_layout, optimized=False)
            first = None
            if not from_start:
                first = plgpu.load(low_ref.at[in_group], layout=row_layout, optimized=False)
            begin, full_begin, full_end, end = (bound(warpgroup, i) for i in range(4))

            def take_turn():
                plgpu.barrier_arrive(turn_bar)
                plgpu.barrier_wait(turn_bar)

            def init(value, shape, layout):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            peak = init(-1e30, (HALF,), row_layout)
            total = init(0.0, (HALF,), row_layout)
            acc = init(0.0, (HALF, d), plgpu.Layout.WGMMA)
            plgpu.barrier_wait(q_bar.at[warpgroup])

            @pl.when(tile_end > tile_begin)
            def _():
                plgpu.barrier_wait(k_bar.at[0])

            pl.when(warpgroup == 1)(take_turn)

            def wait_next(block):
                @pl.when(block + 1 < tile_end)
                def _():
                    plgpu.barrier_wait(k_bar.at[slot_of(block + 1 - tile_begin)])

            def see(block, carry, masked):
                acc, peak, total = carry
                slot = slot_of(block - tile_begin)

                def scores(ref):
                    plgpu.wgmma(ref, queries, k_smem.at[slot].transpose((1, 0)))
                    take_turn()
                    return ref[...]

                logits = pl.run_scoped(scores, plgpu.ACC((HALF, block_n), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                if masked:
                    key = block * block_n + plgpu.broadcasted_iota(
                        jnp.int32, (HALF, block_n), 1, layout=plgpu.Layout.WGMMA
                    )
                    visible = key <= lax.broadcast_in_dim(last, key.shape, [0])
                    if first is not None:
                        visible &= key >= lax.broadcast_in_dim(first, key.shape, [0])
                    logits = jnp.where(visible, logits, -jnp.inf)
                new_peak = jnp.maximum(peak, logits.max(axis=1) * factor)
                shrink = jnp.exp2(peak - new_peak)
                weights = jnp.exp2(
                    logits * factor - lax.broadcast_in_dim(new_peak, logits.shape, [0])
                )
                acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
                total *= shrink
                narrow = weights.astype(q.dtype)
                total += weights.sum(axis=1)
                acc, total, new_peak, narrow = lax.optimization_barrier(
                    (acc, total, new_peak, narrow)
                )
                plgpu.barrier_arrive(turn_bar)  # done with the softmax
                plgpu.barrier_wait(v_bar.at[slot])
                plgpu.barrier_wait(turn_bar)  # the tensor cores are free

                def add(ref):
                    plgpu.wgmma(ref, narrow, v_smem.at[slot])
                    wait_next(block)

                if interpret is None:
                    acc = pl.run_state(add)(plgpu.ACC.init(acc))
                else:  # the interpreter knows neither run_state nor operands in registers
                    acc += jnp.dot(narrow, v_smem[slot], preferred_element_type=jnp.float32)
                    plgpu.commit_smem()
                    wait_next(block)
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, new_peak, total

            def skip(block, _):
                slot = slot_of(block - tile_begin)
                plgpu.barrier_arrive(k_free.at[slot])
                take_turn()
                plgpu.barrier_wait(v_bar.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])
                wait_next(block)
                take_turn()

            carry = (acc, peak, total)
            masked_see = functools.partial(see, masked=True)
            if not from_start:
                lax.fori_loop(tile_begin, begin, skip, None)
                carry = lax.fori_loop(begin, full_begin, masked_see, carry)
            carry = lax.fori_loop(full_begin, full_end, functools.partial(see, masked=False), carry)
            acc, peak, total = lax.fori_loop(full_end, end, masked_see, carry)
            lax.fori_loop(end, tile_end, skip, None)
            pl.when(warpgroup == 0)(take_turn)

            inverse = 1.0 / jnp.where(total > 0.0, total, 1.0)
            acc *= lax.broadcast_in_dim(inverse, acc.shape, [0])
            queries[...] = acc.astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries, out_ref.at[place])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(tile >= 0)
        def _():
            tile_begin = 0 if from_start else jnp.minimum(bound(0, 0), bound(1, 0))
            tile_end = jnp.maximum(bound(0, 3), bound(1, 3))

            @pl.when(warpgroup < 2)
            def _():
                plgpu.set_max_registers(240, action="increase")
                consume(tile_begin, tile_end)

            @pl.when(warpgroup == 2)
            def _():
                plgpu.set_max_registers(24, action="decrease")
                produce(tile_begin, tile_end)

    ring = (stages, block_n, d)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(padded // TILE * rows * hq,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((2, HALF, d), q.dtype),
            plgpu.SMEM(ring, q.dtype),
            plgpu.SMEM(ring, q.dtype),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(q, k, v, low, high, bounds, count, *(edges or ()))
