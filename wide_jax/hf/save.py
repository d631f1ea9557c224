"""Hugging Face folders out: safetensors in shards, written whole or not at all."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wide_jax.config import ModelConfig
from wide_jax.hf.config import config_from_hf, config_to_hf, read_json
from wide_jax.hf.load import INDEX, SINGLE, CheckpointError, Progress, weight_files
from wide_jax.hf.mapping import expected_tensors
from wide_jax.hf.safetensors_file import CODES, StoredTensor, byte_chunks, write_file

SHARD_BYTES = 5_000_000_000

# What is not copied along with a model: weights in other formats, and what belongs to a run.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".safetensors")
_OTHER_FILES = ("adapter_config.json", "wide_config.json", INDEX)


@contextlib.contextmanager
def atomic_folder(target: str | Path, *, overwrite: bool = False) -> Generator[Path]:
    """A new folder to write into, which becomes `target` when the block ends without an error.

    It is written beside the target under a hidden name and renamed, so that nobody ever sees half
    a model; after an error or a kill, the target is as it was.

    Raises:
        FileExistsError: the target exists and is not an empty folder, unless `overwrite`; even then
            only a folder that holds a model (`config.json` or `wide_config.json`) is replaced.
    """
    target = Path(target).absolute()
    check_target(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    fresh.chmod(0o777 & ~umask())
    try:
        yield fresh
        check_target(target, overwrite=overwrite)
        _replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def check_target(target: str | Path, *, overwrite: bool = False) -> None:
    """Raise FileExistsError where `atomic_folder` would: call it before long work."""
    target = Path(target)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists; choose another folder or ask to overwrite it")
    if not any((target / name).exists() for name in ("config.json", "wide_config.json")):
        raise FileExistsError(
            f"{target} is not overwritten: it holds neither config.json nor wide_config.json, so "
            "it does not look like a model"
        )


def save_model(
    target: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Any],
    *,
    files_from: str | Path | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Path:
    """A folder that plain `transformers` loads: config, weights, and another folder's other files.

    Args:
        target: The folder to make.
        config: Written as `config.json`, unless `files_from` has one that says the same.
        weights: By Hugging Face name, exactly those of `expected_tensors(config)`; numpy, JAX or
            `StoredTensor`, fetched to the host one at a time, stored in their own dtype.
        files_from: A folder whose tokenizer, generation config and so on are copied byte by byte.
        overwrite: Replace an existing model folder.
        shard_bytes: Weights above this size are split into files of at most this size.
        progress: Called with bytes written and bytes in all.

    Raises:
        CheckpointError: names or shapes that do not fit the config, all together.
        FileExistsError: see `atomic_folder`.
        ValueError: a config that Hugging Face's `config.json` cannot express.
    """
    check_weights(target, weights, expected_tensors(config))
    with atomic_folder(target, overwrite=overwrite) as folder:
        if files_from is not None:
            copy_companions(files_from, folder)
        write_config(folder, config, dtype=stored_dtype(weights))
        write_weights(folder, weights, shard_bytes=shard_bytes, progress=progress)
    return Path(target)


def write_weights(
    folder: Path,
    weights: Mapping[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """`model.safetensors`, or shards with their index when the weights exceed `shard_bytes`."""
    total = sum(_nbytes(tensor) for tensor in weights.values())
    count = _counter(total, progress)
    shards = _split(weights, shard_bytes)
    if len(shards) == 1:
        write_file(folder / SINGLE, weights, on_bytes=count)
        return
    where = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, {name: weights[name] for name in names}, on_bytes=count)
        where |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def write_config(folder: Path, config: ModelConfig, *, dtype: str) -> None:
    """`config.json` for this model; one that is there and already says the same is left alone.

    Raises:
        ValueError: the `config.json` that is there describes another model.
    """
    path = folder / "config.json"
    if not path.exists():
        write_json(path, config_to_hf(config) | {"torch_dtype": dtype})
        return
    present = read_json(path)
    described = config_from_hf(present, source=str(path))
    if dataclasses.replace(described, dtype=config.dtype) != config:
        raise ValueError(f"{path} describes {described}, but the weights to write are of {config}")
    if described.dtype != dtype:
        key = "dtype" if "dtype" in present else "torch_dtype"
        write_json(path, present | {key: dtype})


def copy_companions(source: str | Path, folder: Path) -> None:
    """Copy a model folder's files other than weights: config, tokenizer, templates, licence."""
    for path in sorted(Path(source).iterdir()):
        skip = path.name.startswith(".") or path.name in _OTHER_FILES
        if path.is_file() and not skip and path.suffix not in _OTHER_WEIGHTS:
            shutil.copyfile(path, folder / path.name)


def copy_weights(source: str | Path, folder: Path) -> None:
    """Copy a model folder's weight files (and index) byte by byte."""
    for path in weight_files(source):
        shutil.copyfile(path, folder / path.name)


def check_weights(
    target: str | Path, weights: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError unless the names and shapes are exactly the expected ones."""
    problems = [f"{name} is missing, expected {list(expected[name])}" for name in expected]
    problems = [p for p, name in zip(problems, expected, strict=True) if name not in weights]
    for name, tensor in weights.items():
        if name not in expected:
            problems.append(f"{name} {list(tensor.shape)} is not a tensor of this model")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(
                f"{name} has shape {list(tensor.shape)}, expected {list(expected[name])}"
            )
    if problems:
        raise CheckpointError(target, problems)


def stored_dtype(weights: Mapping[str, Any]) -> str:
    """The dtype of most of the weights' elements, as `config.json` spells it."""
    counts: dict[str, int] = {}
    for tensor in weights.values():
        name = np.dtype(tensor.dtype).name
        counts[name] = counts.get(name, 0) + math.prod(tensor.shape)
    return max(counts, key=lambda name: counts[name])


def fingerprint(weights: Mapping[str, Any]) -> str:
    """What identifies base weights: `sha256:` and 64 hex digits.

    The hash runs over the tensors in sorted order of their names: `"name dtype [shape]\\n"` in
    UTF-8 with safetensors' dtype code, then the bytes in C order. How they are split into files
    does not matter; their dtype does.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        code = CODES[np.dtype(tensor.dtype)]
        digest.update(f"{name} {code} {list(tensor.shape)}\n".encode())
        for chunk in byte_chunks(tensor):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a newline at the end, on disk when this returns."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _split(weights: Mapping[str, Any], shard_bytes: int) -> list[list[str]]:
    """Names in order, cut before a file would exceed `shard_bytes`; a tensor is never cut."""
    if shard_bytes < 1:
        raise ValueError(f"{shard_bytes=} must be at least 1")
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in weights.items():
        size = _nbytes(tensor)
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _nbytes(tensor: Any) -> int:
    if isinstance(tensor, StoredTensor):
        return tensor.nbytes
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


def _counter(total: int, progress: Progress | None) -> Callable[[int], None] | None:
    """Turns the sizes of single tensors into calls of `progress` with the running sum."""
    if progress is None:
        return None
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    return count


def _replace(fresh: Path, target: Path) -> None:
    """Rename `fresh` to `target`; an old target goes aside first and comes back on failure."""
    if not target.exists():
        os.rename(fresh, target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    os.rename(target, aside)  # onto an empty folder: allowed, and atomic
    try:
        os.rename(fresh, target)
    except OSError:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def umask() -> int:
    """The process's file mode mask, which temporary files do not follow by themselves."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
