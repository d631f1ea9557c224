"""What the benchmark and the tuner ask of a problem, whatever the op."""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels._common.device import Device
from pallas_kernels._common.problem import SMALL_TOKENS, Call, Problem
from pallas_kernels._common.testing import clustered_mask, random_mask

MaskKind = Literal["random", "clustered"]

# Bytes of weights to rotate over, so that none is found in the L2 cache (60 MB on an H200).
COLD_BYTES = 300 << 20

# A contender: `(*operands, layout) -> result`; decode takes the mask itself for a layout.
Run = Callable[..., jax.Array]


class Case(abc.ABC):
    """One op on the shapes of one model layer. Implementations are frozen dataclasses."""

    @property
    @abc.abstractmethod
    def facts(self) -> Call:
        """The problem as dispatch sees it, without a hint."""

    @property
    def shape(self) -> dict[str, int]:
        """The shape as a record holds it."""
        return self.facts.shape

    @property
    @abc.abstractmethod
    def batch(self) -> tuple[Any, ...]:
        """Neighbouring problems of the same batch are compiled and timed together."""

    @property
    @abc.abstractmethod
    def cold(self) -> bool:
        """Whether the weights are read from memory: rotated over, or larger than the L2 cache."""

    @property
    @abc.abstractmethod
    def compute_bound(self) -> bool:
        """Whether the ideal time is the active share of the dense op's."""

    @property
    def own_baseline(self) -> bool:
        """Whether our kernel with every group on is a baseline too."""
        return False

    @abc.abstractmethod
    def checked(self, config: Any) -> bool:
        """Whether the benchmark (`config`: a `BenchConfig`) computes errors against float32."""

    @abc.abstractmethod
    def mask(self, kind: MaskKind, sparsity: float) -> jax.Array:
        """A mask `[M, groups]`."""

    def tuning_mask(self, sparsity: float) -> jax.Array:
        """The mask that `wide tune` measures with."""
        return self.mask("random", sparsity)

    def layout(self, mask: jax.Array) -> Any:
        """What the op takes of a mask."""
        return pallas_kernels.mask_layout(mask)

    @abc.abstractmethod
    def operands(self) -> list[tuple[jax.Array, ...]]:
        """Argument sets to rotate over, each without the layout."""

    def arguments(self, operands: tuple[jax.Array, ...], layout: Any) -> tuple[Any, ...]:
        """What a pruned contender gets: the operands as their producer leaves them for a mask."""
        return (*operands, layout)

    @abc.abstractmethod
    def dense(self) -> Mapping[str, Run]:
        """The unmasked op as plain JAX writes it, in one or several ways: the baselines."""

    @abc.abstractmethod
    def pruned(self, implementation: Any, config: Any = None) -> Run:
        """The op under test, on a layout made beforehand."""

    def naive(self, layout: Any) -> Mapping[str, Run]:
        """Other ways to prune, named, for this very mask."""
        del layout
        return {}

    @abc.abstractmethod
    def candidates(self, device: Device) -> list[Any]:
        """The configs worth tuning on a device; the first is assumed where nobody measured."""

    @abc.abstractmethod
    def relative_time(self, config: Any, sparsity: float) -> float:
        """Time of the kernel over the dense op's: the model of `tune_kernels.DERIVATION`."""

    @abc.abstractmethod
    def active(self, mask: jax.Array) -> dict[str, int]:
        """`flops`, `weight_bytes` and `bytes` of the active work."""


@dataclasses.dataclass(frozen=True)
class ProductCase(Case):
    """A pruned product: `m` tokens, weights `[n, k]`, `group` channels a group."""

    m: int
    n: int
    k: int
    group: int
    dtype: str = "bfloat16"

    @property
    @abc.abstractmethod
    def facts(self) -> Problem:
        """The problem as dispatch sees it, without a hint."""

    @property
    @abc.abstractmethod
    def groups(self) -> int:
        """Number of groups."""

    @property
    def batch(self) -> tuple[Any, ...]:
        """All group sizes of one token count."""
        return self.facts.op, self.m

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of one op."""
        return self.n * self.k * jnp.dtype(self.dtype).itemsize

    @property
    def weight_sets(self) -> int:
        """How many sets of weights to rotate over: one is enough where tokens outweigh them."""
        return 1 if self.m > 1024 else max(1, -(-COLD_BYTES // self.weight_bytes))

    @property
    def cold(self) -> bool:
        """Whether the weights are read from memory: rotated over, or larger than the L2 cache."""
        return self.weight_sets > 1 or self.weight_bytes > COLD_BYTES // 2

    @property
    def compute_bound(self) -> bool:
        """More than a few tokens are."""
        return self.m > SMALL_TOKENS

    def checked(self, config: Any) -> bool:
        """Whether there are few tokens enough."""
        return self.m <= config.error_tokens

    def mask(self, kind: MaskKind, sparsity: float) -> jax.Array:
        """A mask `[m, groups]`."""
        return make_mask(kind, self.m, self.groups, sparsity)

    def tuning_mask(self, sparsity: float) -> jax.Array:
        """Few tokens share what they need; one skips exactly the fraction asked for."""
        if self.m == 1 and sparsity > 0:
            return ((jnp.arange(self.groups) * sparsity) % 1.0 < 1.0 - sparsity)[None, :]
        return self.mask("clustered" if 1 < self.m <= SMALL_TOKENS else "random", sparsity)


@dataclasses.dataclass(frozen=True)
class Family(abc.ABC):
    """All problems of one op in the benchmark and the tuner, from the commands' options.

    `case` is the record field of that name: what a model calls it.
    """

    case: str

    @abc.abstractmethod
    def tune_cases(self, config: Any) -> list[tuple[Case, tuple[float, ...]]]:
        """What `wide tune` measures, with its sparsities; `config` is a `TuneConfig`."""

    @abc.abstractmethod
    def bench_cases(self, config: Any) -> list[Case]:
        """What `wide bench kernels` measures; `config` is a `BenchConfig`."""


@dataclasses.dataclass(frozen=True)
class ProductFamily(Family):
    """The problems of a product.

    Attributes:
        make: `(tokens, channels per group, model name)` -> the problem.
        tune_groups: group sizes that `wide tune` measures.
        bench_groups: group sizes that `wide bench kernels` measures.
        tokens: token counts of both; None: the command's own.
    """

    make: Callable[[int, int, str], ProductCase]
    tune_groups: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    bench_groups: tuple[int, ...] = (32, 128, 256, 512)
    tokens: tuple[int, ...] | None = None

    def tune_cases(self, config: Any) -> list[tuple[Case, tuple[float, ...]]]:
        """Every token count in every group size, with the command's sparsities."""
        return [(case, config.sparsities) for case in self._cases(config, self.tune_groups)]

    def bench_cases(self, config: Any) -> list[Case]:
        """Every token count in every group size."""
        return self._cases(config, self.bench_groups)

    def _cases(self, config: Any, groups: tuple[int, ...]) -> list[Case]:
        sizes = itertools.product(self.tokens or config.tokens, config.groups or groups)
        return [self.make(m, group, config.model) for m, group in sizes]


def make_mask(kind: MaskKind, tokens: int, groups: int, sparsity: float, seed: int = 7):
    """A mask of the kind; sparsity 0 is everything on."""
    if sparsity == 0.0:
        return jnp.ones((tokens, groups), bool)
    make = {"random": random_mask, "clustered": clustered_mask}[kind]
    return make(jax.random.key(seed), tokens, groups, sparsity)
