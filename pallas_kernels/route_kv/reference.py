"""The specification of `route_kv`, and its CPU path: the two operations it stands for."""

from jaxtyping import Array, Bool, Float

from pallas_kernels.norm_route.api import RouterWeights
from pallas_kernels.norm_route.reference import norm_route
from pallas_kernels.project_qkv.api import KVBiases, keys_values


def route_kv(
    x: Float[Array, "1 D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    w_k: Float[Array, "Nk D"],
    w_v: Float[Array, "Nk D"],
    biases: KVBiases | None,
    eps: float,
    threshold: float,
) -> tuple[
    Float[Array, "1 D"], Bool[Array, "1 groups"], Float[Array, "1 Nk"], Float[Array, "1 Nk"]
]:
    """See `pallas_kernels.route_kv`."""
    normed, mask = norm_route(x, norm_weight, weights, eps, threshold)
    return normed, mask, *keys_values(normed, w_k, w_v, biases, "reference")
