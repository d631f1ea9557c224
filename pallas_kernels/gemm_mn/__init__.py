"""Output-pruned product: only the active groups of output channels are computed."""

from pallas_kernels.gemm_mn.api import gemm_mn as gemm_mn
