"""Input-pruned products: the down projection, and the output projection of attention.

The baseline is the product of all inputs, none of them zero. The pruned contenders get inputs that
already hold zeros where a group is skipped, as they come out of `swiglu_up` and the routed
attention, so that `dense` as dispatch runs it has nothing to clear. The K-axis part of the layout
is made inside the timed call: nothing else uses it.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from eval.kernel_cases.base import ProductCase, ProductFamily, Run
from pallas_kernels import dispatch
from pallas_kernels._common.config import Config, KTileConfig, SmallConfig
from pallas_kernels._common.device import Device
from pallas_kernels._common.problem import SMALL_TOKENS, Problem
from pallas_kernels.gemm_k.shapes import DOWN_SHAPES, OUTPUT_SHAPES
from pallas_kernels.layout.k_axis import TILE, super_group_size

# (outputs of a tile, block_k, warps, stages), and (column tiles of a program, band) with each.
TILES = (
    (256, 64, 8, 4, ((16, 8), (4, 8), (1, 16))),
    (256, 64, 8, 3, ((2, 8), (1, 4))),
    (128, 64, 4, 3, ((8, 8), (1, 8))),
)
# Before Hopper: the accumulators of mma.sync leave less room, and there is less shared memory.
TILES_MMA = ((128, 32, 8, 4, ((2, 8),)), (128, 64, 8, 3, ((2, 8),)), (64, 32, 4, 4, ((2, 8),)))
ONE_TOKEN = (
    (4, 1024, 2, 1),
    (4, 2048, 2, 1),
    (4, 2048, 4, 1),
    (8, 1024, 4, 1),
    (2, 4096, 4, 1),
    (8, 512, 4, 1),
)
FEW_TOKENS = ((16, 128, 2, 6), (16, 128, 4, 6), (32, 128, 4, 4), (64, 128, 4, 4), (16, 64, 4, 8))


@dataclasses.dataclass(frozen=True)
class InputPruned(ProductCase):
    """`h[m, k]` times `w[n, k]`, `group` input channels a group."""

    @property
    def facts(self) -> Problem:
        """The problem as dispatch sees it, without a hint."""
        return Problem("gemm_k", self.m, self.n, self.k, self.group, self.dtype)

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.k // self.group

    def operands(self, seed: int = 0) -> list[tuple[jax.Array, ...]]:
        """Random normal h, with each of several weights of variance 1 / k."""
        key = jax.random.key(seed)
        h = jax.random.normal(key, (self.m, self.k), self.dtype)
        scale = jnp.asarray(self.k**-0.5, self.dtype)
        keys = jax.random.split(key, self.weight_sets)
        return [(h, jax.random.normal(k, (self.n, self.k), self.dtype) * scale) for k in keys]

    def arguments(self, operands: tuple[jax.Array, ...], layout: Any) -> tuple[Any, ...]:
        """h with zeros in its skipped pairs."""
        h, w = operands
        kept = jnp.repeat(layout.mask, self.group, axis=1)
        return jnp.where(kept, h, jnp.zeros((), h.dtype)), w, layout

    def dense(self) -> dict[str, Run]:
        """cuBLAS, over all inputs."""
        return {"dense-unmasked": lambda h, w, layout: jnp.einsum("mk,nk->mn", h, w)}

    def pruned(self, implementation: Any, config: Config | None = None) -> Run:
        """The op under test; the order of the K axis is made in it."""

        def run(h, w, layout):
            return pallas_kernels.gemm_k(
                h, w, layout, inputs_zeroed=True, implementation=implementation, config=config
            )

        return run

    def naive(self, layout: Any) -> dict[str, Run]:
        """Gather-scatter and grouped GEMM, sized for this mask's largest group."""
        capacity = int(layout.count.max())
        return {
            "gather-scatter": _gather_scatter(self, capacity),
            "ragged_dot": _ragged(self, capacity),
        }

    def candidates(self, device: Device) -> list[Config]:
        """The configs worth trying: steps within a group, and within the card's shared memory."""
        capability = device.capability or "8.0"
        hopper = capability.startswith("9.")
        found: list[Config] = []
        if self.m <= SMALL_TOKENS:
            found += [SmallConfig(*c) for c in (ONE_TOKEN if self.m == 1 else FEW_TOKENS)]
        else:
            for n, k, warps, stages, orders in TILES if hopper else TILES_MMA:
                found += [KTileConfig(n, k, warps, stages, *order) for order in orders]
        op, limit = dispatch.facts("gemm_k"), device.shared_memory_per_block
        fitting = dict.fromkeys(op.fitted(c, self.facts) for c in found)
        return [c for c in fitting if op.fits(c, self.facts, limit, capability)]

    def relative_time(self, config: Config, sparsity: float) -> float:
        """See `tune_kernels.DERIVATION`."""
        if isinstance(config, SmallConfig):
            return (1.0 - sparsity**self.m) / 0.9
        size = super_group_size(self.m, self.groups)
        supers = math.ceil(self.groups / size)
        # Bits of a pattern that a tile cannot tell apart: it computes those groups always.
        blurred = min(max(size - math.log2(max(self.m / TILE, 1.0)), 0.0), size)
        share = 1.0 - sparsity * (1.0 - blurred / size)
        return 1.05 * share / 0.85 + (200.0 * supers / self.k if supers > 1 else 0.0)

    def active(self, mask: jax.Array) -> dict[str, int]:
        """FLOPs, and bytes that have to move at least once, of the active work."""
        itemsize = jnp.dtype(self.dtype).itemsize
        pairs = int(mask.sum())
        weight_bytes = int(mask.any(axis=0).sum()) * self.group * self.n * itemsize
        return {
            "flops": 2 * pairs * self.group * self.n,
            "weight_bytes": weight_bytes,
            "bytes": weight_bytes + (pairs * self.group + self.m * self.n) * itemsize,
        }


