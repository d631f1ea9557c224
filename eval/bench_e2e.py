"""`wide bench e2e`: a prompt and each token after it, dense and pruned, of a whole model.

Contenders take turns, run by run, and follow another one every round. Dense is the best of two: our
kernels with everything on, and XLA's products with cuDNN's attention. The ideal beside a
measurement is computed from the very masks that ran; in decode, a trained model's are those of one
step after the prompt. Another shape can be timed with them too (`eval.carried_masks`). Times are
the host's, around a call that is waited for: prefills and decode loops last milliseconds.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from rich.console import Console
from rich.table import Table

from eval import records
from eval.carried_masks import SourceMasks, carried_variants, describe, described
from eval.e2e_generate import WAITING, routed_variant, time_generate
from eval.e2e_runs import (
    CompiledRun,
    Models,
    Phase,
    Profile,
    Variant,
    best_dense,
    compile_all,
    decided_usage,
    dense_variants,
    empty_cache,
    forced_variant,
    mask_usage,
    profile,
    random_cache,
    random_model,
    run_decode,
    run_prefill,
    turns,
)
from wide_jax.accounting import (
    Accounting,
    StepUsage,
    Usage,
    account,
    ideal_decode_speedup,
    ideal_prefill_speedup,
)
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.memory import estimate_generation, estimate_memory
from wide_jax.model import WideForCausalLM
from wide_jax.routing import Argmax, Forced

ELEMENT_BYTES = 2  # bf16
SPARE = 1.1  # of an estimate of memory: masks of other variants, what XLA keeps a moment longer
PROMPT = ("prefill", "ttft")  # phases whose time is a prompt's, not a token's


@dataclasses.dataclass(frozen=True)
class E2EConfig:
    """What `wide bench e2e` measures."""

    tokens: tuple[int, ...] = (128, 1024, 4096, 16384, 65536)
    """Lengths of the prompts, and contexts of the decode steps."""
    batches: tuple[int, ...] = (1, 4, 16)
    """Sequences at a time."""
    sparsities: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)
    """Of the random masks; 0 runs with the routers off."""
    ffn_groups: tuple[int, ...] = (64, 128, 256, 512)
    """Channels per FFN group, where weights are random; a trained model has its own."""
    phases: tuple[Phase, ...] = ("prefill", "decode")
    """What to measure."""
    steps: int = 64
    """Decode steps of one timed loop: a call costs about 5 ms beside them."""
    rounds: int = 30
    """Timed turns of every contender, 3 at least."""
    seconds_per_cell: float = 10.0
    """Fewer rounds (3 at least) where a cell would take longer."""
    generate: bool = False
    """Also time `generate` itself, as its caller does: the first token (ttft) and each one after it
    (tpot, over the second half of twice `steps` tokens), dense and by the model's routers: with
    --shape these are random, and skip what they skip."""
    prefill_chunk: int | None = None
    """`generate` runs prompts in pieces of so many tokens; by default at once."""
    compile_alone: bool = False
    """Compile one contender at a time, to quote compile times."""
    profile: bool = False
    """Also where a call's time goes: by part of a layer, and the longest kernels by name."""
    json: Path | None = None
    """Append a record (suite `e2e`) of every measurement to this file."""
    plots: Path | None = None
    """Write plots to this folder."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One variant in one phase of one cell."""

    variant: Variant
    run: CompiledRun | None  # None: a call of `generate`, which runs several
    samples_ms: Sequence[float]
    skipped: tuple[Usage, StepUsage | None] | None  # by the masks that ran; None: nothing is routed
    profile: Profile | None = None


