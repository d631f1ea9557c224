"""From what a user calls a model to a folder on this machine."""

import re
from pathlib import Path

from wide_jax.hf.embedded import EMBEDDED_MODEL, fetch_embedded_model
from wide_jax.hf.load import Progress

# What a model needs: no pickles, no copies in other formats.
_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "README.md")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ResolveError(FileNotFoundError):
    """A model that is nowhere to be found; the message lists what was tried."""


def resolve_model(
    model: str | Path | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of a model.

    Args:
        model: None or the embedded model's key: that model, fetched if need be. A folder: itself.
            Anything else: an id on the Hugging Face hub, downloaded through `huggingface_hub` and
            served from its cache when there is no network.
        revision: Branch, tag or commit of a hub id.
        progress: For the embedded model, see `fetch_embedded_model`.

    Raises:
        ResolveError: neither a folder nor a hub id that could be had; lists what was tried.
        FetchError: the embedded model could not be fetched.
    """
    if model is None or str(model) == EMBEDDED_MODEL.key:
        return fetch_embedded_model(progress=progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        hint = "convert it first (convert_gguf)" if path.suffix == ".gguf" else "name its folder"
        raise ResolveError(f"{model} is a file, expected a model folder: {hint}")
    tried = [f"{path.absolute()}: no such folder", f"not {EMBEDDED_MODEL.key!r}"]
    if not isinstance(model, str) or not _HUB_ID.fullmatch(model):
        raise ResolveError(_message(model, [*tried, "not of the form of a hub id (owner/name)"]))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        reason = f"Hugging Face hub and its local cache: {type(error).__name__}: {reason}"
        raise ResolveError(_message(model, [*tried, reason])) from error


def _message(model: str | Path, tried: list[str]) -> str:
    return f"cannot find the model {str(model)!r}; tried:" + "".join(f"\n  {t}" for t in tried)
