"""Putting a model's inference on kernels, and saying what will run: `use_kernels`, `plan`."""

import dataclasses
from typing import Literal

from flax import nnx

from pallas_kernels import explain
from pallas_kernels._common import triton_support
from pallas_kernels._common.device import Device, current_device
from pallas_kernels.layout.api import default_layout_implementation
from wide_jax import pruned
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.kernels import Kernels, SparsityHints
from wide_jax.model import WideForCausalLM
from wide_jax.params import LoRAParam
from wide_jax.structure import Structure, split


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """What an automatic choice took, and why; `kernels` None is plain JAX."""

    kernels: Kernels | None
    reason: str


def use_kernels(
    model: WideForCausalLM,
    kernels: Kernels | Literal["auto"] | None = "auto",
    hints: SparsityHints | None = None,
) -> EngineChoice:
    """Set what `model`'s inference runs on from now on; what was compiled before stays valid.

    Args:
        model: changed in place; its weights are untouched.
        kernels: settings (they run or raise), None for plain JAX, or `auto`: the kernels on a CUDA
            device that can run them, else plain JAX.
        hints: for `auto`: what the masks are expected to skip.

    Raises:
        ValueError: kernels were asked for and this model cannot run through them.
    """
    obstacle = obstacle_to_kernels(model)
    if kernels == "auto":
        choice = automatic_kernels(obstacle, hints=hints)
    elif kernels is None:
        choice = EngineChoice(None, "asked for")
    else:
        if obstacle is not None:
            raise ValueError(f"this model cannot run through kernels: {obstacle}")
        choice = EngineChoice(kernels, "asked for")
    model.kernels = choice.kernels
    return choice


def split_on(model: WideForCausalLM, kernels: Kernels | None) -> tuple[Structure, nnx.State]:
    """`split` of the model as it runs on these kernels; the model itself keeps its own."""
    own, model.kernels = model.kernels, kernels
    try:
        return split(model)
    finally:
        model.kernels = own


def obstacle_to_kernels(model: WideForCausalLM) -> str | None:
    """Why a model cannot run through `pallas_kernels`, or None if it can."""
    state = nnx.state(model)
    if list(nnx.to_flat_state(nnx.state(model, LoRAParam))):
        return "a LoRA is attached: merge it into the weights (wide export)"
    devices = {
        device
        for _, leaf in nnx.to_flat_state(state)
        for device in getattr(getattr(leaf[...], "sharding", None), "device_set", ())
    }
    if len(devices) > 1:
        return f"its weights lie on {len(devices)} devices, and kernels run on one"
    return None


def automatic_kernels(
    obstacle: str | None = None,
    *,
    hints: SparsityHints | None = None,
    device: Device | None = None,
) -> EngineChoice:
    """What `auto` takes, for a model with the given obstacle; by default on this device."""
    device = device or current_device()
    if device.capability is None:
        return EngineChoice(None, f"{device.kind} is not a CUDA device: plain JAX")
    if float(device.capability) < 8.0:
        reason = f"kernels need compute capability 8.0 or later, not {device.capability}"
        return EngineChoice(None, f"{reason}: plain JAX")
    if not triton_support.available():
        reason = "jax-triton and triton are not installed (the `gpu` extra)"
        return EngineChoice(None, f"{reason}: plain JAX")
    if obstacle is not None:
        return EngineChoice(None, f"{obstacle}: plain JAX")
    return EngineChoice(Kernels(hints or SparsityHints()), f"kernels on {device.kind}")


@dataclasses.dataclass(frozen=True)
class PlannedOp:
    """What one operation of every layer will run."""

    op: str
    part: str  # of a layer, in words: routing, q, attention, o, gate and up, down, ...
    implementation: str
    reason: str
    measured: bool


