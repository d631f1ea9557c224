"""What dispatch knows of `gemm_k`: one weight, token tiles from the layout."""

import dataclasses

from pallas_kernels._common.config import Config, KTileConfig, SmallConfig
from pallas_kernels._common.forms import next_power_of_two
from pallas_kernels._common.problem import OpFacts, Problem


def widest_step(problem: Problem) -> int:
    """The longest step along K within one group: a power of two, at least 16."""
    return max(16, next_power_of_two(problem.group))


def fitted(config: Config, problem: Problem) -> Config:
    """The config with steps along K no longer than a group.

    One token's product may step over several groups at once: it masks channel by channel.
    """
    if problem.m == 1 or config.block_k <= widest_step(problem):
        return config
    return dataclasses.replace(config, block_k=widest_step(problem))


def shared_memory_bytes(config: Config, problem: Problem, capability: str) -> int:
    """Bytes of shared memory a block takes, a model."""
    return config.shared_memory_bytes(problem.itemsize, 1, capability, problem.m)


def default_config(problem: Problem, shared_memory: int, capability: str) -> Config:
    """Tile sizes from shapes alone, for a card or dtype without a table."""
    if problem.m == 1:
        candidates: list[Config] = [SmallConfig(4, 2048, 4, 1)]
    elif problem.small:
        candidates = [SmallConfig(16, 128, 4, 4), SmallConfig(16, 64, 4, 2)]
    elif problem.dtype == "float32":
        candidates = [KTileConfig(64, 32, 8, 2), KTileConfig(32, 32, 8, 2)]
    else:
        # mma.sync keeps operands in registers beside the accumulators: 256 columns spill.
        columns = 256 if capability.startswith("9.") else 128
        candidates = [
            KTileConfig(columns, 64, 8, 3, 2),
            KTileConfig(128, 64, 8, 3, 2),
            KTileConfig(128, 32, 8, 3, 2),
            KTileConfig(64, 32, 8, 2, 2),
        ]
    candidates = [fitted(config, problem) for config in candidates]
    for config in candidates:
        if shared_memory_bytes(config, problem, capability) <= shared_memory:
            return config
    return candidates[-1]


def runs(config: Config, problem: Problem, capability: str) -> bool:
    """Whether the config's kernel can run the problem there, shared memory aside."""
    if isinstance(config, SmallConfig):
        return problem.small
    return isinstance(config, KTileConfig)


def for_pallas(config: Config, problem: Problem) -> KTileConfig:
    """The Pallas body runs in tiles, narrow ones: it computes addresses in the loop, and spills."""
    del problem
    return KTileConfig(64, min(config.block_k, 32), 4, 2)


FACTS = OpFacts(
    default_config=default_config,
    runs=runs,
    for_pallas=for_pallas,
    shared_memory_bytes=shared_memory_bytes,
    fitted=fitted,
)
