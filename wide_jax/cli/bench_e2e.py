"""`wide bench e2e`: time to first token and time per token of a whole model, dense and pruned."""

import dataclasses

from rich.console import Console

from eval.bench_e2e import E2EConfig, check, measure
from wide_jax.cli.demo_text import python_reference
from wide_jax.cli.files import check_writable_file
from wide_jax.cli.models import load_model
from wide_jax.cli.start import start
from wide_jax.shapes import shape


@dataclasses.dataclass(frozen=True)
class Args(E2EConfig):
    """Prefill and decode of a model on this GPU, at its own masks or random ones.

    With --model the model's own masks on text are measured beside random ones; with --shape an
    architecture gets random weights and random masks.
    """

    model: str | None = None
    """A WIDE model folder, for its group sizes and masks."""
    shape: str = "llama-3.1-8b"
    """Architecture of random weights, where no --model is given: llama-3.1-8b or smollm2-135m."""
    layers: int | None = None
    """Fewer layers than the shape has, to look at a part quickly."""


def main(args: Args) -> None:
    """Measure, print, record and plot; fails without a GPU."""
    console = Console()
    check(args)
    if args.model is not None and args.layers is not None:
        raise ValueError("--layers cuts a --shape: a model has the layers it has")
    if args.json is not None:
        check_writable_file(args.json)
    start("gpu", console)
    if args.model is None:
        architecture = shape(args.shape)
        name = f"{args.shape}-shape"
        if args.layers is not None:
            architecture = dataclasses.replace(architecture, num_hidden_layers=args.layers)
        rows = measure(architecture, name, args, console)
    else:
        loaded = load_model(console, args.model, dtype="bfloat16")
        if loaded.model.wide is None:
            raise ValueError(f"{args.model} has no routers: give a WIDE model, or --shape")
        rows = measure(
            loaded.model.config,
            loaded.fingerprint(),
            args,
            console,
            loaded.model,
            loaded.encode("\n\n".join(python_reference().held_out)),
        )
    if args.plots is not None:
        from eval.e2e_plots import write_plots

        for path in write_plots(rows, args.plots):
            console.print(f"wrote {path}")
