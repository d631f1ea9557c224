"""The model's arithmetic: masks, biases, padding, packing and the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.wide_jax.conftest import forward, tiny_config, tiny_model
from wide_jax.batch import TokenBatch, left_aligned
from wide_jax.cache import KVCache
from wide_jax.config import WideConfig
from wide_jax.model import WideForCausalLM
from wide_jax.params import RouterParam
from wide_jax.routing import AllOn, Argmax, Forced, GumbelSoftmax, Masks


def random_ids(rows: int, length: int, seed: int = 0):
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, 61)


def logits_of(model, batch, routing):
    return np.asarray(forward(model, batch, routing)[0])


def constant_masks(model: WideForCausalLM, rows: int, length: int, value: bool) -> Masks:
    wide, config = model.wide, model.config
    layers = range(config.num_hidden_layers)
    return Masks(
        tuple(jnp.full((rows, length, wide.attn_groups(config)), value) for _ in layers),
        tuple(jnp.full((rows, length, wide.ffn_groups(config)), value) for _ in layers),
    )


def test_all_groups_on_is_the_dense_model_bit_for_bit(wide_model):
    batch = TokenBatch.from_lengths(random_ids(2, 9))
    on = Forced(constant_masks(wide_model, 2, 9, True))
    np.testing.assert_array_equal(
        logits_of(wide_model, batch, on), logits_of(wide_model, batch, AllOn())
    )


def test_all_groups_off_leaves_only_embedding_norm_and_head(wide_model):
    batch = TokenBatch.from_lengths(random_ids(2, 9))
    off = forward(wide_model, batch, Forced(constant_masks(wide_model, 2, 9, False)))[1].hidden
    expected = wide_model.model.norm(wide_model.model.embed_tokens(batch.input_ids))
    np.testing.assert_allclose(np.asarray(off), np.asarray(expected), rtol=1e-6)


def test_masks_zero_heads_before_o_proj_and_channels_before_down_proj(wide_model):
    """Zeroing the skipped groups' weights by hand gives the masked model's result."""
    config, wide = wide_model.config, wide_model.wide
    rows, length = 1, 6
    attention = [jnp.array([[[True, False]]]), jnp.array([[[False, True]]])]
    ffn_keep = np.array([True, False, True, True, False, False])
    spread = lambda mask: jnp.broadcast_to(mask, (rows, length, mask.shape[-1]))  # noqa: E731
    masks = Masks(
        tuple(spread(m) for m in attention),
        tuple(spread(jnp.asarray(ffn_keep)[None, None]) for _ in range(2)),
    )
    batch = TokenBatch.from_lengths(random_ids(rows, length))
    masked = logits_of(wide_model, batch, Forced(masks))

    pruned = tiny_model(wide)
    head_columns = wide.attn_group_size * config.head_dim
    for layer, keep in zip(pruned.model.layers, attention, strict=True):
        o_proj, down = layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight
        o_proj[...] = o_proj[...] * np.repeat(np.asarray(keep)[0, 0], head_columns)
        down[...] = down[...] * np.repeat(ffn_keep, wide.ffn_group_size)
    np.testing.assert_allclose(masked, logits_of(pruned, batch, AllOn()), rtol=2e-5, atol=2e-5)


def test_case_A6_biases_are_added_once_whatever_the_masks():
    config = tiny_config(
        num_hidden_layers=1,
        intermediate_size=4,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )
    model = WideForCausalLM(config, WideConfig(3, 2), rngs=nnx.Rngs(0))
    layer = model.model.layers[0]
    for path, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        if "router" not in str(path[0]) and "layernorm" not in str(path[0]):
            variable[...] = jnp.zeros_like(variable[...])
    layer.mlp.down_proj.weight[...] = jnp.full_like(layer.mlp.down_proj.weight[...], 0.25)
    layer.self_attn.o_proj.bias[...] = jnp.full((config.hidden_size,), 0.5)
    layer.mlp.gate_proj.bias[...] = jnp.ones((4,))
    layer.mlp.up_proj.bias[...] = jnp.full((4,), 2.0)
    layer.mlp.down_proj.bias[...] = jnp.full((config.hidden_size,), 0.25)
    batch = TokenBatch.from_lengths(random_ids(1, 1))
    embedded = np.asarray(model.model.embed_tokens(batch.input_ids))
    model.model.norm = lambda x: x  # look at the residual stream itself
    on = model(batch, Forced(constant_masks(model, 1, 1, True))).hidden
    off = model(batch, Forced(constant_masks(model, 1, 1, False))).hidden
    # 0.5 + (4 channels x 0.25 x silu(1) x 2 + 0.25), silu(1) = 0.7310586
    np.testing.assert_allclose(np.asarray(on) - embedded, 2.212117, atol=1e-5)
    np.testing.assert_allclose(np.asarray(off) - embedded, 0.75, atol=1e-6)


def test_case_A3_head_dim_is_free(dense_model):
    attention = dense_model.model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (96, 40)
    assert attention.k_proj.weight.shape == (32, 40)
    assert attention.o_proj.weight.shape == (40, 96)
    normed = tiny_model(qk_norm=True).model.layers[0].self_attn
    assert normed.q_norm.weight.shape == normed.k_norm.weight.shape == (16,)


@pytest.mark.parametrize("routing", [AllOn(), Argmax()])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 4}, {"qk_norm": True}])
def test_cached_pieces_equal_one_pass(routing, changes):
    model = tiny_model(WideConfig(3, 8), **changes)
    ids = random_ids(2, 11)
    whole = logits_of(model, TokenBatch.from_lengths(ids), routing)
    cache = KVCache.empty(model.config, 2, 13, jnp.float32)
    pieces = []
    for start, stop in ((0, 5), (5, 6), (6, 11)):
        positions = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        piece = TokenBatch(ids[:, start:stop], positions, jnp.ones_like(positions))
        logits, output = forward(model, piece, routing, cache)
        cache = output.cache
        pieces.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, atol=1e-4)


def test_packed_segments_equal_rows_of_their_own(wide_model):
    first, second = random_ids(1, 4, seed=1), random_ids(1, 6, seed=2)
    packed = TokenBatch(
        jnp.concatenate([first, second, jnp.zeros((1, 2), jnp.int32)], 1),
        jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 0]]),
        jnp.array([[1] * 4 + [2] * 6 + [0] * 2]),
    )
    together = logits_of(wide_model, packed, Argmax())
    for ids, part in ((first, together[:, :4]), (second, together[:, 4:10])):
        alone = logits_of(wide_model, TokenBatch.from_lengths(ids), Argmax())
        np.testing.assert_allclose(part, alone, atol=1e-4)


def test_case_B1_padding_side_and_pad_id_change_nothing(wide_model):
    short, long = random_ids(1, 3, seed=1), random_ids(1, 7, seed=2)
    real = jnp.array([[False] * 4 + [True] * 3, [True] * 7])
    results = []
    for pad in (0, 5):
        padded = jnp.concatenate([jnp.full((1, 4), pad, jnp.int32), short], 1)
        ids, lengths = left_aligned(jnp.concatenate([padded, long]), real)
        assert lengths.tolist() == [3, 7]
        batch = TokenBatch.from_lengths(ids, lengths)
        assert batch.positions[0, :3].tolist() == [0, 1, 2]
        padded_logits, output = forward(wide_model, batch, Argmax())
        results.append((np.asarray(padded_logits), output.masks))
    (logits, masks), (other, _) = results
    np.testing.assert_array_equal(logits, other)
    for row, ids in ((0, short), (1, long)):
        alone_logits, alone = forward(wide_model, TokenBatch.from_lengths(ids), Argmax())
        n = ids.shape[1]
        np.testing.assert_allclose(logits[row, :n], np.asarray(alone_logits)[0], atol=1e-4)
        for mine, theirs in zip(
            masks.ffn + masks.attention, alone.masks.ffn + alone.masks.attention, strict=True
        ):
            np.testing.assert_array_equal(np.asarray(mine)[row, :n], np.asarray(theirs)[0])


def test_routers_read_the_stream_in_float32_in_a_bfloat16_model():
    model = tiny_model(WideConfig(3, 8))
    half = WideForCausalLM(model.config, model.wide, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert half.model.layers[0].mlp.up_proj.weight.dtype == jnp.bfloat16
    for leaf in jax.tree.leaves(nnx.state(half, RouterParam)):
        assert leaf.dtype == jnp.float32
    batch = TokenBatch.from_lengths(random_ids(1, 5))
    assert forward(half, batch, Argmax())[1].hidden.dtype == jnp.bfloat16


def test_remat_changes_neither_loss_nor_gradient(wide_model):
    batch = TokenBatch.from_lengths(random_ids(2, 8))
    graphdef, routers, rest = nnx.split(wide_model, RouterParam, ...)

    def loss(routers, remat):
        model = nnx.merge(graphdef, routers, rest)
        routing = GumbelSoftmax(jax.random.key(7), jnp.float32(1.0))
        output = model(batch, routing, remat=remat)
        return jnp.square(model.logits(output.hidden)).mean()

    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    plain, again = step(routers, False), step(routers, True)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)
    assert any(np.abs(np.asarray(leaf)).max() > 0 for leaf in jax.tree.leaves(plain[1]))


def test_routing_without_routers_is_an_error(dense_model):
    batch = TokenBatch.from_lengths(random_ids(1, 3))
    with pytest.raises(ValueError, match="routers"):
        dense_model(batch, Argmax())


@pytest.mark.parametrize(("attn", "ffn", "word"), [(4, 8, "attn_group"), (3, 7, "ffn_group")])
def test_group_sizes_that_do_not_divide_are_refused_with_the_numbers(attn, ffn, word):
    with pytest.raises(ValueError, match=word):
        WideForCausalLM(tiny_config(), WideConfig(attn, ffn), rngs=nnx.Rngs(0))


def test_tied_head_is_the_embedding():
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head is None
    hidden = jnp.ones((1, 1, 40))
    expected = hidden @ model.model.embed_tokens.weight[...].T
    np.testing.assert_allclose(np.asarray(model.logits(hidden)), np.asarray(expected), atol=1e-5)
