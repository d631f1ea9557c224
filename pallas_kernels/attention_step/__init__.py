"""One token a row: its rotation, its entry in the cache, and its attention over the cache."""

from pallas_kernels.attention_step.api import attention_step as attention_step
