"""The query projection of the active head groups, with the dense key and value projections."""

from pallas_kernels.project_qkv.api import Biases as Biases
from pallas_kernels.project_qkv.api import project_qkv as project_qkv
from pallas_kernels.project_qkv.api import unmerged as unmerged
