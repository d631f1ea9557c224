"""What dispatch knows of `swiglu_up`: gate and up share a tile."""

from pallas_kernels._common.output_pruned import output_pruned_facts

FACTS = output_pruned_facts(matrices=2)
