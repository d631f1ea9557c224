"""What `wide bench kernels` times beside the pruned ops: a copy, layouts, rotary embedding."""

from collections.abc import Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp

import pallas_kernels
from eval.kernel_cases import make_mask
from eval.kernel_timing import compile_all, time_interleaved
from pallas_kernels._common.shapes import MODELS
from pallas_kernels.layout.api import LayoutImplementation, order_k_axis
from pallas_kernels.rope_cache import rope_cache
from pallas_kernels.rope_cache.api import RopeImplementation


def copy_record(rounds: int) -> dict[str, Any]:
    """The device's copy bandwidth, the ceiling of everything bound by memory."""
    nbytes = 256 << 20
    sources = [jnp.full(nbytes // 4, i, jnp.float32) for i in range(4)]
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

    compiled, failed = compile_all({"order": (order, (mask, count))})
    if failed:
        raise failed["order"]
    timing = time_interleaved({"order": (compiled["order"], [(mask, count)])}, rounds)["order"]
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

        functions[name] = (order, (mask,))
    compiled, failed = compile_all(functions)
    if failed:
        raise next(iter(failed.values()))
    timings = time_interleaved({n: (c, [(mask,)]) for n, c in compiled.items()}, rounds)
    chosen = pallas_kernels.layout.api.default_layout_implementation(m)
    for name, timing in timings.items():
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

    The cache has as many slots as there are tokens and is made in the timed call, for both alike:
    it is updated in place, and a caller's array would be copied first.
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
    functions = {}
    for name in get_args(RopeImplementation):

        def run(q, k, v, cos, sin, slots, name=name):
            keys = jnp.zeros(cache, jnp.bfloat16)
            return rope_cache(q, k, v, cos, sin, keys, keys, slots, implementation=name)

        functions[name] = (run, arguments)
    compiled, failed = compile_all(functions)
    if failed:
        raise next(iter(failed.values()))
    timings = time_interleaved({n: (c, [arguments]) for n, c in compiled.items()}, rounds)
    for name, timing in timings.items():
        yield {
            "op": "rope_cache",
            "case": "rope_cache",
            "shape": {"t": tokens, "hq": m.heads, "hk": m.kv_heads, "d": m.head_dim},
            "dtype": "bfloat16",
            "sparsity": 0.0,
            "mask": "none",
            "implementation": name,
            "dispatched": name == "triton",
            "ms": timing.ms,
            "samples_ms": timing.samples_ms,
            "bytes": 2 * (2 * q.size + 3 * k.size + 2 * v.size),
            "flops": 0,
        }
