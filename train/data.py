"""Batches as a pure function of the update's number, so that resuming needs only that number."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int

from wide_jax.batch import TokenBatch
from wide_jax.partition import PARTITION


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """The arrays of a `TokenBatch` as numpy, before they go to the devices."""

    input_ids: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, "B T"]
    segment_ids: Int[np.ndarray, "B T"]

    @classmethod
    def of(
        cls, input_ids: Int[np.ndarray, "B T"], segment_ids: Int[np.ndarray, "B T"]
    ) -> "HostBatch":
        """Positions count from 0 within each segment of a row.

        Args:
            input_ids: token ids.
            segment_ids: 0 is padding, equal neighbours are one segment.
        """
        ids, segments = input_ids.astype(np.int32), segment_ids.astype(np.int32)
        columns = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
        starts = np.ones(ids.shape, bool)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        first = np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
        return cls(ids, (columns - first).astype(np.int32), segments)


@runtime_checkable
class Batches(Protocol):
    """Where a run's tokens come from."""

    def batch(self, update: int) -> HostBatch:
        """The rows of one update. The same number gives the same rows."""
        ...


@dataclasses.dataclass(frozen=True)
class PackedWindows:
    """Consecutive windows of one long token array, shuffled anew in every epoch.

    Row `r` of the whole run is window `order(epoch)[r % windows]` with `epoch = r // windows`;
    tokens past the last whole window are left out. Every row is one segment.
    """

    tokens: np.ndarray  # [N] token ids, any integer dtype; may be memory-mapped
    sequence_length: int
    rows: int  # sequences per update
    seed: int

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1:
            raise ValueError(f"tokens must be one axis of ids, got shape {self.tokens.shape}")
        if self.windows < 1:
            raise ValueError(
                f"{len(self.tokens)} tokens make no window of sequence_length="
                f"{self.sequence_length}: give more text or a shorter length"
            )

    @property
    def windows(self) -> int:
        """Whole windows in the array: the rows of one epoch."""
        return len(self.tokens) // self.sequence_length

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of windows in one epoch."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.windows)

    def batch(self, update: int) -> HostBatch:
        """Rows `update * rows` to `(update + 1) * rows` of the run."""
        numbers = np.arange(update * self.rows, (update + 1) * self.rows)
        epochs = {epoch: self.order(epoch) for epoch in set((numbers // self.windows).tolist())}
        windows = [epochs[n // self.windows][n % self.windows] for n in numbers.tolist()]
        length = self.sequence_length
        ids = np.stack([self.tokens[w * length : (w + 1) * length] for w in windows])
        return HostBatch.of(ids, np.ones(ids.shape, np.int32))


def on_mesh(batch: HostBatch, mesh: Mesh) -> TokenBatch:
    """The batch on the mesh's devices, rows split over `data` and `fsdp`.

    Every process holds the whole host batch and copies the rows of its own devices.
    """
    sharding = NamedSharding(mesh, PARTITION.tokens_BT)

    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return TokenBatch(put(batch.input_ids), put(batch.positions), put(batch.segment_ids))
