"""Which kernels a model's inference runs on: the choice, and what it means op by op.

A model whose `kernels` is None runs plain JAX: every product whole, then the mask. That is the
specification, what training differentiates, and what a CPU runs. With a `Kernels` attached
(`use_kernels`), forward passes that do not sample go through `pallas_kernels` (`wide_jax.pruned`).
"""

import dataclasses

from pallas_kernels._attention.config import AttentionImplementation
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layout.api import LayoutImplementation
from pallas_kernels.norm_route.api import RouteImplementation
from pallas_kernels.rope_cache.api import RopeImplementation


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Static settings of the kernel path. A named implementation runs or raises.

    None asks each op's table for this device, which may say *dense*. The hints are the fractions
    of (token, group) pairs that the masks are expected to skip; they steer the tables and never
    the results (None: the tables assume one half).
    """

    attention_sparsity: float | None = None
    ffn_sparsity: float | None = None
    norm_route: RouteImplementation | None = None
    mask_layout: LayoutImplementation | None = None
    rope_cache: RopeImplementation | None = None
    gemm_mn: Implementation | None = None
    swiglu_up: Implementation | None = None
    gemm_k: Implementation | None = None
    attention_prefill: AttentionImplementation | None = None
    attention_decode: AttentionImplementation | None = None

    def __post_init__(self) -> None:
        for name in ("attention_sparsity", "ffn_sparsity"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={value} must be in [0, 1]")
