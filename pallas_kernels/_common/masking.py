"""Zeros for the skipped pairs of a dense product, by whatever is cheapest on this device."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels._common.problem import SMALL_TOKENS


def can_clear_in_place() -> bool:
    """Whether the kernel that writes only the skipped pairs runs here."""
    if triton_support.interpreting.get():
        return True
    capability = current_device().capability
    return capability is not None and float(capability) >= 8.0 and triton_support.available()


def clear_skipped(
    y: Float[Array, "M N"], mask: Bool[Array, "M groups"], group_size: int
) -> Float[Array, "M N"]:
    """`y` where the group's mask is on, exact zeros elsewhere."""
    select = functools.partial(_select, group_size=group_size)
    # Of few tokens XLA makes the selection with the product: a second kernel costs more.
    if y.shape[0] <= SMALL_TOKENS or not can_clear_in_place():
        return select(y, mask)
    from pallas_kernels._common.triton_gemm import zero_skipped

    @jax.custom_batching.custom_vmap
    def clear(y, mask):
        return zero_skipped(y, mask, group_size)

    @clear.def_vmap
    def batched(axis_size, in_batched, y, mask):
        axes = tuple(0 if is_batched else None for is_batched in in_batched)
        return jax.vmap(select, axes)(y, mask), True

    return clear(y, mask)


def _select(y: Float[Array, "M N"], mask: Bool[Array, "M groups"], group_size: int):
    return jnp.where(expand(mask, y.shape[1], group_size), y, jnp.zeros((), y.dtype))


def expand(mask: Bool[Array, "M groups"], n: int, group_size: int) -> Bool[Array, "M N"]:
    """The group mask repeated over each group's `group_size` channels, cut to n channels."""
    return jnp.repeat(mask, group_size, axis=1)[:, :n]
