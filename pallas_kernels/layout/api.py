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
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels._common.device import current_device

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
    """

    mask: Bool[Array, "M groups"]
    order: Int32[Array, "groups M"]
    count: Int32[Array, " groups"]
    expected_sparsity: float | None = None

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
        children = [(key(name), getattr(self, name)) for name in ("mask", "order", "count")]
        return children, self.expected_sparsity

    @classmethod
    def tree_unflatten(cls, expected_sparsity, children):
        # Past `__init__`: JAX also unflattens with leaves that are not arrays.
        self = object.__new__(cls)
        names = ("mask", "order", "count", "expected_sparsity")
        for name, value in zip(names, (*children, expected_sparsity), strict=True):
            object.__setattr__(self, name, value)
        return self


def mask_layout(
    mask: Bool[Array, "M groups"],
    *,
    expected_sparsity: float | None = None,
    implementation: LayoutImplementation | None = None,
) -> MaskLayout:
    """Order the tokens of every group: active first, stable. Linear, deterministic, no host sync.

    Args:
        mask: `[M, groups]` bool, True = active. Tokens of a batch are flattened into M.
        expected_sparsity: static hint in [0, 1] for the ops that will use the layout.
        implementation: one of `reference` (stable argsort), `xla` (prefix sums and a scatter),
            `pallas`, `triton`; it runs or raises. None: the fastest for this device.

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
    order, count = _order(mask, implementation or default_layout_implementation(tokens))
    return MaskLayout(mask, order, count, expected_sparsity)


# The Triton kernels keep the counts of all blocks of 256 tokens in registers.
TRITON_TOKENS = 512 * 256


def default_layout_implementation(tokens: int) -> LayoutImplementation:
    """What `mask_layout` runs when none is named: see docs/kernels.md for the measurements."""
    from pallas_kernels._common import triton_support

    capability = current_device().capability
    if capability is None or float(capability) < 8.0 or not triton_support.available():
        return "xla"
    return "triton" if tokens <= TRITON_TOKENS else "xla"


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
