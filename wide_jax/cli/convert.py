"""`wide convert`: a checked copy of a checkpoint as a plain Hugging Face folder."""

import dataclasses
import resource
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from wide_jax.cli.progress import advance_bytes, progress
from wide_jax.hf.convert import convert
from wide_jax.hf.save import SHARD_BYTES


@dataclasses.dataclass(frozen=True)
class Args:
    """Read any supported checkpoint strictly and write it as a plain Hugging Face folder.

    One tensor is in memory at a time. Nothing is permuted or renamed, so without --dtype the
    weights stay bit-equal.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A .gguf file, a model folder or a Hugging Face id."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """The folder to make; never overwritten unasked."""
    dtype: Literal["stored", "float32", "bfloat16", "float16"] = "stored"
    """Of the written weights (a .gguf file gives float32)."""
    shard_bytes: int = SHARD_BYTES
    """Largest size of one weight file."""
    overwrite: bool = False
    """Replace an existing model folder."""


def main(args: Args) -> None:
    """Convert, and say where the folder is."""
    console = Console()
    with progress(console, "converting") as advance:
        folder = convert(
            args.source,
            args.target,
            dtype=None if args.dtype == "stored" else args.dtype,
            shard_bytes=args.shard_bytes,
            overwrite=args.overwrite,
            progress=advance_bytes(advance),
        )
    console.print(f"converted: [bold]{folder}[/bold]", soft_wrap=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    console.print(f"peak host memory of this process: {peak / 2**30:.2f} GiB")
