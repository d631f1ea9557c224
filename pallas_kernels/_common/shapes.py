"""Shapes of real models, for tests, tuning and benchmarks alike."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder layer, from the model's published config."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = {
    "smollm2-135m": ModelShape(576, 1536, 9, 3, 64),
    "qwen3-0.6b": ModelShape(1024, 3072, 16, 8, 128),
    "llama-3.2-3b": ModelShape(3072, 8192, 24, 8, 128),
    "llama-3.1-8b": ModelShape(4096, 14336, 32, 8, 128),
    "qwen3-14b": ModelShape(5120, 17408, 40, 8, 128),
}


@dataclasses.dataclass(frozen=True)
class GemmShape:
    """`x[M, k]` times `w[n, k]` in groups of `group` output channels."""

    n: int
    k: int
    group: int
