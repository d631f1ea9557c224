"""Weights from a Hugging Face folder: streamed tensor by tensor, strictly, onto any sharding.

Before anything is read, the headers of all files are compared with the table of
`wide_jax.hf.mapping`, and everything that does not fit is reported together.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wide_jax.config import ModelConfig
from wide_jax.hf.mapping import EMBEDDING, TIED_HEAD, expected_tensors, is_leftover, is_router
from wide_jax.hf.safetensors_file import SafetensorsError, StoredTensor, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOAT_CODES = ("F32", "BF16", "F16")

ShardingFor = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
Progress = Callable[[int, int], None]  # bytes done, bytes in all


class CheckpointError(ValueError):
    """A checkpoint that does not fit its config; the message lists every problem, one a line."""

    def __init__(self, folder: Path | str, problems: list[str]):
        self.problems = list(problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{folder}: {len(self.problems)} problem(s) with the weights:{lines}")


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: Any = None,
    sharding_for: ShardingFor | None = None,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """The base model's weights by Hugging Face name (`expected_tensors`), in HF layout.

    Host memory peaks at the model plus one tensor on the CPU backend, and at one tensor where the
    arrays live on other devices; with a sharding, only the rows a device needs are read for it.

    Args:
        folder: With `model.safetensors`, or shards and `model.safetensors.index.json`.
        config: Says which tensors there must be.
        dtype: To convert to; None keeps each tensor's own.
        sharding_for: The sharding of each tensor from its name and shape; None: default device.
        progress: Called after each tensor with bytes read and bytes in all.

    Raises:
        CheckpointError: every missing, unknown, duplicate, misshapen or wrongly typed tensor and
            every missing or damaged file, together.
        FileNotFoundError: the folder has no safetensors weights.
    """
    stored = find_weights(folder, config)
    total, done, weights = sum(t.nbytes for t in stored.values()), 0, {}
    for name, tensor in stored.items():
        sharding = None if sharding_for is None else sharding_for(name, tensor.shape)
        weights[name] = place(tensor, dtype, sharding)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    return weights


def find_weights(folder: str | Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Where each tensor of the model is stored, in the table's order; nothing is read yet.

    Raises:
        As `load_weights`.
    """
    folder = Path(folder)
    problems: list[str] = []
    found = _stored_tensors(folder, problems)
    expected = expected_tensors(config)
    head = found.pop(TIED_HEAD, None) if config.tie_word_embeddings else None
    problems += _compare(found, expected)
    if head is not None and EMBEDDING in found and not _same(head, found[EMBEDDING]):
        problems.append(
            f"{head.file.name}: {TIED_HEAD} differs from {EMBEDDING}, but the config has "
            "tie_word_embeddings=true; expected equal tensors or tie_word_embeddings=false"
        )
    if problems:
        raise CheckpointError(folder, problems)
    return {name: found[name] for name in expected}


def place(
    tensor: StoredTensor, dtype: Any = None, sharding: jax.sharding.Sharding | None = None
) -> jax.Array:
    """One stored tensor as a JAX array, reading for each device only its own part."""
    if sharding is None:
        return jax.block_until_ready(jax.device_put(tensor.read(dtype)))
    parts: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or ()
        if str(index) not in parts:  # replicas share one reading
            parts[str(index)] = tensor.read_slice(index, dtype)
        return parts[str(index)]

    array = jax.make_array_from_callback(tensor.shape, sharding, part)
    return jax.block_until_ready(array)


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a folder's weights, and the index where there is one.

    Raises:
        FileNotFoundError: it has none; says what it holds instead.
        CheckpointError: it has both a single file and an index.
    """
    folder = Path(folder)
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise CheckpointError(folder, [f"both {SINGLE} and {INDEX} are there; remove one"])
    if single.exists():
        return [single]
    if index.exists():
        return [index, *(folder / name for name in sorted(set(_weight_map(index).values())))]
    other = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
    raise FileNotFoundError(
        f"{folder}: expected {SINGLE} or {INDEX}, found {other}; pickled or GGUF weights have to "
        "be converted to safetensors first"
    )


def _stored_tensors(folder: Path, problems: list[str]) -> dict[str, StoredTensor]:
    """Every tensor of the folder's files; duplicates and quarrels with the index are noted."""
    files = weight_files(folder)
    listed = _weight_map(files[0]) if files[0].name == INDEX else None
    found: dict[str, StoredTensor] = {}
    for file in files if listed is None else files[1:]:
        if not file.exists():
            lost = [name for name, where in (listed or {}).items() if where == file.name]
            problems.append(
                f"{file.name}: missing file; {INDEX} expects {len(lost)} tensors in it "
                f"({', '.join(sorted(lost)[:3])}{', …' if len(lost) > 3 else ''})"
            )
            continue
        try:
            tensors = read_header(file)
        except SafetensorsError as error:
            problems.append(str(error))
            continue
        for name, tensor in tensors.items():
            if name in found:
                problems.append(
                    f"{file.name}: {name} is a duplicate; also in {found[name].file.name}"
                )
            elif listed is not None and name not in listed:
                problems.append(f"{file.name}: {name} is not listed in {INDEX}")
            found.setdefault(name, tensor)
    for name, where in (listed or {}).items():
        if (folder / where).exists() and (name not in found or found[name].file.name != where):
            elsewhere = f"found in {found[name].file.name}" if name in found else "not found"
            problems.append(f"{where}: {name} expected there by {INDEX}, {elsewhere}")
    return found


def _compare(
    found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """What is unknown, missing, misshapen or of a dtype that is no weight's."""
    problems = []
    for name, tensor in found.items():
        where = tensor.file.name
        if name in expected:
            if tensor.shape != expected[name]:
                problems.append(
                    f"{where}: {name} has shape {list(tensor.shape)}, expected "
                    f"{list(expected[name])} from the config"
                )
            if tensor.code not in FLOAT_CODES:
                problems.append(
                    f"{where}: {name} has dtype {tensor.code}, expected one of "
                    f"{', '.join(FLOAT_CODES)} (quantised weights are not supported)"
                )
        elif is_router(name):
            problems.append(f"{where}: {name} is a router's; expected in wide_routers.safetensors")
        elif name.endswith(".bias"):
            problems.append(
                f"{where}: {name} is in the file, but the config says there is no such bias "
                "(attention_bias, mlp_bias or the model_type)"
            )
        elif not is_leftover(name):
            problems.append(f"{where}: {name} {list(tensor.shape)} is not a tensor of this model")
    problems += [
        f"{name} is missing, expected shape {list(shape)}"
        for name, shape in expected.items()
        if name not in found
    ]
    return problems


def _same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors are equal bit by bit."""
    if (one.code, one.shape) != (other.code, other.shape):
        return False
    return all(np.array_equal(a, b) for a, b in zip(one.chunks(), other.chunks(), strict=True))


def _weight_map(index: Path) -> dict[str, str]:
    """`weight_map` of a shard index: tensor name to file name within the folder."""
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            index.parent, [f"{index.name}: expected a JSON object with weight_map ({error!r})"]
        ) from error
    outside = sorted({file for file in files.values() if Path(file).name != file})
    if outside:
        raise CheckpointError(index.parent, [f"{index.name}: files outside the folder: {outside}"])
    return files
