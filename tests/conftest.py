"""Settings of the whole suite: 8 CPU devices, shapes checked at run time."""

import os

# Before JAX starts: meshes are tested on eight CPU devices, and no test may start a GPU.
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile hundreds of tiny programs and run each once: XLA need not optimise them.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
    ]
)
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches a network

from jaxtyping import install_import_hook

install_import_hook(["wide_jax", "pallas_kernels", "train", "eval"], "beartype.beartype")
