"""A float32 array as a sum of bfloat16 ones, whose products tensor cores make exactly."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32


def bfloat16_parts(x: Float32[Array, "*shape"], count: int) -> list[BFloat16[Array, "*shape"]]:
    """Arrays that add up to `x`: exactly with 3, to 2^-16 of each element with 2.

    Numbers below 2^-118 lose what no bfloat16 can hold.
    """
    parts, rest = [], x
    for _ in range(count):
        # Not a cast there and back, which compilers may take for nothing.
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return parts
