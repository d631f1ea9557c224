"""`TrainConfig`: every number a training run depends on, checked when it is made."""

import dataclasses
from typing import Literal, get_args

from wide_jax.attention import Causal
from wide_jax.routing import MODULES, Module

Budget = Literal["paper", "separate", "flops", "bytes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train: the same for Python, the command line and a YAML file.

    The defaults are the method's router calibration (stage 1); docs/train.md explains each choice.
    """

    sparsity: float = 0.5
    """Target S: the fraction (0 to 1) to skip, in the measure that `budget` names."""
    budget: Budget = "separate"
    """What S counts: `paper` the mean of the modules' rates, `separate` each module's own rate,
    `flops` arithmetic of a prefill, `bytes` traffic of a decode step."""
    attention_sparsity: float | None = None
    """The attention target where it differs from `sparsity` (only with budget `separate`)."""
    ffn_sparsity: float | None = None
    """The FFN target where it differs from `sparsity` (only with budget `separate`)."""
    budget_context: int | None = None
    """Context length in tokens at which `flops` and `bytes` are priced; None: sequence_length."""
    alpha: float = 20.0
    """Weight of the budget term beside the cross entropy."""

    target: Literal["all", "attention", "ffn"] = "all"
    """Modules that may skip; a module left out keeps running everything."""
    freeze_routers: bool = False
    """Hold the routers still: masks are argmax, without noise, and the budget term only a number
    (stage 2)."""
    distill: Literal["off", "beside", "only"] = "off"
    """KL to the dense base (all masks on, no LoRA): added to the cross entropy, or in its place."""
    distill_weight: float = 1.0

    updates: int = 10_000
    """Optimizer updates of the whole run."""
    sequences_per_update: int = 16
    sequence_length: int = 4_096
    """Tokens per sequence."""
    accumulation: int = 1
    """Micro-batches an update is split into; divides `sequences_per_update`."""

    learning_rate: float = 2e-3
    """Peak of the schedule."""
    warmup_fraction: float = 0.1
    """Part of the updates spent in linear warm-up."""
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """Largest global norm of the trained leaves' gradient."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    tau_start: float = 5.0
    tau_end: float = 0.5
    """Gumbel-softmax temperature at the first and at the last update; linear between."""

    seed: int = 0
    """Of the noise and of the order of the data."""
    remat: bool = False
    """Recompute each layer's activations in the backward pass: slower, far less memory."""
    attention: Literal["mask", "cudnn"] = "mask"
    """`cudnn`: flash attention (NVIDIA GPUs, bf16), for rows of one segment; fails elsewhere."""
    logits_chunk: int = 512
    """Positions of each row whose logits exist at once; the whole [tokens, vocab] never does."""

    data_parallel: int = 1
    fsdp: int = 1
    tensor_parallel: int = 1
    """Mesh axes, in devices: `data` and `fsdp` split the batch, `fsdp` and `tensor` the weights."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)} must be {rule}"
            for name, rule, holds in _RULES
            if getattr(self, name) is not None and not holds(getattr(self, name))
        ]
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                problems.append(f"{name}={getattr(self, name)!r} must be one of {allowed}")
        for module in MODULES:
            name = f"{module}_sparsity"
            if getattr(self, name) is not None and self.budget != "separate":
                problems.append(
                    f"{name}={getattr(self, name)} needs budget='separate', not {self.budget!r}: "
                    "other budgets have one target"
                )
        if self.accumulation >= 1 and self.sequences_per_update % self.accumulation:
            problems.append(
                f"sequences_per_update={self.sequences_per_update} must be a multiple of "
                f"accumulation={self.accumulation}"
            )
        elif self.data_parallel >= 1 and self.fsdp >= 1:
            rows, shards = self.micro_batch, self.data_parallel * self.fsdp
            if rows % shards:
                problems.append(
                    f"a micro-batch of {rows} sequences (sequences_per_update / accumulation) must "
                    f"be a multiple of data_parallel * fsdp = {shards}"
                )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def routed(self) -> tuple[Module, ...]:
        """The modules that may skip."""
        return MODULES if self.target == "all" else (self.target,)

    @property
    def module_targets(self) -> dict[Module, float]:
        """Each module's own target (budget `separate`)."""
        attention, ffn = self.attention_sparsity, self.ffn_sparsity
        return {
            "attention": self.sparsity if attention is None else attention,
            "ffn": self.sparsity if ffn is None else ffn,
        }

    @property
    def causal(self) -> Causal | None:
        """What `WideForCausalLM.__call__` takes for `attention`."""
        return None if self.attention == "mask" else self.attention

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch, over all devices."""
        return self.sequences_per_update // self.accumulation

    @property
    def warmup_updates(self) -> int:
        """Updates of linear warm-up, rounded to the nearest."""
        return round(self.warmup_fraction * self.updates)

    @property
    def tokens_per_update(self) -> int:
        """Token positions per update, padding included."""
        return self.sequences_per_update * self.sequence_length


def _at_least(least: int):
    return lambda x: x >= least


def _between_0_and_1(x: float | int) -> bool:
    return 0 <= x <= 1


def _positive(x: float | int) -> bool:
    return 0 < x < float("inf")


def _finite(x: float | int) -> bool:
    return 0 <= x < float("inf")


_CHOICES = {
    "budget": get_args(Budget),
    "target": ("all", *MODULES),
    "distill": ("off", "beside", "only"),
    "attention": ("mask", "cudnn"),
}

_RULES = (
    *((name, "between 0 and 1", _between_0_and_1) for name in ("sparsity", "warmup_fraction")),
    *((f"{module}_sparsity", "between 0 and 1", _between_0_and_1) for module in MODULES),
    *(
        (name, "at least 1", _at_least(1))
        for name in (
            "updates",
            "sequences_per_update",
            "accumulation",
            "budget_context",
            "logits_chunk",
            "data_parallel",
            "fsdp",
            "tensor_parallel",
        )
    ),
    ("sequence_length", "at least 2 (a token and its target)", _at_least(2)),
    *(
        (name, "positive and finite", _positive)
        for name in ("learning_rate", "clip_norm", "tau_start", "tau_end", "epsilon")
    ),
    *(
        (name, "finite and not negative", _finite)
        for name in ("alpha", "weight_decay", "distill_weight")
    ),
    *((name, "in [0, 1)", lambda x: 0 <= x < 1) for name in ("beta1", "beta2")),
    ("seed", "between 0 and 2**32 - 1", lambda x: 0 <= x < 2**32),
)
