"""The end of a stage: router biases moved until argmax masks skip the target on training text.

Training prices the masks it samples: a group is skipped with probability sigmoid(-margin), so a
router that is unsure everywhere (small margins, all positive) skips a quarter in training and
nothing at inference. What training has learnt is the order of the margins; where to cut is one
number a budget, and is set here. The number goes into the routers' output biases: inference stays
the plain argmax, and the files keep their format.
"""

import dataclasses
from collections.abc import Callable, Mapping

from train.config import TrainConfig
from train.data import Rows
from train.parts import Params
from wide_jax.dial import Goal, meet, shifted
from wide_jax.model import WideForCausalLM
from wide_jax.routing import Module

Skipped = Callable[[Params], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Shift:
    """What was moved and what came of it."""

    biases: dict[Module, float]  # added to every execute logit of the module, in logits
    before: dict[str, float]  # skipped by argmax masks, in every measure
    after: dict[str, float]

    def line(self) -> str:
        """One line for people."""
        moved = ", ".join(f"{module} {value:+.3f}" for module, value in self.biases.items())
        skipped = ", ".join(
            f"{name} {self.before[name]:.1%} -> {self.after[name]:.1%}"
            for name in ("attention", "ffn", "flops")
        )
        return f"execute biases moved to meet the target with argmax masks: {moved} ({skipped})"


@dataclasses.dataclass(frozen=True)
class SpreadRows:
    """`count` rows of `rows`, evenly spaced over all of them (some twice where there are fewer)."""

    rows: Rows
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return self.rows[index * len(self.rows) // self.count]


def meet_target(trainable: Params, config: TrainConfig, skipped: Skipped) -> tuple[Params, Shift]:
    """Move the routed modules' output biases until `skipped` meets the config's budget.

    Under budget `separate` each module has a target of its own, under the others one shift serves
    all; `wide_jax.dial` searches.

    Args:
        trainable: with the routers' output biases.
        config: budget, targets and routed modules.
        skipped: what argmax masks skip with these trainables, as `HeldOut.skip` names it.
    """
    found = meet(_goals(config), lambda biases: skipped(shifted(trainable, biases)))
    return shifted(trainable, found.biases), Shift(found.biases, found.before, found.after)


def absorb_thresholds(model: WideForCausalLM) -> dict[Module, float]:
    """Take the thresholds that `wide dial` set into the routers' output biases, in place.

    The argmax masks stay what they are (but for ties), and sampling, which knows no threshold,
    then draws around the same cut: training goes on from where the dial stands.

    Returns:
        The thresholds that were not 0, by module, in logits.
    """
    assert model.wide is not None  # only a model with routers has thresholds
    thresholds: dict[Module, float] = {
        "attention": model.wide.attention_threshold,
        "ffn": model.wide.ffn_threshold,
    }
    moved = {module: value for module, value in thresholds.items() if value != 0}
    if not moved:
        return {}
    for layer in model.model.layers:
        for module, threshold in moved.items():
            router = getattr(layer, f"router_{module}")
            bias = router.router.bias
            bias[...] = bias[...].at[::2].add(-threshold)  # class 0 of every group: execute
            router.threshold = 0.0
    model.wide = dataclasses.replace(model.wide, attention_threshold=0.0, ffn_threshold=0.0)
    return moved


def _goals(config: TrainConfig) -> tuple[Goal, ...]:
    if config.budget == "separate":
        return tuple(
            Goal((module,), module, config.module_targets[module]) for module in config.routed
        )
    figure: str = config.budget
    if figure == "paper" and len(config.routed) == 1:
        figure = config.routed[0]  # a module without a router counts in no mean
    return (Goal(config.routed, figure, config.sparsity),)
