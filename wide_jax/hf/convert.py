"""Any supported checkpoint to a plain Hugging Face folder, one tensor in memory at a time."""

from pathlib import Path
from typing import Any

import numpy as np

from wide_jax.hf.config import DTYPES, read_config
from wide_jax.hf.gguf import convert_gguf
from wide_jax.hf.load import Progress, find_weights
from wide_jax.hf.resolve import resolve_model
from wide_jax.hf.safetensors_file import DTYPES as NUMPY_DTYPES
from wide_jax.hf.safetensors_file import CastTensor
from wide_jax.hf.save import SHARD_BYTES, save_model


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a checked copy of a model in another dtype or other shards, or from GGUF.

    Args:
        source: A `.gguf` file, a model folder, a hub id, or the embedded model's key.
        target: The folder to make.
        dtype: `float32`, `bfloat16` or `float16`; None keeps the stored one. GGUF gives float32.
        shard_bytes: See `save_model`.
        overwrite: Replace an existing model folder.
        progress: Called with bytes written and bytes in all.

    Raises:
        ConfigError, CheckpointError, GGUFError, ResolveError: naming what does not fit.
        FileExistsError: see `atomic_folder`.
        ValueError: an unknown dtype, or GGUF to another dtype than float32.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"{dtype=} is not supported; known: {', '.join(DTYPES)}")
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        if dtype not in (None, "float32"):
            raise ValueError(f"GGUF converts to float32, not {dtype}; convert the result again")
        return convert_gguf(path, target, overwrite=overwrite, progress=progress)
    folder = resolve_model(source)
    config = read_config(folder)
    weights: dict[str, Any] = dict(find_weights(folder, config))
    if dtype is not None:
        wanted = {np.dtype(d).name: d for d in NUMPY_DTYPES.values()}[dtype]
        weights = {name: CastTensor(stored, wanted) for name, stored in weights.items()}
    return save_model(
        target,
        config,
        weights,
        files_from=folder,
        overwrite=overwrite,
        shard_bytes=shard_bytes,
        progress=progress,
    )
