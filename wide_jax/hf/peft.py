"""LoRA in PEFT's format beside a model, and merged into its weights in float32.

A LoRA adds `scale * B A` to a weight `[out, in]`, with `A` `[r, in]`, `B` `[out, r]`, and `scale`
`alpha / r` (arXiv 2106.09685) or `alpha / sqrt(r)` with rank stabilisation (arXiv 2312.03732).
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wide_jax.config import ModelConfig
from wide_jax.hf.config import DTYPES, read_json
from wide_jax.hf.load import CheckpointError
from wide_jax.hf.mapping import expected_tensors
from wide_jax.hf.safetensors_file import DTYPES as NUMPY_DTYPES
from wide_jax.hf.safetensors_file import CastTensor, StoredTensor, read_header, write_file
from wide_jax.hf.save import write_json

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every key in PEFT's files, before the model's own names
_KEY = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")

# Entries of adapter_config.json that change the arithmetic, with the only values understood.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "exclude_modules": (None, []),
}


class MergeWarning(UserWarning):
    """A merge changes what the dense mode computes, or loses part of the adapter to rounding."""


class PeftError(ValueError):
    """An adapter that cannot be read exactly; names the file and its entries."""


@dataclasses.dataclass(frozen=True)
class LoRA:
    """A low-rank adapter.

    Attributes:
        rank: Of every factor pair, `r`.
        alpha: Numerator of the scale.
        factors: Module name (`model.layers.0.self_attn.q_proj`) to (`A` `[r, in]`, `B` `[out, r]`),
            float32.
        dropout: Of the training; kept for the record.
        rank_stabilised: Scale by `alpha / sqrt(r)` instead of `alpha / r`.
    """

    rank: int
    alpha: float
    factors: Mapping[str, tuple[Any, Any]]
    dropout: float = 0.0
    rank_stabilised: bool = False

    @property
    def scale(self) -> float:
        """What `B A` is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    def check(self, config: ModelConfig) -> None:
        """Raise CheckpointError unless every factor pair fits a weight; lists all that do not."""
        expected = expected_tensors(config)
        problems = []
        for module, (a, b) in self.factors.items():
            shape = expected.get(module + ".weight")
            found = (tuple(a.shape), tuple(b.shape))
            if shape is None or len(shape) != 2:
                problems.append(f"{module} is not a linear map of this model")
            elif found != ((self.rank, shape[1]), (shape[0], self.rank)):
                problems.append(
                    f"{module} has A {list(a.shape)} and B {list(b.shape)}, expected "
                    f"[{self.rank}, {shape[1]}] and [{shape[0]}, {self.rank}]"
                )
        if problems:
            raise CheckpointError("LoRA", problems)

    def delta(self, module: str) -> np.ndarray:
        """What is added to a module's weight, float32 `[out, in]`."""
        a, b = (np.asarray(factor, np.float32) for factor in self.factors[module])
        return np.float32(self.scale) * (b @ a)


def write_adapter(folder: Path, lora: LoRA, config: ModelConfig, *, base: str | None) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into an existing folder.

    Args:
        folder: As `atomic_folder` gives it.
        lora: The adapter; stored as float32.
        config: The base's architecture.
        base: Path or hub id of the base, which PEFT loads it onto.
    """
    lora.check(config)
    modules = sorted({module.rsplit(".", 1)[-1] for module in lora.factors})
    tensors = {}
    for module, (a, b) in lora.factors.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = np.asarray(a, np.float32)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = np.asarray(b, np.float32)
    write_file(folder / ADAPTER_WEIGHTS, tensors)
    entries = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rank_stabilised,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    write_json(folder / ADAPTER_CONFIG, entries)


def read_adapter(folder: str | Path, config: ModelConfig) -> LoRA:
    """The adapter of a folder.

    Raises:
        PeftError: an entry of `adapter_config.json` that is not understood, or keys that are not
            pairs of factors.
        CheckpointError: factors that do not fit the model.
    """
    path, weights = Path(folder) / ADAPTER_CONFIG, Path(folder) / ADAPTER_WEIGHTS
    raw = read_json(path)
    problems = [
        f"{key}={raw[key]!r} is not supported"
        for key, allowed in _ONLY.items()
        if key in raw and raw[key] not in allowed
    ]
    problems += [f"{key} is missing" for key in ("r", "lora_alpha") if key not in raw]
    if problems:
        raise PeftError(f"{path}: " + "; ".join(problems))
    pairs: dict[str, dict[str, Any]] = {}
    for key, stored in read_header(weights).items():
        match = _KEY.fullmatch(key)
        if match is None:
            problems.append(f"{key} is not a LoRA factor")
        else:
            pairs.setdefault(match["module"], {})[match["factor"]] = stored.read(np.float32)
    problems += [f"{name} lacks lora_A or lora_B" for name, pair in pairs.items() if len(pair) < 2]
    if problems:
        raise PeftError(f"{weights}: " + "; ".join(problems))
    lora = LoRA(
        rank=int(raw["r"]),
        alpha=float(raw["lora_alpha"]),
        factors={name: (pair["A"], pair["B"]) for name, pair in pairs.items()},
        dropout=float(raw.get("lora_dropout") or 0.0),
        rank_stabilised=bool(raw.get("use_rslora")),
    )
    lora.check(config)
    return lora


@dataclasses.dataclass(frozen=True)
class MergedTensor:
    """A weight with its LoRA added in float32, worked out when it is read."""

    base: Any  # StoredTensor or array
    lora: LoRA
    module: str
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As the base's."""
        return tuple(self.base.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        base, delta = _float32(self.base), self.lora.delta(self.module)
        merged = (base + delta).astype(self.dtype)
        size = np.linalg.norm(delta)
        lost = np.linalg.norm(merged.astype(np.float32) - base - delta) / size if size else 0.0
        if lost > 0.01:
            warnings.warn(
                f"{self.module}: rounding the merged weight to {self.dtype.name} loses "
                f"{lost:.1%} of the adapter; merge to float32 or keep the adapter apart",
                MergeWarning,
                stacklevel=2,
            )
        return merged if dtype is None else merged.astype(dtype)


def merge(
    weights: Mapping[str, Any], lora: LoRA, config: ModelConfig, *, dtype: str = "float32"
) -> dict[str, Any]:
    """The base's weights with the LoRA added, for `save_model` or `save_wide_model`.

    Nothing is computed until a tensor is written, so memory stays at one tensor.

    Args:
        weights: The base, complete, by name: arrays or `StoredTensor`.
        lora: The adapter.
        config: The base's architecture.
        dtype: Of all merged weights. float32 by default, since a bfloat16 base swallows small
            deltas (1.003 rounds to 1.0); a `MergeWarning` says how much another dtype loses.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{dtype=} is not supported; known: {', '.join(DTYPES)}")
    lora.check(config)
    wanted = {np.dtype(d).name: d for d in NUMPY_DTYPES.values()}[dtype]
    warnings.warn(
        "merging the LoRA changes the weights, and so the dense mode too: measure dense quality "
        "again, or keep the adapter apart",
        MergeWarning,
        stacklevel=2,
    )
    return dict(_merged(weights, lora, wanted))


def _merged(weights: Mapping[str, Any], lora: LoRA, dtype: np.dtype) -> Iterator[tuple[str, Any]]:
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in lora.factors:
            yield name, MergedTensor(tensor, lora, module, dtype)
        else:
            yield name, CastTensor(tensor, dtype)


def _float32(tensor: Any) -> np.ndarray:
    if isinstance(tensor, StoredTensor):
        return tensor.read(np.float32)
    return np.asarray(tensor).astype(np.float32)
