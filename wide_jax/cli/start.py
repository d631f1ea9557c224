"""What every command that computes does first: choose the device, keep compiled programs."""

import os
import shutil
from typing import Literal

from rich.console import Console

from wide_jax.hf.cache import cache_dir

Platform = Literal["auto", "cpu", "gpu"]


class PlatformError(RuntimeError):
    """The device that was asked for is not there; the message says what to do."""


def start(platform: Platform, console: Console) -> None:
    """Start JAX on the platform, say which device runs, and turn on the compile cache.

    Raises:
        PlatformError: `gpu` was asked for and JAX can use none. Nothing falls back silently.
    """
    import jax

    keep_compiled_programs(console)
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        devices = jax.devices("gpu" if platform == "gpu" else None)
    except RuntimeError as error:
        raise PlatformError(
            f"no usable {platform} device for jax {jax.__version__}: {_first_line(error)}. "
            "Install the GPU extra (pip install 'wide-jax[gpu]') on a machine with an NVIDIA "
            "driver, or choose --platform cpu"
        ) from error
    device = devices[0]
    console.print(f"[dim]jax {jax.__version__} on {len(devices)} x {device.device_kind}[/dim]")
    if device.platform == "cpu" and platform == "auto" and shutil.which("nvidia-smi"):
        console.print(
            "[yellow]An NVIDIA driver is here but JAX sees no GPU: running on the CPU. "
            "Install the GPU extra: pip install 'wide-jax[gpu]'[/yellow]"
        )


def keep_compiled_programs(console: Console) -> None:
    """Turn on JAX's persistent compile cache; a folder that cannot be used is only a warning."""
    import jax

    if jax.config.jax_compilation_cache_dir is not None:
        return  # the user's own choice (JAX_COMPILATION_CACHE_DIR)
    folder = cache_dir() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.R_OK | os.W_OK)
    except OSError:
        usable = False
    if not usable:
        console.print(f"[yellow]compile cache off: {folder} cannot be written[/yellow]")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
