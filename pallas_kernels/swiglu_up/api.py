"""The public function of the fused gate and up projection."""

from jaxtyping import Array, Float

from pallas_kernels._common.checks import check_gemm, empty_result
from pallas_kernels._common.config import Config, Implementation
from pallas_kernels._common.problem import Problem
from pallas_kernels._common.run import resolve, run_kernel
from pallas_kernels.layout import MaskLayout


def swiglu_up(
    x: Float[Array, "M D"],
    w_gate: Float[Array, "F D"],
    w_up: Float[Array, "F D"],
    layout: MaskLayout,
    *,
    group_size: int | None = None,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "M F"]:
    """`h = silu(x w_gate^T) * (x w_up^T)` on active groups of F, exact zeros elsewhere.

    Both products, silu(z) = z / (1 + exp(-z)) and their product are float32; only h is rounded to
    x's dtype. Group g is channels g G .. g G + G - 1 of F. Weights are in Hugging Face's
    `[out, in]` layout. Arguments and errors as in `pallas_kernels.gemm_mn`.
    """
    weights = {"w_gate": w_gate, "w_up": w_up}
    group_size = check_gemm("swiglu_up", x, weights, layout, group_size)
    if x.shape[0] == 0:
        return empty_result(x, w_gate.shape[0])
    problem = Problem.of("swiglu_up", x, w_gate, group_size, layout.expected_sparsity)
    chosen, config = resolve(problem, implementation, config)
    if config is not None:
        return run_kernel(problem, chosen, x, (w_gate, w_up), None, layout, config)
    if chosen == "dense":
        from pallas_kernels.swiglu_up.dense import swiglu_up as run
    else:
        from pallas_kernels.swiglu_up.reference import swiglu_up as run
    return run(x, w_gate, w_up, layout.mask, group_size)
