"""Masks, error measures and interpreters that tests, tuner and benchmarks share."""

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from pallas_kernels._common.triton_support import interpreting

type Mask = Bool[Array, "M groups"]


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run the `pallas` and `triton` kernel bodies in their interpreters, on a CPU."""
    token = interpreting.set(True)
    try:
        yield
    finally:
        interpreting.reset(token)


def relative_error(y: jax.Array, reference: jax.Array) -> float:
    """norm(y - reference) / norm(reference) in float32; NaN where y holds one."""
    y, reference = y.astype(jnp.float32), reference.astype(jnp.float32)
    return float(jnp.linalg.norm(y - reference) / jnp.maximum(jnp.linalg.norm(reference), 1e-30))


def random_mask(key: Key[Array, ""], tokens: int, groups: int, sparsity: float) -> Mask:
    """Each (token, group) pair skipped independently with probability `sparsity`."""
    return jax.random.bernoulli(key, 1.0 - sparsity, (tokens, groups))


def clustered_mask(
    key: Key[Array, ""], tokens: int, groups: int, sparsity: float, rank: int = 16
) -> Mask:
    """Masks as a low-rank router makes them, `sparsity` of all pairs skipped.

    logits[t, g] = z[t] . a[g] + b[g]: z of `rank` numbers is a stationary walk along the tokens
    (z[t] = 0.9 z[t-1] + noise, unit variance), a and b are normal with variance 1/rank and 1, so
    half of the logits' variance belongs to the group and half to the token. The threshold is the
    logits' quantile.
    """
    walk, mix, offset = jax.random.split(key, 3)
    noise = jax.random.normal(walk, (tokens, rank)) * jnp.sqrt(1 - 0.9**2)
    _, z = jax.lax.scan(lambda z, e: ((z := 0.9 * z + e), z), jnp.zeros((rank,)), noise)
    a = jax.random.normal(mix, (groups, rank)) / jnp.sqrt(rank)
    logits = jnp.dot(z, a.T, precision="highest") + jax.random.normal(offset, (groups,))
    return logits >= jnp.quantile(logits, sparsity)


def _one_token_each(key: Key[Array, ""], tokens: int, groups: int) -> Mask:
    chosen = jax.random.randint(key, (groups,), 0, tokens)
    return jnp.arange(tokens)[:, None] == chosen[None, :]


def _last_tile_partial(key: Key[Array, ""], tokens: int, groups: int) -> Mask:
    """Group g runs for 1 + 37 g tokens (cyclically): tiles end everywhere but at a boundary."""
    counts = (1 + 37 * jnp.arange(groups)) % (tokens + 1)
    ranks = jnp.argsort(jax.random.uniform(key, (groups, tokens)), axis=1)
    return (jnp.argsort(ranks, axis=1) < counts[:, None]).T


def _ragged(key: Key[Array, ""], tokens: int, groups: int) -> Mask:
    """Every group its own density, from 0 to 1."""
    density = jnp.linspace(0.0, 1.0, groups)
    return jax.random.uniform(key, (tokens, groups)) < density[None, :]


# The named patterns of the contract suite: (key, tokens, groups) -> mask.
PATTERNS: dict[str, Callable[[Key[Array, ""], int, int], Mask]] = {
    "all_on": lambda key, m, g: jnp.ones((m, g), bool),
    "all_off": lambda key, m, g: jnp.zeros((m, g), bool),
    "one_token_each": _one_token_each,
    "one_token_only": lambda key, m, g: jnp.zeros((m, g), bool).at[m - 1].set(True),
    "one_group_only": lambda key, m, g: jnp.zeros((m, g), bool).at[:, g - 1].set(True),
    "half": lambda key, m, g: random_mask(key, m, g, 0.5),
    "few": lambda key, m, g: random_mask(key, m, g, 0.9),
    "last_tile_partial": _last_tile_partial,
    "ragged": _ragged,
    "clustered": lambda key, m, g: clustered_mask(key, m, g, 0.5),
}
