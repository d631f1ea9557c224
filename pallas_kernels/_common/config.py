"""Tile sizes of the GEMM kernels: frozen and checked."""

import dataclasses
from typing import Literal

from pallas_kernels._common.forms import check_positive, check_powers_of_two, next_power_of_two

Implementation = Literal["reference", "dense", "pallas", "triton"]


def _buffers(num_stages: int, capability: str) -> int:
    """Copies of the operand tiles in shared memory: with mma.sync the last stage is in registers.

    wgmma (compute capability 9 and 10) reads its operands from shared memory.
    """
    return num_stages if capability.startswith(("9.", "10.")) else max(num_stages - 1, 1)


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """The compacted form: tiles of `block_m` active tokens of one group.

    A tile is `block_m` tokens x `block_n` output channels (for `swiglu_up`: of gate *and* of up),
    reduced `block_k` inputs at a time with `num_stages` buffers. `band` tiles of tokens are
    launched together, tokens fastest (`_common/tile_kernel.py` draws the order, and says what
    `share_zeros` and `halves` change).
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    band: int = 16
    share_zeros: bool = True
    halves: bool = False

    def __post_init__(self):
        check_powers_of_two(self, "block_m", "block_n", "block_k", "num_warps")
        check_positive(self, "num_stages", "band")
        if self.halves and self.share_zeros:
            raise ValueError("halves need share_zeros=False: a half tile clears no other tile")

    def shared_memory_bytes(
        self, itemsize: int, matrices: int, capability: str, tokens: int
    ) -> int:
        """Model of the shared memory one thread block takes, bytes; the same for any `tokens`.

        `matrices` is 1, or 2 when gate and up share a tile. The loop keeps `num_stages` copies of
        both operand tiles; before Hopper the last one lives in registers, so one copy fewer.
        The result is staged through the same memory on its way out, as `itemsize`-byte values.
        """
        stage = (self.block_m + matrices * self.block_n) * self.block_k * itemsize
        stages = _buffers(self.num_stages, capability)
        out = self.block_m * self.block_n * itemsize
        return max(stage * stages, out)


@dataclasses.dataclass(frozen=True)
class PersistentConfig:
    """The persistent form for Hopper (`_common/persistent_kernel.py`): a tile's loads run ahead.

    Tiles as in `TileConfig`; `programs` of them are computed at a time, one a multiprocessor.
    `compact`: tiles of active tokens only. Otherwise of all tokens and any groups, and the mask is
    applied to the result: the dense product, with its zeros for nothing.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    band: int
    programs: int
    compact: bool

    def __post_init__(self):
        check_powers_of_two(self, "block_m", "block_n", "block_k", "num_warps")
        check_positive(self, "band", "programs")
        if self.num_stages < 2:
            raise ValueError(f"num_stages={self.num_stages} must be at least 2: loads run ahead")
        if self.block_m != 16 * self.num_warps:
            raise ValueError(f"block_m={self.block_m} must be 16 rows a warp, {self.num_warps=}")

    def shared_memory_bytes(
        self, itemsize: int, matrices: int, capability: str, tokens: int
    ) -> int:
        """Model of the shared memory one thread block takes, bytes; the same for any `tokens`.

        The result is rearranged beside the operand tiles, of which the next ones are under way.
        """
        stage = (self.block_m + matrices * self.block_n) * self.block_k * itemsize
        out = min(self.block_m * self.block_n * itemsize, 32_768)
        return stage * self.num_stages + out


@dataclasses.dataclass(frozen=True)
class SmallConfig:
    """The form for 1..64 tokens: `block_n` channels of one group, all tokens at once.

    The group's weights are read once, `block_k` inputs at a time, if any token needs them; by
    `splits` programs, each a part of the inputs (`_common/split_kernel.py`, from 2 tokens on).
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1

    def __post_init__(self):
        check_powers_of_two(self, "block_n", "block_k", "num_warps")
        check_positive(self, "num_stages", "splits")

    def shared_memory_bytes(
        self, itemsize: int, matrices: int, capability: str, tokens: int
    ) -> int:
        """Model of the shared memory one thread block takes for 1..64 `tokens`, bytes.

        One token's product is summed from registers; its loads go through shared memory only if
        there are several stages of them.
        """
        padded = 0 if tokens == 1 else max(16, next_power_of_two(tokens))
        stage = (padded + matrices * self.block_n) * self.block_k * itemsize
        if tokens == 1:
            return stage * (self.num_stages if self.num_stages > 1 else 0) + 1024
        return stage * _buffers(self.num_stages, capability)


@dataclasses.dataclass(frozen=True)
class KTileConfig:
    """The form for more tokens of the input-pruned product: token tiles as the layout made them.

    A tile is `layout.k_axis.TILE` tokens x `block_n` outputs, reduced `block_k` inputs at a time
    with `num_stages` buffers. One program computes `column_tiles` of them, one after another;
    `band` token tiles are launched together, tokens fastest (`gemm_k/tile_kernel.py`).
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    column_tiles: int = 1
    band: int = 8

    def __post_init__(self):
        check_powers_of_two(self, "block_n", "block_k", "num_warps")
        check_positive(self, "num_stages", "column_tiles", "band")

    def shared_memory_bytes(
        self, itemsize: int, matrices: int, capability: str, tokens: int
    ) -> int:
        """As `TileConfig.shared_memory_bytes`."""
        tile = TileConfig(128, self.block_n, self.block_k, self.num_warps, self.num_stages)
        return tile.shared_memory_bytes(itemsize, matrices, capability, tokens)


Config = TileConfig | PersistentConfig | SmallConfig | KTileConfig
FORMS: dict[str, type[Config]] = {
    "tile": TileConfig,
    "persistent": PersistentConfig,
    "small": SmallConfig,
    "k_tile": KTileConfig,
}
