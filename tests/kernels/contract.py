"""The contract every op and implementation has to keep; `test_contract.py` runs it.

On a CPU the kernel bodies run in their interpreters, on small shapes. On a GPU the same checks run
the compiled kernels, on the shapes of real models too.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels._common.testing import interpreted, relative_error

ON_GPU = jax.default_backend() == "gpu"
# What rounding to a dtype changes at most, relative to the value.
ROUNDED = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


@dataclasses.dataclass(frozen=True)
class Shape:
    """`x[m, k]` times `w[n, k]`, groups of `group` channels (the last may be shorter)."""

    m: int
    n: int
    k: int
    group: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}g{self.group}"


@dataclasses.dataclass(frozen=True)
class OpUnderTest:
    """A product as the contract sees it: operands of a shape, and the call.

    What depends on the axis that the groups divide is in the methods below `call`; a kind of op
    with another axis overrides them (one file), and is registered in `ops.py` (one line).
    """

    name: str
    weights: int
    has_bias: bool = False

    def operands(self, shape: Shape, dtype: str, seed: int = 0) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((shape.m, shape.k), np.float32)
        arrays = [x]
        for _ in range(self.weights):
            arrays.append(rng.standard_normal((shape.n, shape.k), np.float32) * shape.k**-0.5)
        if self.has_bias:
            arrays.append(rng.standard_normal(shape.n, np.float32))
        return tuple(jnp.asarray(a, dtype) for a in arrays)

    def call(self, operands, layout, shape: Shape, implementation, config=None) -> jax.Array:
        function: Callable = getattr(pallas_kernels, self.name)
        arrays, kwargs = operands, {}
        if self.has_bias:
            *arrays, kwargs["bias"] = operands
        with running(implementation):
            return function(
                *arrays,
                layout,
                group_size=shape.group,
                implementation=implementation,
                config=config,
                **kwargs,
            )

    def groups(self, shape: Shape) -> int:
        """Groups of the mask: they divide the output channels here."""
        raise NotImplementedError

    def shape(self, m: int, groups: int, group: int, other: int) -> Shape:
        """A shape of `groups` groups of `group` channels; `other` is the axis without groups."""
        raise NotImplementedError

    def zeros(self, mask: jax.Array, shape: Shape) -> np.ndarray:
        """Where `y[m, n]` must be exactly zero."""
        raise NotImplementedError

    def with_nan(self, operands, token: int, group: int, shape: Shape) -> tuple[jax.Array, ...]:
        """The operands with NaN in all that only this token and only this group read."""
        raise NotImplementedError

    def own_configs(self) -> list[tuple[Shape, Any]]:
        """Tile sizes so small that small shapes have several tiles and bands, with a shape each."""
        raise NotImplementedError

    def model_shapes(self) -> list[Shape]:
        """Shapes of real models: many on a GPU, few in an interpreter."""
        raise NotImplementedError

    def __call__(self, operands, layout, shape: Shape, implementation, config=None) -> jax.Array:
        return _compiled(self, shape, implementation, config)(operands, layout)

    def exact(self, operands, layout, shape: Shape) -> jax.Array:
        """The reference on float32 copies of the operands."""
        wide = tuple(a.astype(jnp.float32) for a in operands)
        return self(wide, layout, shape, "reference")

    def __str__(self) -> str:
        return self.name + ("+bias" if self.has_bias else "")


@functools.cache
def _compiled(op: OpUnderTest, shape: Shape, implementation, config):
    return jax.jit(
        lambda operands, layout: op.call(operands, layout, shape, implementation, config)
    )


IMPLEMENTATIONS = ("reference", "dense", "pallas", "triton")


def running(implementation: str | None) -> contextlib.AbstractContextManager[None]:
    """Interpreters on a CPU for what needs them; nothing to do on a GPU."""
    if ON_GPU or implementation in (None, "reference"):
        return contextlib.nullcontext()
    return interpreted()


def poison_memory(nbytes: int = 1 << 26) -> None:
    """Leave NaN in memory that the next allocations of a GPU are likely to reuse."""
    if ON_GPU:
        arrays = [jnp.full(nbytes // 4, jnp.nan, jnp.float32) for _ in range(4)]
        jax.block_until_ready(arrays)
        for array in arrays:
            array.delete()


def error_bound(op: OpUnderTest, operands, layout, shape: Shape, exact: jax.Array) -> float:
    """1.5 times the error of the dense product in the same dtype, measured on these operands.

    Dense means: products rounded to the dtype, as XLA gives them. float32 has no such rounding;
    its bound is that of a float32 sum over k.
    """
    if operands[0].dtype == jnp.float32:
        return 2e-6
    dense = op(operands, layout, shape, "dense")
    return 1.5 * relative_error(dense, exact) + 1e-4


def check(
    op: OpUnderTest, implementation: str, shape: Shape, dtype: str, mask: jax.Array, config=None
) -> None:
    """Right values where the mask is on, exact zeros where it is off, ten equal calls."""
    operands = op.operands(shape, dtype)
    layout = pallas_kernels.mask_layout(mask, implementation="xla")
    exact = op.exact(operands, layout, shape)
    poison_memory()
    y = op(operands, layout, shape, implementation, config)
    assert y.shape == (shape.m, shape.n)
    assert y.dtype == operands[0].dtype
    assert not np.any(np.asarray(y, np.float32)[op.zeros(mask, shape)])
    if mask.any():
        assert relative_error(y, exact) <= error_bound(op, operands, layout, shape, exact)
