"""One optimizer update as a pure function of arrays.

`(trainable, opt_state, frozen, batch, update, key, hyper) -> (trainable, opt_state, metrics)`,
jitted once for the whole run, with the first two donated. Everything that changes from update to
update (learning rate, temperature, noise) is computed inside from the update's number, so a resumed
run needs no other state. Targets and schedules are inputs (`train.hyperparameters`): runs that
differ only in them share one compiled program.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Key

from train.budget import budget_term, masks_usage
from train.config import TrainConfig
from train.hyperparameters import Hyperparameters
from train.loss import distillation_loss, next_token_loss, scored_targets
from train.parts import ModelParts, Params
from train.schedule import rate_of, temperature_of
from wide_jax.accounting import Usage
from wide_jax.batch import TokenBatch
from wide_jax.config import ModelConfig
from wide_jax.model import WideForCausalLM
from wide_jax.partition import PARTITION, constrain, sharding_for
from wide_jax.routing import AllOn, Argmax, GumbelSoftmax

DROPOUT = 2**31 - 1  # what dropout folds into a micro-batch's key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one update saw, before its change was applied. Scalars and per-layer sums, on device."""

    update: Int[Array, ""]
    lm_loss: Float[Array, ""]  # nats per scored target
    kl: Float[Array, ""]  # nats per scored target to the dense teacher; 0 without distillation
    budget_term: Float[Array, ""]  # mean over micro-batches with real tokens, before alpha
    scored: Int[Array, ""]
    sampled: Usage  # of the masks trained with (straight-through)
    hard: Usage  # of the argmax masks, without noise, from the same residual streams
    temperature: Float[Array, ""]
    learning_rate: Float[Array, ""]  # the one this update used
    gradient_norm: Float[Array, ""]  # over the trained leaves, before clipping


@runtime_checkable
class Step(Protocol):
    """The jitted update."""

    def __call__(
        self,
        trainable: Params,
        opt_state: optax.OptState,
        frozen: Params,
        batch: TokenBatch,
        update: Int[Array, ""] | np.int32,
        key: Key[Array, ""],
        hyper: Hyperparameters,
        /,
    ) -> tuple[Params, optax.OptState, StepMetrics]: ...

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """For the same arguments, without running: its `compile()` is what the call then finds."""
        ...


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW over the trained leaves, without its learning rate, which the step applies itself.

    Decay acts on every trained leaf, biases included.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay),
    )


def init_optimizer(config: TrainConfig, trainable: Params, mesh: Mesh) -> optax.OptState:
    """Zero moments, each placed like its parameter; counters on every device."""
    optimizer = make_optimizer(config)
    shapes = jax.eval_shape(optimizer.init, trainable)
    init = jax.jit(optimizer.init, out_shardings=optimizer_shardings(shapes, mesh))
    return init(trainable)


def optimizer_shardings(opt_state: optax.OptState, mesh: Mesh) -> optax.OptState:
    """A tree of shardings like `opt_state`: leaves under a parameter's name are placed like it."""

    def sharding(path, leaf):
        if path and isinstance(path[-1], jax.tree_util.DictKey):
            return sharding_for(path[-1].key, leaf.shape, mesh)
        return NamedSharding(mesh, PARTITION.scalar)

    return jax.tree_util.tree_map_with_path(sharding, opt_state)


def make_step(
    parts: ModelParts,
    model: ModelConfig,
    config: TrainConfig,
    trainable: Params,
    opt_state: optax.OptState,
    *,
    teacher: ModelParts | None = None,
) -> Step:
    """The jitted update. Call it under `jax.set_mesh(mesh)` with placed arrays.

    `trainable` and `opt_state` (or their abstract values) say where the results must lie;
    `teacher` is the structure without LoRA, for distillation.

    Raises:
        ValueError: distillation without a teacher.
    """
    if config.distill != "off" and teacher is None:
        raise ValueError(f"distill={config.distill!r} needs the structure of a teacher")

    optimizer = make_optimizer(config)

    def step(trainable, opt_state, frozen, batch, update, key, hyper):
        gradient, metrics = accumulate_gradient(
            trainable,
            frozen,
            batch,
            update,
            key,
            hyper,
            parts=parts,
            model=model,
            config=config,
            teacher=teacher,
        )
        rate = metrics.learning_rate
        change, opt_state = optimizer.update(gradient, opt_state, trainable)
        trainable = jax.tree.map(lambda w, c: w - rate * c, trainable, change)
        return trainable, opt_state, metrics

    shardings = jax.tree.map(lambda x: x.sharding, (trainable, opt_state))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None))


