"""The comparison of the kernel path with plain JAX, on a tiny model."""

import jax
import jax.numpy as jnp

from eval.e2e_runs import random_model
from eval.engine_check import compare
from tests.eval.test_bench_e2e import TINY
from wide_jax.config import WideConfig


def test_kernel_path_computes_the_model():
    wide = WideConfig.for_model(TINY, ffn_group_size=16)
    model = random_model(TINY, wide, dtype=jnp.float32)
    found = compare(model, jax.random.randint(jax.random.key(0), (2, 24), 0, 64))
    assert found.decisions == 2 * 24 * 2 * (2 + 4)
    assert found.float32_max_difference < 1e-4
    assert found.float32_flipped == 0
    assert found.float32_cached_max_difference < 1e-4
    assert found.bf16_error <= 1.5 * found.bf16_plain_error
    assert 0 < found.bf16_plain_error < 0.1
