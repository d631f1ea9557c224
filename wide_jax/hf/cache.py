"""Where downloaded and converted models are kept."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$WIDE_JAX_CACHE`, or `~/.cache/wide-jax`; not created here."""
    named = os.environ.get("WIDE_JAX_CACHE")
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "wide-jax"
