"""`wide eval errors`: how far the pruned model is from the dense one, layer by layer."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from eval.errors import PARTS, LayerErrors, layer_errors, plot_errors
from eval.perplexity import PerplexityConfig
from eval.records import append_record, commit, common_fields
from eval.text import read_text, tokenize
from wide_jax.cli.extras import require_eval_extra
from wide_jax.cli.files import check_writable_file, write_json
from wide_jax.cli.models import LoadedModel, load_model
from wide_jax.cli.progress import progress
from wide_jax.cli.start import Platform, start

PLOTS = (".svg", ".png", ".pdf")


@dataclasses.dataclass(frozen=True)
class Args:
    """Relative L2 error and cosine similarity to everything on, for each layer.

    Of attention and FFN outputs for the same input, and of the residual stream as it accumulates.
    """

    data: Path
    """The text: .txt (one document) or .jsonl (field `text` or `page`), either also .gz."""
    model: str
    """A WIDE model folder."""
    window: int = 1024
    """Tokens the model sees at once."""
    max_windows: int | None = 8
    """Only the first so many windows."""
    json: Path | None = None
    """Also write every figure to this file."""
    record: Path | None = None
    """Append a result record (suite `errors`) to this file; `wide report` draws those."""
    plot: Path | None = None
    """Also draw them into this file (.svg, .png, .pdf; needs the `eval` extra)."""
    platform: Annotated[Platform, tyro.conf.arg(metavar="{auto,cpu,gpu}")] = "auto"
    """Where to compute; `gpu` fails where there is none."""


def main(args: Args) -> None:
    """Compare and print a table, a line a layer."""
    console = Console()
    text = read_text(args.data)
    for file in (args.json, args.record, args.plot):
        if file is not None:
            check_writable_file(file)
    if args.plot is not None:
        require_eval_extra("matplotlib")
        if args.plot.suffix not in PLOTS:
            raise ValueError(f"--plot {args.plot}: its ending must be one of {', '.join(PLOTS)}")
    commit()  # asked once a process: what is committed while this runs is not what ran
    start(args.platform, console)
    loaded = load_model(console, args.model)
    if loaded.model.wide is None:
        raise ValueError(f"{args.model} has no routers, so nothing is pruned: give a WIDE folder")
    config = PerplexityConfig(window=args.window, max_windows=args.max_windows)
    tokens = tokenize(text, loaded.encode, join=config.joined)
    with progress(console, "comparing") as advance:
        found = layer_errors(
            loaded.model, tokens, config, progress=lambda done, total: advance(done, total, "")
        )
    console.print(table(found))
    console.print(found.line(), highlight=False, soft_wrap=True)
    console.print(found.accounting.line(), highlight=False, soft_wrap=True)
    if args.json is not None:
        made = common_fields("errors") | loaded.described() | {"data": str(args.data)}
        write_json(args.json, made | {"window": args.window} | found.to_json())
    if args.record is not None:
        append_record(args.record, to_record(args, loaded, found))
    if args.plot is not None:
        plot_errors(found.to_json()["layers"], args.plot)


def to_record(args: Args, loaded: LoadedModel, found: LayerErrors) -> dict[str, Any]:
    """The result as a record of the `errors` suite."""
    figures = found.to_json()
    return common_fields("errors") | {
        "model": loaded.fingerprint(),
        "name": loaded.name,
        "task": args.data.name.partition(".")[0],
        "tokens": found.tokens,
        "layers": figures["layers"],
        "accounting": found.accounting.summary(),
        "recipe": loaded.recipe(),
        "window": args.window,
    }


def table(found: LayerErrors) -> Table:
    """Error and cosine of every layer."""
    result = Table(title="relative L2 error (cosine) against everything on")
    result.add_column("layer", justify="right")
    for part in PARTS:
        result.add_column(part, justify="right")
    for layer in range(len(found.error["stream"])):
        cells = [
            f"{found.error[part][layer]:.3f} ({found.cosine[part][layer]:.3f})" for part in PARTS
        ]
        result.add_row(str(layer), *cells)
    return result
