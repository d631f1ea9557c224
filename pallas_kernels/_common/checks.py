"""What every op refuses, in words and numbers."""

import jax
import jax.numpy as jnp

from pallas_kernels.layout import MaskLayout

DTYPES = ("bfloat16", "float16", "float32")


def check_gemm(
    op: str,
    x: jax.Array,
    weights: dict[str, jax.Array],
    layout: MaskLayout,
    group_size: int | None,
) -> int:
    """Raise `ValueError` on operands that do not fit together; return channels per group.

    Without `group_size` the groups must divide the channels evenly; with it, the last group may
    be shorter.
    """
    _check_operands(op, "x", x, weights, layout)
    n = next(iter(weights.values())).shape[0]
    return _group_size(op, n, "outputs", layout, group_size)


def check_input_groups(
    op: str, h: jax.Array, w: jax.Array, layout: MaskLayout, group_size: int | None
) -> int:
    """The same for groups of input channels: `h[M, K]`, one weight `w[N, K]`, groups of K."""
    _check_operands(op, "h", h, {"w": w}, layout)
    return _group_size(op, h.shape[1], "inputs", layout, group_size)


def _check_operands(
    op: str,
    name_x: str,
    x: jax.Array,
    weights: dict[str, jax.Array],
    layout: MaskLayout,
) -> None:
    for name, array in {name_x: x, **weights}.items():
        if array.ndim != 2:
            raise ValueError(f"{op}: {name} must be 2-D, got shape {array.shape}")
        if array.dtype != x.dtype:
            raise ValueError(f"{op}: {name} is {array.dtype}, but {name_x} is {x.dtype}")
        if array.shape[1] != x.shape[1]:
            raise ValueError(f"{op}: {name} is {array.shape}, but {name_x} has {x.shape[1]} inputs")
    if x.dtype.name not in DTYPES:
        raise ValueError(f"{op}: dtype {x.dtype} is not one of {', '.join(DTYPES)}")
    if len({array.shape for array in weights.values()}) != 1:
        shapes = {name: array.shape for name, array in weights.items()}
        raise ValueError(f"{op}: weights differ in shape: {shapes}")
    n = next(iter(weights.values())).shape[0]
    if x.shape[1] == 0 or n == 0:
        raise ValueError(
            f"{op}: nothing to multiply, {name_x} is {x.shape} and there are {n} outputs"
        )
    if layout.tokens != x.shape[0]:
        raise ValueError(
            f"{op}: the layout is of {layout.tokens} tokens, {name_x} has {x.shape[0]}"
        )


def _group_size(
    op: str, channels: int, what: str, layout: MaskLayout, group_size: int | None
) -> int:
    if group_size is None:
        if channels % layout.groups:
            raise ValueError(
                f"{op}: {layout.groups} groups do not divide {channels} {what} evenly; pass "
                "group_size if the last group is shorter"
            )
        return channels // layout.groups
    if group_size < 1 or -(-channels // group_size) != layout.groups:
        raise ValueError(
            f"{op}: groups of {group_size=} over {channels} {what} are "
            f"{-(-channels // max(group_size, 1))}, but the layout has {layout.groups}"
        )
    return group_size


def check_bias(op: str, bias: jax.Array | None, x: jax.Array, n: int) -> None:
    """Raise `ValueError` on a bias that does not fit."""
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"{op}: bias is {bias.dtype}{list(bias.shape)}, expected {x.dtype}[{n}]")


def empty_result(x: jax.Array, n: int) -> jax.Array:
    """The product of no tokens: nothing is launched for it."""
    return jnp.zeros((0, n), x.dtype)
