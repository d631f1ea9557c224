"""Output-pruned products: the query projection, and gate and up with SwiGLU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from eval.kernel_cases.base import ProductCase, ProductFamily, Run
from pallas_kernels import dispatch
from pallas_kernels._common.config import Config, PersistentConfig, SmallConfig, TileConfig
from pallas_kernels._common.device import Device
from pallas_kernels._common.problem import SMALL_TOKENS, Problem
from pallas_kernels.gemm_mn.shapes import SHAPES as QUERY_SHAPES
from pallas_kernels.swiglu_up.shapes import SHAPES as FFN_SHAPES

MATRICES = {"gemm_mn": 1, "swiglu_up": 2}

# (block_m, columns of the weight tile, block_k, warps, stages), bands tried with each.
TILES = (
    (128, 256, 64, 8, 3, (4, 8)),
    (128, 256, 64, 8, 4, (8,)),
    (128, 128, 64, 4, 3, (8,)),
    (128, 64, 64, 4, 3, (16,)),
    (128, 32, 64, 4, 4, (16,)),
    (128, 16, 64, 4, 4, (16,)),
)
# Where tiles are few: each program clears its own, and the last tile may be half a one.
FEW_TILES = (
    (128, 128, 64, 8, 5, False),
    (128, 128, 64, 8, 5, True),
    (128, 128, 64, 4, 3, True),
)
FEW_TILES_TOKENS = 4096  # they are tried up to here
# The persistent form, Hopper only: (columns of the weight tile, stages, bands), 128 tokens a tile.
COMPACT = ((256, 3, (8,)), (256, 4, (8, 16)), (128, 5, (8,)))
MASKED = ((256, 4, (8, 16)), (128, 5, (8,)))
# Before Hopper: the accumulators of mma.sync leave less room, and there is less shared memory.
TILES_MMA = (
    (128, 128, 32, 8, 4, (8, 16)),
    (128, 128, 64, 8, 3, (8,)),
    (128, 64, 32, 4, 4, (8, 16)),
    (64, 64, 64, 4, 3, (8,)),
    (128, 32, 64, 4, 3, (16,)),
    (128, 16, 64, 4, 3, (16,)),
)
ONE_TOKEN = ((8, 256, 4, 3), (2, 4096, 4, 1), (2, 2048, 4, 1), (4, 2048, 4, 1), (8, 512, 4, 2))
FEW_TOKENS = (
    (64, 128, 4, 3),
    (64, 64, 4, 4),
    (64, 64, 4, 8),
    (128, 64, 8, 4),
    (128, 128, 8, 2),
    (16, 256, 4, 3),
    (16, 512, 4, 2),
)
ONE_WEIGHT = ((32, 128, 4, 3),)  # with two weights it spills on Hopper
# The query projection has few tiles: K split, (block_n, block_k, warps, stages, splits).
SPLIT_TOKENS = ((128, 128, 8, 3, 8), (128, 64, 4, 4, 8), (256, 64, 8, 4, 8), (128, 128, 8, 4, 4))


@dataclasses.dataclass(frozen=True)
class Product(ProductCase):
    """`x[m, k]`, one or two weights `[n, k]`, `group` output channels a group."""

    op: str = dataclasses.field(kw_only=True)

    @property
    def facts(self) -> Problem:
        """The problem as dispatch sees it, without a hint."""
        return Problem(self.op, self.m, self.n, self.k, self.group, self.dtype)

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.n // self.group

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of one op."""
        return MATRICES[self.op] * super().weight_bytes

    def operands(self, seed: int = 0) -> list[tuple[jax.Array, ...]]:
        """Random normal x, with each of `weight_sets` sets of weights of variance 1 / k."""
        key = jax.random.key(seed)
        x = jax.random.normal(key, (self.m, self.k), self.dtype)
        sets: list[tuple[jax.Array, ...]] = []
        for i in range(self.weight_sets):
            keys = jax.random.split(jax.random.fold_in(key, i), MATRICES[self.op])
            scale = jnp.asarray(self.k**-0.5, self.dtype)
            shape = (self.n, self.k)
            sets.append((x, *(jax.random.normal(k, shape, self.dtype) * scale for k in keys)))
        return sets

    def dense(self) -> dict[str, Run]:
        """cuBLAS products, and one pass for SwiGLU."""

        def run(x, *weights_and_layout):
            *weights, _ = weights_and_layout
            return _finish([jnp.einsum("mk,nk->mn", x, w) for w in weights])

        return {"dense-unmasked": run}

    def pruned(self, implementation: Any, config: Config | None = None) -> Run:
        """The op under test, on a layout made beforehand."""
        function = getattr(pallas_kernels, self.op)

        def run(*operands):
            return function(*operands, implementation=implementation, config=config)

        return run

    def naive(self, layout: Any) -> dict[str, Run]:
        """Gather-scatter and grouped GEMM, sized for this mask's largest group."""
        capacity = int(layout.count.max())
        return {
            "gather-scatter": _gather_scatter(self, capacity),
            "ragged_dot": _ragged(self, capacity),
        }

    def candidates(self, device: Device) -> list[Config]:
        """The configs worth trying: no wider than a group, and within the card's shared memory."""
        matrices = MATRICES[self.op]
        capability = device.capability or "8.0"
        found: list[Config] = []
        if self.m <= SMALL_TOKENS:
            shapes = ONE_TOKEN if self.m == 1 else FEW_TOKENS
            if self.m > 1 and matrices == 1:
                shapes += ONE_WEIGHT + SPLIT_TOKENS
            found += [SmallConfig(min(bn, self.group), *rest) for bn, *rest in shapes]
        else:
            tiles = TILES if capability.startswith("9.") else TILES_MMA
            for bm, columns, bk, warps, stages, bands in tiles:
                block_n = columns // matrices
                if 16 <= block_n <= self.group:
                    found += [TileConfig(bm, block_n, bk, warps, stages, band) for band in bands]
            for bm, columns, bk, warps, stages, halves in FEW_TILES:
                tile = (bm, columns // matrices, bk, warps, stages)
                if self.m <= FEW_TILES_TOKENS and columns // matrices <= self.group:
                    found.append(TileConfig(*tile, 8, share_zeros=False, halves=halves))
            for shapes, compact in ((COMPACT, True), (MASKED, False)):
                for columns, stages, bands in shapes:
                    tile = (128, columns // matrices, 64, 8, stages)
                    found += [
                        PersistentConfig(*tile, band, device.multiprocessors, compact)
                        for band in bands
                        if not compact or columns // matrices <= self.group
                    ]
        limit = device.shared_memory_per_block
        op = dispatch.facts(self.op)
        return [c for c in dict.fromkeys(found) if op.fits(c, self.facts, limit, capability)]

    def relative_time(self, config: Config, sparsity: float) -> float:
        """See `tune_kernels.DERIVATION`."""
        if isinstance(config, SmallConfig):
            return (1.0 - sparsity**self.m) / 0.9
        if not isinstance(config, TileConfig):
            raise ValueError(f"the model has no rate for {config}")
        rate = {128: 0.85, 64: 0.65, 32: 0.45, 16: 0.25}
        columns = min(128, config.block_n * MATRICES[self.op])
        active = self.m * (1.0 - sparsity)
        return (1.0 - sparsity) * (1.0 + config.block_m / (2 * active)) / rate[columns]

    def active(self, mask: jax.Array) -> dict[str, int]:
        """FLOPs, and bytes that have to move at least once, of the active work.

        Bytes: weights of groups some token needs, tokens that need some group, the whole output
        (skipped parts are written as zeros).
        """
        itemsize = jnp.dtype(self.dtype).itemsize
        pairs = int(mask.sum())
        needed_groups = int(mask.any(axis=0).sum())
        needed_tokens = int(mask.any(axis=1).sum())
        matrices = MATRICES[self.op]
        weight_bytes = needed_groups * self.group * self.k * matrices * itemsize
        return {
            "flops": 2 * pairs * self.group * self.k * matrices,
            "weight_bytes": weight_bytes,
            "bytes": weight_bytes + (needed_tokens * self.k + self.m * self.n) * itemsize,
        }


def _query(m: int, group: int, model: str) -> Product:
    shape = QUERY_SHAPES[model]
    return Product(m, shape.n, shape.k, group, op="gemm_mn")


def _gate_up(m: int, group: int, model: str) -> Product:
    shape = FFN_SHAPES[model]
    return Product(m, shape.n, shape.k, group, op="swiglu_up")


QUERY = ProductFamily("q", _query)
GATE_UP = ProductFamily("gate_up", _gate_up)


def _gather_scatter(problem: Product, capacity: int) -> Run:
    """Naive pruning: copy every group's tokens, one batched product, scatter the results.

    `capacity` is the largest number of tokens any group has: a batched product needs one size.
    """

    def run(x, *weights_and_layout):
        *weights, layout = weights_and_layout
        index = layout.order[:, :capacity]
        gathered = x[index]
        ys = [
            jnp.einsum("gck,gnk->gcn", gathered, w.reshape(problem.groups, problem.group, -1))
            for w in weights
        ]
        return _scatter(problem, _finish(ys), index, layout)

    return run


def _ragged(problem: Product, capacity: int) -> Run:
    """Grouped GEMM: tokens copied group after group, one `lax.ragged_dot`, scatter the results.

    The copies fill groups x capacity rows at most; group sizes are the real ones.
    """

    def run(x, *weights_and_layout):
        *weights, layout = weights_and_layout
        slot = jnp.arange(capacity)[None, :]
        index = layout.order[:, :capacity]
        start = jnp.cumsum(layout.count) - layout.count
        place = jnp.where(slot < layout.count[:, None], start[:, None] + slot, index.size)
        tokens = (
            jnp.zeros((index.size,), jnp.int32)
            .at[place.reshape(-1)]
            .set(index.reshape(-1), mode="drop")
        )
        gathered = x[tokens]
        ys = [
            jax.lax.ragged_dot(
                gathered,
                w.reshape(problem.groups, problem.group, -1).transpose(0, 2, 1),
                layout.count,
            )
            for w in weights
        ]
        h = _finish(ys)[jnp.minimum(place, index.size - 1)]
        return _scatter(problem, h, index, layout)

    return run


def _finish(ys: list[jax.Array]) -> jax.Array:
    if len(ys) == 1:
        return ys[0]
    return (jax.nn.silu(ys[0].astype(jnp.float32)) * ys[1].astype(jnp.float32)).astype(ys[0].dtype)


def _scatter(problem: Product, h: jax.Array, index: jax.Array, layout: Any) -> jax.Array:
    """`h[groups, capacity, group]` to `[m, n]`; slots past a group's count are dropped."""
    slot = jnp.arange(index.shape[1])[None, :]
    row = jnp.where(slot < layout.count[:, None], index, problem.m)
    group = jnp.arange(problem.groups)[:, None]
    out = jnp.zeros((problem.m, problem.groups, problem.group), h.dtype)
    return out.at[row, group].set(h, mode="drop").reshape(problem.m, problem.n)
