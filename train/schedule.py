"""Learning rate and temperature as functions of the optimizer update, never of the micro-batch."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from train.hyperparameters import Hyperparameters, Number


def learning_rate(
    update: Int[Array, ""] | int,
    *,
    peak: Number | float,
    warmup_updates: Number | int,
    updates: Number | int,
) -> Float[Array, ""]:
    """Linear warm-up from 0 to `peak`, then a cosine that reaches 0 at `updates`.

    `updates` is the whole run, warm-up included: rate(n) = peak * n / warmup for n < warmup, then
    peak / 2 * (1 + cos(pi * (n - warmup) / (updates - warmup))).

    Policy: update 0 runs at rate 0. It changes no weight; it only starts Adam's moments. The last
    update, number `updates - 1`, still has a small rate; 0 is reached after it.
    """
    n = jnp.asarray(update, jnp.float32)
    rising = n / jnp.maximum(warmup_updates, 1)
    progress = (n - warmup_updates) / jnp.maximum(updates - warmup_updates, 1)
    falling = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(progress, 0.0, 1.0)))
    return peak * jnp.where(n < warmup_updates, rising, falling)


def temperature(
    update: Int[Array, ""] | int,
    *,
    start: Number | float,
    end: Number | float,
    updates: Number | int,
) -> Float[Array, ""]:
    """Linear from `start` at update 0 to `end` at the last update, number `updates - 1`."""
    progress = jnp.asarray(update, jnp.float32) / jnp.maximum(updates - 1, 1)
    return start + progress * (end - start)


def rate_of(hyper: Hyperparameters, update: Int[Array, ""] | int) -> Float[Array, ""]:
    """`learning_rate` of a run."""
    return learning_rate(
        update,
        peak=hyper.learning_rate,
        warmup_updates=hyper.warmup_updates,
        updates=hyper.updates,
    )


def temperature_of(hyper: Hyperparameters, update: Int[Array, ""] | int) -> Float[Array, ""]:
    """`temperature` of a run."""
    return temperature(update, start=hyper.tau_start, end=hyper.tau_end, updates=hyper.updates)
