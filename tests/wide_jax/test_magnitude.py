"""The baseline without routers: which groups it cuts, that it cuts the target, what it can save."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.eval.conftest import TINY, tiny_model
from wide_jax.accounting import Accounting
from wide_jax.batch import TokenBatch
from wide_jax.cache import KVCache
from wide_jax.config import WideConfig
from wide_jax.magnitude import CutProjection, by_magnitude, calibrate_thresholds, savable_flops
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Argmax, Forced, GumbelSoftmax

WIDE = WideConfig.for_model(TINY, attn_group_size=1, ffn_group_size=8, router_rank=4)
IDS = np.random.default_rng(0).integers(0, TINY.vocab_size, (3, 48)).astype(np.int32)


@pytest.fixture(scope="module")
def dense():
    return tiny_model()


@pytest.fixture(scope="module")
def cut(dense):
    """Half of the groups cut, by thresholds calibrated on the very rows."""
    return by_magnitude(
        dense, WIDE, calibrate_thresholds(by_magnitude(dense, WIDE), IDS, target=0.5)
    )


def whole_rows(ids=IDS):
    return TokenBatch.from_lengths(jnp.asarray(ids), jnp.full(ids.shape[0], ids.shape[1]))


def test_every_layer_and_module_cuts_the_target_on_the_calibration_rows(cut):
    masks = cut(whole_rows(), Argmax()).masks
    for mask in (*masks.attention, *masks.ffn):
        assert abs(float(mask.mean()) - 0.5) < 1 / mask.size + 1e-6


def test_the_smallest_contributions_are_cut(dense, cut):
    """By the definition in plain numpy: the first layer's FFN, whose mask the scores decide."""
    inner = np.random.default_rng(1).normal(size=(2, 5, 32)).astype(np.float32)
    weight = np.asarray(dense.model.layers[0].mlp.down_proj.weight[...])
    scores = np.zeros((2, 5, 4), np.float32)
    for group in range(4):
        for channel in range(8 * group, 8 * group + 8):
            norm = np.sqrt((weight[:, channel] ** 2).sum())
            scores[..., group] += np.abs(inner[..., channel]) * norm
    projection = CutProjection(
        dense.model.layers[0].mlp.down_proj, 4, lambda found: jnp.quantile(found, 0.25)
    )
    out = projection(jnp.asarray(inner))
    mask = np.asarray(projection.mask)
    assert (~mask).sum() == 10
    assert scores[mask].min() > scores[~mask].max()
    kept = inner * np.repeat(mask, 8, axis=-1)
    np.testing.assert_allclose(out, kept @ weight.T, rtol=1e-4, atol=1e-4)


def test_the_output_is_the_masked_models(dense, cut):
    """What its masks do is what the same masks do in the specification."""
    routed = WideForCausalLM(TINY, WIDE, rngs=nnx.Rngs(0))
    base = {path: leaf for path, leaf in nnx.to_flat_state(nnx.state(dense, nnx.Param))}
    state = [(path, base.get(path, leaf)) for path, leaf in nnx.to_flat_state(nnx.state(routed))]
    nnx.update(routed, nnx.from_flat_state(state))
    out = cut(whole_rows(), Argmax())
    expected = routed(whole_rows(), Forced(out.masks)).hidden
    np.testing.assert_allclose(out.hidden, expected, rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(out.hidden - dense(whole_rows(), AllOn()).hidden).max()) > 0.1


def test_without_thresholds_and_with_everything_on_it_is_the_dense_model(dense, cut):
    expected = dense(whole_rows(), AllOn()).hidden
    np.testing.assert_array_equal(cut(whole_rows(), AllOn()).hidden, expected)
    np.testing.assert_array_equal(
        by_magnitude(dense, WIDE)(whole_rows(), Argmax()).hidden, expected
    )


def test_token_by_token_with_a_cache_is_the_whole_row(cut):
    ids = IDS[:1, :6]
    whole = cut(whole_rows(ids), Argmax()).hidden
    cache = KVCache.empty(TINY, 1, 8, jnp.float32)
    for position in range(ids.shape[1]):
        token = dataclasses.replace(
            whole_rows(ids[:, position : position + 1]), positions=jnp.full((1, 1), position)
        )
        out = cut(token, Argmax(), cache=cache)
        cache = out.cache
        np.testing.assert_allclose(out.hidden[0, 0], whole[0, position], rtol=1e-4, atol=1e-4)


def test_what_cannot_run_is_refused(dense, cut):
    with pytest.raises(ValueError, match="GumbelSoftmax"):
        cut(whole_rows(), GumbelSoftmax(jax.random.key(0), jnp.float32(1.0)))
    with pytest.raises(ValueError, match=r"target=1.5 must lie"):
        calibrate_thresholds(cut, IDS, 1.5)
    with pytest.raises(ValueError, match="expected"):
        by_magnitude(dense, WIDE, np.zeros((5, 2), np.float32))


def test_only_the_output_projections_can_be_saved():
    """All skipped: o_proj and down_proj of D = 24, Hq d = 32, F = 32, n = 10, by hand."""
    everything = dataclasses.replace(
        Accounting.dense(TINY, tokens=1, mean_keys=10.0), attention=1.0, ffn=1.0
    )
    saved = 2 * 24 * 32 + 2 * 24 * 32
    routable = 4 * 24 * 32 + 4 * 32 * 10 + 6 * 24 * 32
    assert savable_flops(everything, TINY) == pytest.approx(saved / routable)
    assert savable_flops(Accounting.dense(TINY, 1, 10.0), TINY) == 0.0