def accumulate_gradient(
    trainable: Params,
    frozen: Params,
    batch: TokenBatch,
    update: Int[Array, ""],
    key: Key[Array, ""],
    hyper: Hyperparameters,
    *,
    parts: ModelParts,
    model: ModelConfig,
    config: TrainConfig,
    teacher: ModelParts | None = None,
) -> tuple[Params, StepMetrics]:
    """Gradient of one update's loss, micro-batch by micro-batch, and its metrics.

    The loss is total NLL / total scored targets + alpha * mean of the micro-batches' budget terms.
    Cross entropy is exact under any split; the budget term is not (the distance to the target of
    each part's rate, averaged, is not the distance of the whole's rate), as in the paper's code.

    Args:
        trainable: what to differentiate by.
        frozen: everything else of the model.
        batch: `[sequences_per_update, T]`; micro-batch `a` is rows `a`, `a + accumulation`, ...,
            so that every device keeps its rows.
        update: the update's number, from 0.
        key: the run's noise key; the update's and the micro-batch's numbers are folded in.
        hyper: targets, weights of the loss, schedules.
        parts: structure of the model.
        model: its architecture.
        config: the run; of what `hyper` holds nothing is read from it.
        teacher: structure of the dense base, for distillation.
    """
    tau = temperature_of(hyper, update)
    noise_key = jax.random.fold_in(key, update)
    targets = jnp.maximum(scored_targets(batch).sum(dtype=jnp.int32), 1)
    micro_batches = _split_rows(batch, config.accumulation)
    with_tokens = jnp.maximum((micro_batches[-1] > 0).any(axis=(1, 2)).sum(), 1)

    def loss(trainable, micro_batch, index):
        rows = TokenBatch(*micro_batch)
        micro_key = jax.random.fold_in(noise_key, index)
        # Layers and modules fold small numbers into the noise key; dropout has one of its own.
        whole = parts.merge(
            trainable, head_gathered(frozen), jax.random.fold_in(micro_key, DROPOUT)
        )
        routing = Argmax() if config.freeze_routers else GumbelSoftmax(micro_key, tau)
        out = whole(rows, routing, remat=config.remat, causal=config.causal)
        lm = next_token_loss(out.hidden, whole.logits, rows, chunk=config.logits_chunk)
        kl = jnp.zeros((), jnp.float32)
        if teacher is not None and config.distill != "off":
            kl = _teacher_loss(teacher, {**trainable, **frozen}, out.hidden, whole, rows, config)
        sampled = masks_usage(out.masks, rows.real, model, config)
        hard = masks_usage(out.argmax, rows.real, model, config)
        bytes_each = out.hidden.dtype.itemsize
        term = budget_term(
            sampled,
            model,
            config.budget,
            hyper.targets,
            element_bytes=bytes_each,
            routed=config.routed,
        )
        value = hyper.distill_weight * kl / targets + hyper.alpha * term / with_tokens
        if config.distill != "only":
            value = value + lm.total / targets
        return value, (lm, kl, term, sampled, hard)

    def gradient_of(micro_batch, index):
        return jax.grad(loss, has_aux=True)(trainable, micro_batch, index)

    if config.accumulation == 1:
        gradient, seen = gradient_of([rows[0] for rows in micro_batches], 0)
    else:
        gradient, seen = _scan_sum(gradient_of, micro_batches, jnp.arange(config.accumulation))
    lm, kl, terms, sampled, hard = seen
    return gradient, StepMetrics(
        update=jnp.asarray(update, jnp.int32),
        lm_loss=lm.mean,
        kl=kl / targets,
        budget_term=terms / with_tokens,
        scored=lm.count,
        sampled=sampled,
        hard=hard,
        temperature=tau,
        learning_rate=rate_of(hyper, update),
        gradient_norm=optax.tree.norm(gradient),
    )


def head_gathered(frozen: Params) -> Params:
    """The weights with the output head gathered over `fsdp`: once, and not in every loss chunk."""
    name = "lm_head.weight" if "lm_head.weight" in frozen else "model.embed_tokens.weight"
    return frozen | {name: constrain(frozen[name], "gathered_VD")}


def _teacher_loss(
    teacher: ModelParts,
    params: Params,
    hidden: Float[Array, "B T D"],
    student: WideForCausalLM,
    rows: TokenBatch,
    config: TrainConfig,
) -> Float[Array, ""]:
    """Summed KL to the dense base: all masks on, no LoRA, no gradient."""
    params = jax.lax.stop_gradient(params)
    dense = teacher.merge(params, params)
    dense_hidden = dense(rows, AllOn(), causal=config.causal).hidden
    return distillation_loss(
        hidden, student.logits, dense_hidden, dense.logits, rows, chunk=config.logits_chunk
    ).total


def _split_rows(batch: TokenBatch, accumulation: int) -> list[Int[Array, "A b T"]]:
    """Ids, positions and segments as micro-batches; each device's rows stay on it."""

    def split(x):
        x = constrain(x, "tokens_BT").reshape(-1, accumulation, x.shape[1])
        return constrain(jnp.swapaxes(x, 0, 1), "micro_ABT")

    return [split(x) for x in (batch.input_ids, batch.positions, batch.segment_ids)]


def _scan_sum(function: Callable, *inputs):
    """The sum of `function(*inputs[i])` over the leading axis, one at a time."""
    first = jax.tree.map(lambda x: x[0], inputs)
    tree = None

    def leaves(inputs):
        nonlocal tree
        values, tree = jax.tree.flatten(function(*inputs))
        return values

    zeros = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(leaves, first)]

    def add(sums, inputs):
        return [total + more for total, more in zip(sums, leaves(inputs), strict=True)], None

    sums, _ = jax.lax.scan(add, zeros, inputs)
    return jax.tree.unflatten(tree, sums)
