"""The public function of the input-pruned product."""

import jax
from jaxtyping import Array, Float

from pallas_kernels._common import triton_support
from pallas_kernels._common.checks import check_bias, check_input_groups, empty_result
from pallas_kernels._common.config import Config, Implementation, KTileConfig, SmallConfig
from pallas_kernels._common.device import current_device
from pallas_kernels._common.run import resolve
from pallas_kernels.dispatch import Problem
from pallas_kernels.gemm_k.facts import runs
from pallas_kernels.layout import MaskLayout
from pallas_kernels.layout.api import k_order_of


def gemm_k(
    h: Float[Array, "M K"],
    w: Float[Array, "N K"],
    layout: MaskLayout,
    *,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "M N"] | None = None,
    group_size: int | None = None,
    inputs_zeroed: bool = False,
    deterministic: bool = True,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "M N"]:
    """`y[m, n] = sum over k with mask[m, k // G] of h[m, k] w[n, k] + bias[n] + residual[m, n]`.

    The output and down projections: input group g is columns g G .. g G + G - 1 of h and w; w is
    in Hugging Face's `[out, in]` layout. Sums are float32 and include bias and residual (`dense`
    rounds to h's dtype before and after each), added once whatever the mask; a token that skips
    every group gets just those. What h holds in skipped (token, group) pairs, NaN included, does
    not matter. Weights must be finite.

    Args:
        h: M tokens, bfloat16, float16 or float32.
        w: weight of h's dtype, never transposed or permuted.
        layout: `mask_layout(mask[M, groups], k_axis=True)`. Without `k_axis` the ordering that
            the kernels need is made inside this call.
        bias: of h's dtype.
        residual: of h's dtype; kernels add it where they write the result.
        group_size: G. Without it `groups` must divide K; with it the last group may be shorter.
        inputs_zeroed: static promise that h is exactly 0 in every skipped pair, as `swiglu_up`
            and the routed attention leave it. `dense` then reads h as it is; without the promise
            it has to clear h first. No other implementation needs it.
        deterministic: bit-identical results over reruns, and no atomics. Every implementation
            here is, so both values run the same: no faster kernel kept the error bound.
        implementation: `reference`, `dense` (XLA's product), `pallas`, `triton`: runs or raises.
            None: what the table of this device says (`pallas_kernels.explain`).
        config: tile sizes for a named kernel, in place of the table's.

    Raises:
        ValueError: shapes, dtypes or names that do not fit, with the numbers.
        NotImplementedError: the named implementation cannot run here; or the result of a kernel
            is being differentiated.
    """
    group_size = check_input_groups("gemm_k", h, w, layout, group_size)
    check_bias("gemm_k", bias, h, w.shape[0])
    _check_residual(residual, h, w.shape[0])
    if h.shape[0] == 0:
        return empty_result(h, w.shape[0])
    problem = Problem.of("gemm_k", h, w, group_size, layout.expected_sparsity)
    chosen, config = resolve(problem, implementation, config)
    if config is not None:
        capability = current_device().capability
        if chosen == "pallas":
            from pallas_kernels._common import pallas_support

            pallas_support.require_device("gemm_k", capability)
            from pallas_kernels.gemm_k.pallas import gemm_k as run_pallas

            if not isinstance(config, KTileConfig):
                raise NotImplementedError(f"gemm_k: pallas has no form for {config}")
            return run_pallas(h, w, k_order_of(layout), bias, residual, group_size, config)
        triton_support.require_device("gemm_k", capability)
        from pallas_kernels.gemm_k.triton import gemm_k as run_kernel

        capability = capability or "9.0"  # an interpreter: it refuses by itself
        fitting = isinstance(config, KTileConfig | SmallConfig)
        if not fitting or not runs(config, problem, capability):
            raise ValueError(f"gemm_k: {config=} cannot run {problem} on capability {capability}")
        return run_kernel(h, w, layout, bias, residual, group_size, config)
    if chosen == "dense":
        from pallas_kernels.gemm_k.dense import gemm_k as run

        mask = None if inputs_zeroed else layout.mask
        return run(h, w, mask, bias, residual, group_size)
    from pallas_kernels.gemm_k.reference import gemm_k as run

    return run(h, w, layout.mask, bias, residual, group_size)


def _check_residual(residual: jax.Array | None, h: jax.Array, n: int) -> None:
    if residual is not None and (residual.shape != (h.shape[0], n) or residual.dtype != h.dtype):
        raise ValueError(
            f"gemm_k: residual is {residual.dtype}{list(residual.shape)}, expected "
            f"{h.dtype}[{h.shape[0]}, {n}]"
        )
