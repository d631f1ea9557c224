"""A bfloat16 array times a float32 one on tensor cores, to float32 precision.

A float32 number is the sum of three bfloat16 numbers, whose significands of 8 bits make up its 24
(arXiv 1904.06376), and a product of two bfloat16 numbers is exact in float32. So `x w` is
`x w1 + x w2 + x w3` with every product exact and every sum in float32: what a product in float32
computes, but for the order of its sums.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32

from pallas_kernels._common.bfloat16_parts import bfloat16_parts


@jax.custom_vjp
def split_product(
    x: BFloat16[Array, "*B K"], weight: Float32[Array, "N K"]
) -> Float32[Array, "*B N"]:
    """`x weight^T` in float32.

    The weight's gradient is of the same precision. That of `x` is rounded to bfloat16 anyway: it is
    made of three products instead of nine, to 2^-16 of what is added up.
    """
    parts = jnp.concatenate(bfloat16_parts(weight, 3))
    first, second, third = jnp.split(_product("...k,nk->...n", x, parts), 3, axis=-1)
    return first + (second + third)


def _forward(x, weight):
    return split_product(x, weight), (x, weight)


def _backward(kept, gradient):
    x, weight = kept
    high, middle, low = bfloat16_parts(gradient, 3)
    parts = jnp.concatenate([high, middle, low], axis=-1)
    by_weight = jnp.split(_product("...n,...k->nk", parts, x), 3)
    weight_high, weight_low = bfloat16_parts(weight, 2)
    by_x = _product(
        "...n,nk->...k",
        jnp.concatenate([high, middle, high], axis=-1),
        jnp.concatenate([weight_high, weight_high, weight_low]),
    )
    return by_x.astype(x.dtype), by_weight[0] + (by_weight[1] + by_weight[2])


split_product.defvjp(_forward, _backward)


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
