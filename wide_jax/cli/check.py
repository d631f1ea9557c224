"""`wide check`: is this checkpoint read rightly? Ask before any training."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console

from eval.perplexity import PerplexityConfig, evaluate_perplexity
from eval.text import Text, TokenizedText, tokenize
from wide_jax.batch import TokenBatch
from wide_jax.cli.demo_text import python_reference
from wide_jax.cli.progress import advance_bytes, progress
from wide_jax.cli.start import Platform, start
from wide_jax.hf.check import check_folder
from wide_jax.hf.pretrained import from_pretrained
from wide_jax.hf.resolve import resolve_model
from wide_jax.hf.tokenizer import load_tokenizer, text_encoder
from wide_jax.hf.wide_folder import base_folder
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn

WINDOW = 256
REFERENCE_TOLERANCE = 1e-3  # of the logits' standard deviation; float32 on both sides
# A working language model of any size reads Python's manual at a token perplexity of 3 to 60; rows
# in the wrong order or a wrong rotary base give hundreds, untrained weights the vocabulary size.
PLAUSIBLE_PERPLEXITY = (1.5, 150.0)


@dataclasses.dataclass(frozen=True)
class Args:
    """Check that a checkpoint is whole and read rightly, before anything is trained on it.

    Every tensor is there, finite and of plausible size. Then, where torch and transformers are
    installed, the logits equal theirs; otherwise a short text has a plausible perplexity.
    """

    model: str | None = None
    """A model folder or Hugging Face id; by default the embedded SmolLM2-135M-Instruct."""
    windows: int = 4
    """Windows of 256 tokens for the perplexity."""
    perplexity: bool = True
    """Run the model. Without it only the files are checked."""
    platform: Annotated[Platform, tyro.conf.arg(metavar="{auto,cpu,gpu}")] = "auto"
    """Where to compute; `gpu` fails where there is none."""


class CheckFailed(RuntimeError):
    """The checkpoint did not pass; the message says why."""


def main(args: Args) -> None:
    """Run the checks in order of cost; raises CheckFailed at the first that fails."""
    console = Console()
    start(args.platform, console)
    folder = require_plausible(console, args.model)
    if not args.perplexity:
        return
    tokenizer = load_tokenizer(folder)
    text = _text(tokenizer)
    model = from_pretrained(folder, dense=True, dtype="float32", kernels=None)
    if not _has_torch():
        console.print("no torch here, so no reference run: judging by the perplexity of a text")
    else:
        _compare_with_reference(console, model, base_folder(folder), text)
    _judge_perplexity(console, model, text, args.windows)


def require_plausible(console: Console, model: str | None) -> Path:
    """The cheap part: read every tensor once; raises CheckFailed naming those that look wrong."""
    with progress(console, "reading every tensor") as advance:
        folder = resolve_model(model, progress=advance_bytes(advance))
        problems = check_folder(folder, progress=advance_bytes(advance))
    if problems:
        raise CheckFailed("implausible weights:" + "".join(f"\n  {line}" for line in problems))
    console.print("every tensor is there, finite and of plausible size")
    return folder


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _text(tokenizer: Any) -> TokenizedText:
    return tokenize(Text(python_reference().held_out), text_encoder(tokenizer), join=True)


def _judge_perplexity(
    console: Console, model: WideForCausalLM, text: TokenizedText, windows: int
) -> None:
    low, high = PLAUSIBLE_PERPLEXITY
    config = PerplexityConfig(window=WINDOW, max_windows=windows)
    found = evaluate_perplexity(model, text, config, routing=AllOn()).token_perplexity
    line = f"token perplexity {found:.1f} on Python's manual ({windows} windows of {WINDOW})"
    if not low <= found <= high:
        raise CheckFailed(
            f"{line}: expected {low:g} to {high:g} of a trained model. Are the weights trained, "
            "and do config.json (rotary base, head sizes) and tokenizer belong to them?"
        )
    console.print(f"{line}: plausible")


def _compare_with_reference(
    console: Console, model: WideForCausalLM, folder: Path, text: TokenizedText
) -> None:
    """Dense logits against transformers' own, both in float32."""
    ids = np.asarray(text.documents[0][:WINDOW])[None]
    with jax.default_matmul_precision("highest"):
        batch = TokenBatch.from_lengths(jax.numpy.asarray(ids))
        ours = np.asarray(model.logits(model(batch, AllOn()).hidden))
    theirs = _reference_logits(folder, ids)
    difference = float(np.abs(ours - theirs).max() / theirs.std())
    line = f"logits differ from transformers' by {difference:.1e} of their standard deviation"
    if not difference <= REFERENCE_TOLERANCE:
        raise CheckFailed(f"{line}; at most {REFERENCE_TOLERANCE:g} is rounding")
    console.print(line)


def _reference_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    import torch  # pyrefly: ignore[missing-import]  # optional: only where the user has it
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    )
    with torch.no_grad():
        return reference(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
