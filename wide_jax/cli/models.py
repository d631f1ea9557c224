"""Loading a model for a command: the folder, the model, its tokenizer, and what identifies it."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from wide_jax.cli.progress import advance_bytes, progress
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.engine import EngineChoice, use_kernels
from wide_jax.hf.config import read_config
from wide_jax.hf.embedded import EMBEDDED_MODEL
from wide_jax.hf.load import find_weights
from wide_jax.hf.mapping import is_router
from wide_jax.hf.pretrained import from_pretrained, sparsity_hints, tensors_of
from wide_jax.hf.resolve import resolve_model
from wide_jax.hf.save import fingerprint
from wide_jax.hf.tokenizer import load_tokenizer, text_encoder
from wide_jax.hf.wide_folder import base_folder, is_wide_folder, load_wide_info, read_sizes
from wide_jax.model import WideForCausalLM

DType = Literal["checkpoint", "float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class FoundModel:
    """What is known of a model before any weight is loaded."""

    name: str  # what the user called it
    folder: Path
    config: ModelConfig
    wide: WideConfig | None  # None: without routers
    tokenizer: Any


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model as a command uses it."""

    name: str  # what the user called it
    folder: Path
    model: WideForCausalLM
    tokenizer: Any
    engine: EngineChoice  # what inference runs on, and why

    @property
    def encode(self) -> Callable[[str], list[int]]:
        """Text to ids, without special tokens."""
        return text_encoder(self.tokenizer)

    def fingerprint(self) -> str:
        """Of the stored base weights and, with routers, of those too; reads all of them."""
        base = base_folder(self.folder)
        found = fingerprint(find_weights(base, read_config(base)))
        if self.model.wide is None:
            return found
        routers = fingerprint(tensors_of(self.model, is_router))
        return f"sha256:{hashlib.sha256((found + routers).encode()).hexdigest()}"

    def described(self) -> dict[str, Any]:
        """What a file of figures says of the model; reads all of it."""
        return {"model": self.name, "fingerprint": self.fingerprint(), "recipe": self.recipe()}

    def recipe(self) -> dict[str, Any]:
        """How the model was made, as far as its folder says: for result records."""
        if self.model.wide is None or not is_wide_folder(self.folder):
            return {"method": "dense"}
        info = load_wide_info(self.folder)
        return {
            "method": info.training.get("method", "wide"),
            "stage": info.training.get("stage"),
            "budget": info.budget,
            "target": dict(info.targets),
            "ffn_group": info.wide.ffn_group_size,
            "attn_group": info.wide.attn_group_size,
            "updates": info.training.get("updates"),
            "seed": info.training.get("seed"),
        }


def find_model(console: Console, model: str | None, *, dense: bool = False) -> FoundModel:
    """Resolve and fetch a model, with progress, and read its config and its tokenizer."""
    with progress(console, "finding the model", transient=True) as advance:
        folder = resolve_model(model, progress=advance_bytes(advance))
    config, wide = read_sizes(folder, dense=dense)
    name = EMBEDDED_MODEL.name if model is None else model
    return FoundModel(name, folder, config, wide, load_tokenizer(folder))


def load_found(console: Console, found: FoundModel, *, dtype: DType = "checkpoint") -> LoadedModel:
    """Read the weights of a model that was found, with progress.

    Its inference is put on kernels where there are any for this device; the choice is printed.
    """
    with progress(console, "loading the model") as advance:
        model = from_pretrained(
            found.folder,
            dense=found.wide is None,
            dtype=None if dtype == "checkpoint" else dtype,
            kernels=None,  # chosen below, to say what was chosen
            progress=advance_bytes(advance),
        )
    engine = use_kernels(model, hints=sparsity_hints(found.folder))
    console.print(f"[dim]inference: {engine.reason}[/dim]", highlight=False)
    return LoadedModel(found.name, found.folder, model, found.tokenizer, engine)


def load_model(
    console: Console, model: str | None, *, dense: bool = False, dtype: DType = "checkpoint"
) -> LoadedModel:
    """`find_model`, then `load_found`: for commands with nothing to say in between."""
    return load_found(console, find_model(console, model, dense=dense), dtype=dtype)
