"""The limits of a GPU that a kernel's configuration has to respect."""

import dataclasses
import functools

import jax

# Largest dynamic shared memory of one thread block, bytes, by compute capability
# (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability",
# less the 1 KiB a block that the system keeps).
SHARED_MEMORY_PER_BLOCK = {
    "8.0": 166_912,
    "8.6": 101_376,
    "8.7": 166_912,
    "8.9": 101_376,
    "9.0": 232_448,
    "10.0": 232_448,
    "10.3": 232_448,
    "12.0": 101_376,
    "12.1": 101_376,
}

# The measured card whose table stands in for a card of that capability without one of its own.
TABLE_FOR_CAPABILITY = {
    "8.0": "NVIDIA A100",
    "8.6": "NVIDIA GeForce RTX 5090",
    "8.7": "NVIDIA A100",
    "8.9": "NVIDIA GeForce RTX 5090",
    "9.0": "NVIDIA H200",
    "12.0": "NVIDIA GeForce RTX 5090",
    "12.1": "NVIDIA GeForce RTX 5090",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as dispatch sees it.

    `kind` is the driver's name for it ("NVIDIA H200"), `capability` the CUDA compute capability
    ("9.0"; None when it is not a CUDA device), `multiprocessors` how many it has.
    """

    kind: str
    capability: str | None
    multiprocessors: int = 132

    @property
    def shared_memory_per_block(self) -> int:
        """Bytes of shared memory one thread block may use; 0 for a device that is not CUDA's."""
        if self.capability is None:
            return 0
        if self.capability not in SHARED_MEMORY_PER_BLOCK:
            # An unknown card: the smallest limit of all, which every CUDA card since 8.0 has.
            return min(SHARED_MEMORY_PER_BLOCK.values())
        return SHARED_MEMORY_PER_BLOCK[self.capability]


A100 = Device("NVIDIA A100", "8.0", 108)
H200 = Device("NVIDIA H200", "9.0", 132)
RTX_5090 = Device("NVIDIA GeForce RTX 5090", "12.0", 170)
CPU = Device("cpu", None)
KNOWN_DEVICES = (A100, H200, RTX_5090)


def current_device() -> Device:
    """The device that a computation lands on by default. Starts JAX's backend."""
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        return _device_of(jax.devices(default)[0])
    return _device_of(default)


@functools.cache
def _device_of(device: jax.Device) -> Device:
    if device.platform not in ("gpu", "cuda"):
        return Device(device.device_kind, None)
    return Device(device.device_kind, str(device.compute_capability), device.core_count)
