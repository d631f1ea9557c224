"""How fast a stage trains: the real step on random weights of a given shape, timed.

`measure` returns what a `train` result record holds beside its common fields
(`eval.records`): the model's shape, stage, mesh, tokens per second, MFU and peak memory.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from train.config import TrainConfig
from train.data import HostBatch, on_mesh
from train.flops import peak_flops, step_flops_per_token
from train.parts import take_apart
from train.step import init_optimizer, make_step
from wide_jax import lora, partition
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.hf.mapping import expected_router_tensors, expected_tensors
from wide_jax.hf.pretrained import build
from wide_jax.model import WideForCausalLM
from wide_jax.params import LoRAParam, RouterParam


@dataclasses.dataclass(frozen=True)
class TrainTiming:
    """Times of single updates, after compiling and warming up."""

    seconds: tuple[float, ...]
    compile_seconds: float  # the first update, compiling included
    tokens_per_second: float  # at the median update, all devices together
    mfu: float | None  # None: the device's peak is not known
    peak_gib: float | None  # of the first device; None: it does not say
    losses: tuple[float, ...]


def measure(
    model: ModelConfig,
    wide: WideConfig,
    config: TrainConfig,
    *,
    stage: Literal[1, 2] = 1,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    updates: int = 10,
    warm_up: int = 2,
    lora_settings: lora.LoRASettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TrainTiming:
    """Time `updates` updates of a stage on random weights and tokens.

    Args:
        model: the shape; its weights are drawn on the devices.
        wide: group sizes and router rank.
        config: batch, sequence length, accumulation, remat, mesh.
        stage: 1 trains routers, 2 LoRA and routers.
        dtype: of weights and activations.
        updates: timed ones.
        warm_up: untimed ones after the first, which compiles.
        lora_settings: of stage 2; None: the method's.
        progress: called with updates done and in all.

    Raises:
        ValueError: a mesh the model does not fit.
    """
    mesh = partition.make_mesh(config.data_parallel, config.fsdp, config.tensor_parallel)
    partition.check_mesh(mesh, model, wide)
    settings = lora_settings or lora.LoRASettings()
    with jax.set_mesh(mesh):
        network = random_model(model, wide, mesh, dtype=dtype)
        trained: tuple[type[nnx.Variable], ...] = (RouterParam,)
        if stage == 2:
            lora.attach(network, settings, rngs=nnx.Rngs(0))
            lora.with_dropout(network, jax.random.key(0))
            trained = (LoRAParam, RouterParam)
        parts, trainable, frozen = take_apart(network, *trained)
        del network
        trainable = jax.device_put(trainable, partition.shardings_for(trainable, mesh))
        opt_state = init_optimizer(config, trainable, mesh)
        step = make_step(parts, model, config, trainable, opt_state)
        times, losses = [], []
        in_all = 1 + warm_up + updates
        for update in range(in_all):
            batch = on_mesh(_random_batch(model, config, update), mesh)
            jax.block_until_ready(batch)
            started = time.perf_counter()
            trainable, opt_state, metrics = step(
                trainable, opt_state, frozen, batch, np.int32(update), jax.random.key(0)
            )
            jax.block_until_ready((trainable, metrics))
            times.append(time.perf_counter() - started)
            losses.append(float(metrics.lm_loss))
            if progress is not None:
                progress(update + 1, in_all)
    timed = times[1 + warm_up :]
    speed = config.tokens_per_update / float(np.median(timed))
    needed = step_flops_per_token(
        model, wide, config.sequence_length, lora_rank=settings.rank if stage == 2 else 0
    )
    peak = peak_flops(jax.devices()[0].device_kind, dtype)
    memory = jax.devices()[0].memory_stats() or {}
    used = memory.get("peak_bytes_in_use")
    return TrainTiming(
        seconds=tuple(timed),
        compile_seconds=times[0],
        tokens_per_second=speed,
        mfu=None if peak is None else speed * needed / (peak * mesh.size),
        peak_gib=None if used is None else used / 2**30,
        losses=tuple(losses),
    )


def record_fields(
    timing: TrainTiming, config: TrainConfig, *, model: str, stage: int, dtype: str
) -> dict[str, Any]:
    """The fields of a `train` result record, without the common ones."""
    return {
        "model": model,
        "stage": stage,
        "mesh": {
            "data": config.data_parallel,
            "fsdp": config.fsdp,
            "tensor": config.tensor_parallel,
        },
        "sequence": config.sequence_length,
        "sequences_per_update": config.sequences_per_update,
        "accumulation": config.accumulation,
        "dtype": dtype,
        "remat": config.remat,
        "logits_chunk": config.logits_chunk,
        "tokens_per_second": timing.tokens_per_second,
        "mfu": timing.mfu,
        "peak_gib": timing.peak_gib,
        "compile_seconds": timing.compile_seconds,
        "samples_ms": [1e3 * seconds for seconds in timing.seconds],
        "losses": list(timing.losses),
    }


def random_model(
    model: ModelConfig, wide: WideConfig, mesh: Mesh, *, dtype: Literal["float32", "bfloat16"]
) -> WideForCausalLM:
    """Random weights (normal, 0.02; norms one) drawn where they belong, tensor by tensor."""
    shapes = {name: (shape, jnp.dtype(dtype)) for name, shape in expected_tensors(model).items()}
    for name, shape in expected_router_tensors(model, wide).items():
        shapes[name] = (shape, jnp.dtype(jnp.float32))
    tensors = {}
    for number, (name, (shape, kind)) in enumerate(shapes.items()):
        draw = jax.jit(
            _draw, static_argnums=(1, 2, 3), out_shardings=partition.sharding_for(name, shape, mesh)
        )
        tensors[name] = draw(jax.random.key(number), shape, kind, name.endswith("norm.weight"))
    return build(model, wide, tensors, dtype=dtype)


def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any, ones: bool) -> jax.Array:
    return jnp.ones(shape, dtype) if ones else 0.02 * jax.random.normal(key, shape, dtype)


def _random_batch(model: ModelConfig, config: TrainConfig, update: int) -> HostBatch:
    shape = (config.sequences_per_update, config.sequence_length)
    ids = np.random.default_rng(update).integers(0, model.vocab_size, shape)
    return HostBatch.of(ids, np.ones(shape, np.int32))
