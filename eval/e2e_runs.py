"""What the end-to-end benchmark times: a prefill and a loop of decode steps, compiled ahead.

Both are the functions that `generate` runs. A decode loop draws greedily and stays on the device.
"""

import dataclasses
import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from eval.kernel_timing import kernel_events
from wide_jax.accounting import StepUsage, Usage, step_usage, usage
from wide_jax.batch import TokenBatch
from wide_jax.cache import KVCache, LayerCache
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.engine import split_on
from wide_jax.generate import decode_step, prefill
from wide_jax.hf.mapping import expected_router_tensors, expected_tensors
from wide_jax.hf.pretrained import build, without_routers
from wide_jax.kernels import Kernels, SparsityHints
from wide_jax.model import WideForCausalLM
from wide_jax.random_weights import random_weight
from wide_jax.routing import AllOn, Forced, Masks, Routing
from wide_jax.structure import Structure

Phase = Literal["prefill", "decode"]
CACHE_HIT = "/jax/compilation_cache/cache_hits"  # the event that JAX records
WARMING = 2  # rounds of a benchmark that do not count


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run the model."""

    name: str  # dense, dense-xla, wide
    kernels: Kernels | None
    routing: Routing  # for the prefill
    step_routing: Routing  # for each decode step
    sparsity: float | None  # the random masks' target; None: no hint
    # none (everything on, without routers), random, trained, random_routers, trained_statistics,
    # random_same_rates
    mask: str
    masks_of: Mapping[str, Any] | None = None  # where carried masks come from, for records

    def asks(self, phase: Phase) -> Routing:
        """How groups are chosen in a phase."""
        return self.routing if phase == "prefill" else self.step_routing


@dataclasses.dataclass(frozen=True)
class Models:
    """What variants run on: a model with routers, and the dense one that shares its weights.

    The dense model has no routers, as who runs one has none: among a call's arguments they would
    cost it time.
    """

    routed: WideForCausalLM
    dense: WideForCausalLM

    @classmethod
    def of(cls, model: WideForCausalLM) -> "Models":
        """Both of a model; a dense one is both."""
        return cls(model, model if model.wide is None else without_routers(model))

    def split(self, variant: Variant) -> tuple[Structure, nnx.State]:
        """The variant's model on its kernels."""
        return split_on(self.dense if variant.mask == "none" else self.routed, variant.kernels)


def turns(
    contenders: int,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[bool, Sequence[int]]]:
    """Rounds to take: whether one counts, and the contenders' order in it.

    The first two do not: a program's second call is still slow, where XLA captures its kernels.
    That takes milliseconds, so one is enough where a round takes longer than `seconds`. Then
    `rounds` of them, 3 at least, and after these no more than fit into `seconds`.
    """
    start = clock()
    for warming in range(WARMING):
        if warming == 0 or clock() - start <= seconds:
            yield False, order(contenders, warming)
    start = clock()
    for done in range(max(3, rounds)):
        if done >= 3 and clock() - start > seconds:
            return
        yield True, order(contenders, WARMING + done)


