"""The WIDE model folder: an untouched Hugging Face model with routers beside it.

```
config.json, model.safetensors (or shards + index), tokenizer files: plain Hugging Face
wide_config.json          format version, group sizes, rank, targets, budget, training, base
wide_routers.safetensors  the routers, float32
adapter_config.json, adapter_model.safetensors: a LoRA in PEFT's format, where it is not merged
```
Plain `transformers` loads the folder as the dense model. A training run may leave the base out and
name its path instead (`include_base=False`).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wide_jax.config import ModelConfig, WideConfig
from wide_jax.hf.config import read_config, read_json
from wide_jax.hf.load import (
    CheckpointError,
    Progress,
    ShardingFor,
    find_weights,
    place,
)
from wide_jax.hf.mapping import expected_router_tensors, expected_tensors
from wide_jax.hf.peft import LoRA, write_adapter
from wide_jax.hf.safetensors_file import SafetensorsError, read_header, write_file
from wide_jax.hf.save import (
    SHARD_BYTES,
    atomic_folder,
    check_target,
    check_weights,
    copy_companions,
    copy_weights,
    fingerprint,
    stored_dtype,
    write_config,
    write_json,
    write_weights,
)

FORMAT_VERSION = 1
WIDE_CONFIG, WIDE_ROUTERS = "wide_config.json", "wide_routers.safetensors"
_MODEL_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


class WideConfigError(ValueError):
    """A `wide_config.json` that is malformed or belongs to another model; names file and keys."""


@dataclasses.dataclass(frozen=True)
class WideInfo:
    """What `wide_config.json` says beside the routers' sizes.

    Attributes:
        wide: Group sizes and router rank.
        base_fingerprint: `fingerprint` of the base weights that the routers belong to.
        base: Path or hub id of the base, where the folder does not hold it.
        budget: Which budget the routers were trained for (`paper`, `separate`, …).
        targets: Skip rates aimed at, by module, as fractions.
        training: Free summary of the training: updates, seed, data, losses.
        rates: What the masks were measured to skip, by module, when `wide dial` set the thresholds.
        lora: `"adapter"` where the routers need the PEFT adapter beside them, `"merged"` where the
            weights were changed for them.
    """

    wide: WideConfig
    base_fingerprint: str
    base: str | None = None
    budget: str | None = None
    targets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    lora: str | None = None


def save_wide_model(
    target: str | Path,
    *,
    base: str | Path,
    config: ModelConfig,
    wide: WideConfig,
    routers: Mapping[str, Any],
    weights: Mapping[str, Any] | None = None,
    adapter: LoRA | None = None,
    budget: str | None = None,
    targets: Mapping[str, float] | None = None,
    training: Mapping[str, Any] | None = None,
    rates: Mapping[str, float] | None = None,
    include_base: bool = True,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> WideInfo:
    """Write a WIDE model folder, whole or not at all.

    Args:
        target: The folder to make.
        base: The dense model's folder; its files are copied byte by byte.
        config: The base's architecture.
        wide: Group sizes and router rank.
        routers: By name, exactly `expected_router_tensors(config, wide)`; stored as float32.
        weights: Base weights that have changed (a merged LoRA), complete, by name; None keeps the
            base's files.
        adapter: A LoRA to store beside them in PEFT's format.
        budget: See `WideInfo`, as for `targets`, `training` and `rates`.
        include_base: False writes only the routers and the base's absolute path.
        overwrite: Replace an existing model folder.
        shard_bytes: See `save_model`; only for changed weights.
        progress: Called with bytes written and bytes in all; only for changed weights.

    Returns:
        What was written to `wide_config.json`.

    Raises:
        CheckpointError: names or shapes that do not fit the config, all together.
        FileExistsError: see `atomic_folder`.
    """
    base = Path(base)
    check_target(target, overwrite=overwrite)
    check_weights(target, routers, expected_router_tensors(config, wide))
    if adapter is not None:
        adapter.check(config)
    if weights is not None:
        check_weights(target, weights, expected_tensors(config))
        if not include_base:
            raise ValueError("changed weights have to be stored: include_base must be True")
        if adapter is not None:
            raise ValueError("give changed weights (a merged LoRA) or an adapter, not both")
    info = WideInfo(
        wide=wide,
        base_fingerprint=fingerprint(find_weights(base, config) if weights is None else weights),
        base=None if include_base else str(base.resolve()),
        budget=budget,
        targets=dict(targets or {}),
        training=dict(training or {}),
        rates=dict(rates or {}),
        lora=_lora_of(base, weights, adapter),
    )
    with atomic_folder(target, overwrite=overwrite) as folder:
        if include_base:
            copy_companions(base, folder)
            if weights is None:
                copy_weights(base, folder)
            else:
                write_config(folder, config, dtype=stored_dtype(weights))
                write_weights(folder, weights, shard_bytes=shard_bytes, progress=progress)
        if adapter is not None:
            # transformers 4.57 with peft goes where the adapter says, even if the model is here
            own = info.base or str(Path(target).absolute())
            write_adapter(folder, adapter, config, base=own)
        host = {name: np.asarray(array, np.float32) for name, array in routers.items()}
        write_file(folder / WIDE_ROUTERS, host)
        write_json(folder / WIDE_CONFIG, _to_json(info, config))
    return info


def is_wide_folder(folder: str | Path) -> bool:
    """Whether a folder has a `wide_config.json`."""
    return (Path(folder) / WIDE_CONFIG).is_file()


def base_folder(folder: str | Path) -> Path:
    """Where the base model of a WIDE folder is: the folder itself, or the path that it names.

    Raises:
        FileNotFoundError: the named base is not there.
    """
    folder = Path(folder)
    if (folder / "config.json").exists() or not is_wide_folder(folder):
        return folder
    base = read_json(folder / WIDE_CONFIG).get("base", {}).get("path")
    if not base or not (Path(base) / "config.json").exists():
        raise FileNotFoundError(
            f"{folder} holds only routers, and its base {base!r} (from {WIDE_CONFIG}) has no "
            "config.json; put the base model back there or write its new path into base.path"
        )
    return Path(base)


def load_wide_info(folder: str | Path, config: ModelConfig | None = None) -> WideInfo:
    """Read and check `wide_config.json`.

    Args:
        folder: The WIDE model's folder.
        config: The base's architecture; None reads it from `base_folder(folder)`.

    Raises:
        FileNotFoundError: there is no `wide_config.json`.
        WideConfigError: unknown format version, malformed values, or another model's sizes.
    """
    path = Path(folder) / WIDE_CONFIG
    raw = read_json(path)
    if raw.get("format_version") != FORMAT_VERSION:
        raise WideConfigError(
            f"{path}: format_version={raw.get('format_version')!r}, expected {FORMAT_VERSION}; "
            "a newer wide-jax may have written it"
        )
    config = read_config(base_folder(folder)) if config is None else config
    try:
        sizes = ("attn_group_size", "ffn_group_size", "router_rank")
        one_router = raw.get("one_router", False)
        if not isinstance(one_router, bool):
            raise ValueError(f"one_router={one_router!r}, expected true or false")
        wide = WideConfig(
            **{name: _whole(raw, name) for name in sizes},
            one_router=one_router,
            attention_threshold=float(raw.get("attention_threshold", 0.0)),
            ffn_threshold=float(raw.get("ffn_threshold", 0.0)),
        )
        wide.check(config)
        base = raw["base"]
        info = WideInfo(
            wide=wide,
            base_fingerprint=str(base["fingerprint"]),
            base=base.get("path"),
            budget=raw.get("budget"),
            targets=dict(raw.get("targets") or {}),
            training=dict(raw.get("training") or {}),
            rates=dict(raw.get("rates") or {}),
            lora=raw.get("lora"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WideConfigError(f"{path}: {error!r}") from error
    written = raw.get("model") or {}
    wrong = [
        f"{key}={written.get(key)!r} (the model's is {getattr(config, key)})"
        for key in _MODEL_SIZES
        if written.get(key) != getattr(config, key)
    ]
    if wrong:
        raise WideConfigError(f"{path} was written for another model: {', '.join(wrong)}")
    return info


def read_sizes(folder: str | Path, *, dense: bool = False) -> tuple[ModelConfig, WideConfig | None]:
    """A model folder's architecture and its routers' sizes, before any weight is read.

    `dense`: leave the routers out; None where there are none.

    Raises:
        FileNotFoundError, ConfigError, WideConfigError: as loading the model would.
    """
    config = read_config(base_folder(folder))
    if dense or not is_wide_folder(folder):
        return config, None
    return config, load_wide_info(folder, config).wide


def load_wide_routers(
    folder: str | Path,
    config: ModelConfig,
    wide: WideConfig,
    *,
    sharding_for: ShardingFor | None = None,
) -> dict[str, jax.Array]:
    """The routers by name, float32.

    Raises:
        CheckpointError: every missing, unknown, misshapen or wrongly typed router tensor, together.
    """
    path = Path(folder) / WIDE_ROUTERS
    if not path.exists():
        raise CheckpointError(folder, [f"{WIDE_ROUTERS}: missing file"])
    try:
        stored = read_header(path)
    except SafetensorsError as error:
        raise CheckpointError(folder, [str(error)]) from error
    expected = expected_router_tensors(config, wide)
    check_weights(path, stored, expected)
    wrong = [f"{n} has dtype {t.code}, expected F32" for n, t in stored.items() if t.code != "F32"]
    if wrong:
        raise CheckpointError(path, wrong)
    return {
        name: place(stored[name], None, sharding_for(name, shape) if sharding_for else None)
        for name, shape in expected.items()
    }


def set_thresholds(
    folder: str | Path, *, attention: float, ffn: float, rates: Mapping[str, float]
) -> None:
    """Change what the routers' margins must reach, in one step; all else stays as it is.

    Args:
        folder: The WIDE model's folder.
        attention, ffn: See `WideConfig`.
        rates: What the masks skip with them, by module; empty where nobody measured.

    Raises:
        WideConfigError, FileNotFoundError: see `load_wide_info`.
        ValueError: a threshold that is not finite.
    """
    thresholds = {"attention_threshold": attention, "ffn_threshold": ffn}
    dataclasses.replace(load_wide_info(folder).wide, **thresholds)  # checks them and the file
    path = Path(folder) / WIDE_CONFIG
    unfinished = path.with_name(f".{WIDE_CONFIG}.unfinished")
    write_json(unfinished, read_json(path) | thresholds | {"rates": dict(rates)})
    unfinished.replace(path)


def verify_base(folder: str | Path, config: ModelConfig, info: WideInfo) -> None:
    """Check that the base weights are those the routers were trained for; reads all of them.

    Raises:
        WideConfigError: the fingerprints differ; shows both.
    """
    base = base_folder(folder)
    found = fingerprint(find_weights(base, config))
    if found != info.base_fingerprint:
        raise WideConfigError(
            f"{Path(folder) / WIDE_CONFIG}: the routers belong to base weights "
            f"{info.base_fingerprint}, but {base} has {found}"
        )


def _lora_of(base: Path, weights: Any, adapter: LoRA | None) -> str | None:
    """`WideInfo.lora` of a new folder; weights that are copied stay merged if they were."""
    if weights is not None:
        return "merged"
    if adapter is not None:
        return "adapter"
    merged = is_wide_folder(base) and read_json(base / WIDE_CONFIG).get("lora") == "merged"
    return "merged" if merged else None


def _to_json(info: WideInfo, config: ModelConfig) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        **dataclasses.asdict(info.wide),
        "targets": dict(info.targets),
        "budget": info.budget,
        "model": {key: getattr(config, key) for key in _MODEL_SIZES},
        "base": {"fingerprint": info.base_fingerprint, "path": info.base},
        "lora": info.lora,
        "rates": dict(info.rates),
        "training": dict(info.training),
    }


def _whole(raw: Mapping[str, Any], key: str) -> int:
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key}={value!r}, expected a whole number")
    return value
