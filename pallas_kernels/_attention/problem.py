"""The static facts of an attention call, and what dispatch knows of both attention ops."""

import dataclasses
from typing import Any, ClassVar

from pallas_kernels._attention.config import AttentionConfig
from pallas_kernels._common.problem import Call


@dataclasses.dataclass(frozen=True)
class AttentionProblem(Call):
    """The static facts of one call: `q[b, t, hq, d]`, `k[b, s, hk, d]`, `group` heads a group.

    `plain`: what cuDNN can run without a T x S mask. For prefill, whole rows from slot 0 (lengths
    and a window may differ); for decode, rows from slot 0 without a window. Decode has t = 1.
    `from_start`: queries see from slot 0 on: no window, segments or left padding.
    """

    SHAPE: ClassVar = {"b": 1, "t": 2, "s": 1, "hq": 1, "hk": 1, "d": 0, "group": 1}
    op: str
    b: int
    t: int
    s: int
    hq: int
    hk: int
    d: int
    group: int
    dtype: str
    expected_sparsity: float | None = None
    plain: bool = True
    from_start: bool = True

    def comparable(self, tuned: Any) -> bool:
        """As `Call.comparable`: of heads of the same size, too."""
        return self.d == tuned.d and super().comparable(tuned)


def dense_runs(problem: AttentionProblem, capability: str) -> bool:
    """Whether cuDNN's attention can run the problem."""
    return problem.plain and problem.dtype != "float32" and float(capability) >= 8.0


def shared_memory_bytes(config: AttentionConfig, problem: AttentionProblem, capability: str) -> int:
    """Bytes of shared memory a block takes, a model."""
    return config.shared_memory_bytes(problem.d, problem.itemsize, capability)


def first_that_fits(
    candidates: list[AttentionConfig], problem: AttentionProblem, limit: int, capability: str
) -> AttentionConfig:
    """The first config whose shared memory fits, or the last of all."""
    for config in candidates:
        if shared_memory_bytes(config, problem, capability) <= limit:
            return config
    return candidates[-1]