def measure(
    architecture: ModelConfig,
    name: str,
    config: E2EConfig,
    console: Console,
    trained: WideForCausalLM | None = None,
    text: Sequence[int] | None = None,
    source: SourceMasks | None = None,
) -> list[dict[str, Any]]:
    """Every cell; returns the records, which are also appended to `config.json` one by one.

    Args:
        architecture: of random weights, or of `trained`.
        name: of the model in the records.
        config: cells, phases, rounds.
        console: for tables and for the cells that are skipped.
        trained: a model with routers: its own masks are measured too, on its own weights and
            group sizes.
        text: token ids of prompts, repeated as often as needed; None: random ids.
        source: a trained model's masks on at least `tokens_needed` tokens: random weights are
            measured with them too, and with as many skipped at random in every layer.

    Raises:
        RuntimeError: there is no GPU (nothing is simulated), or no cell fits.
        ValueError: see `check`; or `trained` has no routers.
    """
    if jax.default_backend() != "gpu":
        raise RuntimeError("wide bench e2e needs a CUDA device: timings elsewhere mean nothing")
    check(config)
    common = records.common_fields("e2e") | {"memory_limit_gib": _gib(memory_limit())}
    rows = []
    own = trained is not None
    if trained is not None:
        if trained.wide is None:
            raise ValueError("the model has no routers: its own masks cannot be measured")
        sizes = [trained.wide]
    else:
        sizes = group_sizes(architecture, config)
    for wide in sizes:
        if source is not None:
            about = describe(source, architecture, wide)
            console.print(described(about, architecture, wide), highlight=False)
        models = Models.of(random_model(architecture, wide) if trained is None else trained)
        for batch in config.batches:
            for tokens in config.tokens:
                asked = []
                for part in parts(config):
                    refused = refusal(architecture, wide, batch, tokens, part, own=own)
                    if refused is None:
                        asked.append(part)
                    else:
                        what = "generate" if part.generate else ", ".join(part.phases)
                        console.print(f"skipped: B={batch}, T={tokens}, {what}: {refused}")
                if not asked:
                    continue
                ids = prompt_ids(architecture.vocab_size, batch, tokens, text)
                more: list[Variant] = []
                if source is not None and any(part.phases for part in asked):
                    size = (batch, tokens, config.steps)
                    more = carried_variants(source, architecture, wide, *size)
                dense = dense_variants()
                found = [
                    cell(models, wide, ids, part, own=own, dense=dense, more=more)
                    if part.phases
                    else generated(models, wide, ids, part, own=own, dense=dense)
                    for part in asked
                ]
                for row in itertools.chain.from_iterable(found):
                    record = common | {"model": name} | row
                    rows.append(record)
                    if config.json is not None:
                        records.append_record(config.json, record)
                    console.print(line(record), highlight=False)
                    for where in profile_lines(record):
                        console.print(f"[dim]{where}[/dim]", highlight=False)
        del models
    if not rows:
        raise RuntimeError("nothing could be measured: no cell fits, or none was asked for")
    console.print(table(rows))
    return rows


def parts(config: E2EConfig) -> list[E2EConfig]:
    """The phases, and `generate`, which needs more room: one may fit where the other does not."""
    phases = [dataclasses.replace(config, generate=False)] if config.phases else []
    return phases + ([dataclasses.replace(config, phases=())] if config.generate else [])


def group_sizes(architecture: ModelConfig, config: E2EConfig) -> list[WideConfig]:
    """The FFN group sizes that random weights are measured at.

    Raises:
        ValueError: one that does not divide the shape's channels.
    """
    return [WideConfig.for_model(architecture, ffn_group_size=g) for g in config.ffn_groups]


def tokens_needed(architecture: ModelConfig, config: E2EConfig) -> int:
    """Tokens of a source's text whose masks the cells take: prompts, and the steps after them."""
    phases = dataclasses.replace(config, generate=False)
    return max(
        (
            batch * tokens + config.steps
            for wide in group_sizes(architecture, config)
            for batch in config.batches
            for tokens in config.tokens
            if refusal(architecture, wide, batch, tokens, phases) is None
        ),
        default=1,  # no cell fits: `measure` says so
    )


def check(config: E2EConfig) -> None:
    """Raise ValueError for a setting that no cell could be measured with."""
    for option in ("tokens", "batches", "ffn_groups"):
        if any(value < 1 for value in getattr(config, option)):
            raise ValueError(f"{option}={getattr(config, option)} must all be at least 1")
    for option in ("steps", "prefill_chunk"):
        if (value := getattr(config, option)) is not None and value < 1:
            raise ValueError(f"{option}={value} must be at least 1")
    if config.prefill_chunk is not None and not config.generate:
        raise ValueError("prefill_chunk is how `generate` runs prompts: give --generate too")
    if not all(0.0 <= value <= 1.0 for value in config.sparsities):
        raise ValueError(f"sparsities={config.sparsities} must all be in [0, 1]")


