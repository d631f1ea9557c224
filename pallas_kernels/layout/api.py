"""`MaskLayout`: one routing decision, ordered once, shared by every op of a sublayer.

    mask[M, groups]             order[group]                         count[group]
        g0 g1                   g0: 0 2 3 | 1                        g0: 3
     t0  #  .                   g1: 1 2   | 0 3                      g1: 2
     t1  .  #                       active | skipped, each in token order
     t2  #  #
     t3  #  .

Order is *stable*: tile i of every group then covers about the same window of tokens, so their
activations stay in the L2 cache while all groups' tiles of that window run. A kernel reads only
`order` and `count`: slots below `count[g]` are to be computed, the rest to be written as zero.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels._common import triton_support
from pallas_kernels._common.device import Device, current_device
from pallas_kernels._common.problem import SMALL_TOKENS
from pallas_kernels.layout import k_axis as k_axis_module
from pallas_kernels.layout.k_axis import KOrder

LayoutImplementation = Literal["reference", "xla", "pallas", "triton"]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class MaskLayout:
    """A mask and its per-group token order. Make it with `mask_layout`, never by hand.

    Attributes:
        mask: `[M, groups]` bool; True = active = execute.
        order: `[groups, M]` int32, a permutation of the tokens for each group: the active tokens
            in increasing order, then the skipped ones in increasing order.
        count: `[groups]` int32, the number of active tokens.
        expected_sparsity: static hint, the fraction of (token, group) pairs expected to be
            skipped. It steers the choice of implementation, never the result. None: unknown.
        k_order: what `gemm_k` needs besides, if it was asked for (`k_axis.py`).
    """

    mask: Bool[Array, "M groups"]
    order: Int32[Array, "groups M"]
    count: Int32[Array, " groups"]
    expected_sparsity: float | None = None
    k_order: KOrder | None = None

    _children: ClassVar[tuple[str, ...]] = ("mask", "order", "count", "k_order")

    @property
    def tokens(self) -> int:
        """M, the number of tokens."""
        return self.mask.shape[0]

    @property
    def groups(self) -> int:
        """The number of groups."""
        return self.mask.shape[1]

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        children = [(key(name), getattr(self, name)) for name in self._children]
        return children, self.expected_sparsity

    @classmethod
    def tree_unflatten(cls, expected_sparsity, children):
        # Past `__init__`: JAX also unflattens with leaves that are not arrays.
        self = object.__new__(cls)
        for name, value in zip(cls._children, children, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "expected_sparsity", expected_sparsity)
        return self


def mask_layout(
    mask: Bool[Array, "M groups"],
    *,
    expected_sparsity: float | None = None,
    k_axis: bool = False,
    implementation: LayoutImplementation | None = None,
) -> MaskLayout:
    """Order the tokens of every group: active first, stable. Linear, deterministic, no host sync.

    Args:
        mask: `[M, groups]` bool, True = active. Tokens of a batch are flattened into M.
        expected_sparsity: static hint in [0, 1] for the ops that will use the layout.
        k_axis: also make the tiles of tokens that `gemm_k` runs (from 65 tokens on; its form for
            fewer needs none).
        implementation: one of `reference` (stable argsort), `xla` (prefix sums and a scatter),
            `pallas`, `triton`; it runs or raises. None: the fastest for this device. The K axis
            is ordered by Triton for `triton`, and by XLA for all others.

    Raises:
        ValueError: the mask is not a 2-D bool array, has more than 2^31 - 1 tokens or entries'
            offsets, or the hint is outside [0, 1].
        NotImplementedError: the named implementation does not run on this device.
    """
    if mask.ndim != 2 or mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be a 2-D bool array, got {mask.dtype}{list(mask.shape)}")
    tokens, groups = mask.shape
    if groups == 0:
        raise ValueError("mask needs at least one group")
    if tokens >= 2**31:
        raise ValueError(f"{tokens=} must be below 2^31: token ids are int32")
    if expected_sparsity is not None and not 0.0 <= expected_sparsity <= 1.0:
        raise ValueError(f"{expected_sparsity=} must be in [0, 1]")
    if implementation is None:
        implementation = default_layout_implementation(tokens)
    order, count = _order(mask, implementation)
    k_order = None
    if k_axis and tokens > SMALL_TOKENS:
        k_order = order_k_axis(mask, count, implementation=implementation)
    return MaskLayout(mask, order, count, expected_sparsity, k_order)


def order_k_axis(
    mask: Bool[Array, "M groups"],
    count: Int32[Array, " groups"],
    *,
    size: int | None = None,
    implementation: LayoutImplementation | None = None,
) -> KOrder:
    """The K-axis part of a layout by itself, from its mask and count.

    `size`: groups of a super-group, up to 8; None: what suits the shape.

    Raises `ValueError` on more tokens than a row's entry can name, or a size out of range.
    """
    tokens, groups = mask.shape
    if size is None:
        size = k_axis_module.super_group_size(tokens, groups)
    if not 1 <= size <= k_axis_module.LARGEST:
        raise ValueError(f"{size=} must be in 1..{k_axis_module.LARGEST}")
    if tokens > k_axis_module.TOKENS:
        raise ValueError(f"{tokens=}: the K axis is ordered for up to {k_axis_module.TOKENS}")
    if implementation is None:
        implementation = default_layout_implementation(tokens)
    if implementation == "triton":
        from pallas_kernels.layout.k_axis_triton import make_k_order
    else:
        from pallas_kernels.layout.k_axis import make_k_order
    return make_k_order(mask, count, size)


def k_order_of(layout: MaskLayout) -> KOrder:
    """The layout's K order; made now where `mask_layout` was not asked for it."""
    return layout.k_order or order_k_axis(layout.mask, layout.count)


# The Triton kernels keep the counts of all blocks of 256 tokens in registers.
TRITON_TOKENS = 512 * 256


def default_layout_implementation(
    tokens: int, device: Device | None = None
) -> LayoutImplementation:
    """What `mask_layout` runs when none is named: see docs/kernels.md for the measurements."""
    runs = triton_support.runs_on(device or current_device())
    return "triton" if runs and tokens <= TRITON_TOKENS else "xla"


def _order(
    mask: Bool[Array, "M groups"], implementation: str
) -> tuple[Int32[Array, "groups M"], Int32[Array, " groups"]]:
    tokens, groups = mask.shape
    if tokens == 0:
        return jnp.zeros((groups, 0), jnp.int32), jnp.zeros((groups,), jnp.int32)
    match implementation:
        case "reference":
            from pallas_kernels.layout.reference import order_tokens
        case "xla":
            from pallas_kernels.layout.xla import order_tokens
        case "pallas":
            from pallas_kernels.layout.pallas import order_tokens
        case "triton":
            from pallas_kernels.layout.triton import order_tokens
        case _:
            raise ValueError(f"unknown {implementation=}; known: reference, xla, pallas, triton")
    return order_tokens(mask)
