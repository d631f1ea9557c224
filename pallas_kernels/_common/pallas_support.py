"""Calling Pallas kernels through the Triton lowering, on a GPU or in Pallas' interpreter.

JAX deprecates this lowering (a warning since 0.11, removal without a date), so no op depends on
it: every op has a `triton` implementation too. The interpreter does not need a GPU and is how the
kernel bodies are tested on a CPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._common.triton_support import interpreting, not_differentiable


def require_device(op: str, capability: str | None) -> None:
    """Raise `NotImplementedError` where the Triton lowering has no device to run on."""
    if interpreting.get():
        return
    if capability is None or float(capability) < 8.0:
        raise NotImplementedError(
            f"{op}: the pallas implementation needs a CUDA device of compute capability 8.0 or "
            f"later, this one has {capability}; use implementation='reference'"
        )


def call(
    body: Callable[..., None], *, num_warps: int, num_stages: int, name: str, **kwargs: Any
) -> Callable[..., Any]:
    """`pl.pallas_call` of `body`, not differentiable.

    Lowering it for a GPU raises JAX's deprecation warning: the backend was asked for by name.
    """
    kernel = pl.pallas_call(
        body,
        interpret=interpreting.get(),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        name=name,
        **kwargs,
    )

    return not_differentiable(kernel, name)


def load(ref: Any, index: tuple[jax.Array, ...], ok: jax.Array | None = None) -> jax.Array:
    """`ref[index]`, 0 where `ok` is False. All indices are whole integer arrays."""
    index = jnp.broadcast_arrays(*index)
    if ok is None:
        return plgpu.load(ref.at[tuple(index)])
    return plgpu.load(ref.at[tuple(index)], mask=jnp.broadcast_to(ok, index[0].shape), other=0)


def store(ref: Any, index: tuple[jax.Array, ...], value: jax.Array, ok: jax.Array) -> None:
    """`ref[index] = value` where `ok`. Send indices that are not ok out of range, all distinct
    from good ones: the interpreter may write a duplicate's old value last.
    """
    index = jnp.broadcast_arrays(*index)
    shape = index[0].shape
    plgpu.store(
        ref.at[tuple(index)], jnp.broadcast_to(value, shape), mask=jnp.broadcast_to(ok, shape)
    )
