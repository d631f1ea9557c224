"""The public function of the routing step that projects keys and values as well."""

from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._common import triton_support
from pallas_kernels.norm_route.api import RouteImplementation, RouterWeights, check_norm_route
from pallas_kernels.project_qkv.api import KVBiases, check_keys_values


def route_kv(
    x: Float[Array, "1 D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    w_k: Float[Array, "Nk D"],
    w_v: Float[Array, "Nk D"],
    counter: Int32[Array, " C"],
    *,
    eps: float,
    threshold: float = 0.0,
    biases: KVBiases | None = None,
    implementation: RouteImplementation | None = None,
) -> tuple[
    Float[Array, "1 D"],
    Bool[Array, "1 groups"],
    Float[Array, "1 Nk"],
    Float[Array, "1 Nk"],
    Int32[Array, " C"],
]:
    """`norm_route_step` and the keys and values of what it norms, for one token.

    No decision bears on keys and values, so one kernel reads their weights while its router
    waits for memory; queries follow by `gemm_mn`, under the mask. One token only: each program
    norms for itself all that it multiplies, 8 KB beside its 16 KB of weights where D is 4096, and
    16 tokens would be 128 KB. More tokens take `norm_route_step` and `project_qkv`.

    Args:
        x: one token of the residual stream, bfloat16, float16 or float32.
        norm_weight: of x's dtype.
        weights: the router's, float32.
        w_k, w_v: of x's dtype, in Hugging Face's `[out, in]` layout.
        counter: as for `norm_route_step`: 0 before and after.
        eps: of the norm.
        threshold: how far the execute logit must lie above the skip logit.
        biases: of keys and values.
        implementation: `reference` (jnp) or `triton`: runs or raises. None: `triton` on a CUDA
            device that can, else `reference`.

    Returns:
        normed, mask, keys, values, and the counter for the next call.

    Raises:
        ValueError: shapes or dtypes that do not fit together, with the numbers; not one token.
        NotImplementedError: the named implementation cannot run here; or the result of the kernel
            is being differentiated, or batched by `jax.vmap`.
    """
    check_norm_route("route_kv", x, norm_weight, weights, counter)
    if x.shape[0] != 1:
        raise ValueError(
            f"route_kv: one token, got {x.shape[0]}: more take norm_route_step and project_qkv"
        )
    check_keys_values("route_kv", x, w_k, w_v, biases)
    match implementation or ("triton" if triton_support.runs_here() else "reference"):
        case "reference":
            from pallas_kernels.route_kv.reference import route_kv as run
        case "triton":
            from pallas_kernels.route_kv.triton import route_kv as run

            return run(x, norm_weight, weights, w_k, w_v, counter, biases, eps, threshold)
        case _:
            raise ValueError(f"unknown {implementation=}; known: reference, triton")
    return *run(x, norm_weight, weights, w_k, w_v, biases, eps, threshold), counter
