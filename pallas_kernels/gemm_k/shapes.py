"""Output and down projections of real models: `h[M, K]`, `w[N, K]`, groups of K."""

from pallas_kernels._common.shapes import MODELS, GemmShape

# `group` is the query heads of a KV head.
OUTPUT_SHAPES = {
    name: GemmShape(n=m.hidden, k=m.heads * m.head_dim, group=m.heads // m.kv_heads * m.head_dim)
    for name, m in MODELS.items()
}
DOWN_SHAPES = {
    name: GemmShape(n=m.hidden, k=m.intermediate, group=128) for name, m in MODELS.items()
}
