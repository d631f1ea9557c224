"""The token order of a mask."""

from pallas_kernels.layout.api import MaskLayout as MaskLayout
from pallas_kernels.layout.api import mask_layout as mask_layout
