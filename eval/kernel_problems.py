"""The problems that kernels are tuned and benchmarked on: operands, masks, baselines, counts."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels._common.config import Config
from pallas_kernels._common.testing import clustered_mask, random_mask
from pallas_kernels.gemm_mn.shapes import SHAPES as QUERY_SHAPES
from pallas_kernels.swiglu_up.shapes import SHAPES as FFN_SHAPES

MaskKind = Literal["random", "clustered"]
OpName = Literal["gemm_mn", "swiglu_up"]
CASES: dict[OpName, str] = {"gemm_mn": "q", "swiglu_up": "gate_up"}
MATRICES: dict[OpName, int] = {"gemm_mn": 1, "swiglu_up": 2}

# Bytes of weights to rotate over, so that none is found in the L2 cache (60 MB on an H200).
COLD_BYTES = 300 << 20


@dataclasses.dataclass(frozen=True)
class Product:
    """One op on the shapes of one model layer: `x[m, k]`, weights `[n, k]`, `group` channels."""

    op: OpName
    m: int
    n: int
    k: int
    group: int
    dtype: str = "bfloat16"

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.n // self.group

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of one op."""
        return MATRICES[self.op] * self.n * self.k * jnp.dtype(self.dtype).itemsize

    @property
    def weight_sets(self) -> int:
        """How many sets of weights to rotate over: one is enough where tokens outweigh them."""
        return 1 if self.m > 1024 else max(1, -(-COLD_BYTES // self.weight_bytes))

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
        return {
            "flops": 2 * pairs * self.group * self.k * matrices,
            "weight_bytes": needed_groups * self.group * self.k * matrices * itemsize,
            "bytes": (
                needed_groups * self.group * self.k * matrices
                + needed_tokens * self.k
                + self.m * self.n
            )
            * itemsize,
        }


def product(op: OpName, m: int, group: int | None, model: str = "llama-3.1-8b") -> Product:
    """The product of a model's layer; `group` None is the model's own group size."""
    shape = (QUERY_SHAPES if op == "gemm_mn" else FFN_SHAPES)[model]
    return Product(op, m, shape.n, shape.k, group or shape.group)


def operands(problem: Product, seed: int = 0) -> tuple[jax.Array, list[tuple[jax.Array, ...]]]:
    """Random normal x, and `weight_sets` sets of weights of variance 1 / k."""
    key = jax.random.key(seed)
    x = jax.random.normal(key, (problem.m, problem.k), problem.dtype)
    sets = []
    for i in range(problem.weight_sets):
        keys = jax.random.split(jax.random.fold_in(key, i), MATRICES[problem.op])
        sets.append(
            tuple(
                jax.random.normal(k, (problem.n, problem.k), problem.dtype)
                * jnp.asarray(problem.k**-0.5, problem.dtype)
                for k in keys
            )
        )
    return x, sets


def make_mask(kind: MaskKind, problem: Product, sparsity: float, seed: int = 7) -> jax.Array:
    """A mask of the kind; sparsity 0 is everything on."""
    if sparsity == 0.0:
        return jnp.ones((problem.m, problem.groups), bool)
    make = {"random": random_mask, "clustered": clustered_mask}[kind]
    return make(jax.random.key(seed), problem.m, problem.groups, sparsity)


def dense(problem: Product) -> Callable[..., jax.Array]:
    """The unmasked op as plain JAX writes it: cuBLAS products, and one pass for SwiGLU."""

    def run(x, weights, layout):
        del layout
        ys = [jnp.einsum("mk,nk->mn", x, w) for w in weights]
        if len(ys) == 1:
            return ys[0]
        gate, up = (y.astype(jnp.float32) for y in ys)
        return (jax.nn.silu(gate) * up).astype(x.dtype)

    return run


def pruned(
    problem: Product, implementation: Any, config: Config | None = None
) -> Callable[..., jax.Array]:
    """The op under test, on a layout made beforehand."""
    function = getattr(pallas_kernels, problem.op)

    def run(x, weights, layout):
        return function(x, *weights, layout, implementation=implementation, config=config)

    return run


def gather_scatter(problem: Product, capacity: int) -> Callable[..., jax.Array]:
    """Naive pruning: copy every group's tokens, one batched product, scatter the results.

    `capacity` is the largest number of tokens any group has: a batched product needs one size.
    """

    def run(x, weights, layout):
        index = layout.order[:, :capacity]
        gathered = x[index]
        ys = [
            jnp.einsum("gck,gnk->gcn", gathered, w.reshape(problem.groups, problem.group, -1))
            for w in weights
        ]
        return _scatter(problem, _finish(ys), index, layout)

    return run


def ragged(problem: Product, capacity: int) -> Callable[..., jax.Array]:
    """Grouped GEMM: tokens copied group after group, one `lax.ragged_dot`, scatter the results.

    The copies fill groups x capacity rows at most; group sizes are the real ones.
    """

    def run(x, weights, layout):
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
