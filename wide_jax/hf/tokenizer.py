"""Tokenizers through `transformers.AutoTokenizer`, without torch and without a network."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wide_jax.hf.wide_folder import base_folder


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a model folder, or of the base that a WIDE folder names.

    A `transformers` fast tokenizer.

    Raises:
        FileNotFoundError: the folder has no `tokenizer.json`.
    """
    folder = base_folder(folder)
    if not (folder / "tokenizer.json").exists():
        raise FileNotFoundError(
            f"{folder}: tokenizer.json is missing; only fast tokenizers are supported. Copy the "
            "model's tokenizer files there, or save them anew with transformers' save_pretrained"
        )
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to ids without special tokens, and without a warning about long texts."""
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
