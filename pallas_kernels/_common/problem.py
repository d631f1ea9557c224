"""The static facts of one call, and what dispatch has to know of an op to choose for it."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax

from pallas_kernels._common.config import FORMS, Implementation
from pallas_kernels._common.forms import form_from_json, form_to_json

# Op -> the module with its `FACTS`. An op is known to dispatch, tables and `explain` by this.
OPS = {
    "attention_decode": "pallas_kernels.attention_decode.facts",
    "attention_prefill": "pallas_kernels.attention_prefill.facts",
    "gemm_k": "pallas_kernels.gemm_k.facts",
    "gemm_mn": "pallas_kernels.gemm_mn.facts",
    "swiglu_up": "pallas_kernels.swiglu_up.facts",
}

# What a hint of None stands for: the sparsity the method is usually trained to.
UNKNOWN_SPARSITY = 0.5
SMALL_TOKENS = 64
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "dense", "pallas", "triton")

AnyImplementation = Literal["reference", "dense", "pallas", "triton", "mosaic"]


@dataclasses.dataclass(frozen=True)
class Call:
    """What the static facts of every op have; subclasses are frozen dataclasses.

    `SHAPE` names the sizes, each with the weight of a doubling between two problems.
    """

    SHAPE: ClassVar[Mapping[str, int]]

    if TYPE_CHECKING:  # fields of the subclasses

        @property
        def op(self) -> str:
            """The op's name."""
            ...

        @property
        def dtype(self) -> str:
            """Of the operands."""
            ...

        @property
        def expected_sparsity(self) -> float | None:
            """The hint."""
            ...

    @property
    def sparsity(self) -> float:
        """The hint, or what stands for none."""
        return UNKNOWN_SPARSITY if self.expected_sparsity is None else self.expected_sparsity

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def shape(self) -> dict[str, int]:
        """The sizes, by name."""
        return {name: getattr(self, name) for name in self.SHAPE}

    def hinted(self, expected_sparsity: float | None) -> "Call":
        """The problem with another hint."""
        return dataclasses.replace(self, expected_sparsity=expected_sparsity)

    def comparable(self, tuned: Any) -> bool:
        """Whether what was fastest for a tuned problem of this op may run this one."""
        # float16 runs exactly as bfloat16 does, and borrows its entries.
        return (self.dtype == "float32") == (tuned.dtype == "float32")


@dataclasses.dataclass(frozen=True)
class Problem(Call):
    """The static facts of one product: `x[m, k]` times `w[n, k]`, `group` channels a group.

    The op says which axis its groups divide.
    """

    SHAPE: ClassVar = {"m": 2, "n": 1, "k": 1, "group": 4}
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

    def comparable(self, tuned: Any) -> bool:
        """As `Call.comparable`: of the same form, too."""
        return self.small == tuned.small and super().comparable(tuned)


@dataclasses.dataclass(frozen=True)
class OpFacts[P: Call, C]:
    """What dispatch knows of an op. Pure functions of static facts; an op's `facts.py` has them.

    Attributes:
        default_config: `(problem, bytes of shared memory a block, capability)` -> tile sizes of
            the Triton kernel for a card or dtype without a table.
        shared_memory_bytes: `(config, problem, capability)` -> bytes one block takes, a model.
        fitted: `(config, problem)` -> the tuned config as this problem can run it.
        for_pallas: a config for `implementation="pallas"`, from a tuned one; None: as it is.
        mosaic_config: as `default_config`, for `implementation="mosaic"`.
        runs: `(config, problem, capability)` -> whether the config's kernel can run the problem
            there, shared memory aside; None: always.
        implementations: the names that `implementation=` takes.
        problem: the class of the op's static facts.
        forms: the op's configs by the names they have in a table.
        kernel_of: the kernel that a config is for.
        kernels: `(problem, capability)` -> the kernels that dispatch may choose there.
        dense_runs: `(problem, capability)` -> whether the dense op can run the problem there.
    """

    default_config: Callable[[P, int, str], C]
    shared_memory_bytes: Callable[[C, P, str], int]
    fitted: Callable[[C, P], C]
    for_pallas: Callable[[C, P], C] | None = None
    mosaic_config: Callable[[P, int, str], C] | None = None
    runs: Callable[[C, P, str], bool] | None = None
    implementations: tuple[AnyImplementation, ...] = IMPLEMENTATIONS
    problem: Callable[..., Any] = Problem
    forms: Mapping[str, type] = dataclasses.field(default_factory=lambda: FORMS)
    kernel_of: Callable[[C], AnyImplementation] = lambda config: "triton"
    kernels: Callable[[P, str], tuple[AnyImplementation, ...]] = lambda problem, at: ("triton",)
    dense_runs: Callable[[P, str], bool] = lambda problem, capability: True

    def config_to_json(self, config: C) -> dict[str, Any]:
        """The JSON object of a config; `config_from_json` reads it back."""
        return form_to_json(config, self.forms)

    def config_from_json(self, data: Mapping[str, Any]) -> C:
        """A config from its JSON object. Raises `ValueError` on an unknown form or field."""
        return form_from_json(data, self.forms)

    def fits(self, config: C | None, problem: P, limit: int, capability: str) -> bool:
        """Whether the config runs the problem. None, no tile sizes, always does."""
        if config is None:
            return True
        if self.runs is not None and not self.runs(config, problem, capability):
            return False
        return self.shared_memory_bytes(config, problem, capability) <= limit


def facts(op: str) -> OpFacts[Any, Any]:
    """What is known of an op. Raises `ValueError` on an unknown name."""
    if op not in OPS:
        raise ValueError(f"unknown {op=}; known: {', '.join(OPS)}")
    return importlib.import_module(OPS[op]).FACTS
