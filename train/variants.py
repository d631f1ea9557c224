"""Baselines and single-module routing as settings of the same model: which router weights exist.

All keep the format of routers on disk, so a variant is saved, loaded and evaluated like any other.
"""

import jax.numpy as jnp

from train.run_config import Method
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.model import WideForCausalLM
from wide_jax.router import Router
from wide_jax.routing import MODULES, Module

ALWAYS = 1e4  # an execute logit that no noise (at most 88 in float32) can turn


def wide_config(
    config: ModelConfig,
    method: Method,
    *,
    attn_group_size: int | None,
    ffn_group_size: int,
    router_rank: int,
) -> WideConfig:
    """Group sizes of a method: `depth` and `layer` have one group a module, whatever the sizes."""
    if method == "layer":
        return WideConfig.layer_skipping(config, router_rank=router_rank)
    if method == "depth":
        return WideConfig.depth_routing(config, router_rank=router_rank)
    return WideConfig.for_model(
        config,
        attn_group_size=attn_group_size,
        ffn_group_size=ffn_group_size,
        router_rank=router_rank,
    )


def prepare_routers(model: WideForCausalLM, method: Method, routed: tuple[Module, ...]) -> None:
    """Set the router weights that training will leave alone, in place.

    A module that is not routed, and under `layer` the FFN's unasked router, always executes. A
    `static` router's compressor puts out ones for every token, so what is trained after it sees no
    token. Its biases alone would move by the learning rate an update, too little in a short run to
    be heard over the noise that masks are sampled with; r inputs of one move the logits r times as
    far.
    """
    for layer in model.model.layers:
        for module in MODULES:
            router = getattr(layer, f"router_{module}")
            if module not in routed or (method == "layer" and module == "ffn"):
                _zero(router)
                bias = router.router.bias
                bias[...] = bias[...].at[::2].set(ALWAYS)  # class 0 of every group: execute
            elif method == "static":
                _zero(router)
                ones = jnp.ones_like(router.compressor.bias[...])
                router.compressor.bias[...] = ones


def is_trained(name: str, method: Method, routed: tuple[Module, ...]) -> bool:
    """Whether a router parameter of this Hugging Face name is trained. True for other parameters.

    Of a static router the part that sees no token.
    """
    for module in MODULES:
        if f".router_{module}." in name:
            if method == "layer" and module == "ffn":
                return False  # never asked
            return module in routed and (method != "static" or ".compressor." not in name)
    return True


def _zero(router: Router) -> None:
    for part in (router.compressor, router.router):
        part.weight[...] = jnp.zeros_like(part.weight[...])
        part.bias[...] = jnp.zeros_like(part.bias[...])
