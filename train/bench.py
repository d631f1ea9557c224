"""How fast a stage trains: the real step on random weights of a given shape, timed.

`prepare` compiles the step from shapes alone and says what memory it will need; `start` draws the
weights; `measure` times updates. `record_fields` turns a measurement into what a `train` result
record holds beside its common fields (`eval.records`).
"""

import dataclasses
import functools
import math
import os
import time
import zlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from train.config import TrainConfig
from train.data import HostBatch, on_mesh
from train.flops import peak_flops, step_flops_per_token
from train.hyperparameters import hyperparameters
from train.loop import TrainState
from train.parts import Params, take_apart
from train.step import init_optimizer, make_optimizer, make_step, optimizer_shardings
from wide_jax import lora, partition
from wide_jax.batch import TokenBatch
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.model import WideForCausalLM
from wide_jax.params import LoRAParam, RouterParam
from wide_jax.partition import PARTITION
from wide_jax.random_weights import random_weight

DType = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a compiled step needs on one device, in GiB, by the compiler's own account."""

    weights: float  # the frozen model
    trained: float  # trained leaves and their moments
    temporary: float  # activations, logits, gradients: everything that lives within a step

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.trained + self.temporary

    def line(self) -> str:
        """One line for people."""
        return (
            f"GiB a device: weights {self.weights:.2f}, trained leaves and moments "
            f"{self.trained:.2f}, within a step {self.temporary:.2f}; {self.total:.2f} in all"
        )


@dataclasses.dataclass(frozen=True)
class PreparedStage:
    """A stage's compiled step, without any weights."""

    model: ModelConfig
    wide: WideConfig
    config: TrainConfig
    stage: Literal[1, 2]
    dtype: DType
    lora_rank: int  # 0 in stage 1
    mesh: Mesh
    trainable: Params  # shapes and shardings only
    frozen: Params
    step: jax.stages.Compiled
    compile_seconds: float  # tracing included
    memory: MemoryPlan | None  # None: the compiler does not say


@dataclasses.dataclass(frozen=True)
class TrainTiming:
    """Times of single updates, after warming up."""

    seconds: tuple[float, ...]
    tokens_per_second: float  # at the median update, all devices together
    mfu: float | None  # None: the device's peak is not known
    peak_gib: float | None  # of the first device; None: unknown (see `measure`)
    losses: tuple[float, ...]  # of every update, warm-up included
    gradient_norms: tuple[float, ...]  # likewise, before clipping


