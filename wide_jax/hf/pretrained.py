"""`from_pretrained` and `save_pretrained`: between model folders and `WideForCausalLM`."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from wide_jax.config import ModelConfig, WideConfig
from wide_jax.engine import use_kernels
from wide_jax.hf.config import read_config
from wide_jax.hf.load import Progress, ShardingFor, find_weights, load_weights
from wide_jax.hf.mapping import expected_router_tensors, is_router, module_path, tensor_name
from wide_jax.hf.peft import ADAPTER_CONFIG, MergedTensor, read_adapter
from wide_jax.hf.resolve import resolve_model
from wide_jax.hf.save import save_model
from wide_jax.hf.wide_folder import (
    base_folder,
    is_wide_folder,
    load_wide_info,
    load_wide_routers,
    save_wide_model,
)
from wide_jax.kernels import Kernels, SparsityHints
from wide_jax.model import WideForCausalLM
from wide_jax.router import Router


def from_pretrained(
    model: str | Path | None = None,
    *,
    dtype: DTypeLike | None = None,
    wide: WideConfig | None = None,
    dense: bool = False,
    adapter: bool = True,
    kernels: Kernels | Literal["auto"] | None = "auto",
    seed: int = 0,
    sharding_for: ShardingFor | None = None,
    ignore_keys: Collection[str] = (),
    revision: str | None = None,
    progress: Progress | None = None,
) -> WideForCausalLM:
    """A model with its weights and, where there are any, its routers.

    Args:
        model: A folder (dense or WIDE), a hub id, or None for the embedded model; see
            `resolve_model`.
        dtype: Of weights and activations; None: the checkpoint's own. Routers stay float32.
        wide: Attach new, randomly initialised routers of these sizes, whatever the folder holds.
        dense: Leave the folder's routers out.
        adapter: Merge the PEFT adapter beside the model, where there is one, into the weights (in
            float32, then rounded to `dtype`); False leaves it out.
        kernels: What inference runs on; see `wide_jax.engine.use_kernels`, whose answer says what
            `auto` took. None is plain JAX, which can be differentiated.
        seed: For new routers.
        sharding_for: The sharding of each tensor from its name and shape.
        ignore_keys: Keys of `config.json` to pass over; see `config_from_hf`.
        revision: Branch, tag or commit of a hub id.
        progress: Called with bytes of weights read and bytes in all.

    Raises:
        ResolveError, ConfigError, CheckpointError, WideConfigError: naming what does not fit.
        ValueError: both `wide` and `dense`.
    """
    if wide is not None and dense:
        raise ValueError("wide asks for routers and dense for none: give one of them")
    folder = resolve_model(model, revision=revision, progress=progress)
    base = base_folder(folder)
    config = read_config(base, ignore_keys=ignore_keys)
    routers: dict[str, jax.Array] = {}
    if wide is not None:
        routers = new_routers(config, wide, seed=seed)
        if sharding_for is not None:
            routers = {n: jax.device_put(a, sharding_for(n, a.shape)) for n, a in routers.items()}
    elif not dense and is_wide_folder(folder):
        wide = load_wide_info(folder, config).wide
        routers = load_wide_routers(folder, config, wide, sharding_for=sharding_for)
    target = jnp.dtype(config.dtype if dtype is None else dtype)
    weights = load_weights(base, config, dtype=target, sharding_for=sharding_for, progress=progress)
    if adapter and (folder / ADAPTER_CONFIG).exists():
        weights |= _adapted(folder, base, config, target, sharding_for)
    loaded = build(config, wide, weights | routers, dtype=target)
    use_kernels(loaded, kernels, sparsity_hints(folder))
    return loaded


def sparsity_hints(folder: str | Path) -> SparsityHints:
    """What a model's folder says its routers skip.

    The rates that `wide dial` measured, else the targets of its training, else nothing.
    """
    if not is_wide_folder(folder):
        return SparsityHints()
    info = load_wide_info(folder)
    rates = {**info.targets, **info.rates}
    return SparsityHints(rates.get("attention"), rates.get("ffn"))


def _adapted(
    folder: Path,
    base: Path,
    config: ModelConfig,
    dtype: jnp.dtype,
    sharding_for: ShardingFor | None,
) -> dict[str, jax.Array]:
    """The weights that the folder's adapter changes, merged in float32."""
    lora = read_adapter(folder, config)
    stored = find_weights(base, config)
    merged = {}
    for module in lora.factors:
        name = f"{module}.weight"
        array = np.asarray(MergedTensor(stored[name], lora, module, np.dtype(dtype)))
        merged[name] = jax.device_put(array, sharding_for and sharding_for(name, array.shape))
    return merged


