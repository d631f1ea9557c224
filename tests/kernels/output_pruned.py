"""Output-pruned products under the contract: groups divide the rows of the weights."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common.config import SmallConfig, TileConfig
from pallas_kernels.gemm_mn.shapes import SHAPES as QUERY_SHAPES
from pallas_kernels.swiglu_up.shapes import SHAPES as FFN_SHAPES
from tests.kernels.cases import PATTERN_SHAPE, model_shapes
from tests.kernels.contract import OpUnderTest, Shape

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
        return [
            (PATTERN_SHAPE, TileConfig(32, 16, 32, 4, 2, band=2)),
            (PATTERN_SHAPE, TileConfig(16, 32, 16, 4, 2, band=3)),
            (Shape(40, 96, 72, 32), SmallConfig(16, 32, 4, 2)),
        ]

    def model_shapes(self) -> list[Shape]:
        return model_shapes(SHAPES[self.name])
