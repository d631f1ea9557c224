"""Tile sizes of the attention kernels: frozen and checked."""

import dataclasses
from typing import Literal

from pallas_kernels._common.forms import check_positive, check_powers_of_two, next_power_of_two

AttentionImplementation = Literal["reference", "dense", "triton", "mosaic"]


def head_block(d: int) -> int:
    """Columns of a tile that holds heads of size d: a power of two."""
    return max(16, next_power_of_two(d))


@dataclasses.dataclass(frozen=True)
class FlashConfig:
    """Prefill in Triton: `block_m` gathered queries of one head against `block_n` keys a step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        check_powers_of_two(self, "block_m", "block_n", "num_warps")
        check_positive(self, "num_stages")

    def shared_memory_bytes(self, d: int, itemsize: int, capability: str) -> int:
        """Model of the shared memory of one thread block, bytes: q, and the buffers of k and v.

        An upper bound for mma.sync (`capability` other than 9), which keeps q in registers.
        """
        del capability
        columns = head_block(d)
        keys = 2 * self.num_stages * self.block_n * columns * itemsize
        return keys + self.block_m * columns * itemsize


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """Prefill in Mosaic GPU: two warpgroups of 64 queries, `stages` buffers of `block_n` keys."""

    block_n: int
    stages: int

    BLOCK_M = 128  # queries of a tile: 64 for each of the two consumer warpgroups

    def __post_init__(self):
        if self.block_n % 64 or self.block_n < 64:
            raise ValueError(f"block_n={self.block_n} must be a multiple of 64")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")

    def shared_memory_bytes(self, d: int, itemsize: int, capability: str = "9.0") -> int:
        """Shared memory of one thread block, bytes: q (reused for the result), k and v.

        2 KiB more that Mosaic GPU keeps for reductions, and 1 KiB for barriers and alignment.
        """
        del capability
        keys = 2 * self.stages * self.block_n * d * itemsize
        return self.BLOCK_M * d * itemsize + keys + 2048 + 1024


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Decode in Triton: a program reads `split` slots of one kv head, `block_n` at a time."""

    split: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        check_powers_of_two(self, "split", "block_n", "num_warps")
        if self.split < self.block_n:
            raise ValueError(f"split={self.split} must be at least block_n={self.block_n}")
        check_positive(self, "num_stages")

    def shared_memory_bytes(self, d: int, itemsize: int, capability: str) -> int:
        """Model of the shared memory of one thread block, bytes: q, and the buffers of k and v.

        mma.sync keeps the last stage's operands in registers. 8 KiB more for the weights.
        """
        del capability
        row = head_block(d) * itemsize
        return 2 * max(self.num_stages - 1, 1) * self.block_n * row + 16 * row + 8192


AttentionConfig = FlashConfig | MosaicConfig | DecodeConfig
FORMS: dict[str, type[FlashConfig] | type[MosaicConfig] | type[DecodeConfig]] = {
    "flash": FlashConfig,
    "mosaic": MosaicConfig,
    "decode": DecodeConfig,
}
