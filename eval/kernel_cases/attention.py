"""Attention: a prompt beside cuDNN, and one token against a cache beside the best dense there is.

Decode's baseline is the fastest of cuDNN, XLA and our own kernel with every group on, in the same
run.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eval.kernel_cases.base import COLD_BYTES, Case, Family, MaskKind, Run, make_mask
from pallas_kernels._attention.config import (
    AttentionConfig,
    AttentionImplementation,
    DecodeConfig,
    FlashConfig,
    MosaicConfig,
)
from pallas_kernels._attention.problem import AttentionProblem
from pallas_kernels._common.device import Device
from pallas_kernels._common.problem import facts
from pallas_kernels._common.shapes import MODELS
from pallas_kernels.attention_decode import attention_decode
from pallas_kernels.attention_prefill import attention_prefill

MOSAIC = ((192, 2), (128, 2), (64, 3))
# wgmma (Hopper), and mma.sync before and after it: larger tiles spill there.
FLASH = ((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3))
FLASH_MMA = ((128, 32, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 3), (64, 32, 8, 2))
DECODE_SPLITS = ((512, 64, 4, 3), (256, 64, 4, 3), (1024, 64, 4, 3), (1024, 64, 4, 4))
DECODE_SPLITS += ((1024, 32, 4, 4), (2048, 64, 4, 3), (128, 64, 4, 2), (256, 128, 4, 2))
DECODE_SPLITS += ((512, 128, 8, 2), (256, 32, 4, 4))


@dataclasses.dataclass(frozen=True)
class AttentionTune:
    """Attention's problems in `wide tune`: groups are counted in heads."""

    prefill_tokens: tuple[int, ...] = (128, 512, 2048, 16384)
    prefill_groups: tuple[int, ...] = (4,)
    decode: tuple[tuple[int, int], ...] = (
        (1, 4096),
        (1, 16384),
        (1, 131072),
        (16, 4096),
        (16, 16384),
    )
    """Rows, and slots a row."""
    decode_groups: tuple[int, ...] = (4,)
    sparsities: tuple[float, ...] = (0.0, 0.5, 0.75)


@dataclasses.dataclass(frozen=True)
class AttentionBench:
    """Attention's problems in `wide bench kernels`: groups are counted in heads."""

    prefill_tokens: tuple[int, ...] = (512, 2048, 16384, 131072)
    groups: tuple[int, ...] = (1, 2, 4, 8)
    one_group_from: int = 32768  # prompts from here on are measured in the last but one only
    decode: tuple[tuple[int, int], ...] = ((1, 16384), (1, 131072), (16, 4096), (16, 16384))
    """Rows, and slots a row."""
    decode_groups: tuple[int, ...] = (4,)
    error_pairs: int = 1 << 24  # errors against float32, up to so many (query, slot) pairs


