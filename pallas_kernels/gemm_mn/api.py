"""The public function of the output-pruned product."""

from jaxtyping import Array, Float

from pallas_kernels._common.checks import check_bias, check_gemm, empty_result
from pallas_kernels._common.config import Config, Implementation
from pallas_kernels._common.problem import Problem
from pallas_kernels._common.run import resolve, run_kernel
from pallas_kernels.layout import MaskLayout


def gemm_mn(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"],
    layout: MaskLayout,
    *,
    bias: Float[Array, " N"] | None = None,
    group_size: int | None = None,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "M N"]:
    """`y[m, n] = mask[m, n // G] ? sum_k x[m, k] w[n, k] + bias[n] : 0`, accumulated in float32.

    The query projection: output group g is rows g G .. g G + G - 1 of w, in Hugging Face's
    `[out, in]` layout. One group is token (M-axis) pruning. Skipped outputs are exact zeros,
    whatever x and w hold there.

    Args:
        x: M tokens, bfloat16, float16 or float32.
        w: weight of x's dtype, never transposed or permuted.
        layout: `mask_layout(mask[M, groups])`, shared by all ops of one routing decision. Its
            `expected_sparsity` steers the choice of implementation.
        bias: added to active groups only.
        group_size: G. Without it `groups` must divide N; with it the last group may be shorter.
        implementation: `reference`, `dense` (XLA's product, then zeros), `pallas`, `triton`: runs
            or raises. None: what the table of this device says (`pallas_kernels.explain`).
        config: tile sizes for a named kernel, in place of the table's.

    Raises:
        ValueError: shapes, dtypes or names that do not fit, with the numbers.
        NotImplementedError: the named implementation cannot run here; or the result of a kernel
            is being differentiated.
    """
    group_size = check_gemm("gemm_mn", x, {"w": w}, layout, group_size)
    check_bias("gemm_mn", bias, x, w.shape[0])
    if x.shape[0] == 0:
        return empty_result(x, w.shape[0])
    problem = Problem.of("gemm_mn", x, w, group_size, layout.expected_sparsity)
    chosen, config = resolve(problem, implementation, config)
    if config is not None:
        return run_kernel(problem, chosen, x, (w,), bias, layout, config)
    if chosen == "dense":
        from pallas_kernels.gemm_mn.dense import gemm_mn as run
    else:
        from pallas_kernels.gemm_mn.reference import gemm_mn as run
    return run(x, w, layout.mask, bias, group_size)
