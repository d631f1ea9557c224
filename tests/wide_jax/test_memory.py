"""The memory estimate counts what the model and its cache really take."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests.wide_jax.conftest import tiny_config, tiny_model
from wide_jax.cache import KVCache
from wide_jax.config import WideConfig
from wide_jax.generate import generate, padded_sizes
from wide_jax.memory import estimate_memory
from wide_jax.params import RouterParam
from wide_jax.routing import AllOn
from wide_jax.shapes import shape


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_weights_and_cache_of_a_real_model():
    config = tiny_config()
    wide = WideConfig.for_model(config, ffn_group_size=8)
    model = tiny_model(wide)
    found = estimate_memory(config, wide, batch=3, piece=5, capacity=40, element_bytes=4)
    everything, routers = nbytes(nnx.state(model)), nbytes(nnx.state(model, RouterParam))
    assert found.weights == everything - routers
    assert found.routers == routers
    cache = KVCache.empty(config, 3, 40, jnp.float32)
    assert found.cache == nbytes(cache.layers)
    assert "GiB" in found.line()


def test_a_generation_pads_prompts_and_cache_to_these_sizes(monkeypatch):
    made = []
    empty = KVCache.empty
    monkeypatch.setattr(
        KVCache, "empty", lambda *args: made.append(empty(*args)) or made[-1], raising=True
    )
    model = tiny_model(None)
    for chunk, width in ((None, 32), (5, 20)):
        generate(
            model, [[3] * 17], max_new_tokens=3, routing=AllOn(), stop_ids=(), prefill_chunk=chunk
        )
        assert padded_sizes(17, 3, chunk) == (width, made[-1].capacity) == (width, width + 16)


def test_prompts_in_pieces_share_programs():
    """A program is of a cache's slots: of prompts of up to 8 pieces there are four, as many as of
    whole prompts that long; and no piece runs that holds no prompt."""
    sizes = {length: padded_sizes(length, 10, 32) for length in range(1, 257)}
    assert {capacity for _, capacity in sizes.values()} == {32 + 16, 64 + 16, 128 + 16, 256 + 16}
    assert all(length <= width < length + 32 for length, (width, _) in sizes.items())
    assert all(capacity >= length + 10 for length, (_, capacity) in sizes.items())


def test_llama_3_1_8b():
    """8.03e9 parameters; a token's keys and values are 2 x 32 x 8 x 128 elements, and each layer's
    cache has a counter of 64 bytes."""
    config = shape("llama-3.1-8b")
    found = estimate_memory(config, None, batch=1, piece=4096, capacity=16384, element_bytes=2)
    assert found.weights == 2 * 8_030_261_248
    assert found.cache == 2 * 16384 * 2 * 32 * 8 * 128 + 64 * 32
    assert found.routers == 0
    assert 0.3e9 < found.temporary < 1e9
