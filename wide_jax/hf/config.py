"""`config.json` to `ModelConfig` and back, in the spellings of transformers 4.57 and 5.x.

Read exactly or not at all: a key that is neither understood nor known to be harmless is an error,
because a feature that is silently left out gives a model that is almost right.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from wide_jax.config import ModelConfig, RopeConfig
from wide_jax.hf.families import FAMILIES, ConfigError, Keys
from wide_jax.rope import ROPE_TYPES, inverse_frequencies

DTYPES = ("float32", "bfloat16", "float16")

# Keys that say nothing about the arithmetic of one forward pass: provenance, training, heads of
# other tasks, and generation settings that old checkpoints keep in config.json.
_HARMLESS = """
    architectures attention_dropout auto_map chunk_size_feed_forward finetuning_task id2label
    initializer_range is_decoder is_encoder_decoder is_llama_config label2id name_or_path num_labels
    output_attentions output_hidden_states prefix pretraining_tp problem_type return_dict
    sep_token_id task_specific_params tokenizer_class torchscript transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature
    tie_encoder_decoder top_k top_p typical_p
"""
HARMLESS = frozenset(_HARMLESS.split())

# Features of other families: switched off they are harmless.
_OFF = (
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "rope_interleaved",
    "use_mrope",
    "use_qk_norm",
    "use_sliding_window",
)

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (),  # the factor may follow from the contexts
}
_ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


def config_from_hf(
    raw: Mapping[str, Any], *, ignore_keys: Collection[str] = (), source: str = "config.json"
) -> ModelConfig:
    """The architecture that a Hugging Face `config.json` describes.

    Args:
        raw: The parsed file.
        ignore_keys: Keys to pass over although they are not understood; you say they are harmless.
        source: How errors call the file.

    Raises:
        ConfigError: lists every key that is missing, wrong, unknown or not supported.
    """
    model_type = raw.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise ConfigError(
            [f"model_type={model_type!r} is not supported; known: {', '.join(FAMILIES)}"], source
        )
    keys = Keys(raw, family.defaults)
    keys.seen |= {"model_type", *ignore_keys}
    fields: dict[str, Any] = {key: keys.size(key) for key in _SIZES}
    heads = fields["num_attention_heads"]
    fields["num_key_value_heads"] = keys.size("num_key_value_heads", heads)
    fields["head_dim"] = keys.size("head_dim", fields["hidden_size"] // heads)
    fields["max_position_embeddings"] = keys.size("max_position_embeddings")
    fields["rms_norm_eps"] = keys.number("rms_norm_eps")
    fields["tie_word_embeddings"] = keys.flag("tie_word_embeddings")
    keys.only("hidden_act", ["silu", "swish"], "the FFN is SwiGLU: silu")
    fields["rope"] = _read_rope(keys, fields["max_position_embeddings"])
    try:
        inverse_frequencies(fields["rope"], fields["head_dim"])
    except ValueError as error:
        keys.problems.append(str(error))
    fields["bos_token_id"] = _first(_token_ids(keys, "bos_token_id"))
    fields["eos_token_ids"] = _token_ids(keys, "eos_token_id")
    fields["pad_token_id"] = _first(_token_ids(keys, "pad_token_id"))
    fields["dtype"] = _read_dtype(keys)
    fields |= family.read(keys, dict(fields))
    if "layer_types" not in keys.seen:
        types = keys.take("layer_types") or []
        if set(types) - {"full_attention"}:
            keys.problems.append(f"layer_types={types!r} is not supported for {model_type}")
    keys.problems += [
        f"{key}={value!r} is not understood (if it changes nothing, pass it in ignore_keys)"
        for key, value in raw.items()
        if key not in keys.seen | HARMLESS
        and value not in (None, [], {})
        and not key.startswith("_")
        and not (key in _OFF and value is False)
    ]
    if keys.problems:
        raise ConfigError(keys.problems, source)
    try:
        return ModelConfig(model_type=family.model_type, **fields)
    except ValueError as error:
        raise ConfigError([str(error)], source) from error


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """A `config.json` in transformers 4.57's spelling, which 5.x reads as well.

    (The reverse does not hold: 4.57 ignores `rope_parameters` and takes theta's default.)

    Raises:
        ValueError: the family's `config.json` cannot express this model; names the fields.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model_type={config.model_type!r} is not supported; known: {', '.join(FAMILIES)}"
        )
    eos = config.eos_token_ids
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        **{key: getattr(config, key) for key in _SIZES},
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.rope_theta,
        "rope_scaling": _write_rope(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (list(eos) or None),
        "pad_token_id": config.pad_token_id,
        "torch_dtype": config.dtype,
        **family.write(config),
    }
    again = config_from_hf(raw)
    lost = [
        f"{field.name}={getattr(config, field.name)!r} (would be read as {found!r})"
        for field in dataclasses.fields(config)
        if (found := getattr(again, field.name)) != getattr(config, field.name)
    ]
    if lost:
        raise ValueError(f"a {config.model_type} config.json cannot express " + "; ".join(lost))
    return raw


def read_config(folder: str | Path, *, ignore_keys: Collection[str] = ()) -> ModelConfig:
    """`config_from_hf` of a folder's `config.json`.

    Raises:
        FileNotFoundError: the folder has none.
        ConfigError: see `config_from_hf`, or the file is not a JSON object.
    """
    path = Path(folder) / "config.json"
    return config_from_hf(read_json(path), ignore_keys=ignore_keys, source=str(path))