def build(
    config: ModelConfig,
    wide: WideConfig | None,
    tensors: Mapping[str, jax.Array],
    *,
    dtype: DTypeLike,
) -> WideForCausalLM:
    """The module around given tensors, without ever making random weights.

    Args:
        config: The architecture.
        wide: Sizes of the routers, or None for a model without.
        tensors: Every parameter by its Hugging Face name; they are taken as they are.
        dtype: Of weights and activations.

    Raises:
        ValueError: names that are missing or left over.
    """
    abstract = nnx.eval_shape(lambda: WideForCausalLM(config, wide, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    wanted = {tensor_name(path) for path in flat}
    if wanted != set(tensors):
        missing, extra = sorted(wanted - set(tensors)), sorted(set(tensors) - wanted)
        raise ValueError(f"tensors do not fit the module: missing {missing}, left over {extra}")
    filled = [
        (module_path(name), flat[module_path(name)].replace(tensors[name])) for name in tensors
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def new_routers(config: ModelConfig, wide: WideConfig, *, seed: int = 0) -> dict[str, jax.Array]:
    """Randomly initialised routers by name, float32."""
    rngs = nnx.Rngs(seed)
    sizes = {"router_attention": wide.attn_groups(config), "router_ffn": wide.ffn_groups(config)}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for module, groups in sizes.items():
            router = Router(config.hidden_size, wide.router_rank, groups, rngs=rngs)
            for path, variable in nnx.to_flat_state(nnx.state(router, nnx.Param)):
                tensors[tensor_name(("model", "layers", layer, module, *path))] = variable[...]
    return {name: tensors[name] for name in expected_router_tensors(config, wide)}


def tensors_of(
    model: WideForCausalLM, keep: Callable[[str], bool] = lambda name: True
) -> dict[str, jax.Array]:
    """The model's parameters by Hugging Face name.

    Raises:
        KeyError: a parameter that is neither the base model's nor a router's (an unmerged LoRA).
    """
    found = {
        tensor_name(path): variable[...]
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    return {name: array for name, array in found.items() if keep(name)}


def without_routers(model: WideForCausalLM) -> WideForCausalLM:
    """The dense model of the same weights, which the two share; on no kernels.

    Raises:
        KeyError: an unmerged LoRA.
    """
    tensors = tensors_of(model, lambda name: not is_router(name))
    return build(model.config, None, tensors, dtype=model.dtype)


def save_pretrained(
    model: WideForCausalLM,
    target: str | Path,
    *,
    base: str | Path,
    weights_changed: bool = False,
    budget: str | None = None,
    targets: Mapping[str, float] | None = None,
    training: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a folder that plain `transformers` loads as the dense model, routers beside it.

    Args:
        model: With or without routers.
        target: The folder to make.
        base: The folder the model came from. Its files are copied byte by byte; its weights too,
            unless they changed.
        weights_changed: Write the model's own base weights, in the dtype they have now.
        budget: See `WideInfo`, as for `targets` and `training`.
        overwrite: Replace an existing model folder.
        progress: Called with bytes written and bytes in all.

    Raises:
        FileExistsError: see `atomic_folder`.
        KeyError: see `tensors_of`.
    """
    base = base_folder(base)
    weights = tensors_of(model, lambda name: not is_router(name))
    if model.wide is None:
        if not weights_changed:
            weights = find_weights(base, model.config)
        return save_model(
            target,
            model.config,
            weights,
            files_from=base,
            overwrite=overwrite,
            progress=progress,
        )
    save_wide_model(
        target,
        base=base,
        config=model.config,
        wide=model.wide,
        routers=tensors_of(model, is_router),
        weights=weights if weights_changed else None,
        budget=budget,
        targets=targets,
        training=training,
        overwrite=overwrite,
        progress=progress,
    )
    return Path(target)
