"""Input-pruned product: only the active groups of input channels are summed."""

from pallas_kernels.gemm_k.api import gemm_k as gemm_k