def stop_token_ids(folder: str | Path, config: ModelConfig) -> tuple[int, ...]:
    """Ids that end a generated text: `generation_config.json`'s, or else `config.json`'s."""
    path = Path(folder) / "generation_config.json"
    if path.exists():
        keys = Keys(read_json(path), {})
        ids = _token_ids(keys, "eos_token_id")
        if keys.problems:
            raise ConfigError(keys.problems, str(path))
        if ids:
            return ids
    return config.eos_token_ids


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError names the file when it holds anything else."""
    if not path.exists():
        there = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else None
        found = f"the folder holds {there}" if there is not None else "no such folder"
        raise FileNotFoundError(f"{path} is missing ({found})")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError([f"not valid JSON: {error}"], str(path)) from error
    if not isinstance(raw, dict):
        raise ConfigError([f"expected a JSON object, found {type(raw).__name__}"], str(path))
    return raw


def _read_rope(keys: Keys, max_position_embeddings: int) -> RopeConfig:
    """`rope_parameters` (5.x), or `rope_scaling` and `rope_theta` (4.57 and before)."""
    new, old = keys.take("rope_parameters"), keys.take("rope_scaling")
    theta, partial = keys.take("rope_theta"), keys.take("partial_rotary_factor")
    name = "rope_parameters" if new else "rope_scaling"
    nested = new or old or {}
    if new and old and new != old:
        keys.problems.append(f"rope_parameters={new!r} and rope_scaling={old!r} disagree")
    if not isinstance(nested, Mapping) or any(isinstance(v, Mapping) for v in nested.values()):
        keys.problems.append(f"{name}={nested!r} is not supported (one flat object expected)")
        return RopeConfig()
    rest = dict(nested)
    kinds = {rest.pop(key) for key in ("rope_type", "type") if rest.get(key) is not None}
    kinds = kinds or {"default"}
    kind = sorted(kinds)[0]
    if len(kinds) > 1:
        keys.problems.append(f"{name} has rope_type and type that disagree: {sorted(kinds)}")
    if kind not in ROPE_TYPES:
        keys.problems.append(
            f"{name} rope_type={kind!r} is not supported; known: {', '.join(ROPE_TYPES)}"
        )
        return RopeConfig()
    thetas = {float(t) for t in (rest.pop("rope_theta", None), theta) if t is not None}
    if len(thetas) > 1:
        keys.problems.append(f"rope_theta={theta!r} and {name} rope_theta disagree: {thetas}")
    partials = {float(p) for p in (rest.pop("partial_rotary_factor", None), partial) if p}
    if partials - {1.0}:
        keys.problems.append(f"partial_rotary_factor={partials} is not supported (only 1.0)")
    fields: dict[str, Any] = {"rope_type": kind, "rope_theta": max(thetas, default=10_000.0)}
    missing = [k for k in _ROPE_NEEDS[kind] if rest.get(k) is None and keys.raw.get(k) is None]
    if missing:
        keys.problems.append(f"{name} lacks {', '.join(missing)} for rope_type={kind!r}")
        return RopeConfig()
    if kind == "default":
        rest = {k: v for k, v in rest.items() if v not in (1, None)}  # a factor of 1 scales nothing
    else:
        fields |= {key: float(rest.pop(key)) for key in _ROPE_NUMBERS if rest.get(key) is not None}
        fields["truncate"] = bool(rest.pop("truncate", True))
        original = _original_context(keys, rest, kind, max_position_embeddings)
        fields["original_max_position_embeddings"] = original
        if kind == "yarn" and original and "factor" not in fields:
            fields["factor"] = max_position_embeddings / original
    unknown = {key: value for key, value in rest.items() if value is not None}
    if unknown:
        keys.problems.append(f"{name} has {unknown!r}, not understood for rope_type={kind!r}")
    return RopeConfig(**fields)


def _original_context(keys: Keys, rest: dict[str, Any], kind: str, maximum: int) -> int | None:
    """The context before scaling. `dynamic` counts from max_position_embeddings, whatever it says.

    As in transformers, YaRN's `factor` is taken as written even when it is not the ratio of the
    two contexts.
    """
    outer = keys.take("original_max_position_embeddings")
    inner = rest.pop("original_max_position_embeddings", None)
    if kind == "linear":
        return None
    if kind == "dynamic":
        return maximum
    return int(outer or inner or maximum)


def _write_rope(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.rope_type == "default":
        return None
    written: dict[str, Any] = {"rope_type": rope.rope_type}
    for key in (*_ROPE_NUMBERS, "original_max_position_embeddings"):
        if getattr(rope, key) is not None:
            written[key] = getattr(rope, key)
    if rope.rope_type == "dynamic":
        written.pop("original_max_position_embeddings", None)
    if not rope.truncate:
        written["truncate"] = False
    return written


def _read_dtype(keys: Keys) -> str:
    new, old = keys.take("dtype"), keys.take("torch_dtype")
    name = str(new or old or "float32").removeprefix("torch.")
    if name not in DTYPES:
        keys.problems.append(f"dtype={name!r} is not supported; known: {', '.join(DTYPES)}")
    return name


def _token_ids(keys: Keys, key: str) -> tuple[int, ...]:
    """A token id, a list of them, or none (null, and the -1 that some files write)."""
    value = keys.take(key)
    values = value if isinstance(value, list) else [value]
    ids = [v for v in values if v is not None and v != -1]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in ids):
        keys.problems.append(f"{key}={value!r}, expected a token id or a list of them")
        return ()
    return tuple(dict.fromkeys(ids))


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