def refusal(
    config: ModelConfig,
    wide: WideConfig,
    batch: int,
    tokens: int,
    bench: E2EConfig,
    *,
    own: bool = False,
) -> str | None:
    """Why one of a cell's `parts` cannot run here, or None.

    Steps alone need no prompt's activations, but for a model's `own` masks, which see one.
    """
    after = 2 * bench.steps if bench.generate else bench.steps
    if tokens + after > config.max_position_embeddings:
        limit = config.max_position_embeddings
        return f"{tokens} + {after} tokens are beyond max_position_embeddings={limit}"
    if bench.generate:
        estimate = estimate_generation(
            config,
            wide,
            batch=batch,
            prompt=tokens,
            max_new_tokens=after,
            prefill_chunk=bench.prefill_chunk,
            element_bytes=ELEMENT_BYTES,
        )
    else:
        estimate = estimate_memory(
            config,
            wide,
            batch=batch,
            piece=tokens if own or "prefill" in bench.phases else 1,
            capacity=tokens + after,
            element_bytes=ELEMENT_BYTES,
        )
    needed, limit = SPARE * estimate.total, memory_limit()
    if limit is not None and needed > limit:
        return (
            f"needs about {needed / 2**30:.0f} GiB, JAX has {limit / 2**30:.0f} of the device's "
            "(XLA_PYTHON_CLIENT_MEM_FRACTION says how much it takes)"
        )
    return None