def prepare(
    model: ModelConfig,
    wide: WideConfig,
    config: TrainConfig,
    *,
    stage: Literal[1, 2] = 1,
    dtype: DType = "bfloat16",
    lora_settings: lora.LoRASettings | None = None,
) -> PreparedStage:
    """Compile a stage's step from shapes; nothing is allocated for the model.

    Args:
        model: the shape.
        wide: group sizes and router rank.
        config: batch, sequence length, accumulation, remat, attention, mesh.
        stage: 1 trains routers, 2 LoRA and routers.
        dtype: of weights and activations.
        lora_settings: of stage 2; None: the method's.

    Raises:
        ValueError: a mesh the model does not fit.
    """
    mesh = partition.make_mesh(config.data_parallel, config.fsdp, config.tensor_parallel)
    partition.check_mesh(mesh, model, wide)
    settings = lora_settings or lora.LoRASettings()
    trained = (RouterParam,) if stage == 1 else (LoRAParam, RouterParam)

    def network() -> WideForCausalLM:
        built = WideForCausalLM(model, wide, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
        if stage == 2:
            lora.attach(built, settings, rngs=nnx.Rngs(0))
            lora.with_dropout(built, jax.random.key(0))
        return built

    started = time.perf_counter()
    parts, trainable, frozen = take_apart(nnx.eval_shape(network), *trained)
    trainable, frozen = _placed(trainable, mesh), _placed(frozen, mesh)
    opt_state = jax.eval_shape(make_optimizer(config).init, trainable)
    opt_state = jax.tree.map(_with_sharding, opt_state, optimizer_shardings(opt_state, mesh))
    with jax.set_mesh(mesh):
        step = make_step(parts, model, config, trainable, opt_state)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def run(trainable, opt_state, frozen, ids, positions, segments, number, key, numbers):
            batch, hyper = TokenBatch(ids, positions, segments), settings_tree.unflatten(numbers)
            return step(trainable, opt_state, frozen, batch, number, key, hyper)

        settings_tree = jax.tree.structure(hyperparameters(config))
        # The other inputs are real: they are small.
        inputs = _inputs(model, config, mesh, 0)
        compiled = run.lower(trainable, opt_state, frozen, *inputs).compile()
    return PreparedStage(
        model=model,
        wide=wide,
        config=config,
        stage=stage,
        dtype=dtype,
        lora_rank=settings.rank if stage == 2 else 0,
        mesh=mesh,
        trainable=trainable,
        frozen=frozen,
        step=compiled,
        compile_seconds=time.perf_counter() - started,
        memory=_memory(compiled, trainable, opt_state, frozen),
    )


def start(prepared: PreparedStage, *, frozen: Params | None = None) -> tuple[TrainState, Params]:
    """The state before update 0, and the frozen weights: drawn, or those of an earlier call.

    Each array is drawn where it belongs (`wide_jax.random_weights`), by its name, so that any mesh
    and stage gets the same ones.
    """
    trainable = {name: _draw(name, like) for name, like in prepared.trainable.items()}
    if frozen is None:
        frozen = {name: _draw(name, like) for name, like in prepared.frozen.items()}
    opt_state = init_optimizer(prepared.config, trainable, prepared.mesh)
    return TrainState(trainable, opt_state, 0), frozen


def measure(
    prepared: PreparedStage,
    state: TrainState,
    frozen: Params,
    *,
    updates: int = 10,
    warm_up: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[TrainTiming, TrainState]:
    """Run `warm_up` and then `updates` timed updates from `state`, whose arrays are donated.

    Devices count their peak memory from the start of the process. It is these updates' only where
    they raised it; after something larger in the same process `peak_gib` is None.

    Args:
        prepared: the compiled step.
        state: where to start; update `n` always sees the same random tokens.
        frozen: the weights.
        updates: timed ones.
        warm_up: untimed ones before them.
        progress: called with updates done and in all.
    """
    config, mesh = prepared.config, prepared.mesh
    device = mesh.devices.flat[0]
    peak_before = _peak_bytes(device)
    times, losses, norms = [], [], []
    with jax.set_mesh(mesh):
        for done in range(warm_up + updates):
            inputs = jax.block_until_ready(_inputs(prepared.model, config, mesh, state.update))
            started = time.perf_counter()
            trainable, opt_state, metrics = prepared.step(
                state.trainable, state.opt_state, frozen, *inputs
            )
            jax.block_until_ready((trainable, metrics))
            times.append(time.perf_counter() - started)
            losses.append(float(metrics.lm_loss))
            norms.append(float(metrics.gradient_norm))
            state = TrainState(trainable, opt_state, state.update + 1)
            if progress is not None:
                progress(done + 1, warm_up + updates)
    speed = config.tokens_per_update / float(np.median(times[warm_up:]))
    needed = step_flops_per_token(
        prepared.model, prepared.wide, config.sequence_length, lora_rank=prepared.lora_rank
    )
    peak = peak_flops(device.device_kind, prepared.dtype)
    peak_after = _peak_bytes(device)
    timing = TrainTiming(
        seconds=tuple(times[warm_up:]),
        tokens_per_second=speed,
        mfu=None if peak is None else speed * needed / (peak * mesh.size),
        peak_gib=peak_after / 2**30 if peak_after > peak_before else None,
        losses=tuple(losses),
        gradient_norms=tuple(norms),
    )
    return timing, state


def record_fields(prepared: PreparedStage, timing: TrainTiming, *, model: str) -> dict[str, Any]:
    """The fields of a `train` result record, without the common ones."""
    config = prepared.config
    return {
        "model": model,
        "layers": prepared.model.num_hidden_layers,
        "stage": prepared.stage,
        "mesh": {
            "data": config.data_parallel,
            "fsdp": config.fsdp,
            "tensor": config.tensor_parallel,
        },
        "sequence": config.sequence_length,
        "sequences_per_update": config.sequences_per_update,
        "accumulation": config.accumulation,
        "dtype": prepared.dtype,
        "remat": config.remat,
        "attention": config.attention,
        "logits_chunk": config.logits_chunk,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "tokens_per_second": timing.tokens_per_second,
        "mfu": timing.mfu,
        "peak_gib": timing.peak_gib,
        "planned_gib": None if prepared.memory is None else prepared.memory.total,
        "compile_seconds": prepared.compile_seconds,
        "samples_ms": [1e3 * seconds for seconds in timing.seconds],
        "losses": list(timing.losses),
        "gradient_norms": list(timing.gradient_norms),
    }


def _peak_bytes(device: jax.Device) -> int:
    """Since the process started; 0 where the device does not count."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)


def _placed(params: Params, mesh: Mesh) -> Params:
    return {
        name: _with_sharding(x, partition.sharding_for(name, x.shape, mesh))
        for name, x in params.items()
    }


def _with_sharding(x: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _memory(
    compiled: jax.stages.Compiled, trainable: Params, opt_state: Any, frozen: Params
) -> MemoryPlan | None:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None

    def local(tree: Any) -> float:
        leaves = jax.tree.leaves(tree)
        sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
        return sum(sizes) / 2**30

    return MemoryPlan(
        weights=local(frozen),
        trained=local((trainable, opt_state)),
        temporary=analysis.temp_size_in_bytes / 2**30,
    )


def _draw(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    key = jax.random.key(zlib.crc32(name.encode()))  # one of its own for every name
    return random_weight(name, like.shape, like.dtype, key, sharding=like.sharding)


def _inputs(model: ModelConfig, config: TrainConfig, mesh: Mesh, update: int) -> tuple[Any, ...]:
    """An update's random tokens with positions and segments, its number, noise key and settings."""
    shape = (config.sequences_per_update, config.sequence_length)
    ids = np.random.default_rng(update).integers(0, model.vocab_size, shape)
    batch = on_mesh(HostBatch.of(ids, np.ones(shape, np.int32)), mesh)
    numbers = jax.tree.leaves(hyperparameters(config))
    scalars = np.int32(update), jax.random.key(config.seed), numbers
    scalars = jax.device_put(scalars, NamedSharding(mesh, PARTITION.scalar))
    return batch.input_ids, batch.positions, batch.segment_ids, *scalars
