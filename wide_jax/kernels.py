"""Which kernels a model's inference runs on: the choice, and what it means op by op.

A model whose `kernels` is None runs plain JAX: every product whole, then the mask. That is the
specification, what training differentiates, and what a CPU runs. With a `Kernels` attached
(`use_kernels`), forward passes that do not sample go through `pallas_kernels` (`wide_jax.pruned`).
"""

import dataclasses
from typing import Any

import jax

from pallas_kernels._attention.config import AttentionImplementation
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layout.api import LayoutImplementation
from pallas_kernels.norm_route.api import RouteImplementation
from pallas_kernels.rms_norm.api import NormImplementation
from pallas_kernels.rope_cache.api import RopeImplementation


@dataclasses.dataclass(frozen=True)
class SparsityHints:
    """Fractions of (token, group) pairs that the masks are expected to skip; None: not known."""

    attention: float | None = None
    ffn: float | None = None

    def __post_init__(self) -> None:
        for name in ("attention", "ffn"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"sparsity hint {name}={value} must be in [0, 1]")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Static settings of the kernel path. A named implementation runs or raises.

    None asks each op's table for this device, which may say *dense*. The hints steer the tables
    and never the results; without one the tables assume one half.

    Raises:
        ValueError: `attention_decode` and `attention_step` are both named.
    """

    hints: SparsityHints = SparsityHints()
    norm_route: RouteImplementation | None = None
    # A step of one token: the decision of attention with its keys and values. None leaves them to
    # `norm_route` and `gemm_mn` where one of these is named.
    route_kv: RouteImplementation | None = None
    rms_norm: NormImplementation | None = None  # of sublayers that ask no router
    mask_layout: LayoutImplementation | None = None
    rope_cache: RopeImplementation | None = None
    gemm_mn: Implementation | None = None
    swiglu_up: Implementation | None = None
    gemm_k: Implementation | None = None
    attention_prefill: AttentionImplementation | None = None
    attention_decode: AttentionImplementation | None = None
    # A decode step: rotation, cache and attention in one. None leaves them to `rope_cache` and
    # `attention_decode` where one of these is named, or the cache has another dtype than its keys.
    attention_step: AttentionImplementation | None = None

    def __post_init__(self) -> None:
        if self.attention_decode is not None and self.attention_step is not None:
            raise ValueError(
                f"attention_decode={self.attention_decode!r} and attention_step="
                f"{self.attention_step!r} are both named, and a decode step runs one of them: "
                "leave the other at None"
            )

    @property
    def routes_with_kv(self) -> bool:
        """Whether a step of one token takes `route_kv`."""
        return self.route_kv is not None or (self.norm_route is None and self.gemm_mn is None)

    @property
    def attends_in_a_step(self) -> bool:
        """Whether a decode step takes `attention_step`."""
        apart = self.rope_cache is not None or self.attention_decode is not None
        return self.attention_step is not None or not apart

    @property
    def plain_products(self) -> bool:
        """Whether every product is named as XLA's: a dense step then needs no layout at all."""
        return {self.gemm_mn, self.swiglu_up, self.gemm_k} == {"dense"}


@jax.custom_jvp
def without_gradient(arrays: Any) -> Any:
    """The same arrays, for a computation that has no gradient: differentiating by them raises.

    Raises:
        NotImplementedError: what to do instead, when a derivative is taken.
    """
    return arrays


@without_gradient.defjvp
def _no_derivative(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "this model infers on kernels, which have no gradients: to train it, load it with "
        "kernels=None, or take it off them with wide_jax.engine.use_kernels(model, None)"
    )