def _down(m: int, group: int, model: str) -> InputPruned:
    shape = DOWN_SHAPES[model]
    return InputPruned(m, shape.n, shape.k, group)


def _output(m: int, group: int, model: str) -> InputPruned:
    shape = OUTPUT_SHAPES[model]
    return InputPruned(m, shape.n, shape.k, group)


DOWN = ProductFamily("down", _down)
OUTPUT = ProductFamily("o", _output, tune_groups=(128, 256, 512), bench_groups=(128, 256, 512))


def _gather_scatter(problem: InputPruned, capacity: int) -> Run:
    """Naive pruning: for one group after another, copy its tokens, multiply, add to their rows."""

    def run(h, w, layout):
        slot = jnp.arange(capacity)

        def add(y, group):
            index = layout.order[group, :capacity]
            start = group * problem.group
            inputs = jax.lax.dynamic_slice_in_dim(h, start, problem.group, axis=1)[index]
            weights = jax.lax.dynamic_slice_in_dim(w, start, problem.group, axis=1)
            product = jnp.einsum("ck,nk->cn", inputs, weights, preferred_element_type=jnp.float32)
            row = jnp.where(slot < layout.count[group], index, problem.m)
            return y.at[row].add(product, mode="drop"), None

        zeros = jnp.zeros((problem.m, problem.n), jnp.float32)
        return jax.lax.scan(add, zeros, jnp.arange(problem.groups))[0].astype(h.dtype)

    return run


def _ragged(problem: InputPruned, capacity: int) -> Run:
    """Grouped GEMM: active inputs copied group after group, one `lax.ragged_dot`, added up."""

    def run(h, w, layout):
        slot = jnp.arange(capacity)[None, :]
        index = layout.order[:, :capacity]
        size = index.size
        start = jnp.cumsum(layout.count) - layout.count
        place = jnp.where(slot < layout.count[:, None], start[:, None] + slot, size).reshape(-1)
        token = jnp.full((size,), problem.m).at[place].set(index.reshape(-1), mode="drop")
        group = jnp.repeat(jnp.arange(problem.groups), capacity)
        group = jnp.zeros((size,), jnp.int32).at[place].set(group, mode="drop")
        grouped = h.reshape(problem.m, problem.groups, problem.group)
        inputs = grouped[jnp.minimum(token, problem.m - 1), group]
        weights = w.reshape(problem.n, problem.groups, problem.group).transpose(1, 2, 0)
        product = jax.lax.ragged_dot(inputs, weights, layout.count)
        y = jnp.zeros((problem.m, problem.n), jnp.float32)
        return y.at[token].add(product.astype(jnp.float32), mode="drop").astype(h.dtype)

    return run
