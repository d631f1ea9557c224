"""What dispatch knows of output-pruned products: one weight (`gemm_mn`) or two (`swiglu_up`)."""

import dataclasses

from pallas_kernels._common.config import Config, PersistentConfig, SmallConfig, TileConfig
from pallas_kernels._common.forms import next_power_of_two
from pallas_kernels._common.problem import SMALL_TOKENS, OpFacts, Problem


def output_pruned_facts(matrices: int) -> OpFacts:
    """The facts of an op whose tiles hold `matrices` weights side by side."""

    def shared_memory_bytes(config: Config, problem: Problem, capability: str) -> int:
        return config.shared_memory_bytes(problem.itemsize, matrices, capability, problem.m)

    return OpFacts(
        default_config=lambda problem, limit, capability: default_config(
            problem, matrices, limit, capability
        ),
        shared_memory_bytes=shared_memory_bytes,
        fitted=fitted,
        for_pallas=lambda config, problem: pallas_config(config, matrices),
        runs=lambda config, problem, capability: refusal(config, problem, capability) is None,
    )


def refusal(config: Config, problem: Problem, capability: str) -> str | None:
    """Why the config's kernel cannot run the problem, in words; None where it can.

    `problem.n` must be the output channels; shared memory is not looked at.
    """
    if isinstance(config, SmallConfig) and not problem.small:
        return f"the small form takes up to {SMALL_TOKENS} tokens, got m={problem.m}"
    if isinstance(config, SmallConfig) and config.splits > 1 and problem.m == 1:
        return "one token is summed whole: splits=1"
    if not isinstance(config, PersistentConfig):
        return None
    groups = -(-problem.n // problem.group)
    if not capability.startswith("9."):
        return f"the persistent form needs compute capability 9 (wgmma), not {capability}"
    if problem.dtype == "float32":
        return "the persistent form takes bfloat16 and float16, not float32"
    least = config.block_k * (config.num_stages - 1)
    if problem.k % config.block_k or problem.k < least:
        return (
            f"the persistent form takes k in multiples of {config.block_k} from {least} on, "
            f"got k={problem.k}"
        )
    if problem.group % 8 or problem.n % 8:
        return f"the persistent form stores 8 channels at a time: {problem.group=}, {problem.n=}"
    if max(problem.m * problem.k, problem.n * problem.k, problem.m * groups) >= 2**31:
        return "the persistent form has 32-bit offsets: an array here has 2^31 elements or more"
    return None


def widest(problem: Problem) -> int:
    """The widest channel tile that a group can fill: a power of two, at least 16."""
    return max(16, next_power_of_two(problem.group))


def fitted(config: Config, problem: Problem) -> Config:
    """The config with a channel tile no wider than a group, where tiles end with their group."""
    if isinstance(config, SmallConfig) and problem.m == 1 and config.splits > 1:
        config = dataclasses.replace(config, splits=1)
    over_groups = isinstance(config, PersistentConfig) and not config.compact
    if over_groups or config.block_n <= widest(problem):
        return config
    return dataclasses.replace(config, block_n=widest(problem))


def default_config(problem: Problem, matrices: int, shared_memory: int, capability: str) -> Config:
    """Tile sizes from shapes alone, for a card or dtype without a table.

    The largest tile of a short list whose shared memory fits; float32 runs on 64 x 64 tiles.
    """
    if problem.small:
        if problem.m == 1:
            candidates: list[Config] = [SmallConfig(8, 512, 4, 1)]
        else:
            candidates = [SmallConfig(64, 64, 4, 3), SmallConfig(32, 64, 4, 2)]
    elif problem.dtype == "float32":
        candidates = [TileConfig(64, min(64 // matrices, widest(problem)), 32, 4, 2, 8)]
    else:
        # mma.sync keeps operands in registers beside the accumulators: 256 columns spill.
        columns = 256 if capability.startswith("9.") else 128
        wide = min(columns // matrices, widest(problem))
        candidates = [
            TileConfig(128, wide, 64, 8, 3, 16),
            TileConfig(128, min(wide, 128 // matrices), 64, 8, 3, 16),
            TileConfig(128, min(wide, 128 // matrices), 32, 8, 3, 16),
            TileConfig(64, min(wide, 64 // matrices), 32, 4, 2, 16),
        ]
    for config in candidates:
        needed = config.shared_memory_bytes(problem.itemsize, matrices, capability, problem.m)
        if needed <= shared_memory:
            return config
    return candidates[-1]


def pallas_config(config: Config, matrices: int) -> TileConfig:
    """A tuned config as the Pallas body can run it: in tiles, without spilling registers.

    Pallas computes addresses inside the loop; with 128 accumulators a thread it spills.
    """
    if isinstance(config, SmallConfig):
        return TileConfig(16, min(64, max(32, config.block_n)), 32, 4, 2, 1)
    if isinstance(config, PersistentConfig):
        c = config
        config = TileConfig(c.block_m, c.block_n, c.block_k, c.num_warps, c.num_stages, c.band)
    if not isinstance(config, TileConfig):
        raise NotImplementedError(f"no output-pruned product runs with {config}")
    while config.block_m * config.block_n * matrices // (32 * config.num_warps) >= 128:
        config = dataclasses.replace(config, block_n=config.block_n // 2)
    return config
