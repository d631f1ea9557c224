"""What the study is made of: a `Row` a model, made by one recipe and listed in order of value."""

import dataclasses
from typing import Any, Literal

from train.config import Budget

Method = Literal["dense", "threshold", "wide", "depth", "layer", "static"]
Distill = Literal["off", "beside", "only"]
Stage = Literal[0, 1, 2]  # 0: nothing is trained

# The seven zero-shot tasks, each with the metric that the field reports.
TASKS = {
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "boolq": "acc",
    "hellaswag": "acc_norm",
    "openbookqa": "acc_norm",
    "piqa": "acc",
    "winogrande": "acc",
}
GENERATION = "gsm8k"
# Where speed is measured: at the row's own shapes, and at a large model's with its masks.
OWN_SHAPE, LARGE_SHAPE = "own_shape", "llama-3.1-8b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all rows share, and the values that the sweeps go through."""

    updates: int = 500
    """Of each stage."""
    long_updates: int = 2_000
    """Of each stage of the long run."""
    group: int = 64
    """FFN channels a group wherever the group size is not what varies."""
    groups: tuple[int, ...] = (16, 32, 128, 256, 512)
    heads: int = 3
    """Query heads an attention group wherever that is not what varies."""
    head_groups: tuple[int, ...] = (1, 9)
    seeds: tuple[int, ...] = (1, 2)
    """Of the headline rows, beside 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One model of the study. Rows of equal settings are one row: the id is made of them."""

    wave: int
    """Rows of lower waves are worth more: all their parts come first."""
    method: Method
    stage: Stage = 1
    ffn_group: int | None = None
    """Channels a group; None where the method has no choice."""
    attn_group: int | None = None
    """Query heads a group; None where the method has no choice."""
    budget: Budget | None = None
    target: float | None = None
    distill: Distill = "off"
    seed: int | None = None
    updates: int | None = None
    """Of its own stage; stage 1 of a stage-2 row had as many."""
    whole_tasks: bool = False
    """All documents of every task, not only the first `limit`."""
    generation: bool = False
    """Also GSM8K."""
    speed: bool = False
    """Also how fast its masks are, on a GPU."""

    @property
    def id(self) -> str:
        """Names the row in records, folders and `--only`: `wide-g64-h3-separate-50-s1-u500`."""
        parts: list[str] = [self.method]
        if self.ffn_group is not None:
            parts += [f"g{self.ffn_group}", f"h{self.attn_group}"]
        if self.budget is not None:
            parts.append(self.budget)
        if self.target is not None:
            parts.append(f"{100 * self.target:g}")
        if self.stage:
            parts += [f"s{self.stage}", f"u{self.updates}"]
        if self.distill != "off":
            parts.append(f"distill_{self.distill}")
        if self.seed:
            parts.append(f"seed{self.seed}")
        return "-".join(parts)

    @property
    def program(self) -> str:
        """Names the program of its training step.

        Targets, seeds and numbers of updates are inputs of it: rows that differ in nothing else
        compile it once.
        """
        return f"{self.structure}-{self.budget}-{self.distill}-s{self.stage}"

    @property
    def structure(self) -> str:
        """Names the structure of its model: rows of one structure are measured by one program."""
        return f"{self.method}-{self.ffn_group}-{self.attn_group}"

    @property
    def parent(self) -> "Row | None":
        """The stage-1 row that a stage-2 row starts from."""
        return dataclasses.replace(self, stage=1) if self.stage == 2 else None

    def recipe(self) -> dict[str, Any]:
        """How the model was made, as result records say it."""
        return {
            "method": self.method,
            "stage": self.stage or None,
            "budget": self.budget,
            "target": self.target,
            "ffn_group": self.ffn_group,
            "attn_group": self.attn_group,
            "distill": self.distill,
            "updates": self.updates,
            "seed": self.seed,
        }


