"""The RMS norm inside Triton kernels, rounded as `pallas_kernels.rms_norm`'s reference rounds."""

import triton.language as tl

from pallas_kernels._common.jit import jit


@jit
def rms_scale(squares, D: tl.constexpr, EPS: tl.constexpr):
    """1 / RMS of D values, from the sum of their squares."""
    return 1.0 / tl.sqrt_rn(squares / D + EPS)


@jit
def rms_normed(x, scale, weight, DTYPE: tl.constexpr):
    """`weight * (x * scale)` in DTYPE, rounded to it in between as well."""
    unit = (x.to(tl.float32) * scale).to(DTYPE)
    return (weight.to(tl.float32) * unit.to(tl.float32)).to(DTYPE)
