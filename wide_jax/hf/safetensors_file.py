"""Reading and writing safetensors files piece by piece, so that memory stays at one tensor.

The format (github.com/huggingface/safetensors): 8 bytes little-endian length of the header, a JSON
header `{name: {"dtype", "shape", "data_offsets": [begin, end]}}` padded with spaces, then the bytes
of the tensors in C order, offsets counted from the end of the header. `__metadata__` is optional.
"""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
CHUNK_BYTES = 8 << 20
MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit


class SafetensorsError(ValueError):
    """A file that is not a whole, well-formed safetensors file; the message names it."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, not read yet."""

    file: Path
    name: str
    code: str  # safetensors' dtype, "F32"; may be one that `DTYPES` does not know
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    nbytes: int

    @property
    def dtype(self) -> np.dtype:
        """The numpy dtype; KeyError for codes that numpy has none for."""
        return DTYPES[self.code]

    def read(self, dtype: Any = None) -> np.ndarray:
        """The whole tensor, converted to `dtype` if given."""
        return self.read_slice((), dtype)

    def read_slice(self, index: tuple[slice, ...], dtype: Any = None) -> np.ndarray:
        """`tensor[index]` (steps of 1), reading only the rows it needs, a few MiB at a time."""
        ranges = [range(*s.indices(n)) for s, n in zip(index, self.shape, strict=False)]
        ranges += [range(n) for n in self.shape[len(ranges) :]]
        if any(r.step != 1 for r in ranges):
            raise ValueError(f"{self.name}: slices must have step 1, got {index}")
        out = np.empty([len(r) for r in ranges], self.dtype if dtype is None else dtype)
        if not out.size:
            return out
        if not self.shape:
            out[...] = next(self._blocks(0, 1))[1].reshape(())
            return out
        columns = tuple(slice(r.start, r.stop) for r in ranges[1:])
        first = ranges[0].start
        for start, block in self._blocks(first, ranges[0].stop):
            out[start - first : start - first + len(block)] = block[:, *columns]
        return out

    def chunks(self) -> Iterator[np.ndarray]:
        """The tensor's bytes in order, as uint8 arrays of a few MiB."""
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.offset)
            left = self.nbytes
            while left:
                chunk = np.empty(min(left, CHUNK_BYTES), np.uint8)
                _fill(stream, memoryview(chunk), self)
                left -= chunk.size
                yield chunk

    def _blocks(self, first: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Rows `first` to `stop` in order: (number of its first row, rows)."""
        row = self.shape[1:]
        row_bytes = math.prod(row) * self.dtype.itemsize
        rows = max(1, CHUNK_BYTES // max(row_bytes, 1))
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.offset + first * row_bytes)
            for start in range(first, stop, rows):
                count = min(rows, stop - start)
                raw = np.empty(count * row_bytes, np.uint8)
                _fill(stream, memoryview(raw), self)
                yield start, raw.view(self.dtype).reshape(count, *row)


@dataclasses.dataclass(frozen=True)
class CastTensor:
    """An array or `StoredTensor` in another dtype, converted when it is read."""

    base: Any
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As the base's."""
        return tuple(self.base.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        wanted = self.dtype if dtype is None else dtype
        if isinstance(self.base, StoredTensor):
            return self.base.read(wanted)
        return np.asarray(self.base).astype(wanted)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, without reading their data.

    Raises:
        SafetensorsError: truncated, malformed, or with a name twice.
    """
    file = Path(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise SafetensorsError(
                f"{file}: not a safetensors file, or cut short: {size} bytes, of which the header "
                f"is said to take {length}"
            )
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except ValueError as error:
        raise SafetensorsError(f"{file}: malformed header: {error}") from error
    if not isinstance(header, dict):
        raise SafetensorsError(f"{file}: malformed header: not a JSON object")
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        try:
            code, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise SafetensorsError(f"{file}: malformed header entry {name!r}: {entry}") from error
        if not 0 <= begin <= end <= size - 8 - length:
            raise SafetensorsError(
                f"{file}: cut short: {name} ends at byte {8 + length + end} of {size}"
            )
        if code in DTYPES and end - begin != math.prod(shape) * DTYPES[code].itemsize:
            raise SafetensorsError(
                f"{file}: {name} of shape {shape} and dtype {code} has {end - begin} bytes"
            )
        tensors[name] = StoredTensor(file, name, code, shape, 8 + length + begin, end - begin)
    return tensors


def write_file(
    file: Path, tensors: Mapping[str, Any], *, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Write arrays (numpy, JAX or `StoredTensor`), fetching one at a time to the host.

    The header says `format: pt`, which transformers asks for. Tensors keep their order, but wider
    dtypes come first, so that each starts at a multiple of its element size. `on_bytes` is called
    with the size of each tensor written.
    """
    ordered = sorted(tensors.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize)
    tensors = dict(ordered)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
        header[name] = {
            "dtype": CODES[np.dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Path(file).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for chunk in byte_chunks(tensor):
                stream.write(chunk)
            if on_bytes is not None:
                on_bytes(math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize)
        stream.flush()
        os.fsync(stream.fileno())


def byte_chunks(tensor: Any) -> Iterator[memoryview]:
    """The bytes of an array or `StoredTensor` in C order, a few MiB at a time."""
    if isinstance(tensor, StoredTensor):
        for chunk in tensor.chunks():
            yield memoryview(chunk)
        return
    flat = np.ascontiguousarray(np.asarray(tensor)).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, CHUNK_BYTES):
        yield memoryview(flat[start : start + CHUNK_BYTES])


def _fill(stream: Any, buffer: memoryview, tensor: StoredTensor) -> None:
    """Read exactly `len(buffer)` bytes; the operating system may return fewer at a time."""
    while buffer:
        count = stream.readinto(buffer)
        if not count:
            raise SafetensorsError(f"{tensor.file}: ended within {tensor.name}")
        buffer = buffer[count:]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"stored twice: {', '.join(twice)}")
    return dict(pairs)
