"""`wide bench e2e`: a prompt and each token after it, dense and pruned, of a whole model."""

import dataclasses
import gc
from pathlib import Path

from rich.console import Console

from eval.bench_e2e import E2EConfig, check, measure, tokens_needed
from eval.carried_masks import SourceMasks, source_masks
from eval.text import Text, read_text
from wide_jax.cli.demo_text import python_reference
from wide_jax.cli.files import check_writable_file
from wide_jax.cli.models import LoadedModel, load_model
from wide_jax.cli.start import start
from wide_jax.config import ModelConfig
from wide_jax.shapes import shape


@dataclasses.dataclass(frozen=True)
class Args(E2EConfig):
    """Prefill and decode of a model on this GPU, at its own masks or random ones.

    With --model the model's own masks on text are measured beside random ones; with --shape an
    architecture gets random weights and random masks, and with --masks-of a trained model's too.
    """

    model: str | None = None
    """A WIDE model folder, for its group sizes and masks."""
    shape: str = "llama-3.1-8b"
    """Architecture of random weights, where no --model is given: llama-3.1-8b or smollm2-135m."""
    layers: int | None = None
    """Fewer layers than the shape has, to look at a part quickly."""
    masks_of: str | None = None
    """A WIDE model folder: the shape is also timed with this model's masks on text, carried to its
    layers and groups, and with as many skipped at random in every layer. `--sparsities` with
    nothing after it leaves the other random masks out."""
    text: Path | None = None
    """The text that a model's own masks are taken on: .txt or .jsonl, either also .gz; by default
    Python's language reference (about 9,000 tokens; a text is repeated where it is too short)."""


def main(args: Args) -> None:
    """Measure, print, record and plot; fails without a GPU."""
    console = Console()
    check(args)
    if args.model is not None and args.layers is not None:
        raise ValueError("--layers cuts a --shape: a model has the layers it has")
    if args.model is not None and args.masks_of is not None:
        raise ValueError(
            "--masks-of gives a --shape the masks of a model, and --model is timed with its own: "
            "give one of them"
        )
    if args.text is not None and args.model is None and args.masks_of is None:
        raise ValueError("--text is what a model decides on: give --model or --masks-of too")
    text = Text(python_reference().held_out) if args.text is None else read_text(args.text)
    if args.json is not None:
        check_writable_file(args.json)
    start("gpu", console)
    if args.model is None:
        architecture = shape(args.shape)
        name = f"{args.shape}-shape"
        if args.layers is not None:
            architecture = dataclasses.replace(architecture, num_hidden_layers=args.layers)
        source = None
        if args.masks_of is not None:
            source = _masks_of(args.masks_of, text, architecture, args, console)
            gc.collect()  # the model is gone before the shape's weights come
        rows = measure(architecture, name, args, console, source=source)
    else:
        loaded = _with_routers(args.model, console)
        rows = measure(
            loaded.model.config,
            loaded.fingerprint(),
            args,
            console,
            loaded.model,
            loaded.encode(text.joined()),
        )
    if args.plots is not None:
        from eval.e2e_plots import write_plots

        drawn = write_plots(rows, args.plots)
        for path in drawn:
            console.print(f"wrote {path}")
        if not drawn:
            console.print("no plots: they are of one sequence, and none was measured")


def _masks_of(
    folder: str, text: Text, architecture: ModelConfig, args: Args, console: Console
) -> SourceMasks:
    needed = tokens_needed(architecture, args)  # group sizes that do not divide end here
    loaded = _with_routers(folder, console)
    ids = loaded.encode(text.joined())
    if len(ids) < needed:
        console.print(f"the text's {len(ids):,} tokens are repeated to {needed:,}")
    return source_masks(loaded.model, ids, needed, fingerprint=loaded.fingerprint())


def _with_routers(folder: str, console: Console) -> LoadedModel:
    loaded = load_model(console, folder, dtype="bfloat16")
    if loaded.model.wide is None:
        raise ValueError(f"{folder} has no routers: give a WIDE model, or --shape")
    return loaded