def memory_limit() -> int | None:
    """Bytes of the device's memory that JAX may take; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def cell(
    models: Models,
    wide: WideConfig,
    ids: jax.Array,
    config: E2EConfig,
    *,
    own: bool,
    dense: Sequence[Variant],
    more: Sequence[Variant] = (),
) -> Iterator[dict[str, Any]]:
    """The phases' records of one `ids[B, T]`: dense, random masks, `own`: the routers', `more`."""
    architecture, (batch, tokens) = models.routed.config, ids.shape
    prompt = tokens if "prefill" in config.phases else 1  # masks of a prompt that is not run
    variants = list(dense)
    variants += [forced_variant(architecture, wide, batch, prompt, s) for s in config.sparsities]
    if own:
        variants.append(routed_variant(models.routed, own=True))
    variants += more
    for phase in config.phases:
        found = _phase(models, variants, ids, phase, config)
        yield from _rows(phase, found, ids, architecture, wide, config)


def generated(
    models: Models,
    wide: WideConfig,
    ids: jax.Array,
    config: E2EConfig,
    *,
    own: bool,
    dense: Sequence[Variant],
) -> Iterator[dict[str, Any]]:
    """The records of `generate` on one `ids[B, T]`: dense, and the routers', random but for `own`.

    What each variant took: its first token, and each one after it.
    """
    variants = [*dense, routed_variant(models.routed, own=own)]
    waited = time_generate(
        models,
        variants,
        np.asarray(ids),
        steps=config.steps,
        rounds=config.rounds,
        seconds=config.seconds_per_cell,
        prefill_chunk=config.prefill_chunk,
    )

    def skipped(used: Usage | None) -> tuple[Usage, StepUsage | None] | None:
        # What the steps of several rows need not read together is not in their sums.
        one = ids.shape[0] == 1
        return None if used is None else (used, StepUsage.of_one_row(used) if one else None)

    for waiting in WAITING:
        found = [
            Measured(variant, None, one.samples_ms[waiting], skipped(one.usage[waiting]))
            for variant, one in zip(variants, waited, strict=True)
        ]
        yield from _rows(waiting, found, ids, models.routed.config, wide, config)


def _rows(
    phase: str,
    found: Sequence[Measured],
    ids: Int[Array, "B T"],
    architecture: ModelConfig,
    wide: WideConfig,
    config: E2EConfig,
) -> Iterator[dict[str, Any]]:
    """The records of one phase, beside its best dense."""
    batch, tokens = ids.shape
    best = found[best_dense([m.variant for m in found], [m.samples_ms for m in found])]
    dense_ms = statistics.median(best.samples_ms)
    for one in found:
        ms, run, skipped = statistics.median(one.samples_ms), one.run, None
        if one.skipped is not None:
            skipped = _accounting(architecture, wide, one.skipped)
        yield {
            "phase": phase,
            "batch": batch,
            "tokens": tokens,
            "prefill_chunk": config.prefill_chunk if run is None else None,
            "ffn_group": wide.ffn_group_size,
            "attn_group": wide.attn_group_size,
            "layers": architecture.num_hidden_layers,
            "variant": one.variant.name,
            "mask": one.variant.mask,
            "masks_of": one.variant.masks_of,
            "sparsity": 0.0 if skipped is None else skipped.paper,
            "accounting": None if skipped is None else skipped.summary(),
            "rates": None if skipped is None else skipped.by_layer(),
            "ms": ms,
            "samples_ms": list(one.samples_ms),
            "dense_ms": dense_ms,
            "dense": best.variant.name,
            "speedup": dense_ms / ms,
            "ideal_speedup": _ideal(architecture, wide, one.skipped, phase, batch),
            "tokens_per_second": 1e3 * batch * (tokens if phase in PROMPT else 1) / ms,
            "compile_seconds": None if run is None else run.compile_seconds,
            "compiled_alone": None if run is None else config.compile_alone,
            "compiled_from_cache": None if run is None else run.from_cache,
            "temporary_gib": None if run is None else _gib(run.temporary_bytes),
            "peak_gib": None if run is None else _gib(run.peak_bytes),
            "breakdown": None if one.profile is None else one.profile.parts,
            "kernels": None if one.profile is None else one.profile.kernels,
        }


def _phase(
    models: Models,
    variants: list[Variant],
    ids: jax.Array,
    phase: Phase,
    config: E2EConfig,
) -> list[Measured]:
    """Compile every variant, then run them in turns."""
    model, (batch, tokens) = models.routed, ids.shape
    lengths = jnp.full(batch, tokens, jnp.int32)
    capacity = tokens + config.steps
    if phase == "prefill":
        cache = empty_cache(model.config, batch, capacity)
        function, first, last, calls = run_prefill, (ids, lengths), (), 1
    else:
        if any(isinstance(v.step_routing, Argmax) for v in variants):  # these see what is cached
            cache = _filled(models, ids, lengths, empty_cache(model.config, batch, capacity))
        else:
            cache = random_cache(model.config, batch, tokens, capacity)
        token = jnp.zeros((batch,), jnp.int32)
        function, first, last, calls = run_decode, (token,), (config.steps,), config.steps
    states, wanted = [], []
    for variant in variants:
        graphdef, state = models.split(variant)
        states.append(state)
        arguments = (graphdef, state, *first, cache, variant.asks(phase), *last)
        wanted.append((function, arguments))
    runs = compile_all(wanted, together=not config.compile_alone)

    def once(index: int, cache):
        routing = variants[index].asks(phase)
        return runs[index].call(states[index], *first, cache, routing)

    used = [_used(model, variant, ids, lengths, cache, phase=phase) for variant in variants]
    samples: list[list[float]] = [[] for _ in variants]
    for counts, order in turns(len(variants), config.rounds, config.seconds_per_cell):
        for index in order:
            start = time.perf_counter()
            _, cache = jax.block_until_ready(once(index, cache))
            taken = time.perf_counter() - start
            if counts:
                samples[index].append(1e3 * taken / calls)
    profiles: list[Profile | None] = [None] * len(variants)
    if config.profile:
        for index in range(len(variants)):
            kept = [cache]

            def call(index=index, kept=kept):
                token, kept[0] = once(index, kept[0])
                return token

            profiles[index] = profile(call, calls)
            cache = kept[0]
    return [Measured(*one) for one in zip(variants, runs, samples, used, profiles, strict=True)]


def _filled(models: Models, ids, lengths, cache):
    """The cache after a dense prefill."""
    variant = dense_variants()[0]
    graphdef, state = models.split(variant)
    _, cache = run_prefill(graphdef, state, ids, lengths, cache, variant.routing)
    held = jnp.array(lengths)  # a copy: whoever gets the cache donates it
    return jax.block_until_ready(dataclasses.replace(cache, lengths=held))


def _used(
    model: WideForCausalLM, variant: Variant, ids, lengths, cache, *, phase: Phase
) -> tuple[Usage, StepUsage] | None:
    """What the variant's masks skip; None: nothing is routed."""
    match variant.asks(phase):
        case Forced(masks):
            first = jnp.int32(1 if phase == "prefill" else ids.shape[1] + 1)
            return jax.device_get(mask_usage(masks, first, model.config))
        case Argmax():
            prompt = phase == "prefill"
            return decided_usage(model, variant, ids, lengths, cache, prompt=prompt)
    return None


