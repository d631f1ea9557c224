"""Batches as a pure function of the update's number, so that resuming needs only that number."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

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
        """The rows of one update, all or this process's. The same number gives the same rows."""
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

    Args:
        rows: what an epoch runs through.
        per_update: rows of an update, over all processes.
        seed: of the order.
        local: which of an update's rows this process reads (`local_rows`); None: all.
    """

    def __init__(self, rows: Rows, per_update: int, seed: int, local: Sequence[int] | None = None):
        import grain

        # Endless repetition overflows grain's length for batches of one row.
        order = grain.MapDataset.source(rows).seed(seed).shuffle().repeat(MOST_EPOCHS)
        numbers = range(per_update) if local is None else local
        source = grain.MapDataset.source(_LocalRows(order, per_update, tuple(numbers)))
        self._iterator = iter(
            source.batch(len(numbers), batch_fn=stack_rows).to_iter_dataset(
                grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
            )
        )
        self._next = 0

    def batch(self, update: int) -> HostBatch:
        """This process's rows of one update."""
        if update != self._next:
            self._iterator.set_state({"next_index": update})
        self._next = update + 1
        return next(self._iterator)

    def state(self) -> dict[str, int]:
        """The iterator's own state, as grain gives it."""
        return self._iterator.get_state()


@dataclasses.dataclass(frozen=True)
class _LocalRows:
    """Of every `per_update` rows in turn those numbered `numbers`; no other is read."""

    rows: Any  # `Rows`, as grain's data set
    per_update: int
    numbers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows) // self.per_update * len(self.numbers)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        update, place = divmod(int(index), len(self.numbers))
        return self.rows[update * self.per_update + self.numbers[place]]


def stack_rows(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> HostBatch:
    """Ids and segments of several rows as one batch."""
    ids, segments = zip(*rows, strict=True)
    return HostBatch.of(np.stack(ids), np.stack(segments))


def local_rows(mesh: Mesh, count: int) -> tuple[int, ...]:
    """Which of `count` rows lie on this process's devices, in order."""
    places = _tokens_sharding(mesh).addressable_devices_indices_map((count, 1))
    return tuple(sorted({row for index in places.values() for row in _rows_of(index, count)}))


def on_mesh(batch: HostBatch, mesh: Mesh, *, count: int | None = None) -> TokenBatch:
    """The batch on the mesh's devices, rows split over `data` and `fsdp`.

    Args:
        batch: all rows, or this process's alone (`local_rows`).
        mesh: the devices.
        count: rows over all processes; None: `batch` holds all.

    Raises:
        ValueError: as many rows as are neither all nor this process's.
    """
    held, length = batch.input_ids.shape
    count = held if count is None else count
    numbers = local_rows(mesh, count)
    if held == count:
        numbers = tuple(range(count))
    elif held != len(numbers):
        raise ValueError(
            f"{held} rows of a batch of {count}: this process's devices hold {len(numbers)}"
        )
    sharding = _tokens_sharding(mesh)

    def put(x: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            return x[np.searchsorted(numbers, _rows_of(index, count))]

        return jax.make_array_from_callback((count, length), sharding, part)

    return TokenBatch(put(batch.input_ids), put(batch.positions), put(batch.segment_ids))


def _rows_of(index: tuple[slice, ...] | None, count: int) -> range:
    """The rows in a device's part of `count`; tokens are never split."""
    return range(count) if index is None else range(count)[index[0]]


def _tokens_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PARTITION.tokens_BT)
