"""From a resolved implementation and config of a product to its call."""

from jaxtyping import Array, Float

from pallas_kernels._common.config import Config, Implementation, TileConfig
from pallas_kernels._common.device import current_device
from pallas_kernels._common.output_pruned import refusal
from pallas_kernels._common.problem import Problem
from pallas_kernels.dispatch import resolve as resolve
from pallas_kernels.layout import MaskLayout


def run_kernel(
    problem: Problem,
    implementation: Implementation,
    x: Float[Array, "M K"],
    weights: tuple[Float[Array, "N K"], ...],
    bias: Float[Array, " N"] | None,
    layout: MaskLayout,
    config: Config,
) -> Float[Array, "M N"]:
    """Run the `pallas` or `triton` kernel; raise `NotImplementedError` where it cannot run."""
    from pallas_kernels._common import pallas_support, triton_support

    capability = current_device().capability
    if implementation == "triton":
        triton_support.require_device(problem.op, capability)
        if (why := refusal(config, problem, capability or "9.0")) is not None:
            raise NotImplementedError(f"{problem.op}: {why}")
        from pallas_kernels._common.triton_gemm import pruned_gemm

        return pruned_gemm(x, weights, bias, layout, problem.group, config)
    pallas_support.require_device(problem.op, capability)
    from pallas_kernels._common.pallas_tile import tile_gemm

    if not isinstance(config, TileConfig):
        raise NotImplementedError(
            f"{problem.op}: pallas has no form for {config}; use a TileConfig"
        )
    return tile_gemm(x, weights, bias, layout, problem.group, config)
