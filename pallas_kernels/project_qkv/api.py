"""The public function of the three projections in front of attention."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._common.checks import check_bias, check_gemm
from pallas_kernels._common.config import Implementation, SmallConfig
from pallas_kernels._common.problem import Problem
from pallas_kernels._common.run import resolve
from pallas_kernels.gemm_mn import gemm_mn
from pallas_kernels.layout import MaskLayout

type Biases = tuple[Float[Array, " N"], Float[Array, " Nk"], Float[Array, " Nk"]]


def project_qkv(
    x: Float[Array, "M K"],
    w_q: Float[Array, "N K"],
    w_k: Float[Array, "Nk K"],
    w_v: Float[Array, "Nk K"],
    layout: MaskLayout,
    *,
    biases: Biases | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "M N"], Float[Array, "M Nk"], Float[Array, "M Nk"]]:
    """`gemm_mn(x, w_q, layout)`, `x w_k^T` and `x w_v^T`: keys and values are never skipped.

    Up to 64 tokens the three are one kernel, so that a decode step launches one instead of three;
    more tokens run as `gemm_mn` and XLA's products. Arguments, choices and errors are those of
    `gemm_mn`; with `biases`, of q, k and v, q's is added to active groups only.
    """
    b_q, b_k, b_v = (None, None, None) if biases is None else biases
    for name, w in (("w_k", w_k), ("w_v", w_v)):
        if w.shape != w_k.shape[:1] + x.shape[1:] or w.dtype != x.dtype:
            raise ValueError(
                f"project_qkv: {name} is {w.dtype}{list(w.shape)}, expected "
                f"{x.dtype}{[w_k.shape[0], x.shape[1]]}"
            )
    check_bias("project_qkv", b_k, x, w_k.shape[0])
    check_bias("project_qkv", b_v, x, w_v.shape[0])
    group_size = check_gemm("project_qkv", x, {"w_q": w_q}, layout, None)
    problem = Problem.of("gemm_mn", x, w_q, group_size, layout.expected_sparsity)
    chosen, config = resolve(problem, implementation, None)
    if chosen == "triton" and isinstance(config, SmallConfig) and x.shape[0] > 0:
        from pallas_kernels.project_qkv.triton import project_qkv as run

        return run(x, w_q, w_k, w_v, layout, (b_q, b_k, b_v), group_size, config)
    q = gemm_mn(x, w_q, layout, bias=b_q, implementation=chosen)
    return q, _whole(x, w_k, b_k, chosen), _whole(x, w_v, b_v, chosen)


def _whole(x, w, bias, implementation: Implementation):
    """Every channel: float32 sums for the specification, else XLA's product."""
    if implementation == "reference":
        wide = {"precision": "highest", "preferred_element_type": jnp.float32}
        y = jnp.einsum("mk,nk->mn", x, w, **wide)
        y = y if bias is None else y + bias.astype(jnp.float32)
        return y.astype(x.dtype)
    y = jnp.einsum("mk,nk->mn", x, w, precision="highest" if x.dtype == jnp.float32 else None)
    return y if bias is None else y + bias
