"""A trained model's masks on another shape: which decision lands where, and what is kept of it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from eval.carried_masks import (
    SourceMasks,
    agreement,
    carried,
    carried_variants,
    describe,
    described,
    places,
    shuffled,
    skipped,
    source_masks,
    typical_step,
)
from eval.scoring import score_windows
from eval.windows import Window
from tests.eval.conftest import TINY, tiny_model
from wide_jax.config import WideConfig
from wide_jax.routing import MODULES, Argmax, Forced, Masks

TARGET = dataclasses.replace(TINY, num_hidden_layers=3)  # four heads, 32 channels
WIDE = WideConfig.for_model(TARGET, attn_group_size=1, ffn_group_size=8)  # 4 and 4 groups
TEXT = np.random.default_rng(0).integers(0, TINY.vocab_size, 60)


def source_of(attention, ffn):
    """Masks `[layers][tokens][groups]` given by hand, 1 = active."""
    layers = [tuple(np.array(layer, bool) for layer in masks) for masks in (attention, ffn)]
    return SourceMasks(*layers, fingerprint="sha256:x", window=4, text_tokens=4)


@pytest.fixture(scope="module")
def clustered():
    """Runs of tokens that skip together, 12 attention and 12 FFN groups, 3 layers, 400 tokens."""
    rng = np.random.default_rng(1)

    def layer(rate):
        return np.repeat(rng.random((40, 12)) >= rate, 10, axis=0)

    rates = (0.2, 0.5, 0.8)
    return source_of([layer(r) for r in rates], [layer(r) for r in reversed(rates)])


def test_places_are_those_of_the_middles():
    # (j + 0.5) 3 / 8: 0.19, 0.56, 0.94, 1.31, 1.69, 2.06, 2.44, 2.81.
    assert places(8, 3).tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert places(3, 3).tolist() == [0, 1, 2]
    assert places(2, 6).tolist() == [1, 4]
    assert sorted(set(places(32, 30))) == list(range(30))
    assert np.bincount(places(112, 24)).tolist() == [5, 4, 5, 5, 4, 5] * 4
    assert np.bincount(places(112, 96)).max() == 2


def test_a_small_example_by_hand():
    """Two layers to three, two groups of heads to four, one FFN group to four; three tokens."""
    source = source_of(
        attention=[[[1, 0], [0, 0], [1, 1]], [[0, 1], [1, 0], [0, 0]]],
        ffn=[[[1], [0], [1]], [[0], [0], [1]]],
    )
    found = carried(source, TARGET, WIDE, np.array([[0, 1], [2, 0]]))
    # Middles of three layers of two: 0.33, 1, 1.67.
    first = [[[1, 1, 0, 0], [0, 0, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]]]
    second = [[[0, 0, 1, 1], [1, 1, 0, 0]], [[0, 0, 0, 0], [0, 0, 1, 1]]]
    assert [mask.tolist() for mask in found.attention] == [first, second, second]
    assert found.ffn[0].tolist() == [[[1] * 4, [0] * 4], [[1] * 4, [1] * 4]]
    assert found.ffn[1].tolist() == [[[0] * 4, [0] * 4], [[1] * 4, [0] * 4]]
    assert all(mask.dtype == bool for mask in found.ffn)
    about = describe(source, TARGET, WIDE)
    assert about["places"] == {"layers": 2, "attention": 2, "ffn": 1}
    assert about["repeats"] == {"layers": [1, 2], "attention": [2, 2], "ffn": [4, 4]}
    line = described(about, TARGET, WIDE)
    assert "2 layers for 3 (each 1 to 2x)" in line
    assert "1 ffn groups for 4 (each 4x)" in line


def test_rates_of_layers_and_modules_are_kept(clustered):
    """Where every group is repeated as often: to the last pair."""
    found = carried(clustered, TARGET, WIDE, np.arange(400)[None])  # every third group
    for module in MODULES:
        for mask, own in zip(getattr(found, module), clustered.of(module), strict=True):
            assert float(mask.mean()) == pytest.approx(own[:, 1::3].mean(), abs=1e-6)
    wide = dataclasses.replace(TARGET, num_attention_heads=24, intermediate_size=48)
    sizes = WideConfig.for_model(wide, attn_group_size=1, ffn_group_size=4)
    found = carried(clustered, wide, sizes, np.arange(400)[None])  # each twice, each once
    for module in MODULES:
        for mask, own in zip(getattr(found, module), clustered.of(module), strict=True):
            assert float(mask.mean()) == pytest.approx(own.mean(), abs=1e-6)


def test_shuffled_masks_skip_as_many_a_layer_but_not_together(clustered):
    own = carried(clustered, TARGET, WIDE, np.arange(400)[None])
    random = shuffled(own, seed=0)
    for module in MODULES:
        for one, other in zip(getattr(own, module), getattr(random, module), strict=True):
            assert int(one.sum()) == int(other.sum())
            assert one.shape == other.shape
        for layer, rate in enumerate((0.2, 0.5, 0.8)):
            rate = rate if module == "attention" else 1 - rate
            assert abs(1 - float(getattr(random, module)[layer].mean()) - rate) < 0.12
    assert not jnp.array_equal(random.attention[0], random.ffn[2])
    # Runs of ten tokens: 39 of 399 neighbours may differ at all.
    assert agreement(own)["tokens"]["ffn"] > 0.9
    expected = np.mean([float(m.mean()) ** 2 + (1 - float(m.mean())) ** 2 for m in random.ffn])
    assert agreement(random)["tokens"]["ffn"] == pytest.approx(expected, abs=0.03)
    assert agreement(random)["groups"]["ffn"] == pytest.approx(expected, abs=0.03)


def test_what_is_before_nothing_agrees_with_nothing():
    one = Masks((jnp.ones((1, 2, 1), bool),), (jnp.ones((1, 2, 4), bool),))
    assert agreement(one) == {
        "tokens": {"attention": 1.0, "ffn": 1.0},
        "groups": {"attention": None, "ffn": 1.0},
    }


def test_the_step_is_of_the_token_nearest_the_prompts_rates():
    half, none, all_on = (jnp.array([[[1, 0]]], bool), *(jnp.full((1, 1, 2), b) for b in (0, 1)))
    prompt = Masks((half,), (half,))
    following = jnp.concatenate([none.astype(bool), all_on.astype(bool), half], axis=1)
    assert skipped(prompt).tolist() == [0.5, 0.5]
    assert skipped(Masks((following,), (following,)), (0, 2)).tolist() == [[1.0, 0.0, 0.5]] * 2
    assert typical_step(prompt, Masks((following,), (following,))) == 2
    # Several rows: the column of all of them.
    rows = [jnp.concatenate([following, following[:, ::-1]]) for _ in range(2)]
    assert typical_step(prompt, Masks(*((row,) for row in rows))) == 0


def test_rows_and_steps_are_consecutive_tokens_of_the_text():
    """Every token is recognised by its own pattern of four groups."""
    bits = (np.arange(12)[:, None] >> np.arange(4)) & 1
    source = source_of([bits] * 3, [bits] * 3)
    variants = carried_variants(source, TARGET, WIDE, 2, 4, steps=3)
    assert [v.mask for v in variants] == ["trained_statistics", "random_same_rates"]
    own = variants[0]

    def numbers(routing):
        assert isinstance(routing, Forced)
        assert routing.ask_routers  # a benchmark pays for routing
        return (np.asarray(routing.masks.ffn[0]) << np.arange(4)).sum(axis=-1).tolist()

    assert numbers(own.routing) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert own.masks_of is not None
    chosen = own.masks_of["step_token"]
    assert numbers(own.step_routing) == [[4 + chosen], [8 + chosen]]
    numbers(variants[1].routing)
    # Of tokens 0 to 7, 20 of 32 pairs are skipped; of 4 and 8, 5 and 9, 6 and 10: 6, 4, 4 of 8.
    assert chosen == 0
    assert own.kernels == variants[1].kernels
    assert own.kernels is not None
    assert own.kernels.hints.ffn == pytest.approx(20 / 32)


def test_masks_are_the_models_own_on_the_text_window_by_window(monkeypatch):
    model = tiny_model(WideConfig.for_model(TINY, ffn_group_size=8, router_rank=4))
    monkeypatch.setattr("eval.carried_masks.WINDOW", 20)
    found = source_masks(model, TEXT, 70, fingerprint="sha256:x")
    assert (found.window, found.text_tokens) == (20, 60)
    assert [mask.shape for mask in found.ffn] == [(70, 4)] * 2
    assert [mask.shape for mask in found.attention] == [(70, 2)] * 2
    windows = [Window(w, w, np.ones(20, bool)) for w in TEXT.reshape(3, 20)]
    [batch] = score_windows(model, windows, routing=Argmax(), batch_size=3, limit=32)
    for module in MODULES:
        skips = [60 * mask.shape[1] - mask[:60].sum() for mask in found.of(module)]
        assert getattr(batch.ran.usage, module).tolist() == skips
        # The text begins again.
        assert all(np.array_equal(mask[60:], mask[:10]) for mask in found.of(module))


def test_a_model_without_routers_has_no_masks():
    with pytest.raises(ValueError, match="has no routers"):
        source_masks(tiny_model(), TEXT, 4, fingerprint="")
    wide = tiny_model(WideConfig.for_model(TINY, ffn_group_size=8, router_rank=4))
    with pytest.raises(ValueError, match="no token ids"):
        source_masks(wide, [], 4, fingerprint="")
