"""The router: two linear maps from the residual stream to execute / skip logits per group."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from wide_jax.params import RouterParam
from wide_jax.partition import constrain
from wide_jax.routing import (
    AllOn,
    Argmax,
    Forced,
    GroupMask,
    GumbelSoftmax,
    Module,
    Routing,
    execute_margin,
    sample_mask,
)
from wide_jax.split_product import split_product


class RouterLinear(nnx.Module):
    """A linear map in float32 at highest precision: TF32 would flip decisions near ties.

    A bfloat16 input is multiplied part by part (`wide_jax.split_product`), to the same precision.
    """

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs):
        bound = (3.0 / in_features) ** 0.5  # `lecun_uniform`, with fan_in the second axis here
        self.weight = RouterParam(
            jax.random.uniform(
                rngs.params(), (out_features, in_features), jnp.float32, -bound, bound
            )
        )
        self.bias = RouterParam(jnp.zeros((out_features,), jnp.float32))

    def __call__(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        weight = self.weight[...]
        if x.dtype == jnp.bfloat16:
            y = split_product(x, weight)
        else:
            y = jnp.einsum("...k,nk->...n", x, weight, precision=jax.lax.Precision.HIGHEST)
        return y + self.bias[...]


class Router(nnx.Module):
    """`D -> R -> 2 * groups` with nothing between the maps; class 0 = execute, class 1 = skip."""

    def __init__(
        self,
        hidden_size: int,
        rank: int,
        groups: int,
        *,
        threshold: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.groups = groups
        self.threshold = threshold  # on execute minus skip logit, at inference
        self.compressor = RouterLinear(hidden_size, rank, rngs=rngs)
        self.router = RouterLinear(rank, 2 * groups, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], *, training: bool = False
    ) -> Float[Array, "B T groups 2"]:
        """Logits. In training a bfloat16 `x` is taken as it is, which saves its float32 copies."""
        logits = self.router(self.compressor(x if training else x.astype(jnp.float32)))
        return logits.reshape(*logits.shape[:-1], self.groups, 2)


def decide(
    router: Router | None,
    x: Float[Array, "B T D"],
    routing: Routing,
    *,
    layer: int,
    module: Module,
) -> tuple[GroupMask | None, Bool[Array, "B T groups"] | None]:
    """The mask of one sublayer (None: everything runs), and what argmax would have chosen.

    `x` is the residual stream that enters the sublayer, before its norm. The second value is None
    where no router was asked.

    Raises:
        ValueError: `routing` needs a router and the model has none.
    """
    match routing:
        case AllOn():
            return None, None
        case Forced(masks, ask_routers=False):
            return getattr(masks, module)[layer], None
    router = required(router, routing)
    logits = router(x, training=isinstance(routing, GumbelSoftmax))
    argmax = constrain(execute_margin(logits) >= router.threshold, "mask_BTG")
    match routing:
        case Forced(masks):
            return getattr(masks, module)[layer], argmax
        case Argmax():
            return argmax, argmax
        case GumbelSoftmax():
            return constrain(sample_mask(logits, routing, layer, module), "mask_BTG"), argmax


def required(router: Router | None, routing: Routing) -> Router:
    """The router that `routing` asks. Raises ValueError where the model has none."""
    if router is None:
        raise ValueError(
            f"{type(routing).__name__} routing needs routers and this model has none: "
            "build it with a WideConfig, or use AllOn"
        )
    return router