@dataclasses.dataclass(frozen=True)
class AttentionCase(Case):
    """One call on a model's heads: `q[b, t, hq, d]`, `k[b, s, hk, d]`, `group` heads a group."""

    op: str
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
        return AttentionProblem(**dataclasses.asdict(self))

    @property
    def shape(self) -> dict[str, int]:
        """The shape as a record holds it; `tk` is the number of keys a row."""
        return {{"s": "tk"}.get(name, name): size for name, size in self.facts.shape.items()}

    @property
    def decode(self) -> bool:
        """Whether there is one query a row."""
        return self.op == "attention_decode"

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.hq // self.group

    @property
    def batch(self) -> tuple[Any, ...]:
        """All group sizes of one length."""
        return self.op, self.b, self.t, self.s

    @property
    def cold(self) -> bool:
        """Whether the cache is read from memory: rotated over."""
        return self.decode

    @property
    def compute_bound(self) -> bool:
        """A prompt is."""
        return not self.decode

    def checked(self, config: Any) -> bool:
        """Whether the reference's `[heads, T, S]` array is small enough."""
        return self.b * self.t * self.s <= config.attention.error_pairs

    def operands(self) -> list[tuple[Any, ...]]:
        """Random normal q, k, v; for decode enough sets that none is found in the L2 cache."""
        cache_bytes = 2 * self.b * self.s * self.hk * self.d * jnp.dtype(self.dtype).itemsize
        sets: list[tuple[Any, ...]] = []
        for seed in range(-(-COLD_BYTES // cache_bytes) if self.decode else 1):
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

    def layout(self, mask: jax.Array) -> Any:
        """A layout for prefill, the mask itself for decode."""
        return mask if self.decode else super().layout(mask)

    def pruned(
        self, implementation: AttentionImplementation, config: AttentionConfig | None = None
    ) -> Run:
        """The op on `(q, k, v, layout or mask)`."""
        if self.decode:

            def decode(q, k, v, mask):
                lengths = jnp.full((self.b,), self.s, jnp.int32)
                return attention_decode(
                    q, k, v, mask, lengths, implementation=implementation, config=config
                )

            return decode
        return functools.partial(attention_prefill, implementation=implementation, config=config)

    def dense(self) -> dict[str, Run]:
        """Unmasked attention as JAX offers it: cuDNN, and XLA's where no T x T array is needed."""
        if not self.decode:
            return {
                "cudnn, unmasked": lambda q, k, v, _: attention_prefill(
                    q, k, v, None, implementation="dense"
                )
            }

        def attend(q, k, v, _, implementation):
            lengths = jnp.full((self.b,), self.s, jnp.int32)
            return jax.nn.dot_product_attention(
                q[:, None], k, v, key_value_seq_lengths=lengths, implementation=implementation
            )[:, 0]

        ways = ("cudnn", "xla")
        return {f"{way}, unmasked": functools.partial(attend, implementation=way) for way in ways}

    @property
    def own_baseline(self) -> bool:
        """Whether our kernel with every group on is a baseline too."""
        return self.decode

    def candidates(self, device: Device) -> list[AttentionConfig]:
        """The configs worth trying: kernels that run there, within the card's shared memory."""
        op, capability = facts(self.op), device.capability or "8.0"
        found: list[AttentionConfig] = []
        if self.decode:
            found += [DecodeConfig(*c) for c in DECODE_SPLITS if c[0] <= max(256, self.s)]
        else:
            if "mosaic" in op.kernels(self.facts, capability):
                found += [MosaicConfig(*c) for c in MOSAIC]
            tiles = FLASH if capability.startswith("9.") else FLASH_MMA
            found += [FlashConfig(*c) for c in tiles]
        limit = device.shared_memory_per_block
        return [c for c in found if op.fits(c, self.facts, limit, capability)]

    def relative_time(self, config: AttentionConfig, sparsity: float) -> float:
        """See `tune_kernels.DERIVATION`."""
        if not isinstance(config, FlashConfig):
            return (1.0 - sparsity) / 0.9
        partial = config.block_m / (2 * self.t * (1.0 - sparsity))
        return (1.0 - sparsity) * (1.0 + partial) / 0.7

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
    m = MODELS[model]
    heads = (m.heads, m.kv_heads, m.head_dim, group)
    return AttentionCase("attention_prefill", 1, tokens, tokens, *heads)


def decode_case(rows: int, slots: int, group: int, model: str) -> AttentionCase:
    """One token for each of `rows` sequences of `slots` tokens."""
    m = MODELS[model]
    heads = (m.heads, m.kv_heads, m.head_dim, group)
    return AttentionCase("attention_decode", rows, 1, slots, *heads)


def _prefills(tokens: tuple[int, ...], groups: tuple[int, ...], model: str) -> list[AttentionCase]:
    return [prefill_case(t, group, model) for t, group in itertools.product(tokens, groups)]


def _decodes(config: AttentionTune | AttentionBench, model: str) -> list[AttentionCase]:
    sizes = itertools.product(config.decode, config.decode_groups)
    return [decode_case(b, s, group, model) for (b, s), group in sizes]


@dataclasses.dataclass(frozen=True)
class AttentionFamily(Family):
    """An attention op's problems, from the `attention` part of the commands' options."""

    tuned: Callable[[AttentionTune, str], list[AttentionCase]]
    benched: Callable[[AttentionBench, str], list[AttentionCase]]

    def tune_cases(self, config: Any) -> list[tuple[Case, tuple[float, ...]]]:
        """With attention's own sparsities."""
        cases = self.tuned(config.attention, config.model)
        return [(case, config.attention.sparsities) for case in cases]

    def bench_cases(self, config: Any) -> list[Case]:
        """In order of length."""
        return [*self.benched(config.attention, config.model)]


def _bench_prefills(config: AttentionBench, model: str) -> list[AttentionCase]:
    short = tuple(t for t in config.prefill_tokens if t < config.one_group_from)
    long = tuple(t for t in config.prefill_tokens if t >= config.one_group_from)
    one = config.groups[-2:][:1]
    return _prefills(short, config.groups, model) + _prefills(long, one, model)


PREFILL = AttentionFamily(
    "prefill",
    lambda config, model: _prefills(config.prefill_tokens, config.prefill_groups, model),
    _bench_prefills,
)
DECODE = AttentionFamily("decode", _decodes, _decodes)
