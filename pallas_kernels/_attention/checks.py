"""What the attention ops refuse, in words and numbers."""

import jax

from pallas_kernels._common.checks import DTYPES


def check_heads(
    op: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    groups: int | None,
    names: tuple[str, str] = ("k", "v"),
) -> None:
    """Raise `ValueError` unless `q[B, ..., Hq, d]`, `k[B, S, Hk, d]`, `v` and the groups fit.

    `names`: what the op calls k and v.
    """
    keys, values = names
    if k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"{op}: {keys} and {values} must be equal [B, S, Hk, d], got {k.shape} and {v.shape}"
        )
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{op}: q is {q.shape}, {keys} is {k.shape}: batch and head size must agree"
        )
    for name, array in ((keys, k), (values, v)):
        if array.dtype != q.dtype:
            raise ValueError(f"{op}: {name} is {array.dtype}, but q is {q.dtype}")
    if q.dtype.name not in DTYPES:
        raise ValueError(f"{op}: dtype {q.dtype} is not one of {', '.join(DTYPES)}")
    heads, kv_heads = q.shape[-2], k.shape[2]
    if 0 in (heads, kv_heads, q.shape[-1]) or heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads are not a multiple of {kv_heads} kv heads")
    if groups is not None and heads % groups:
        raise ValueError(f"{op}: {groups} groups do not divide {heads} query heads evenly")


def check_rows(op: str, batch: int, **arrays: jax.Array | None) -> None:
    """Raise `ValueError` unless every given array is one integer a row."""
    for name, array in arrays.items():
        if array is not None and (array.shape != (batch,) or array.dtype.kind not in "iu"):
            raise ValueError(
                f"{op}: {name} must be integers [{batch}], got {array.dtype}{list(array.shape)}"
            )


def check_settings(op: str, sliding_window: int | None, scale: float | None, d: int) -> float:
    """Raise `ValueError` on a window or scale that means nothing; return the scale to use."""
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{op}: {sliding_window=} must be at least 1")
    if scale is None:
        return d**-0.5
    if not scale > 0.0:
        raise ValueError(f"{op}: {scale=} must be positive")
    return scale
