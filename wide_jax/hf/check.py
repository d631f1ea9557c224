"""Cheap checks of a checkpoint: is it whole, finite, and of plausible size?

They catch what makes a model silently worthless (a shard of zeros, NaN, weights of another
training stage) before anybody trains on it. They are no proof that a conversion is right: for that
compare logits or perplexity with a reference.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from wide_jax.hf.config import read_config
from wide_jax.hf.load import Progress, find_weights
from wide_jax.hf.safetensors_file import StoredTensor
from wide_jax.hf.wide_folder import base_folder, is_wide_folder, load_wide_info, load_wide_routers

# RMS of a trained tensor. Norm weights of real models lie between about 0.05 and 30, linear maps
# and embeddings between about 0.003 and 1; an order of magnitude is left on either side.
NORM_RMS = (5e-3, 300.0)
LINEAR_RMS = (3e-4, 10.0)


@dataclasses.dataclass(frozen=True)
class TensorFigures:
    """What one pass over a tensor finds, in float64."""

    name: str
    rms: float
    largest: float
    finite: bool


def check_folder(folder: str | Path, *, progress: Progress | None = None) -> list[str]:
    """Problems of a model folder's weights and routers; empty when there are none.

    Reads every weight once, a few MiB at a time.

    Args:
        folder: A dense or WIDE model folder.
        progress: Called with bytes read and bytes in all.

    Raises:
        ConfigError, CheckpointError, WideConfigError: files that do not fit together at all.
    """
    folder = Path(folder)
    base = base_folder(folder)
    config = read_config(base)
    stored = find_weights(base, config)
    if is_wide_folder(folder):
        load_wide_routers(folder, config, load_wide_info(folder, config).wide)
    total, done, problems = sum(t.nbytes for t in stored.values()), 0, []
    for tensor in stored.values():
        problems += judge(figures(tensor))
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    return problems


def figures(tensor: StoredTensor) -> TensorFigures:
    """RMS and largest magnitude of a stored tensor."""
    squares, largest, count = 0.0, 0.0, 0
    for chunk in tensor.chunks():
        values = chunk.view(tensor.dtype).astype(np.float32)
        largest = max(largest, float(np.abs(values).max())) if values.size else largest
        squares += float(np.square(values, dtype=np.float64).sum())
        count += values.size
    finite = bool(np.isfinite(squares))
    rms = float(np.sqrt(squares / count)) if count and finite else float("nan")
    return TensorFigures(tensor.name, rms, largest, finite)


def judge(found: TensorFigures) -> Iterator[str]:
    """What is wrong with a tensor of these figures, if anything."""
    low, high = NORM_RMS if "norm" in found.name else LINEAR_RMS
    if not found.finite:
        yield f"{found.name} holds NaN or infinity"
    elif found.name.endswith(".bias"):
        return  # may well be zero
    elif found.rms == 0:
        yield f"{found.name} is all zeros"
    elif not low <= found.rms <= high:
        yield f"{found.name} has RMS {found.rms:.3g}, expected {low:g} to {high:g}"
