"""`wide check kernels`: does every kernel compute what it should on this card?"""

import dataclasses

from rich.console import Console
from rich.table import Table

from eval.card_check import CardCase, Verdict, check_card
from pallas_kernels._common.shapes import MODELS
from pallas_kernels._common.testing import PATTERNS
from wide_jax.cli.start import start


@dataclasses.dataclass(frozen=True)
class Args:
    """Run every operation as this card would and compare it with its float32 reference.

    Some minutes on a cold machine, most of it compiling. Exits with 1 if anything is wrong.
    """

    tokens: tuple[int, ...] = (1, 9, 37, 600, 4096)
    """Tokens of a call."""
    models: tuple[str, ...] = ("llama-3.1-8b", "smollm2-135m")
    """Whose layers: llama-3.1-8b, llama-3.2-3b, qwen3-0.6b, qwen3-14b, smollm2-135m."""
    patterns: tuple[str, ...] = ("half", "ragged")
    """Masks: half, few, ragged, clustered, all_on, all_off, one_token_each, one_token_only,
    one_group_only, last_tile_partial."""


class KernelsWrong(RuntimeError):
    """A kernel failed or is wrong; the table says which."""


def main(args: Args) -> None:
    """Print a row a case; raises KernelsWrong if one is wrong."""
    for option, given, known in (
        ("models", args.models, MODELS),
        ("patterns", args.patterns, PATTERNS),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"unknown {option} {', '.join(unknown)}; known: {', '.join(known)}")
    if min(args.tokens, default=1) < 1:
        raise ValueError(f"--tokens {min(args.tokens)}: a call has at least one token")
    if not (args.tokens and args.models and args.patterns):
        raise ValueError("nothing to check: give --tokens, --models and --patterns a value each")
    console = Console()
    start("gpu", console)
    table = Table("operation", "model", "tokens", "masks", "error", "at most", "")
    wrong: list[CardCase] = []
    for verdict in check_card(args.tokens, args.models, args.patterns):
        table.add_row(*row(verdict))
        if not verdict.passed:
            wrong.append(verdict.case)
            console.print(f"[red]wrong[/red] {verdict.case}: {_why(verdict)}", soft_wrap=True)
    console.print(table)
    if wrong:
        raise KernelsWrong(f"{len(wrong)} of {table.row_count} cases: {wrong[0]}")


def row(verdict: Verdict) -> list[str]:
    """A line of the table."""
    case = verdict.case
    mark = "[green]ok[/green]" if verdict.passed else "[red]wrong[/red]"
    figures = [f"{verdict.error:.1e}", f"{verdict.bound:.1e}", mark]
    return [case.op, case.model, str(case.tokens), case.pattern, *figures]


def _why(verdict: Verdict) -> str:
    if verdict.problem is not None:
        return verdict.problem.splitlines()[0]
    return f"relative error {verdict.error:.2e}, at most {verdict.bound:.2e}"
