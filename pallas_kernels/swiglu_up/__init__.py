"""Gate, up and SwiGLU in one output-pruned op."""

from pallas_kernels.swiglu_up.api import swiglu_up as swiglu_up
