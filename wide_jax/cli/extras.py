"""What a command needs of the optional dependencies, asked before its long work."""

import importlib.util


def require_eval_extra(module: str) -> None:
    """Raise RuntimeError, with what to install, where the `eval` extra's module is missing."""
    if importlib.util.find_spec(module) is None:
        raise RuntimeError(
            f"{module} is not installed: install the eval extra, pip install 'wide-jax[eval]'"
        )
