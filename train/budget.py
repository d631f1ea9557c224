"""The budget term: how far the skipped fraction is from its target.

Rates come from `wide_jax.accounting`, which is differentiable: with training's float masks (0.0 or
1.0, straight-through gradient) they carry the gradient that moves the routers.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from train.config import Budget, TrainConfig
from train.hyperparameters import Targets
from wide_jax.accounting import Fractions, Usage, fractions, usage
from wide_jax.config import ModelConfig
from wide_jax.routing import MODULES, Masks, Module


def visible_keys(config: TrainConfig) -> float:
    """Keys that a token is taken to see, itself included, when skips are priced.

    At context length C: a token of a prefill sees (C + 1) / 2 on average (`flops` and the
    unpriced budgets), a decode step at the end of the context C (`bytes`).
    """
    context = config.budget_context or config.sequence_length
    return float(context) if config.budget == "bytes" else (context + 1) / 2


def masks_usage(
    masks: Masks | None, real: Bool[Array, "B T"], model: ModelConfig, config: TrainConfig
) -> Usage:
    """Sums of what masks skip over the real tokens, every token seeing `visible_keys`.

    Raises:
        ValueError: there are no masks (the forward pass asked no router).
    """
    if masks is None:
        raise ValueError("the forward pass made no masks: route with Argmax or GumbelSoftmax")
    return usage(masks, real, jnp.full(real.shape, visible_keys(config), jnp.float32), model)


def budget_term(
    used: Usage,
    model: ModelConfig,
    budget: Budget,
    targets: Targets,
    *,
    element_bytes: int,
    routed: tuple[Module, ...] = MODULES,
) -> Float[Array, ""]:
    """The term of one micro-batch, before `alpha`; 0 (no gradient) where no token is real.

    | budget     | term                                              |
    |------------|---------------------------------------------------|
    | `paper`    | abs(S - mean of the routed modules' skip rates)   |
    | `separate` | mean over routed modules of abs(S_m - rate_m)     |
    | `flops`    | abs(S - saved / routable FLOPs)                   |
    | `bytes`    | abs(S - saved / routable bytes of a decode step)  |

    Args:
        used: sums over all real tokens of the micro-batch, on all devices together.
        model: the architecture.
        budget: what is compared.
        targets: with what.
        element_bytes: size of a weight and of a cached key or value element.
        routed: modules that have a router; the others never skip and count in no mean.
    """
    rates = fractions(used, model, weight_bytes=element_bytes, kv_bytes=element_bytes)
    match budget:
        case "flops":
            gaps = [targets.sparsity - jnp.asarray(rates.flops)]
        case "bytes":
            gaps = [targets.sparsity - jnp.asarray(rates.bytes)]
        case "paper":
            gaps = [targets.sparsity - jnp.mean(jnp.stack([_rate(rates, m) for m in routed]))]
        case "separate":
            gaps = [targets.modules[m] - _rate(rates, m) for m in routed]
    term = jnp.mean(jnp.abs(jnp.stack(gaps)))
    return jnp.where(used.tokens > 0, term, 0.0)


def _rate(rates: Fractions, module: Module) -> Float[Array, ""]:
    return jnp.asarray(rates.attention if module == "attention" else rates.ffn)