def order(contenders: int, turn: int) -> list[int]:
    """The contenders in one round, so that nobody follows the same one round after round.

    On a card at its power limit a run is the faster the less the one before it took. Williams'
    design (Aust. J. Sci. Res. 2, 1949): in as many rounds as contenders everyone follows each of
    the others once; of an odd number every other round runs backwards, and it takes twice as many.
    """
    ends = [i // 2 if i % 2 == 0 else contenders - (i + 1) // 2 for i in range(contenders)]
    found = [(end + turn) % contenders for end in ends]
    return found[::-1] if contenders % 2 and turn % 2 else found


def best_dense(variants: Sequence[Variant], samples: Sequence[Sequence[float]]) -> int:
    """Which of the variants with everything on is the fastest, by its median."""
    dense = [index for index, variant in enumerate(variants) if variant.mask == "none"]
    return min(dense, key=lambda index: statistics.median(samples[index]))


@dataclasses.dataclass(frozen=True)
class CompiledRun:
    """A compiled function and what compiling it took."""

    call: Any
    compile_seconds: float  # tracing included
    from_cache: bool  # the program came from JAX's compile cache on disk
    temporary_bytes: int
    peak_bytes: int  # with its arguments (weights, cache, masks) and what it gives back


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def run_prefill(graphdef, state, ids, lengths, cache, routing):
    """First tokens, and the filled cache with its first lengths again."""
    logits, after, _ = prefill(graphdef, state, ids, lengths, cache, routing, fresh=True)
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return token, dataclasses.replace(after, lengths=cache.lengths)


@functools.partial(jax.jit, static_argnames=("graphdef", "steps"), donate_argnames="cache")
def run_decode(graphdef, state, token, cache, routing, steps):
    """`steps` greedy steps; the last tokens, and the cache with its first length again."""
    active = jnp.ones(token.shape, bool)

    def step(_, carried):
        token, cache = carried
        logits, cache, _ = decode_step(graphdef, state, token, active, cache, routing)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    token, after = jax.lax.fori_loop(0, steps, step, (token, cache))
    return token, dataclasses.replace(after, lengths=cache.lengths)


def compile_all(
    calls: Sequence[tuple[Any, tuple[Any, ...]]], *, together: bool
) -> list[CompiledRun]:
    """Compile jitted functions for given arguments; nothing runs.

    Args:
        calls: (jitted function, its arguments).
        together: side by side; false where the compile times are to be quoted.
    """

    def finish(item) -> CompiledRun:
        lowered, tracing = item
        found.discard(threading.get_ident())  # a thread may have finished another before
        start = time.perf_counter()
        done = lowered.compile()
        spent = tracing + time.perf_counter() - start
        memory = done.memory_analysis()
        peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
        peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
        cached = threading.get_ident() in found
        return CompiledRun(done, spent, cached, memory.temp_size_in_bytes, peak)

    found = set()  # threads whose program was found: JAX says so where it compiles

    def note(event: str, **_) -> None:
        if event == CACHE_HIT:
            found.add(threading.get_ident())

    lowered = []
    for function, arguments in calls:
        start = time.perf_counter()
        lowered.append((function.lower(*arguments), time.perf_counter() - start))
    jax.monitoring.register_event_listener(note)
    try:
        with ThreadPoolExecutor(len(calls) if together else 1) as pool:
            return list(pool.map(finish, lowered))
    finally:
        jax.monitoring.unregister_event_listener(note)


def random_model(
    config: ModelConfig, wide: WideConfig, *, dtype: Any = jnp.bfloat16, seed: int = 0
) -> WideForCausalLM:
    """Random weights (`wide_jax.random_weights`), made array by array; router weights too."""
    shapes = {**expected_tensors(config), **expected_router_tensors(config, wide)}
    key = jax.random.key(seed)
    routers = expected_router_tensors(config, wide)
    tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        kind = jnp.float32 if name in routers else jnp.dtype(dtype)
        tensors[name] = random_weight(name, shape, kind, jax.random.fold_in(key, number))
    return build(config, wide, tensors, dtype=dtype)


def random_masks(
    config: ModelConfig, wide: WideConfig, batch: int, tokens: int, sparsity: float, seed: int
) -> Masks:
    """Independent decisions, each skipped with probability `sparsity`, layer by layer."""
    keys = jax.random.split(jax.random.key(seed), 2 * config.num_hidden_layers)

    def layer(key, groups):
        return jax.random.bernoulli(key, 1.0 - sparsity, (batch, tokens, groups))

    layer = jax.jit(layer, static_argnums=1)
    return Masks(
        tuple(layer(key, wide.attn_groups(config)) for key in keys[0::2]),
        tuple(layer(key, wide.ffn_groups(config)) for key in keys[1::2]),
    )


def decided_usage(
    model: WideForCausalLM, variant: Variant, ids, lengths, cache: KVCache, *, prompt: bool
) -> tuple[Usage, StepUsage]:
    """What the routers skip for a prompt, or for the step after it (`cache` then holds it)."""
    graphdef, state = split_on(model, variant.kernels)

    @jax.jit
    def ask(state, ids, lengths, cache):
        asked = nnx.merge(graphdef, state)
        if prompt:
            batch = TokenBatch.from_lengths(ids, lengths)
        else:
            ones = jnp.ones((ids.shape[0], 1), jnp.int32)
            batch = TokenBatch(ids[:, :1], cache.lengths[:, None], ones)
        output = asked(batch, variant.routing, cache=cache, fresh=prompt)
        used = usage(output.masks, batch.real, batch.positions + 1, model.config)
        return used, step_usage(output.masks, batch.real)

    return jax.device_get(ask(state, ids, lengths, cache))


@functools.partial(jax.jit, static_argnames="config")
def mask_usage(masks: Masks, first_key: Int[Array, ""], config) -> tuple[Usage, StepUsage]:
    """What the masks of tokens that follow `first_key - 1` cached ones skip."""
    shape = masks.ffn[0].shape[:2]
    real = jnp.ones(shape, bool)
    keys = jnp.broadcast_to(first_key + jnp.arange(shape[1]), shape)
    return usage(masks, real, keys, config), step_usage(masks, real)


def dense_variants() -> list[Variant]:
    """The contenders for the best dense: our kernels with everything on, and XLA with cuDNN."""
    plain = Kernels(
        rms_norm="reference",
        gemm_mn="dense",
        swiglu_up="dense",
        gemm_k="dense",
        attention_prefill="dense",
        attention_decode="dense",
    )
    every = AllOn()
    return [
        Variant("dense", Kernels(), every, every, None, "none"),
        Variant("dense-xla", plain, every, every, None, "none"),
    ]


def forced_variant(
    config: ModelConfig, wide: WideConfig, batch: int, tokens: int, sparsity: float
) -> Variant:
    """WIDE with random masks, for prompts of `tokens` and for steps.

    With a hint of 0 the routers are off, as a user would have it.
    """
    asked = sparsity > 0
    masks = random_masks(config, wide, batch, tokens, sparsity, seed=1)
    step = random_masks(config, wide, batch, 1, sparsity, seed=2)
    return Variant(
        "wide",
        Kernels(SparsityHints(sparsity, sparsity)),
        Forced(masks, ask_routers=asked),
        Forced(step, ask_routers=asked),
        sparsity,
        "random",
    )


def empty_cache(config: ModelConfig, batch: int, capacity: int) -> KVCache:
    """A bf16 cache, ready on the device."""
    return jax.block_until_ready(KVCache.empty(config, batch, capacity, jnp.bfloat16))


def random_cache(config: ModelConfig, batch: int, tokens: int, capacity: int) -> KVCache:
    """A bf16 cache whose rows hold `tokens` random normal keys and values, ready on the device."""
    cache = empty_cache(config, batch, capacity)

    @functools.partial(jax.jit, donate_argnums=0)
    def normal(old, key):
        return jax.random.normal(key, old.shape, old.dtype)

    layers = []
    for number, layer in enumerate(cache.layers):
        keys = jax.random.split(jax.random.key(number))
        filled = normal(layer.keys, keys[0]), normal(layer.values, keys[1])
        layers.append(LayerCache(*filled, layer.counter))
    return jax.block_until_ready(KVCache(tuple(layers), jnp.full((batch,), tokens, jnp.int32)))


# What a kernel's name contains -> the part of a layer it belongs to; the first match counts.
PARTS = (
    ("routing, k and v", ("route_kv_kernel",)),
    (
        "routing",
        ("rows_kernel", "step_kernel", "count_kernel", "place_kernel", "k_axis", "pattern"),
    ),
    (
        "attention",
        (
            *("flash", "fmha", "sdpa", "attention", "mosaic", "cudnn"),
            *("gather_kernel", "scatter_kernel", "split_kernel", "merge"),
        ),
    ),
    ("norm", ("norm_kernel",)),
    ("rotation", ("rope_kernel",)),
    (
        "products",
        (
            *("tile_kernel", "small_kernel", "qkv_kernel", "persistent_kernel", "sum_kernel"),
            *("split_k_kernel", "zero_kernel", "gemm", "cutlass", "nvjet", "dot"),
        ),
    ),
)
LISTED = 12  # kernels by name in a profile


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where a call's device time goes, in milliseconds."""

    parts: dict[str, float]  # by part of a layer; `gaps` is time between kernels
    kernels: dict[str, tuple[float, int]]  # the longest by name: time, launches


def part_of(kernel: str) -> str:
    """The part of a layer that a kernel of this name belongs to."""
    name = kernel.lower()
    return next((part for part, names in PARTS if any(n in name for n in names)), "other")


def profile(call: Callable[[], Any], calls: int = 1) -> Profile:
    """Profile a call that has run before; figures are for one of the `calls` steps in it."""
    events = kernel_events(call)
    parts = dict.fromkeys([*(part for part, _ in PARTS), "other"], 0.0)
    kernels: dict[str, tuple[float, int]] = {}
    for event in events:
        ms = event.duration_ns * 1e-6 / calls
        parts[part_of(event.name)] += ms
        spent, launches = kernels.get(event.name, (0.0, 0))
        kernels[event.name] = (spent + ms, launches + 1)
    end = max(event.start_ns + event.duration_ns for event in events)
    total = (end - events[0].start_ns) * 1e-6 / calls
    parts["gaps"] = max(0.0, total - sum(parts.values()))
    longest = sorted(kernels, key=lambda name: -kernels[name][0])[:LISTED]
    return Profile(
        parts, {name: (kernels[name][0], round(kernels[name][1] / calls)) for name in longest}
    )
