"""TensorBoard event files, written without TensorBoard.

A file is a sequence of records (TFRecord: length, masked CRC of it, payload, masked CRC of that),
each payload an `Event` protocol buffer: wall time (field 1), step (2), and either the file version
(3) or a summary (5) of values (1) with a tag (1) and a float (2).
"""

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path


class EventWriter:
    """Appends scalars to a new event file in a folder, on disk after every call."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{os.getpid()}.wide"
        self._file = (folder / name).open("xb")
        self._write(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one value per tag for a step."""
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _key(2, 5) + struct.pack("<f", value))
            for tag, value in values.items()
        )
        self._write(_double(1, time.time()) + _key(2, 0) + _varint(step) + _bytes(5, summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, payload: bytes) -> None:
        length = struct.pack("<Q", len(payload))
        self._file.write(length + _masked_crc(length) + payload + _masked_crc(payload))
        self._file.flush()


def crc32c(data: bytes) -> int:
    """The Castagnoli CRC (reflected polynomial 0x82F63B78)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = [_table_entry(byte) for byte in range(256)]


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)
