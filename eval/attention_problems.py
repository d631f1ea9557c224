"""The attention problems that are tuned and benchmarked: operands, masks, baselines, counts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from eval.kernel_cases import Family, families
from eval.kernel_cases.base import COLD_BYTES, MaskKind, make_mask
from pallas_kernels._attention.config import AttentionConfig, AttentionImplementation
from pallas_kernels._attention.dispatch import AttentionOp, AttentionProblem
from pallas_kernels._common.shapes import MODELS
from pallas_kernels.attention_decode import attention_decode
from pallas_kernels.attention_prefill import attention_prefill

# Op -> the record field `case`.
CASES: dict[AttentionOp, str] = {"attention_prefill": "prefill", "attention_decode": "decode"}


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One call on a model's heads: `q[b, t, hq, d]`, `k[b, s, hk, d]`, `group` heads a group."""

    op: AttentionOp
    b: int
    t: int
    s: int
    hq: int
    hk: int
    d: int
    group: int
    dtype: str = "bfloat16"

    @property
    def facts(self) -> AttentionProblem:
        """The problem as dispatch sees it, without a hint."""
        fields = (self.b, self.t, self.s, self.hq, self.hk, self.d, self.group, self.dtype)
        return AttentionProblem(self.op, *fields)

    @property
    def shape(self) -> dict[str, int]:
        """The shape as a record holds it; `tk` is the number of keys a row."""
        names = {"b": self.b, "t": self.t, "tk": self.s, "hq": self.hq, "hk": self.hk}
        return names | {"d": self.d, "group": self.group}

    @property
    def decode(self) -> bool:
        """Whether there is one query a row."""
        return self.op == "attention_decode"

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.hq // self.group

    @property
    def cache_bytes(self) -> int:
        """Bytes of k and v."""
        return 2 * self.b * self.s * self.hk * self.d * jnp.dtype(self.dtype).itemsize

    def operands(self) -> list[tuple[Any, ...]]:
        """Random normal q, k, v; for decode enough sets that none is found in the L2 cache."""
        count = -(-COLD_BYTES // self.cache_bytes) if self.decode else 1
        sets: list[tuple[Any, ...]] = []
        for seed in range(count):
            keys = jax.random.split(jax.random.key(seed), 3)
            tokens = (self.b,) if self.decode else (self.b, self.t)
            q = jax.random.normal(keys[0], (*tokens, self.hq, self.d), self.dtype)
            cache = (self.b, self.s, self.hk, self.d)
            sets.append((q, *(jax.random.normal(k, cache, self.dtype) for k in keys[1:])))
        return sets

    def mask(self, kind: MaskKind, sparsity: float) -> jax.Array:
        """`[M, groups]`. Decode's few (row, group) pairs skip exactly the fraction asked for."""
        if self.b * self.t == 1:
            return ((jnp.arange(self.groups) * sparsity) % 1.0 < 1.0 - sparsity)[None, :]
        if self.decode and kind == "random":
            ranks = jax.random.permutation(jax.random.key(7), self.b * self.groups)
            return (ranks >= sparsity * ranks.size).reshape(self.b, self.groups)
        return make_mask(kind, self.b * self.t, self.groups, sparsity)

    def choice(self, mask: jax.Array) -> Any:
        """What the op takes: a layout for prefill, the mask itself for decode."""
        return mask if self.decode else pallas_kernels.mask_layout(mask)

    def run(
        self, implementation: AttentionImplementation, config: AttentionConfig | None = None
    ) -> Callable[..., jax.Array]:
        """The op on `(q, k, v, layout or mask)`."""
        if self.decode:

            def decode(q, k, v, mask):
                lengths = jnp.full((self.b,), self.s, jnp.int32)
                return attention_decode(
                    q, k, v, mask, lengths, implementation=implementation, config=config
                )

            return decode
        return functools.partial(attention_prefill, implementation=implementation, config=config)

    def dense(self) -> dict[str, Callable[..., jax.Array]]:
        """Unmasked attention as JAX offers it: cuDNN, and XLA's where no T x T array is needed."""
        if not self.decode:
            return {
                "cudnn": lambda q, k, v, _: attention_prefill(q, k, v, None, implementation="dense")
            }
        lengths = jnp.full((self.b,), self.s, jnp.int32)

        def attend(q, k, v, _, implementation):
            return jax.nn.dot_product_attention(
                q[:, None], k, v, key_value_seq_lengths=lengths, implementation=implementation
            )[:, 0]

        return {name: functools.partial(attend, implementation=name) for name in ("cudnn", "xla")}

    def active(self, mask: jax.Array) -> dict[str, int]:
        """FLOPs of the visible (query, key) pairs that run, and bytes that have to move once.

        Bytes of decode: k and v of the kv heads that an active group reads, for the rows that need
        them. Of prefill: k, v, the active queries, and the whole output.
        """
        itemsize = jnp.dtype(self.dtype).itemsize
        heads = jnp.repeat(mask.reshape(self.b, self.t, -1), self.group, axis=-1)
        keys = (jnp.arange(self.t) + self.s - self.t + 1).astype(jnp.float32)
        pairs = float((heads.sum(axis=-1) * keys).sum())
        queries = int(heads.sum()) * self.d
        needed = heads.reshape(self.b, self.t, self.hk, -1).any(axis=(1, 3))
        cache = 2 * int(needed.sum()) * self.s * self.d
        rows = self.b * self.t * self.hq * self.d
        return {"flops": int(4 * pairs * self.d), "bytes": (cache + queries + rows) * itemsize}


def prefill_case(tokens: int, group: int, model: str) -> AttentionCase:
    """One sequence of `tokens` on a model's heads, `group` heads a group."""
    shape = MODELS[model]
    return AttentionCase(
        "attention_prefill", 1, tokens, tokens, shape.heads, shape.kv_heads, shape.head_dim, group
    )


def decode_case(rows: int, slots: int, group: int, model: str) -> AttentionCase:
    """One token for each of `rows` sequences of `slots` tokens."""
    shape = MODELS[model]
    return AttentionCase(
        "attention_decode", rows, 1, slots, shape.heads, shape.kv_heads, shape.head_dim, group
    )


def split_ops(ops: tuple[str, ...]) -> tuple[dict[str, Family], tuple[AttentionOp, ...]]:
    """The product families and the attention ops named, or all of both for none named.

    Raises `ValueError` on an unknown op.
    """
    products = tuple(op for op in ops if op not in CASES)
    attention = tuple(op for op in CASES if not ops or op in ops)
    return ({} if ops and not products else families(products)), attention
