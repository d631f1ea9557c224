"""Batches as a pure function of the update's number, so that resuming needs only that number."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int, Integer

from train.corpus import TokenCache
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
        cls, input_ids: Integer[np.ndarray, "B T"], segment_ids: Integer[np.ndarray, "B T"]
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


@runtime_checkable
class Rows(Protocol):
    """Rows of one length by number: what an epoch runs through."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and segments of a row, `[T]` each."""
        ...


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Documents end to end, cut into rows; with `separate`, tokens do not see other documents."""

    cache: TokenCache
    sequence_length: int
    separate: bool = False

    def __post_init__(self) -> None:
        if not len(self):
            raise ValueError(
                f"{len(self.cache.tokens)} tokens make no row of sequence_length="
                f"{self.sequence_length}: give more text, a shorter length or packing='padded'"
            )

    def __len__(self) -> int:
        return len(self.cache.tokens) // self.sequence_length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start = int(index) * self.sequence_length
        ids = np.asarray(self.cache.tokens[start : start + self.sequence_length], np.int32)
        if not self.separate:
            return ids, np.ones_like(ids)
        places = np.arange(start, start + self.sequence_length)
        document = np.searchsorted(self.cache.ends, places, side="right")
        return ids, (document - document[0] + 1).astype(np.int32)


class PaddedRows:
    """A document a row, padded on the right; a longer one continues in rows of its own."""

    def __init__(self, cache: TokenCache, sequence_length: int):
        self.cache, self.sequence_length = cache, sequence_length
        lengths = np.diff(cache.ends, prepend=0)
        self._row_ends = np.cumsum(-(-lengths // sequence_length))  # rows up to each document

    def __len__(self) -> int:
        return int(self._row_ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        document = int(np.searchsorted(self._row_ends, index, side="right"))
        first_row = int(self._row_ends[document - 1]) if document else 0
        document_start = int(self.cache.ends[document - 1]) if document else 0
        start = document_start + (int(index) - first_row) * self.sequence_length
        stop = min(start + self.sequence_length, int(self.cache.ends[document]))
        ids, segments = np.zeros((2, self.sequence_length), np.int32)
        ids[: stop - start] = self.cache.tokens[start:stop]
        segments[: stop - start] = 1
        return ids, segments


MOST_EPOCHS = 1_000_000


class ShuffledBatches:
    """Rows in a new random order every epoch, read ahead by threads (grain).

    `batch(update)` depends on the update's number alone. Called with consecutive numbers, as a run
    does, it reads ahead; any other number moves the iterator there.
    """

    def __init__(self, rows: Rows, per_update: int, seed: int):
        import grain

        # Endless repetition overflows grain's length for batches of one row.
        source = grain.MapDataset.source(rows).seed(seed).shuffle().repeat(MOST_EPOCHS)
        self._dataset = source.batch(per_update, batch_fn=stack_rows)
        self._iterator = iter(
            self._dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
        )
        self._next = 0

    def batch(self, update: int) -> HostBatch:
        """The rows of one update."""
        if update != self._next:
            self._iterator.set_state({"next_index": update})
        self._next = update + 1
        return next(self._iterator)

    def state(self) -> dict[str, int]:
        """The iterator's own state, as grain gives it."""
        return self._iterator.get_state()


def stack_rows(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> HostBatch:
    """Ids and segments of several rows as one batch."""
    ids, segments = zip(*rows, strict=True)
    return HostBatch.of(np.stack(ids), np.stack(segments))


def on_mesh(batch: HostBatch, mesh: Mesh) -> TokenBatch:
    """The batch on the mesh's devices, rows split over `data` and `fsdp`.

    Every process holds the whole host batch and copies the rows of its own devices.
    """
    sharding = NamedSharding(mesh, PARTITION.tokens_BT)

    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return TokenBatch(put(batch.input_ids), put(batch.positions), put(batch.segment_ids))
