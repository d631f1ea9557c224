"""What both attention ops' tests share: shapes, operands, a dense oracle and the error bound."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels._attention.config import AttentionConfig
from pallas_kernels.attention_decode import attention_decode
from pallas_kernels.attention_prefill import attention_prefill
from pallas_kernels.rope_cache import Rotation
from tests.kernels.contract import running

KEY = jax.random.key(6)
# Query and key-value heads of real models, from one kv head for all to seven queries a kv head.
HEADS = ((4, 1), (9, 3), (14, 2), (15, 5), (32, 8), (40, 8), (48, 2))
HEAD_SIZES = (64, 80, 96, 128, 256)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """`q[b, t, hq, d]`, `k[b, s, hk, d]`, `groups` groups of heads."""

    b: int
    t: int
    s: int
    hq: int
    hk: int
    d: int
    groups: int

    def __str__(self) -> str:
        return f"b{self.b}t{self.t}s{self.s}h{self.hq}-{self.hk}d{self.d}g{self.groups}"

    def operands(self, dtype: str, seed: int = 0, scale: float = 1.0) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(seed)
        shapes = ((self.b, self.t, self.hq, self.d), *[(self.b, self.s, self.hk, self.d)] * 2)
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
        return tuple(jnp.asarray(a, dtype) for a in (q * scale, k, v))


def visible(
    shape: AttentionShape,
    start=None,
    lengths=None,
    first=None,
    segment_ids=None,
    sliding_window=None,
) -> np.ndarray:
    """`[B, T, S]`, which slot each query sees, slot by slot as the docstring says it."""
    seen = np.zeros((shape.b, shape.t, shape.s), bool)
    for b in range(shape.b):
        begin = shape.s - shape.t if start is None else int(start[b])
        end = shape.s if lengths is None else int(lengths[b])
        pad = 0 if first is None else int(first[b])
        ids = np.ones(shape.s, int) if segment_ids is None else np.asarray(segment_ids)[b]
        for t in range(shape.t):
            p = begin + t
            if not pad <= p < end or ids[p] == 0:
                continue
            for s in range(pad, p + 1):
                near = sliding_window is None or s > p - sliding_window
                seen[b, t, s] = near and (ids[s : p + 1] == ids[p]).all()
    return seen


@functools.partial(jax.jit, static_argnames="dtype")
def oracle(operands, mask, seen, dtype=jnp.float32) -> jax.Array:
    """XLA's attention with an explicit mask, zeros where nothing is seen or the head is off."""
    q, k, v = (a.astype(dtype) for a in operands)
    used = seen.any(axis=1)[:, :, None, None]
    k, v = jnp.where(used, k, 0), jnp.where(used, v, 0)
    with jax.default_matmul_precision("highest"):
        out = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])
    on = jnp.repeat(mask.reshape(*q.shape[:2], -1), q.shape[2] // mask.shape[-1], axis=-1)
    on &= seen.any(axis=-1)[..., None]
    return jnp.where(on[..., None], out, 0)


def prefill(operands, mask, implementation, config: AttentionConfig | None = None, **ranges: Any):
    """`attention_prefill` as a compiled function, in interpreters on a CPU."""
    function = functools.partial(_prefill_of_mask, function=attention_prefill)
    return _run(function, operands, mask, implementation, config, ranges)


def _prefill_of_mask(q, k, v, mask, *, function, **kwargs):
    return function(q, k, v, pallas_kernels.mask_layout(mask, implementation="xla"), **kwargs)


def decode(operands, mask, lengths, implementation, config=None, **ranges: Any):
    """`attention_decode` of `q[B, 1, Hq, d]`, likewise; the result is `[B, 1, Hq, d]`."""
    q, k, v = operands
    function = functools.partial(_decode_of_rows, function=attention_decode)
    ranges = {"lengths": lengths, **ranges}
    return _run(function, (q[:, 0], k, v), mask, implementation, config, ranges)[:, None]


def _decode_of_rows(q, k, v, mask, *, lengths, function, **kwargs):
    return function(q, k, v, mask, lengths, **kwargs)


def _run(function, operands, mask, implementation, config, ranges):
    static = {name: r for name, r in ranges.items() if name in ("sliding_window", "scale")}
    arrays = {
        name: r if isinstance(r, Rotation) else jnp.asarray(r)
        for name, r in ranges.items()
        if name not in static
    }

    @jax.jit
    def call(operands, mask, arrays):
        return function(
            *operands, mask, implementation=implementation, config=config, **static, **arrays
        )

    with running(implementation):
        return jax.block_until_ready(call(operands, mask, arrays))


def assert_right(y, operands, mask, seen: np.ndarray) -> None:
    """Exact zeros where nothing runs, and at most 1.5 times the error of XLA in the same dtype."""
    exact = np.asarray(oracle(operands, mask, seen))
    assert y.shape == operands[0].shape
    assert y.dtype == operands[0].dtype
    result = np.asarray(y, np.float32)
    assert not np.any(result[(exact == 0).all(axis=-1)])
    if operands[0].dtype == jnp.float32:
        bound = 5e-6
    else:
        # Op by op: XLA's CPU compiler takes float16 products so, but not in a larger program.
        run = oracle.__wrapped__ if operands[0].dtype == jnp.float16 else oracle
        dense = run(operands, mask, jnp.asarray(seen), operands[0].dtype)
        bound = 1.5 * _error(dense, exact) + 1e-4
    assert _error(result, exact) <= bound


def _error(y, exact: np.ndarray) -> float:
    difference = np.linalg.norm(np.asarray(y, np.float32) - exact)
    return float(difference / max(np.linalg.norm(exact), 1e-30))
