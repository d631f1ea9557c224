"""Frozen descriptions of a model: architecture (`ModelConfig`) and pruning (`WideConfig`).

Field names are Hugging Face's wherever it has one. Reading and writing `config.json` is
`wide_jax.hf`'s job; these classes only hold checked values.

Dimension letters used in the whole project (CONTRIBUTING.md has the list):
`B` batch, `T` query tokens, `S` key tokens (cache slots), `D` hidden_size, `F` intermediate_size,
`V` vocab_size, `L` layers, `Hq`/`Hk` query / key-value heads, `d` head_dim, `R` router rank,
`Ga`/`Gf` attention / FFN groups per layer.
"""

import dataclasses
import math
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, in the field names of Hugging Face's `rope_parameters`.

    Only the fields of the given `rope_type` are used; `wide_jax.rope` has the formulas.
    """

    rope_type: RopeType = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only Llama-like model. All sizes are counts of elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_window_layers: tuple[bool, ...] | None = (
        None  # None: every layer, if sliding_window is set
    )
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "float32"  # of the stored weights

    def __post_init__(self) -> None:
        sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
        for name in [*sizes.split(), "num_key_value_heads", "head_dim"]:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        layers = self.sliding_window_layers
        if layers is not None and len(layers) != self.num_hidden_layers:
            raise ValueError(
                f"sliding_window_layers has {len(layers)} entries for "
                f"num_hidden_layers={self.num_hidden_layers}"
            )

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one key-value head, Hq / Hk."""
        return self.num_attention_heads // self.num_key_value_heads

    def window_of_layer(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens (itself included), or None for full attention."""
        if self.sliding_window is None:
            return None
        if self.sliding_window_layers is not None and not self.sliding_window_layers[layer]:
            return None
        return self.sliding_window


@dataclasses.dataclass(frozen=True)
class WideConfig:
    """What the routers decide about: group sizes and router rank.

    `attn_group_size` consecutive query heads form an attention group, `ffn_group_size` consecutive
    intermediate channels an FFN group. One group a module (`depth_routing`) is per-token sublayer
    skipping. With `one_router` the attention router decides for the FFN too (`layer_skipping`); the
    FFN's own router exists but is never asked.

    A group runs where its execute logit exceeds its skip logit by at least the threshold of its
    module: 0 as trained, moved by `wide dial`.
    """

    attn_group_size: int
    ffn_group_size: int
    router_rank: int = 32
    one_router: bool = False
    attention_threshold: float = 0.0
    ffn_threshold: float = 0.0

    def __post_init__(self) -> None:
        for name in ("attn_group_size", "ffn_group_size", "router_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("attention_threshold", "ffn_threshold"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be finite")

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        *,
        attn_group_size: int | None = None,
        ffn_group_size: int = 128,
        router_rank: int = 32,
    ) -> "WideConfig":
        """Group sizes checked against a model; attention groups default to one KV head's queries.

        Raises:
            ValueError: a group size that does not divide the model's heads or channels.
        """
        wide = cls(attn_group_size or config.heads_per_kv_head, ffn_group_size, router_rank)
        wide.check(config)
        return wide

    @classmethod
    def depth_routing(cls, config: ModelConfig, *, router_rank: int = 32) -> "WideConfig":
        """One group a module: a token runs a whole sublayer or skips it."""
        return cls(config.num_attention_heads, config.intermediate_size, router_rank)

    @classmethod
    def layer_skipping(cls, config: ModelConfig, *, router_rank: int = 32) -> "WideConfig":
        """One decision a layer: a token runs both sublayers or skips both."""
        return cls(config.num_attention_heads, config.intermediate_size, router_rank, True)

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError unless these group sizes divide the model's heads and channels."""
        if self.one_router and self.attn_groups(config) != self.ffn_groups(config):
            raise ValueError(
                f"one_router needs as many FFN groups as attention groups, not "
                f"{self.ffn_groups(config)} and {self.attn_groups(config)}"
            )
        heads, channels = config.num_attention_heads, config.intermediate_size
        if heads % self.attn_group_size:
            raise ValueError(
                f"attn_group_size={self.attn_group_size} must divide num_attention_heads={heads}"
            )
        if channels % self.ffn_group_size:
            raise ValueError(
                f"ffn_group_size={self.ffn_group_size} must divide intermediate_size={channels}"
            )

    def attn_groups(self, config: ModelConfig) -> int:
        """Attention groups per layer, Ga."""
        return config.num_attention_heads // self.attn_group_size

    def ffn_groups(self, config: ModelConfig) -> int:
        """FFN groups per layer, Gf."""
        return config.intermediate_size // self.ffn_group_size
