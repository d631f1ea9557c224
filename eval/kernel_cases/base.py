"""What the benchmark and the tuner ask of a problem, whatever the op."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels._common.config import Config
from pallas_kernels._common.device import Device
from pallas_kernels._common.problem import Problem
from pallas_kernels._common.testing import clustered_mask, random_mask

MaskKind = Literal["random", "clustered"]

# Bytes of weights to rotate over, so that none is found in the L2 cache (60 MB on an H200).
COLD_BYTES = 300 << 20

# A contender: `(*operands, layout) -> result`.
Run = Callable[..., jax.Array]


class Case(abc.ABC):
    """One op on the shapes of one model layer. Implementations are frozen dataclasses."""

    @property
    @abc.abstractmethod
    def facts(self) -> Problem:
        """The problem as dispatch sees it, without a hint."""

    @property
    @abc.abstractmethod
    def shape(self) -> dict[str, int]:
        """The shape as a record holds it; `m` and `group` among its keys."""

    @property
    @abc.abstractmethod
    def groups(self) -> int:
        """Number of groups of the mask."""

    @property
    @abc.abstractmethod
    def cold(self) -> bool:
        """Whether the weights are read from memory: rotated over, or larger than the L2 cache."""

    @abc.abstractmethod
    def operands(self) -> list[tuple[jax.Array, ...]]:
        """Argument sets to rotate over, each without the layout."""

    def arguments(self, operands: tuple[jax.Array, ...], layout: Any) -> tuple[Any, ...]:
        """What a pruned contender gets: the operands as their producer leaves them for a mask."""
        return (*operands, layout)

    @abc.abstractmethod
    def dense(self) -> Run:
        """The unmasked op as plain JAX writes it: the baseline."""

    @abc.abstractmethod
    def pruned(self, implementation: Any, config: Config | None = None) -> Run:
        """The op under test, on a layout made beforehand."""

    @abc.abstractmethod
    def naive(self, layout: Any) -> Mapping[str, Run]:
        """Other ways to prune, named, for this very mask."""

    @abc.abstractmethod
    def candidates(self, device: Device) -> list[Config]:
        """The configs worth tuning on a device."""

    @abc.abstractmethod
    def relative_time(self, config: Config, sparsity: float) -> float:
        """Time of the kernel over the dense op's by a stated model, for cards nobody measured."""

    @abc.abstractmethod
    def active(self, mask: jax.Array) -> dict[str, int]:
        """`flops`, `weight_bytes` and `bytes` of the active work."""


@dataclasses.dataclass(frozen=True)
class Family:
    """All problems of one op in the benchmark and the tuner.

    Attributes:
        case: the record field `case`: what a model calls it.
        make: `(tokens, channels per group, model name)` -> the problem.
        tune_groups: group sizes that `wide tune` measures.
        bench_groups: group sizes that `wide bench kernels` measures.
        tokens: token counts of both; None: the command's own.
    """

    case: str
    make: Callable[[int, int, str], Case]
    tune_groups: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    bench_groups: tuple[int, ...] = (32, 128, 256, 512)
    tokens: tuple[int, ...] | None = None


def make_mask(kind: MaskKind, tokens: int, groups: int, sparsity: float, seed: int = 7):
    """A mask of the kind; sparsity 0 is everything on."""
    if sparsity == 0.0:
        return jnp.ones((tokens, groups), bool)
    make = {"random": random_mask, "clustered": clustered_mask}[kind]
    return make(jax.random.key(seed), tokens, groups, sparsity)


def weight_sets(nbytes: int, tokens: int) -> int:
    """How many sets of weights to rotate over: one is enough where tokens outweigh them."""
    return 1 if tokens > 1024 else max(1, -(-COLD_BYTES // nbytes))
