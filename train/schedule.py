"""Learning rate and temperature as functions of the optimizer update, never of the micro-batch."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from train.config import TrainConfig


def learning_rate(
    update: Int[Array, ""] | int,
    *,
    peak: float,
    warmup_updates: int,
    updates: int,
) -> Float[Array, ""]:
    """Linear warm-up from 0 to `peak`, then a cosine that reaches 0 at `updates`.

    `updates` is the whole run, warm-up included: rate(n) = peak * n / warmup for n < warmup, then
    peak / 2 * (1 + cos(pi * (n - warmup) / (updates - warmup))).

    Policy: update 0 runs at rate 0. It changes no weight; it only starts Adam's moments. The last
    update, number `updates - 1`, still has a small rate; 0 is reached after it.
    """
    n = jnp.asarray(update, jnp.float32)
    rising = n / max(warmup_updates, 1)
    progress = (n - warmup_updates) / max(updates - warmup_updates, 1)
    falling = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(progress, 0.0, 1.0)))
    return jnp.float32(peak) * jnp.where(n < warmup_updates, rising, falling)


def temperature(
    update: Int[Array, ""] | int, *, start: float, end: float, updates: int
) -> Float[Array, ""]:
    """Linear from `start` at update 0 to `end` at the last update, number `updates - 1`."""
    progress = jnp.asarray(update, jnp.float32) / max(updates - 1, 1)
    return jnp.float32(start) + progress * jnp.float32(end - start)


def rate_of(config: TrainConfig, update: Int[Array, ""] | int) -> Float[Array, ""]:
    """`learning_rate` with a run's settings."""
    return learning_rate(
        update,
        peak=config.learning_rate,
        warmup_updates=config.warmup_updates,
        updates=config.updates,
    )


def temperature_of(config: TrainConfig, update: Int[Array, ""] | int) -> Float[Array, ""]:
    """`temperature` with a run's settings."""
    return temperature(update, start=config.tau_start, end=config.tau_end, updates=config.updates)
