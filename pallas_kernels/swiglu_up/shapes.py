"""Gate and up projections of real models: `x[M, D]`, `w[F, D]`, groups of 128 channels."""

from pallas_kernels._common.shapes import MODELS, GemmShape

SHAPES = {name: GemmShape(n=m.intermediate, k=m.hidden, group=128) for name, m in MODELS.items()}
