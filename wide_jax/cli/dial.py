"""`wide dial`: move a trained model's sparsity to a target, on a text, and store it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from eval.perplexity import PerplexityConfig, PerplexityResult, evaluate_perplexity
from eval.text import Text, read_text, tokenize
from wide_jax.cli.demo_text import python_reference
from wide_jax.cli.models import load_model
from wide_jax.cli.start import Platform, start
from wide_jax.dial import Goal, meet, shifted
from wide_jax.hf.mapping import tensor_name
from wide_jax.hf.wide_folder import is_wide_folder, load_wide_info, set_thresholds
from wide_jax.model import WideForCausalLM
from wide_jax.params import RouterParam
from wide_jax.routing import MODULES, Module

SHARED = ("paper", "parameters", "flops", "bytes")  # figures of both modules together


@dataclasses.dataclass(frozen=True)
class Args:
    """Set how far a router's execute logit must lie above its skip logit, so that a text meets a
    target. The thresholds are kept in the folder's wide_config.json: generate, eval and bench use
    them from then on. Nothing else changes, and --reset takes them back.
    """

    model: str
    """A WIDE model folder."""
    target: tuple[str, ...] = ()
    """What to skip, as figure=fraction: one of flops, bytes, parameters or paper (one threshold
    for both modules), or attention=... and ffn=... (a threshold each)."""
    reset: bool = False
    """Back to the routers as they were trained."""
    data: Path | None = None
    """The text: .txt or .jsonl, either also .gz; by default Python's language reference."""
    windows: int = 16
    """Windows of the text to measure on."""
    window: int = 512
    """Tokens of a window."""
    batch_size: int = 4
    """Windows at once."""
    platform: Annotated[Platform, tyro.conf.arg(metavar="{auto,cpu,gpu}")] = "auto"
    """Where to compute; `gpu` fails where there is none."""


def main(args: Args) -> None:
    """Search, print what moved, store."""
    console = Console()
    folder = Path(args.model)
    if not is_wide_folder(folder):
        raise ValueError(f"{folder} is no WIDE model folder: it has no wide_config.json")
    if args.reset:
        if args.target:
            raise ValueError("--reset takes thresholds back and --target sets them: give one")
        set_thresholds(folder, attention=0.0, ffn=0.0, rates={})
        console.print("thresholds are 0 again: the routers decide as they were trained")
        return
    goals = parse_targets(args.target, one_router=load_wide_info(folder).wide.one_router)
    text = Text(python_reference().held_out) if args.data is None else read_text(args.data)
    start(args.platform, console)
    loaded = load_model(console, str(folder))
    tokens = tokenize(text, loaded.encode, join=True)
    settings = PerplexityConfig(
        window=args.window, max_windows=args.windows, batch_size=args.batch_size
    )
    seen: dict[tuple[float, ...], PerplexityResult] = {}

    def skipped(biases: Mapping[Module, float]) -> Mapping[str, float]:
        moved = with_biases(loaded.model, biases)
        result = evaluate_perplexity(moved, tokens, settings)
        seen[tuple(biases.values())] = result
        console.print(f"[dim]{_tried(biases, result)}[/dim]", highlight=False)
        return result.accounting.summary()

    found = meet(goals, skipped)
    wide = loaded.model.wide
    assert wide is not None  # the folder has a wide_config.json
    thresholds = {
        "attention": wide.attention_threshold - found.biases.get("attention", 0.0),
        "ffn": wide.ffn_threshold - found.biases.get("ffn", 0.0),
    }
    set_thresholds(folder, **thresholds, rates={m: found.after[m] for m in MODULES})
    console.print(_table(found.before, found.after))
    before, after = seen[(0.0,) * len(found.biases)], seen[tuple(found.biases.values())]
    console.print(
        f"perplexity of this text a token: {before.token_perplexity:.2f} -> "
        f"{after.token_perplexity:.2f}"
    )
    stored = ", ".join(f"{module} {value:+.4f}" for module, value in thresholds.items())
    console.print(f"stored in {folder}: thresholds {stored}", soft_wrap=True)
    missed = [g for g in goals if abs(found.after[g.figure] - g.value) > 0.01]
    for goal in missed:
        console.print(
            f"[yellow]{goal.figure} is {found.after[goal.figure]:.1%}, not {goal.value:.1%}: "
            "this text's margins jump over it[/yellow]"
        )


def parse_targets(targets: tuple[str, ...], *, one_router: bool) -> list[Goal]:
    """`figure=fraction` words as goals.

    Raises:
        ValueError: an unknown figure, a fraction outside [0, 1), or figures that exclude each
            other.
    """
    values: dict[str, float] = {}
    for word in targets:
        figure, _, number = word.partition("=")
        if figure not in (*SHARED, *MODULES):
            known = ", ".join((*SHARED, *MODULES))
            raise ValueError(f"--target {word!r}: unknown figure {figure!r}; known: {known}")
        try:
            values[figure] = float(number)
        except ValueError:
            raise ValueError(f"--target {word!r}: expected a fraction, as in flops=0.4") from None
        if not 0 <= values[figure] < 1:
            raise ValueError(f"--target {word!r}: the fraction must be at least 0 and below 1")
    shared = [figure for figure in values if figure in SHARED]
    if not values or len(shared) > 1 or (shared and len(values) > 1):
        raise ValueError(
            f"--target {' '.join(targets) or '(none)'}: give one of {', '.join(SHARED)}, or "
            "attention and ffn, as in --target flops=0.4"
        )
    if shared:
        return [Goal(MODULES, shared[0], values[shared[0]])]
    if one_router:
        raise ValueError(f"one router decides for both modules: give one of {', '.join(SHARED)}")
    return [Goal((module,), module, values[module]) for module in MODULES if module in values]


def with_biases(model: WideForCausalLM, biases: Mapping[Module, float]) -> WideForCausalLM:
    """The same model with `biases` added to every execute logit; no weight is copied."""
    graphdef, routers, rest = nnx.split(model, RouterParam, ...)
    variables = {tensor_name(path): (path, v) for path, v in nnx.to_flat_state(routers)}
    moved = shifted({name: v[...] for name, (_, v) in variables.items()}, biases)
    flat = [(path, v.replace(moved[name])) for name, (path, v) in variables.items()]
    return nnx.merge(graphdef, nnx.from_flat_state(flat), rest)


def _tried(biases: Mapping[Module, float], result: PerplexityResult) -> str:
    moved = ", ".join(f"{module} {-bias:+.4f}" for module, bias in biases.items())
    rates = result.accounting
    return (
        f"thresholds moved by {moved}: attention {rates.attention:.1%}, FFN {rates.ffn:.1%}, "
        f"FLOPs {rates.flops:.1%}; perplexity {result.token_perplexity:.2f}"
    )


def _table(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    table = Table("skipped", "before", "now", title="what the masks skip of this text")
    for figure in before:
        table.add_row(figure, f"{before[figure]:.1%}", f"{after[figure]:.1%}")
    return table