def plan(
    config: ModelConfig,
    wide: WideConfig | None,
    kernels: Kernels,
    *,
    batch: int,
    tokens: int,
    context: int,
    dtype: str = "bfloat16",
    device: Device | None = None,
) -> list[PlannedOp]:
    """The operations of a layer for `batch` rows of `tokens` new tokens among `context` slots.

    One token is a decode step. An operation that `kernels` names is reported as asked for. Without
    routers (`wide` None) everything is on, which more than a few tokens run by plain products.
    Attention is that of the layers with a sliding window, where there are any.
    """
    m = batch * tokens
    hints, whole = kernels.hints, wide is None
    plain: dict[str, str] = {}  # products that take no kernel, and why
    if config.mlp_bias:
        plain["swiglu_up"] = "the kernel has no biases"
    if wide is None:
        wide = WideConfig(config.heads_per_kv_head, pruned.dense_ffn_group(config))
        hints = SparsityHints(0.0, 0.0)
        if m > pruned.FEW_TOKENS:
            reason = f"everything is on for more than {pruned.FEW_TOKENS} tokens"
            plain = dict.fromkeys(("gemm_mn", "gemm_k", "swiglu_up"), reason)
    hidden, head = config.hidden_size, config.head_dim
    queries = config.num_attention_heads * head
    heads = wide.attn_group_size
    products = (
        ("gemm_mn", "q", queries, hidden, heads * head, hints.attention),
        ("gemm_k", "o", hidden, queries, heads * head, hints.attention),
        (
            "swiglu_up",
            "gate and up",
            config.intermediate_size,
            hidden,
            wide.ffn_group_size,
            hints.ffn,
        ),
        (
            "gemm_k",
            "down",
            hidden,
            config.intermediate_size,
            wide.ffn_group_size,
            hints.ffn,
        ),
    )
    found = []
    for op, part, n, k, group, sparsity in products:
        if op in plain:
            found.append(PlannedOp(op, part, "plain JAX", plain[op], measured=False))
            continue
        choice = explain(
            op,
            m=m,
            n=n,
            k=k,
            group=group,
            dtype=dtype,
            expected_sparsity=sparsity,
            device=device,
        )
        found.append(_planned(op, part, getattr(kernels, op), choice))
    op = "attention_decode" if tokens == 1 else "attention_prefill"
    unwindowed = config.sliding_window is None
    choice = explain(
        op,
        b=batch,
        t=tokens,
        s=context,
        hq=config.num_attention_heads,
        hk=config.num_key_value_heads,
        d=head,
        group=config.num_attention_heads if whole else heads,
        dtype=dtype,
        expected_sparsity=hints.attention,
        plain=tokens > 1 or unwindowed,
        from_start=unwindowed,
        device=device,
    )
    part = "attention"
    if tokens == 1 and kernels.attends_in_a_step:  # by the table of `attention_decode`
        op, part = "attention_step", "rotation, cache, attention"
        found.insert(1, _planned(op, part, getattr(kernels, op), choice))
    else:
        rotation = _untabled("rope_cache", "rotation and cache", kernels.rope_cache, device)
        found[1:1] = [rotation, _planned(op, part, getattr(kernels, op), choice)]
    if not whole or (m <= pruned.FEW_TOKENS and not kernels.plain_products):
        found.insert(0, _planned_layout(kernels.mask_layout, m, device))
    if whole:
        return [_untabled("rms_norm", "norms", kernels.rms_norm, device), *found]
    return [*_planned_routing(kernels, m, device), *found]


def _planned_layout(asked: str | None, m: int, device: Device | None) -> PlannedOp:
    """How the masks of m tokens are ordered."""
    default = default_layout_implementation(m, device)
    implementation, reason = (default, "by tokens") if asked is None else (asked, "asked for")
    return PlannedOp("mask_layout", "layouts", implementation, reason, measured=False)


def _planned_routing(kernels: Kernels, m: int, device: Device | None) -> list[PlannedOp]:
    """How the two routers are asked for m tokens, and what is made beside an answer."""
    if m > 1 or not kernels.routes_with_kv:
        return [_untabled("norm_route", "routing", kernels.norm_route, device)]
    return [
        _untabled("route_kv", "attention's routing, k and v", kernels.route_kv, device),
        _untabled("norm_route", "FFN's routing", kernels.norm_route, device),
    ]


def _untabled(op: str, part: str, asked: str | None, device: Device | None) -> PlannedOp:
    """An operation that has no table: Triton where it runs."""
    runs = triton_support.runs_on(device or current_device())
    automatic = ("triton", "Triton runs here") if runs else ("reference", "no Triton here")
    implementation, reason = automatic if asked is None else (asked, "asked for")
    return PlannedOp(op, part, implementation, reason, measured=False)


def _planned(op: str, part: str, asked: str | None, choice) -> PlannedOp:
    if asked is not None:
        return PlannedOp(op, part, asked, "asked for", measured=False)
    return PlannedOp(op, part, choice.implementation, choice.reason, choice.measured)
