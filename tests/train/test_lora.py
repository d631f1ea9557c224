"""LoRA factors beside weights and merged into them (case C5)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.train.tiny import ragged_batch, tiny_model
from wide_jax import lora
from wide_jax.layers import Linear
from wide_jax.lora import LoRASettings
from wide_jax.params import LoRAParam
from wide_jax.routing import AllOn

A, B = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0.0, 1.0], [0.0, 0.0]])


def with_random_factors(model, **settings):
    """Attach a LoRA whose B is not zero, so that it does something."""
    settings = LoRASettings(rank=4, **settings)
    lora.attach(model, settings, rngs=nnx.Rngs(1))
    for number, factors in enumerate(lora.factors_of(model).values()):
        shape = factors.lora_B.shape
        factors.lora_B[...] = 0.1 * jax.random.normal(jax.random.key(number), shape)
    return settings


def logits_of(model, batch):
    return model.logits(model(batch, AllOn()).hidden)


def test_case_C5_a_linear_map_with_lora_by_hand():
    linear = Linear(2, 2, bias=False, dtype=jnp.float32, rngs=nnx.Rngs(0))
    linear.weight[...] = jnp.zeros((2, 2))
    linear.lora = lora.LoRAFactors(2, 2, LoRASettings(rank=2, alpha=8.0), rngs=nnx.Rngs(0))
    linear.lora.lora_A[...], linear.lora.lora_B[...] = A, B
    # x W^T with W = [[12, 16], [0, 0]]: columns of the identity give W's columns.
    assert linear(jnp.eye(2)).T.tolist() == [[12.0, 16.0], [0.0, 0.0]]


def test_case_C5_scales():
    assert LoRASettings(rank=2, alpha=8.0).scale == 4.0
    assert LoRASettings(rank=8, alpha=32.0).scale == 4.0
    stabilised = LoRASettings(rank=8, alpha=32.0, rank_stabilised=True)
    assert stabilised.scale == pytest.approx(11.3137, abs=1e-4)


@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_case_C5_merged_and_unmerged_logits_agree(rank_stabilised):
    model, batch = tiny_model(layers=2), ragged_batch()
    dense = logits_of(model, batch)
    with_random_factors(model, rank_stabilised=rank_stabilised)
    apart = logits_of(model, batch)
    lora.merge(model)
    assert not lora.factors_of(model)
    np.testing.assert_allclose(logits_of(model, batch), apart, atol=1e-5)
    assert float(jnp.abs(apart - dense).max()) > 0.1


def test_case_C5_a_merge_that_bf16_would_round_away_is_refused():
    model = tiny_model(dtype=jnp.bfloat16)
    with_random_factors(model)
    with pytest.raises(ValueError, match="merging into bfloat16 would round the LoRA away"):
        lora.merge(model)


def test_case_C5_factors_are_float32_in_a_bf16_model():
    model = tiny_model(dtype=jnp.bfloat16)
    with_random_factors(model)
    factors = jax.tree.leaves(nnx.state(model, LoRAParam))
    assert len(factors) == 2 * 7
    assert {leaf.dtype for leaf in factors} == {jnp.dtype(jnp.float32)}
    assert logits_of(model, ragged_batch()).dtype == jnp.bfloat16


def test_a_new_lora_changes_nothing_and_detaching_leaves_no_trace():
    model, batch = tiny_model(), ragged_batch()
    before, structure = logits_of(model, batch), jax.tree.structure(nnx.state(model))
    lora.attach(model, LoRASettings(), rngs=nnx.Rngs(0))
    assert np.array_equal(logits_of(model, batch), before)
    with_two = pytest.raises(ValueError, match="has a LoRA already")
    with with_two:
        lora.attach(model, LoRASettings(), rngs=nnx.Rngs(0))
    lora.detach(model)
    assert jax.tree.structure(nnx.state(model)) == structure


def test_dropout_needs_a_key_and_keeps_the_mean():
    settings = LoRASettings(rank=2, alpha=2.0, dropout=0.25)
    model = tiny_model()
    lora.attach(model, settings, rngs=nnx.Rngs(0))
    factors = next(iter(lora.factors_of(model).values()))
    factors.lora_A[...] = jnp.ones_like(factors.lora_A[...])
    factors.lora_B[...] = jnp.ones_like(factors.lora_B[...])
    x = jnp.ones((4_000, 32))
    assert np.unique(factors(x)).tolist() == [64.0]
    lora.with_dropout(model, jax.random.key(0))
    dropped = factors(x)
    assert len(np.unique(dropped)) > 5
    assert float(dropped.mean()) == pytest.approx(64.0, rel=0.01)
    lora.with_dropout(model, None)
    assert np.unique(factors(x)).tolist() == [64.0]


def test_dropout_masks_are_fair_and_independent():
    def mask(seed, dropout=0.1):
        key = jax.random.fold_in(jax.random.key(seed), 3)
        return np.asarray(lora.keep_mask(key, dropout, (4, 256, 512)), np.float64)

    one, other = mask(0), mask(1)
    elements = one.size
    for drawn in (one, other, mask(2, 0.5)):
        rate = 0.5 if drawn.mean() < 0.7 else 0.9
        deviation = (rate * (1 - rate)) ** 0.5
        assert drawn.mean() == pytest.approx(rate, abs=5 * deviation / elements**0.5)
        # Rows and columns vary as independent draws do, not more and not less.
        for axis in ((0, 1), 2):
            means = drawn.mean(axis=axis)
            expected = deviation / (elements / means.size) ** 0.5
            assert means.std() == pytest.approx(expected, rel=0.15)
    neighbours = [(one[..., 1:], one[..., :-1]), (one[:, 1:], one[:, :-1]), (one[1:], one[:-1])]
    for a, b in [(one, other), *neighbours]:
        correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(correlation) < 5 / a.size**0.5
    assert mask(0, 0.0).all()
    assert np.array_equal(one, mask(0))


def test_adapters_go_out_and_come_back():
    model, batch = tiny_model(), ragged_batch()
    settings = with_random_factors(model, alpha=8.0)
    expected = logits_of(model, batch)
    adapter = lora.to_adapter(model, settings)
    adapter.check(model.config)
    fresh = tiny_model()
    assert lora.attach_adapter(fresh, adapter).scale == settings.scale
    assert np.array_equal(logits_of(fresh, batch), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"targets": ("q_proj", "lm_head")}, "lm_head"),
        ({"alpha": float("nan")}, "alpha=nan"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LoRASettings(**changes)
