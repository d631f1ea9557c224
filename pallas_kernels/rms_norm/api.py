"""The public function of the norm."""

from typing import Literal

from jaxtyping import Array, Float

from pallas_kernels._common import triton_support
from pallas_kernels._common.checks import DTYPES

NormImplementation = Literal["reference", "triton"]


def rms_norm(
    x: Float[Array, "M D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    implementation: NormImplementation | None = None,
) -> Float[Array, "M D"]:
    """`weight * x / sqrt(mean(x^2) + eps)` row by row (arXiv 1910.07467), float32 inside.

    The quotient is rounded to x's dtype before the weight multiplies it, as Hugging Face does.
    With a router beside it, `norm_route` does both in one pass.

    Args:
        x: M tokens of the residual stream, bfloat16, float16 or float32.
        weight: of x's dtype.
        eps: added to the mean square.
        implementation: `reference` (jnp) or `triton`: runs or raises. None: `triton` on a CUDA
            device that can, else `reference`.

    Raises:
        ValueError: shapes or dtypes that do not fit together, with the numbers.
        NotImplementedError: the named implementation cannot run here; or the result of the kernel
            is being differentiated.
    """
    if x.ndim != 2 or x.dtype.name not in DTYPES:
        raise ValueError(
            f"rms_norm: x must be [M, D] of {', '.join(DTYPES)}, got {x.dtype}{list(x.shape)}"
        )
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: weight is {weight.dtype}{list(weight.shape)}, "
            f"expected {x.dtype}[{x.shape[1]}]"
        )
    match implementation or ("triton" if triton_support.runs_here() else "reference"):
        case "reference":
            from pallas_kernels.rms_norm.reference import rms_norm as run
        case "triton":
            from pallas_kernels.rms_norm.triton import rms_norm as run
        case _:
            raise ValueError(f"unknown {implementation=}; known: reference, triton")
    return run(x, weight, eps)
