"""What `wide bench kernels` times beside the pruned ops: a copy, layouts, rotary embedding."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp

import pallas_kernels
from eval.kernel_cases import make_mask
from eval.kernel_cases.base import COLD_BYTES
from eval.kernel_timing import Timing, compile_all, time_interleaved
from pallas_kernels._common.shapes import MODELS
from pallas_kernels.attention_prefill import attention_prefill
from pallas_kernels.layout.api import LayoutImplementation, order_k_axis
from pallas_kernels.rope_cache import Rotation, rope_cache
from pallas_kernels.rope_cache.api import RopeImplementation

COPIES = tuple(mib << 20 for mib in (32, 64, 128, 256))  # bytes; small ones reach less bandwidth
ATTENTION_BELOW = 32768  # tokens: of longer prompts the rotation is too small a part to see


def copy_record(nbytes: int, rounds: int) -> dict[str, Any]:
    """The device's bandwidth of copying so much, the ceiling of what is bound by memory."""
    sources = [jnp.full(nbytes // 4, i, jnp.float32) for i in range(-(-COLD_BYTES // nbytes))]
    compiled, failed = compile_all({"copy": (jnp.copy, (sources[0],))})
    if failed:
        raise failed["copy"]
    timing = time_interleaved({"copy": (compiled["copy"], [(s,) for s in sources])}, rounds)["copy"]
    return {
        "op": "copy",
        "case": "copy",
        "shape": {"bytes": nbytes},
        "dtype": "float32",
        "sparsity": 0.0,
        "mask": "none",
        "implementation": "xla",
        "ms": timing.ms,
        "samples_ms": timing.samples_ms,
        "bytes": 2 * nbytes,
        "flops": 0,
    }


def k_layout_record(m: int, groups: int, rounds: int) -> dict[str, Any]:
    """Time of the K-axis part of a layout, which `gemm_k` needs, as it is made by default."""
    mask = make_mask("random", m, groups, 0.5)
    count = mask.sum(axis=0, dtype=jnp.int32)

    def order(mask, count):
        found = order_k_axis(mask, count)
        return found.rows, found.tiles

    timing = _timed({"order": order}, (mask, count), rounds)["order"]
    return {
        "op": "mask_layout",
        "case": "layout_k_axis",
        "shape": {"m": m, "groups": groups},
        "dtype": "bool",
        "sparsity": 0.5,
        "mask": "random",
        "implementation": pallas_kernels.layout.api.default_layout_implementation(m),
        "dispatched": True,
        "ms": timing.ms,
        "samples_ms": timing.samples_ms,
        "bytes": mask.size,
        "flops": 0,
    }


def layout_records(m: int, groups: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Time of `mask_layout` by every implementation that runs here."""
    mask = make_mask("random", m, groups, 0.5)
    functions: dict[str, Any] = {}
    names: tuple[LayoutImplementation, ...] = ("xla", "pallas", "triton")
    for name in names:

        def order(mask, name: LayoutImplementation = name):
            layout = pallas_kernels.mask_layout(mask, implementation=name)
            return layout.order, layout.count

        functions[name] = order
    chosen = pallas_kernels.layout.api.default_layout_implementation(m)
    for name, timing in _timed(functions, (mask,), rounds).items():
        yield {
            "op": "mask_layout",
            "case": "layout",
            "shape": {"m": m, "groups": groups},
            "dtype": "bool",
            "sparsity": 0.5,
            "mask": "random",
            "implementation": name,
            "dispatched": name == chosen,
            "ms": timing.ms,
            "samples_ms": timing.samples_ms,
            "bytes": mask.size * 5,
            "flops": 0,
        }


def rope_records(model: str, tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Rotation with the cache write, fused (`triton`) and as XLA makes it of the specification.

    The cache has as many slots as there are tokens and is made in the timed call, for all alike:
    it is updated in place, and a caller's array would be copied first. Of a prompt, attention at
    50 % besides, with the queries' rotation before it and left to it.
    """
    m = MODELS[model]
    heads, cache = (1, tokens, m.heads, m.head_dim), (1, tokens, m.kv_heads, m.head_dim)
    q, k, v = (
        jax.random.normal(jax.random.key(i), s, jnp.bfloat16)
        for i, s in enumerate((heads, cache, cache))
    )
    angles = jax.random.normal(jax.random.key(3), (1, tokens, m.head_dim // 2))
    slots = jnp.arange(tokens, dtype=jnp.int32)[None]
    arguments = (q, k, v, jnp.cos(angles), jnp.sin(angles), slots)
    common = {
        "op": "rope_cache",
        "shape": {"t": tokens, "hq": m.heads, "hk": m.kv_heads, "d": m.head_dim},
        "dtype": "bfloat16",
        "flops": 0,
    }
    functions = {}
    for name in get_args(RopeImplementation):

        def run(q, k, v, cos, sin, slots, name=name):
            keys = jnp.zeros(cache, jnp.bfloat16)
            return rope_cache(q, k, v, cos, sin, keys, keys, slots, implementation=name)

        functions[name] = run
    for name, timing in _timed(functions, arguments, rounds).items():
        yield common | {
            "case": "rope_cache",
            "sparsity": 0.0,
            "mask": "none",
            "implementation": name,
            "dispatched": name == "triton",
            "ms": timing.ms,
            "samples_ms": timing.samples_ms,
            "bytes": 2 * (2 * q.size + 3 * k.size + 2 * v.size),
        }
    if not 1 < tokens < ATTENTION_BELOW:
        return
    mask = make_mask("random", tokens, m.kv_heads, 0.5)
    layout = pallas_kernels.mask_layout(mask, expected_sparsity=0.5)

    def attend(q, k, v, cos, sin, slots, layout, *, within):
        keys = jnp.zeros(cache, jnp.bfloat16)
        before = None if within else q
        rotated, k, *written = rope_cache(before, k, v, cos, sin, keys, keys, slots)
        rotation = Rotation(cos, sin) if within else None
        q = q if rotated is None else rotated
        return attention_prefill(q, k, v, layout, rotation=rotation), written

    functions = {
        "queries before attention": functools.partial(attend, within=False),
        "queries in attention": functools.partial(attend, within=True),
    }
    for name, timing in _timed(functions, (*arguments, layout), rounds).items():
        yield common | {
            "case": "rope_attention",
            "sparsity": 1.0 - float(mask.mean()),
            "mask": "random",
            "implementation": name,
            "dispatched": name == "queries in attention",
            "ms": timing.ms,
            "samples_ms": timing.samples_ms,
            "bytes": 2 * (2 * q.size + 3 * k.size + 3 * v.size),
        }


def _timed(
    functions: dict[str, Callable[..., Any]], arguments: tuple[Any, ...], rounds: int
) -> dict[str, Timing]:
    """The times of functions of the same arguments, in turns. Raises what does not compile."""
    compiled, failed = compile_all({name: (run, arguments) for name, run in functions.items()})
    if failed:
        raise next(iter(failed.values()))
    return time_interleaved({n: (c, [arguments]) for n, c in compiled.items()}, rounds)
