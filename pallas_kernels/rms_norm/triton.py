"""`rms_norm` in Triton: a program a token, its row in registers, read once and written once."""

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float

from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels._common.forms import next_power_of_two
from pallas_kernels._common.jit import jit
from pallas_kernels._common.rms import rms_normed, rms_scale


@jit
def norm_kernel(
    x,  # [M, D]
    weight,  # [D]
    out,  # [M, D]
    D: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D rounded up to a power of two
):
    """One token."""
    d = tl.arange(0, BLOCK_D)
    ok = d < D
    row = tl.program_id(0).to(tl.int64) * D
    a = tl.load(x + row + d, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=ok, other=0.0)
    scale = rms_scale(tl.sum(a * a, axis=0), D, EPS)
    result = rms_normed(a, scale, w, x.dtype.element_ty)
    tl.store(out + row + d, result, mask=ok)


def rms_norm(x: Float[Array, "M D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "M D"]:
    """See `pallas_kernels.rms_norm`."""
    triton_support.require_device("rms_norm", current_device().capability)
    m, hidden = x.shape
    if m == 0:
        return x
    (out,) = triton_support.launch(
        norm_kernel,
        [x, weight],
        [],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=m,
        constants=dict(D=hidden, EPS=eps, BLOCK_D=triton.next_power_of_2(hidden)),
        num_warps=num_warps(hidden),
        num_stages=1,
    )
    return out


def num_warps(hidden: int) -> int:
    """So that a thread holds 16 numbers or so."""
    return min(16, max(1, next_power_of_two(hidden) // 512))
