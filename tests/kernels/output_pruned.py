"""Output-pruned products under the contract: groups divide the rows of the weights."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common.config import PersistentConfig, SmallConfig, TileConfig
from pallas_kernels.gemm_mn.shapes import SHAPES as QUERY_SHAPES
from pallas_kernels.swiglu_up.shapes import SHAPES as FFN_SHAPES
from tests.kernels.cases import PATTERN_SHAPE, model_shapes
from tests.kernels.contract import ON_GPU, OpUnderTest, Shape

SHAPES = {"gemm_mn": QUERY_SHAPES, "swiglu_up": FFN_SHAPES}


class OutputPruned(OpUnderTest):
    def groups(self, shape: Shape) -> int:
        return -(-shape.n // shape.group)

    def shape(self, m: int, groups: int, group: int, other: int) -> Shape:
        return Shape(m, groups * group, other, group)

    def zeros(self, mask: jax.Array, shape: Shape) -> np.ndarray:
        return ~np.repeat(np.asarray(mask), shape.group, axis=1)[:, : shape.n]

    def with_nan(self, operands, token: int, group: int, shape: Shape) -> tuple[jax.Array, ...]:
        x, *rest = operands
        channels = slice(group * shape.group, (group + 1) * shape.group)
        return x.at[token].set(jnp.nan), *(a.at[channels].set(jnp.nan) for a in rest)

    def own_configs(self):
        found = [
            (PATTERN_SHAPE, TileConfig(32, 16, 32, 4, 2, band=2)),
            (PATTERN_SHAPE, TileConfig(16, 32, 16, 4, 2, band=3)),
            (PATTERN_SHAPE, TileConfig(32, 16, 32, 4, 2, band=2, share_zeros=False)),
            (PATTERN_SHAPE, TileConfig(32, 32, 32, 4, 2, 2, share_zeros=False, halves=True)),
            (Shape(40, 96, 72, 32), SmallConfig(16, 32, 4, 2)),
            (Shape(40, 96, 72, 32), SmallConfig(16, 32, 4, 2, splits=2)),
            (Shape(40, 96, 72, 32), SmallConfig(32, 16, 4, 2, splits=4)),
        ]
        if ON_GPU:  # Gluon kernels have no interpreter
            for compact in (True, False):
                for programs in (1, 7):
                    config = PersistentConfig(64, 32, 64, 4, 3, 2, programs, compact)
                    found.append((Shape(600, 136, 256, 48), config))
                config = PersistentConfig(128, 128 // self.weights, 64, 8, 4, 8, 132, compact)
                found.append((Shape(3000, 1024, 512, 128), config))
        return found

    def model_shapes(self) -> list[Shape]:
        return model_shapes(SHAPES[self.name])
