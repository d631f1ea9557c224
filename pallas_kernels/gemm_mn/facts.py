"""What dispatch knows of `gemm_mn`: one weight a tile."""

from pallas_kernels._common.output_pruned import output_pruned_facts

FACTS = output_pruned_facts(matrices=1)
