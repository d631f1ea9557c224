"""The run: batches through the step, numbers out. `calibrate` is stage 1 on a model in memory."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from train.config import TrainConfig
from train.data import Batches, PackedWindows, on_mesh
from train.hyperparameters import hyperparameters
from train.parts import Params, place, put_back, take_apart
from train.records import UpdateRecord, check_finite, to_record
from train.step import Step, StepMetrics, init_optimizer, make_step
from train.threshold import absorb_thresholds
from wide_jax import partition
from wide_jax.batch import TokenBatch
from wide_jax.model import WideForCausalLM
from wide_jax.params import RouterParam


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that changes during a run. Noise, data and schedules follow from `update`."""

    trainable: Params
    opt_state: optax.OptState
    update: int  # the next one to run, from 0


@dataclasses.dataclass(frozen=True)
class CalibrationResult:
    """What a run leaves: the trained parameters by Hugging Face name, and its numbers."""

    trainable: Params
    history: tuple[UpdateRecord, ...]
    seconds: float


def run_updates(
    step: Step,
    state: TrainState,
    frozen: Params,
    batches: Batches,
    mesh: Mesh,
    config: TrainConfig,
    *,
    report: Callable[[StepMetrics], None],
    before_first: Callable[[Callable[[], None]], None] | None = None,
    after_update: Callable[[TrainState], None] | None = None,
) -> TrainState:
    """Run updates `state.update` to `config.updates`, under `jax.set_mesh(mesh)`.

    `report` gets each update's metrics after the next one is under way, so fetching them never
    leaves the device idle. `before_first` is called before the first update, if one is left, with a
    function that compiles the step without running it. `state`'s arrays are donated: only the
    returned state is alive.
    """
    key, hyper = jax.random.key(config.seed), hyperparameters(config)

    def arguments(state: TrainState, batch: TokenBatch) -> tuple[Any, ...]:
        update = np.int32(state.update)
        return state.trainable, state.opt_state, frozen, batch, update, key, hyper

    def batch_of(update: int) -> TokenBatch:
        return on_mesh(batches.batch(update), mesh, count=config.sequences_per_update)

    if before_first is not None and state.update < config.updates:

        def compile_first() -> None:
            step.lower(*arguments(state, batch_of(state.update))).compile()

        before_first(compile_first)
    pending: StepMetrics | None = None
    for update in range(state.update, config.updates):
        trainable, opt_state, metrics = step(*arguments(state, batch_of(update)))
        state = TrainState(trainable, opt_state, update + 1)
        if pending is not None:
            report(pending)
        pending = metrics
        if after_update is not None:
            after_update(state)
    if pending is not None:
        report(pending)
    return state


def calibrate(
    model: WideForCausalLM,
    tokens: np.ndarray,
    config: TrainConfig,
    *,
    on_update: Callable[[UpdateRecord], None] | None = None,
) -> CalibrationResult:
    """Stage 1: train the routers on packed windows of `tokens`; the base stays bit-identical.

    The model's routers are replaced in place when the run ends; a run that fails leaves their
    decisions as they were. Thresholds are taken into the routers' biases first.

    Args:
        model: with routers (built with a `WideConfig`).
        tokens: `[N]` token ids.
        config: the run.
        on_update: called after every update with its record, one update late.

    Raises:
        ValueError: no routers, too few tokens, or a mesh the model does not fit.
        LossNotFiniteError: the loss became NaN or infinite.
    """
    if model.wide is None:
        raise ValueError("the model has no RouterParam to train: build it with a WideConfig")
    absorb_thresholds(model)
    parts, trainable, frozen = take_apart(model, RouterParam)
    wide = model.wide
    batches = PackedWindows(
        np.asarray(tokens), config.sequence_length, config.sequences_per_update, config.seed
    )
    mesh = partition.make_mesh(config.data_parallel, config.fsdp, config.tensor_parallel)
    partition.check_mesh(mesh, model.config, wide)
    history: list[UpdateRecord] = []
    started = time.perf_counter()
    element_bytes = next(iter(frozen.values())).dtype.itemsize

    def report(metrics: StepMetrics) -> None:
        seconds = time.perf_counter() - started
        record = to_record(
            metrics, model.config, wide, element_bytes=element_bytes, seconds=seconds
        )
        check_finite(record)
        history.append(record)
        if on_update is not None:
            on_update(record)

    with jax.set_mesh(mesh):
        frozen = place(frozen, mesh)
        # The step donates its trainables: train on copies.
        trainable = jax.tree.map(lambda x: x.copy(), place(trainable, mesh))
        state = TrainState(trainable, init_optimizer(config, trainable, mesh), 0)
        step = make_step(parts, model.config, config, state.trainable, state.opt_state)
        state = run_updates(step, state, frozen, batches, mesh, config, report=report)
    put_back(model, state.trainable)
    return CalibrationResult(state.trainable, tuple(history), time.perf_counter() - started)
