"""The one table of tensors: Hugging Face name, module path, shape, and when a model has it.

Modules carry Hugging Face's parameter names and its `[out, in]` layout, so nothing is ever
transposed and a row gives both directions: the name `model.layers.{i}.mlp.up_proj.weight` *is* the
module path `("model", "layers", i, "mlp", "up_proj", "weight")`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable

from wide_jax.config import ModelConfig, WideConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: Tensor name; `{i}` is the layer index.
        shape: Dimensions as keys of `sizes`.
        when: Whether a model of this config has the tensor.
    """

    name: str
    shape: tuple[str, ...]
    when: Callable[[ModelConfig], bool] = lambda config: True


def _qkv_bias(config: ModelConfig) -> bool:
    return config.qkv_bias


def _o_bias(config: ModelConfig) -> bool:
    return config.o_bias


def _mlp_bias(config: ModelConfig) -> bool:
    return config.mlp_bias


def _qk_norm(config: ModelConfig) -> bool:
    return config.qk_norm


def _untied(config: ModelConfig) -> bool:
    return not config.tie_word_embeddings


# Q = Hq * d and K = Hk * d: d is head_dim, which need not be D / Hq.
BASE_TABLE = (
    Row("model.embed_tokens.weight", ("V", "D")),
    Row("model.layers.{i}.input_layernorm.weight", ("D",)),
    Row("model.layers.{i}.self_attn.q_proj.weight", ("Q", "D")),
    Row("model.layers.{i}.self_attn.q_proj.bias", ("Q",), _qkv_bias),
    Row("model.layers.{i}.self_attn.k_proj.weight", ("K", "D")),
    Row("model.layers.{i}.self_attn.k_proj.bias", ("K",), _qkv_bias),
    Row("model.layers.{i}.self_attn.v_proj.weight", ("K", "D")),
    Row("model.layers.{i}.self_attn.v_proj.bias", ("K",), _qkv_bias),
    Row("model.layers.{i}.self_attn.q_norm.weight", ("d",), _qk_norm),
    Row("model.layers.{i}.self_attn.k_norm.weight", ("d",), _qk_norm),
    Row("model.layers.{i}.self_attn.o_proj.weight", ("D", "Q")),
    Row("model.layers.{i}.self_attn.o_proj.bias", ("D",), _o_bias),
    Row("model.layers.{i}.post_attention_layernorm.weight", ("D",)),
    Row("model.layers.{i}.mlp.gate_proj.weight", ("F", "D")),
    Row("model.layers.{i}.mlp.gate_proj.bias", ("F",), _mlp_bias),
    Row("model.layers.{i}.mlp.up_proj.weight", ("F", "D")),
    Row("model.layers.{i}.mlp.up_proj.bias", ("F",), _mlp_bias),
    Row("model.layers.{i}.mlp.down_proj.weight", ("D", "F")),
    Row("model.layers.{i}.mlp.down_proj.bias", ("D",), _mlp_bias),
    Row("model.norm.weight", ("D",)),
    Row("lm_head.weight", ("V", "D"), _untied),
)

# Always float32. The second map's rows are [group, class] flattened; class 0 = execute.
ROUTER_TABLE = (
    Row("model.layers.{i}.router_attention.compressor.weight", ("R", "D")),
    Row("model.layers.{i}.router_attention.compressor.bias", ("R",)),
    Row("model.layers.{i}.router_attention.router.weight", ("2Ga", "R")),
    Row("model.layers.{i}.router_attention.router.bias", ("2Ga",)),
    Row("model.layers.{i}.router_ffn.compressor.weight", ("R", "D")),
    Row("model.layers.{i}.router_ffn.compressor.bias", ("R",)),
    Row("model.layers.{i}.router_ffn.router.weight", ("2Gf", "R")),
    Row("model.layers.{i}.router_ffn.router.bias", ("2Gf",)),
)

TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

# Buffers that old checkpoints store and that follow from the config.
_LEFTOVER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\..*")


def sizes(config: ModelConfig, wide: WideConfig | None = None) -> dict[str, int]:
    """The value of every dimension letter in the tables."""
    values = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "d": config.head_dim,
        "Q": config.num_attention_heads * config.head_dim,
        "K": config.num_key_value_heads * config.head_dim,
    }
    if wide is not None:
        values |= {
            "R": wide.router_rank,
            "2Ga": 2 * wide.attn_groups(config),
            "2Gf": 2 * wide.ffn_groups(config),
        }
    return values


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the base model, in the order of the layers."""
    return _expand(BASE_TABLE, config, sizes(config))


def expected_router_tensors(config: ModelConfig, wide: WideConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every router tensor (float32).

    Raises:
        ValueError: group sizes that do not divide the model's heads or channels.
    """
    wide.check(config)
    return _expand(ROUTER_TABLE, config, sizes(config, wide))


def module_path(name: str) -> tuple[str | int, ...]:
    """The path of a tensor in the module tree; layer numbers are ints.

    Raises:
        KeyError: the name is in neither table.
    """
    if not any(pattern.fullmatch(name) for pattern in _PATTERNS):
        hint = ": merge or detach the LoRA first" if ".lora." in name else ""
        raise KeyError(f"{name!r} is not a tensor of the base model or of its routers{hint}")
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))


def tensor_name(path: Iterable[object]) -> str:
    """The inverse of `module_path`.

    Raises:
        KeyError: the path is in neither table.
    """
    name = ".".join(str(part) for part in path)
    module_path(name)
    return name


def is_leftover(name: str) -> bool:
    """Whether a stored tensor is a known buffer that the config determines (`inv_freq`)."""
    return _LEFTOVER.fullmatch(name) is not None


def is_router(name: str) -> bool:
    """Whether a tensor belongs to a router rather than to the base model."""
    return ".router_attention." in name or ".router_ffn." in name


def _expand(
    table: tuple[Row, ...], config: ModelConfig, values: dict[str, int]
) -> dict[str, tuple[int, ...]]:
    """The rows that apply, one entry a layer; what precedes and follows the layers stays there."""
    rows = [row for row in table if row.when(config)]
    per_layer = [row for row in rows if "{i}" in row.name]
    first = rows.index(per_layer[0])
    expanded = [(row, row.name) for row in rows[:first]]
    for layer in range(config.num_hidden_layers):
        expanded += [(row, row.name.format(i=layer)) for row in per_layer]
    expanded += [(row, row.name) for row in rows[first:] if "{i}" not in row.name]
    return {name: tuple(values[size] for size in row.shape) for row, name in expanded}


_PATTERNS = tuple(
    re.compile(re.escape(row.name).replace(re.escape("{i}"), r"(0|[1-9]\d*)"))
    for row in BASE_TABLE + ROUTER_TABLE
)
