"""Between the projections and attention: head norms, rotation, and the cache's new entries."""

from pallas_kernels.rope_cache.api import rope_cache as rope_cache
from pallas_kernels.rope_cache.rotation import Rotation as Rotation
