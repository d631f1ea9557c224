"""The public function of the three projections in front of attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._common.checks import check_bias, check_gemm
from pallas_kernels._common.config import Implementation, SmallConfig
from pallas_kernels._common.problem import Problem
from pallas_kernels._common.run import resolve
from pallas_kernels.gemm_mn import gemm_mn
from pallas_kernels.layout import MaskLayout

type KVBiases = tuple[Float[Array, " Nk"], Float[Array, " Nk"]]
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

    Up to 64 tokens the three are one kernel, so that a decode step launches one instead of three,
    where `gemm_mn`'s config gives a program all of K; else, and of more tokens, they run as
    `gemm_mn` and XLA's products. Arguments, choices and errors are those of
    `gemm_mn`; with `biases`, of q, k and v, q's is added to active groups only.
    """
    b_q, kv_biases = (None, None) if biases is None else (biases[0], biases[1:])
    check_keys_values("project_qkv", x, w_k, w_v, kv_biases)
    group_size = check_gemm("project_qkv", x, {"w_q": w_q}, layout, None)
    problem = Problem.of("gemm_mn", x, w_q, group_size, layout.expected_sparsity)
    chosen, config = resolve(problem, implementation, None)
    whole = isinstance(config, SmallConfig) and config.splits == 1
    if chosen == "triton" and whole and x.shape[0] > 0:
        from pallas_kernels.project_qkv.triton import project_qkv as run

        return run(x, w_q, w_k, w_v, layout, biases, group_size, config)
    q = gemm_mn(x, w_q, layout, bias=b_q, implementation=chosen)
    return q, *keys_values(x, w_k, w_v, kv_biases, chosen)


def check_keys_values(
    op: str, x: jax.Array, w_k: jax.Array, w_v: jax.Array, biases: KVBiases | None
) -> None:
    """Raise `ValueError` on weights or biases of keys and values that do not fit x."""
    for name, w in (("w_k", w_k), ("w_v", w_v)):
        if w.shape != w_k.shape[:1] + x.shape[1:] or w.dtype != x.dtype:
            raise ValueError(
                f"{op}: {name} is {w.dtype}{list(w.shape)}, expected "
                f"{x.dtype}{[w_k.shape[0], x.shape[1]]}"
            )
    for bias in biases or ():
        check_bias(op, bias, x, w_k.shape[0])


def keys_values(
    x: Float[Array, "M K"],
    w_k: Float[Array, "Nk K"],
    w_v: Float[Array, "Nk K"],
    biases: KVBiases | None,
    implementation: Implementation,
) -> tuple[Float[Array, "M Nk"], Float[Array, "M Nk"]]:
    """`x w_k^T` and `x w_v^T`: float32 sums for the specification, else XLA's products."""
    b_k, b_v = (None, None) if biases is None else biases
    for_k, for_v = unmerged(x, 2)
    return _whole(for_k, w_k, b_k, implementation), _whole(for_v, w_v, b_v, implementation)


def unmerged(x: Float[Array, "M K"], count: int) -> list[Float[Array, "M K"]]:
    """`x` under several names, for products that shall stay as many.

    XLA merges small products of one x, and for that copies their weights together in every call:
    28 us of 670 a layer of Llama-3.1-8B's queries, keys and values, at 1,024 tokens on an H200.
    """
    return jax.lax.optimization_barrier([x] * count)


def _whole(x, w, bias, implementation: Implementation):
    """Every channel of a product."""
    if implementation == "reference":
        wide = {"precision": "highest", "preferred_element_type": jnp.float32}
        y = jnp.einsum("mk,nk->mn", x, w, **wide)
        y = y if bias is None else y + bias.astype(jnp.float32)
        return y.astype(x.dtype)
    y = jnp.einsum("mk,nk->mn", x, w, precision="highest" if x.dtype == jnp.float32 else None)
    return y if bias is None else y + bias