def _accounting(
    config: ModelConfig, wide: WideConfig, used: tuple[Usage, StepUsage | None]
) -> Accounting:
    return account(
        used[0], config, wide, weight_bytes=ELEMENT_BYTES, kv_bytes=ELEMENT_BYTES, steps=used[1]
    )


def _ideal(
    config: ModelConfig,
    wide: WideConfig,
    used: tuple[Usage, StepUsage | None] | None,
    phase: str,
    batch: int,
) -> float | None:
    """None: not known what the steps of several rows read."""
    if used is None:
        return 1.0
    usage, steps = used
    if phase in PROMPT:
        return ideal_prefill_speedup(usage, config, wide, batch)
    if steps is None:
        return None
    return ideal_decode_speedup(
        usage, steps, config, wide, weight_bytes=ELEMENT_BYTES, kv_bytes=ELEMENT_BYTES
    )


def prompt_ids(
    vocab_size: int, batch: int, tokens: int, text: Sequence[int] | None
) -> Int[Array, "B T"]:
    """Prompts of equal length: pieces of the text, one after another, or random ids."""
    if text is None:
        return jax.random.randint(jax.random.key(3), (batch, tokens), 0, vocab_size)
    return jnp.asarray(np.resize(np.asarray(text, np.int32), (batch, tokens)))


def line(row: dict[str, Any]) -> str:
    """One measurement for people."""
    kind = row["variant"] if row["mask"] == "none" else f"{row['mask']} {row['sparsity']:.0%}"
    unit = "ms" if row["phase"] in PROMPT else "ms a step"
    found = (
        f"{row['phase']} B={row['batch']} T={row['tokens']} G={row['ffn_group']} {kind}: "
        f"{row['ms']:.3f} {unit}, {row['speedup']:.3f}x {row['dense']}"
    )
    if row["ideal_speedup"] is not None:
        found += f" (ideal {row['ideal_speedup']:.2f}x)"
    if row["compile_seconds"] is None:
        return found
    how = "from the compile cache" if row["compiled_from_cache"] else "compiled"
    return f"{found}, {row['peak_gib']:.1f} GiB, {how} in {row['compile_seconds']:.1f} s"


def profile_lines(row: dict[str, Any]) -> list[str]:
    """Where the time goes, for people; nothing without a profile."""
    if row["breakdown"] is None:
        return []
    parts = ", ".join(f"{part} {ms:.3f}" for part, ms in row["breakdown"].items())
    kernels = [f"  {ms:.3f} ms {n}x {name[:90]}" for name, (ms, n) in row["kernels"].items()]
    return [f"  ms by part: {parts}", *kernels]


def table(rows: list[dict[str, Any]]) -> Table:
    """All measurements."""
    columns = ("phase", "B", "T", "G", "masks", "ms", "x dense", "ideal", "tokens/s", "GiB")
    result = Table(*columns, title="end to end; x is over the best dense of the same run")
    for row in rows:
        kind = row["variant"] if row["mask"] == "none" else f"{row['mask']} {row['sparsity']:.0%}"
        result.add_row(
            row["phase"],
            str(row["batch"]),
            str(row["tokens"]),
            str(row["ffn_group"]),
            kind,
            f"{row['ms']:.3f}",
            f"{row['speedup']:.3f}",
            "" if row["ideal_speedup"] is None else f"{row['ideal_speedup']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}",
        )
    return result
