"""What dispatch knows of `attention_decode`: slots split over programs, one kernel."""

from pallas_kernels._attention.config import FORMS, AttentionConfig, DecodeConfig
from pallas_kernels._attention.problem import (
    AttentionProblem,
    dense_runs,
    first_that_fits,
    shared_memory_bytes,
)
from pallas_kernels._common.problem import OpFacts


def default_config(problem: AttentionProblem, limit: int, capability: str) -> AttentionConfig:
    """Splits and blocks from shapes alone."""
    candidates: list[AttentionConfig]
    if problem.itemsize < 4:
        candidates = [DecodeConfig(512, 64, 4, 3), DecodeConfig(512, 16, 4, 2)]
    elif problem.d <= 128:
        candidates = [DecodeConfig(512, 32, 4, 2), DecodeConfig(512, 16, 4, 2)]
    else:  # queries and sums of large heads fill the registers of four warps
        candidates = [DecodeConfig(512, 16, 8, 2)]
    return first_that_fits(candidates, problem, limit, capability)


FACTS = OpFacts(
    default_config=default_config,
    shared_memory_bytes=shared_memory_bytes,
    fitted=lambda config, problem: config,
    implementations=("reference", "dense", "triton"),
    problem=AttentionProblem,
    forms=FORMS,
    dense_runs=dense_runs,
)
