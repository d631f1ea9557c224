"""Query projections of real models: `x[M, K]`, `w[N, K]`, G = the query heads of a KV head."""

from pallas_kernels._common.shapes import MODELS, GemmShape

SHAPES = {
    name: GemmShape(n=m.heads * m.head_dim, k=m.hidden, group=m.heads // m.kv_heads * m.head_dim)
    for name, m in MODELS.items()
}
