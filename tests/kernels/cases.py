"""Shapes of the contract suite: small for interpreters, real models' on a GPU."""

from collections.abc import Mapping

from pallas_kernels._common.shapes import GemmShape
from tests.kernels.contract import ON_GPU, Shape

TOKENS = (1, 2, 17, 64, 65, 192)

# Every pattern runs on this one: several groups, ragged in every direction, two token tiles.
PATTERN_SHAPE = Shape(m=150, n=96, k=72, group=32)

# Group sizes from 16 to 512, not all powers of two, last group shorter in some.
GROUPED = (
    Shape(m=70, n=64, k=64, group=16),
    Shape(m=70, n=144, k=40, group=48),
    Shape(m=40, n=512, k=32, group=512),
    Shape(m=33, n=257, k=100, group=48),
    Shape(m=5, n=257, k=100, group=48),
    Shape(m=1, n=257, k=100, group=48),
)

ALL_MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-14b")
MODEL_TOKENS = (1, 33, 1000, 4096) if ON_GPU else (3, 65)
MODEL_NAMES = ALL_MODELS if ON_GPU else ("smollm2-135m",)


def model_shapes(shapes: Mapping[str, GemmShape]) -> list[Shape]:
    """A product of the models at several token counts."""
    return [
        Shape(m, shapes[name].n, shapes[name].k, shapes[name].group)
        for m in MODEL_TOKENS
        for name in MODEL_NAMES
    ]