def plan(recipe: Recipe | None = None) -> tuple[Row, ...]:
    """Every row once, in order of value; a stage-2 row comes after its stage-1 row.

    A row that several sweeps ask for keeps its first place and gets every part asked for.
    """
    recipe = Recipe() if recipe is None else recipe
    asked: list[Row] = [Row(wave=1, method="dense", stage=0, whole_tasks=True, generation=True)]

    def both_stages(wave: int, method: Method, target: float, **changes: Any) -> None:
        asked.extend(_trained(recipe, wave, method, target, stage, **changes) for stage in (1, 2))

    # 1: the comparison at 50 %, and 25 %.
    asked.append(_trained(recipe, 1, "wide", 0.5, 1, whole_tasks=True, speed=True))
    asked.append(_trained(recipe, 1, "wide", 0.25, 1, whole_tasks=True, speed=True))
    asked.append(_trained(recipe, 1, "depth", 0.5, 1))
    asked.append(_trained(recipe, 1, "static", 0.5, 1))
    asked.append(_threshold(recipe, 1, 0.5))
    headline = _trained(recipe, 1, "wide", 0.5, 2, whole_tasks=True, generation=True, speed=True)
    asked.append(headline)
    asked.append(_trained(recipe, 1, "depth", 0.5, 2))
    asked.append(_trained(recipe, 1, "static", 0.5, 2))
    asked.append(_trained(recipe, 1, "wide", 0.25, 2, whole_tasks=True, speed=True))
    # 2: the same at 25 %.
    both_stages(2, "depth", 0.25)
    both_stages(2, "static", 0.25)
    asked.append(_threshold(recipe, 2, 0.25))
    # 3: group sizes, stage 1 of all before stage 2 of any.
    for stage in (1, 2):
        for group in recipe.groups:
            timed = group == min(recipe.groups)
            row = _trained(recipe, 3, "wide", 0.5, stage, ffn_group=group, speed=timed)
            asked.append(row)
    # 4: budgets.
    for budget in ("paper", "flops"):
        both_stages(4, "wide", 0.5, budget=budget)
    # 5: one decision a layer, and other groups of heads.
    for target in (0.5, 0.25):
        both_stages(5, "layer", target)
    for heads in recipe.head_groups:
        both_stages(5, "wide", 0.5, attn_group=heads)
    # 6: targets.
    for target in (0.1, 0.3, 0.7):
        both_stages(6, "wide", target)
        both_stages(6, "depth", target)
        asked.append(_threshold(recipe, 6, target))
    # 7: distillation.
    for target in (0.5, 0.25):
        both_stages(7, "wide", target, distill="beside")
    # 8: seeds of the headline rows, and of what they are compared with.
    for seed in recipe.seeds:
        for target in (0.5, 0.25):
            both_stages(8, "wide", target, seed=seed)
        both_stages(8, "depth", 0.5, seed=seed)
    # 9: a long run.
    both_stages(9, "wide", 0.5, updates=recipe.long_updates, whole_tasks=True)
    return _once(asked)


def _trained(
    recipe: Recipe, wave: int, method: Method, target: float, stage: Stage, **changes: Any
) -> Row:
    values: dict[str, Any] = {"budget": "separate", "seed": 0, "updates": recipe.updates}
    if method in ("wide", "static"):
        values |= {"ffn_group": recipe.group, "attn_group": recipe.heads}
    values |= {"wave": wave, "method": method, "target": target, "stage": stage}
    return Row(**(values | changes))


def _threshold(recipe: Recipe, wave: int, target: float) -> Row:
    """The baseline without training: its thresholds are set module by module, layer by layer."""
    return Row(
        wave=wave,
        method="threshold",
        stage=0,
        ffn_group=recipe.group,
        attn_group=recipe.heads,
        target=target,
    )


def _once(rows: list[Row]) -> tuple[Row, ...]:
    found: dict[str, Row] = {}
    for row in rows:
        first = found.setdefault(row.id, row)
        found[row.id] = dataclasses.replace(
            first,
            whole_tasks=first.whole_tasks or row.whole_tasks,
            generation=first.generation or row.generation,
            speed=first.speed or row.speed,
        )
    return tuple(found.values())
