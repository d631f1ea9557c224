"""Shapes of the contract suite: small for interpreters, real models' on a GPU."""

from pallas_kernels.gemm_mn.shapes import SHAPES as QUERY_SHAPES
from pallas_kernels.swiglu_up.shapes import SHAPES as FFN_SHAPES
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


def model_shapes(shapes, m: int, names: tuple[str, ...]) -> list[Shape]:
    return [Shape(m, shapes[name].n, shapes[name].k, shapes[name].group) for name in names]


ALL_MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-14b")
MODEL_TOKENS = (1, 33, 1000, 4096) if ON_GPU else (3, 65)
MODEL_NAMES = ALL_MODELS if ON_GPU else ("smollm2-135m",)
MODEL_SHAPES = {
    "gemm_mn": [s for m in MODEL_TOKENS for s in model_shapes(QUERY_SHAPES, m, MODEL_NAMES)],
    "swiglu_up": [s for m in MODEL_TOKENS for s in model_shapes(FFN_SHAPES, m, MODEL_NAMES)],
}
