"""Every op that the contract suite checks. A bias exercises all that a product without one does."""

from tests.kernels.output_pruned import OutputPruned

OUTPUT_PRUNED = (OutputPruned("gemm_mn", 1, has_bias=True), OutputPruned("swiglu_up", 2))
OPS = (*OUTPUT_PRUNED,)
# The model shapes run without a bias.
BARE_OPS = (OutputPruned("gemm_mn", 1), OutputPruned("swiglu_up", 2))
