"""`wide export`: a run or a WIDE model as one self-contained folder for `transformers`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from wide_jax.cli.progress import advance_bytes, progress
from wide_jax.hf.config import read_config
from wide_jax.hf.hub import push_to_hub
from wide_jax.hf.load import find_weights
from wide_jax.hf.peft import merge, read_adapter
from wide_jax.hf.save import check_target
from wide_jax.hf.wide_folder import (
    base_folder,
    load_wide_info,
    load_wide_routers,
    save_wide_model,
    verify_base,
)


@dataclasses.dataclass(frozen=True)
class Args:
    """Write a folder that plain `transformers` loads as the dense model, routers beside it.

    A LoRA (after stage 2) is merged into the weights in float32, which changes the dense mode too,
    or stays beside them as an adapter that `peft` loads.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder of `wide calibrate` or `wide recover`, or a WIDE model folder."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """The folder to make; never overwritten unasked."""
    lora: Literal["merge", "adapter"] = "merge"
    """What to do with a LoRA, where the run has one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of merged weights. Less than float32 rounds small deltas away; how much is reported."""
    overwrite: bool = False
    """Replace an existing model folder."""
    push: str | None = None
    """Also upload the folder to this repository of the Hugging Face hub (private)."""


def main(args: Args) -> None:
    """Export, and say what was written."""
    console = Console()
    check_target(args.target, overwrite=args.overwrite)
    source = args.run / "model" if (args.run / "model").is_dir() else args.run
    base = base_folder(source)
    config = read_config(base)
    info = load_wide_info(source, config)
    verify_base(source, config, info)
    extra: dict[str, Any] = {}
    if info.lora == "adapter":
        adapter = read_adapter(source, config)
        if args.lora == "merge":
            extra["weights"] = merge(find_weights(base, config), adapter, config, dtype=args.dtype)
        else:
            extra["adapter"] = adapter
    with progress(console, "writing") as advance:
        save_wide_model(
            args.target,
            base=base,
            config=config,
            wide=info.wide,
            routers=load_wide_routers(source, config, info.wide),
            budget=info.budget,
            targets=info.targets,
            training=info.training,
            rates=info.rates,
            overwrite=args.overwrite,
            progress=advance_bytes(advance),
            **extra,
        )
    console.print(f"exported: [bold]{args.target}[/bold]", soft_wrap=True)
    if "weights" in extra:
        console.print(
            "[yellow]The LoRA is in the weights now, so the dense mode is another model than the "
            "base: measure it with wide eval ppl --dense.[/yellow]"
        )
    if args.push is not None:
        console.print(f"uploaded: {push_to_hub(args.target, args.push)}", soft_wrap=True)
