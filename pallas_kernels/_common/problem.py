"""The static facts of one call, and what dispatch has to know of an op to choose for it."""

import dataclasses
from collections.abc import Callable

import jax

from pallas_kernels._common.config import Config, Implementation

# What a hint of None stands for: the sparsity the method is usually trained to.
UNKNOWN_SPARSITY = 0.5
SMALL_TOKENS = 64
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "dense", "pallas", "triton")


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static facts of one call: `x[m, k]` times `w[n, k]` in groups of `group` channels.

    The op says which axis its groups divide.
    """

    op: str
    m: int
    n: int
    k: int
    group: int
    dtype: str
    expected_sparsity: float | None = None

    @classmethod
    def of(
        cls, op: str, x: jax.Array, w: jax.Array, group: int, expected_sparsity: float | None
    ) -> "Problem":
        """The problem of a product's operands: `x[m, k]`, and one weight `w[n, k]`."""
        (m, k), n = x.shape, w.shape[0]
        return cls(op, m, n, k, group, x.dtype.name, expected_sparsity)

    @property
    def small(self) -> bool:
        """Whether the form for few tokens applies."""
        return self.m <= SMALL_TOKENS

    @property
    def sparsity(self) -> float:
        """The hint, or what stands for none."""
        return UNKNOWN_SPARSITY if self.expected_sparsity is None else self.expected_sparsity

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 2


@dataclasses.dataclass(frozen=True)
class OpFacts:
    """What dispatch knows of an op. Pure functions of static facts; an op's `facts.py` has them.

    Attributes:
        default_config: `(problem, bytes of shared memory a block, capability)` -> tile sizes for a
            card or dtype without a table.
        shared_memory_bytes: `(config, problem, capability)` -> bytes one block takes, a model.
        fitted: `(config, problem)` -> the tuned config as this problem can run it.
        for_pallas: a config for `implementation="pallas"`, from a tuned one; None: as it is.
        runs: `(config, problem, capability)` -> whether the config's kernel can run the problem
            there, shared memory aside; None: always.
        implementations: the names that `implementation=` takes.
    """

    default_config: Callable[[Problem, int, str], Config]
    shared_memory_bytes: Callable[[Config, Problem, str], int]
    fitted: Callable[[Config, Problem], Config]
    for_pallas: Callable[[Config, Problem], Config] | None = None
    runs: Callable[[Config, Problem, str], bool] | None = None
    implementations: tuple[Implementation, ...] = IMPLEMENTATIONS

    def fits(self, config: Config | None, problem: Problem, limit: int, capability: str) -> bool:
        """Whether the config runs the problem. None, no tile sizes, always does."""
        if config is None:
            return True
        if self.runs is not None and not self.runs(config, problem, capability):
            return False
        return self.shared_memory_bytes(config, problem, capability) <= limit
