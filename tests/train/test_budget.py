"""Budget terms from hand-made masks (case C1's router part), and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.tiny import tiny_config, tiny_model
from train.budget import budget_term, masks_usage, visible_keys
from train.hyperparameters import hyperparameters
from wide_jax.accounting import account
from wide_jax.routing import Masks

MODEL = tiny_model(layers=2)


def masks_of(attention, ffn):
    """The same masks in both layers: keep rates by token, `[B, T]`, over all groups."""
    groups = (MODEL.wide.attn_groups(MODEL.config), MODEL.wide.ffn_groups(MODEL.config))
    attention, ffn = (
        jnp.broadcast_to(jnp.asarray(keep, jnp.float32)[..., None], (*np.shape(keep), count))
        for keep, count in zip((attention, ffn), groups, strict=True)
    )
    return Masks((attention, attention), (ffn, ffn))


def priced(used, config):
    goals = hyperparameters(config).targets
    return budget_term(used, MODEL.config, config.budget, goals, element_bytes=4)


def term(masks, real, **config):
    config = tiny_config(**config)
    used = masks_usage(masks, jnp.asarray(real, bool), MODEL.config, config)
    return priced(used, config)


def test_case_C1_padding_never_counts():
    keep = np.array([[1.0, 0.0] * 5 + [1.0] * 6])  # 10 real tokens at 0.5, 6 pads at 1.0
    real = np.array([[True] * 10 + [False] * 6])
    for budget in ("paper", "separate"):
        assert float(term(masks_of(keep, keep), real, sparsity=0.5, budget=budget)) == 0.0
    everything = np.ones_like(real)
    assert float(term(masks_of(keep, keep), everything, sparsity=0.5)) == pytest.approx(0.1875)


def test_paper_is_the_gap_of_the_mean_and_separate_the_mean_of_gaps():
    attention, ffn = np.array([[0.0, 1.0, 1.0, 1.0]]), np.array([[0.0, 0.0, 0.0, 1.0]])
    real = np.ones((1, 4), bool)  # skip rates 0.25 and 0.75
    masks = masks_of(attention, ffn)
    assert float(term(masks, real, sparsity=0.5, budget="paper")) == 0.0
    assert float(term(masks, real, sparsity=0.5, budget="separate")) == pytest.approx(0.25)
    own = {"attention_sparsity": 0.25, "ffn_sparsity": 0.75}
    assert float(term(masks, real, budget="separate", **own)) == 0.0


@pytest.mark.parametrize("budget", ["flops", "bytes"])
def test_priced_budgets_agree_with_the_report(budget):
    attention, ffn = np.array([[0.0, 1.0, 1.0, 1.0]]), np.array([[0.0, 0.0, 0.0, 1.0]])
    masks, real = masks_of(attention, ffn), jnp.ones((1, 4), bool)
    config = tiny_config(budget=budget, sparsity=0.0, budget_context=32)
    used = masks_usage(masks, real, MODEL.config, config)
    report = account(used, MODEL.config, MODEL.wide, weight_bytes=4, kv_bytes=4)
    value = float(priced(used, config))
    assert value == pytest.approx(getattr(report, budget), rel=1e-6)
    assert value not in (pytest.approx(0.25), pytest.approx(0.5), pytest.approx(0.75))


def test_flops_of_a_prefill_by_hand():
    # D 32, groups of 2 heads x 8, 16 channels; context 31: a token sees 16 keys on average.
    config = tiny_config(budget="flops", sparsity=0.0, budget_context=31)
    assert visible_keys(config) == 16
    attention_group = 4 * 32 * 16 + 4 * 16 * 16
    ffn_group = 6 * 32 * 16
    share = 4 * attention_group / (4 * attention_group + 8 * ffn_group)
    off, on = np.zeros((1, 3)), np.ones((1, 3))
    used = masks_usage(masks_of(off, on), jnp.ones((1, 3), bool), MODEL.config, config)
    value = priced(used, config)
    assert float(value) == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("budget", ["paper", "separate", "flops", "bytes"])
def test_no_real_token_gives_zero_and_zero_gradient(budget):
    keep = jnp.ones((2, 4))

    def value(scale):
        masks = jax.tree.map(lambda m: m * scale, masks_of(keep, keep))
        return term(masks, np.zeros((2, 4), bool), sparsity=0.5, budget=budget)

    number, gradient = jax.value_and_grad(value)(1.0)
    assert float(number) == 0.0
    assert float(gradient) == 0.0


@pytest.mark.parametrize("budget", ["paper", "separate", "flops", "bytes"])
def test_gradient_pushes_masks_toward_the_target(budget):
    keep = np.full((1, 4), 0.5)

    def value(scale, sparsity):
        masks = jax.tree.map(lambda m: m * scale, masks_of(keep, keep))
        return term(masks, np.ones((1, 4), bool), sparsity=sparsity, budget=budget)

    assert float(jax.grad(value)(1.0, 0.9)) > 0  # skips too little: keep less
    assert float(jax.grad(value)(1.0, 0.1)) < 0
