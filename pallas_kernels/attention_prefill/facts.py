"""What dispatch knows of `attention_prefill`: flash tiles anywhere, Mosaic on Hopper."""

from pallas_kernels._attention.config import (
    FORMS,
    AttentionConfig,
    AttentionImplementation,
    FlashConfig,
    MosaicConfig,
)
from pallas_kernels._attention.problem import (
    AttentionProblem,
    dense_runs,
    first_that_fits,
    shared_memory_bytes,
)
from pallas_kernels._common.problem import OpFacts

MOSAIC_HEAD_SIZES = (64, 128, 256)


def default_config(problem: AttentionProblem, limit: int, capability: str) -> AttentionConfig:
    """Triton's tiles from shapes alone.

    mma.sync (before and after Hopper) keeps operands in registers beside the accumulators: larger
    tiles spill there. float32 products run on the ordinary units, in small tiles.
    """
    wide, wgmma = problem.d > 128, capability.startswith("9.")
    if problem.itemsize == 4:
        candidates = [FlashConfig(16, 16, 8, 1)] if wide else [FlashConfig(32, 16, 8, 1)]
    elif wide:
        candidates = [FlashConfig(64, 64, 8, 2)] if wgmma else [FlashConfig(64, 32, 8, 2)]
    elif wgmma:
        candidates = [FlashConfig(128, 64, 8, 3)]
    elif problem.d > 64:
        candidates = [FlashConfig(128, 32, 8, 3), FlashConfig(64, 32, 4, 2)]
    else:
        candidates = [FlashConfig(128, 64, 8, 2), FlashConfig(64, 32, 4, 2)]
    return first_that_fits([*candidates], problem, limit, capability)


def mosaic_config(problem: AttentionProblem, limit: int, capability: str) -> AttentionConfig:
    """Mosaic's blocks from shapes alone."""
    candidates = [MosaicConfig(192, 2), MosaicConfig(128, 2), MosaicConfig(64, 2)]
    return first_that_fits([*candidates], problem, limit, capability)


def kernel_of(config: AttentionConfig) -> AttentionImplementation:
    """The kernel that a config is for."""
    return "mosaic" if isinstance(config, MosaicConfig) else "triton"


def kernels(problem: AttentionProblem, capability: str) -> tuple[AttentionImplementation, ...]:
    """The kernels to choose from on a device.

    Of Mosaic's forms, those that have run on a card: whole rows from slot 0. The others run by
    name and in the interpreter; docs/kernels_attention.md says what ran where.
    """
    whole_rows = problem.plain and problem.from_start
    heads = problem.itemsize == 2 and problem.d in MOSAIC_HEAD_SIZES
    return ("mosaic", "triton") if capability == "9.0" and whole_rows and heads else ("triton",)


FACTS = OpFacts(
    default_config=default_config,
    mosaic_config=mosaic_config,
    shared_memory_bytes=shared_memory_bytes,
    fitted=lambda config, problem: config,
    implementations=("reference", "dense", "triton", "mosaic"),
    problem=AttentionProblem,
    forms=FORMS,
    kernel_of=kernel_of,
    kernels=kernels,
    dense_runs=dense_runs,
)
