"""A model on kernels cannot be differentiated, and says what to do about it; off them it can."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.dispatch import SMALL_TOKENS
from tests.wide_jax.conftest import tiny_config, tiny_model
from wide_jax.batch import TokenBatch
from wide_jax.config import WideConfig
from wide_jax.engine import use_kernels
from wide_jax.kernels import Kernels, without_gradient
from wide_jax.params import RouterParam
from wide_jax.routing import AllOn, Argmax, GumbelSoftmax

FEW = TokenBatch.from_lengths(jnp.arange(8)[None])
SAMPLED = GumbelSoftmax(jax.random.key(0), jnp.float32(1.0))
MESSAGE = r"no gradients: to train it, load it with kernels=None, or .*use_kernels\(model, None\)"


@pytest.fixture
def model():
    built = tiny_model(WideConfig.for_model(tiny_config(), ffn_group_size=8))
    use_kernels(built, Kernels())  # references, on a CPU
    return built


def loss(model, batch, routing):
    hidden = model(batch, routing).hidden
    return (model.logits(hidden) ** 2).mean()


def gradient(model, batch, routing):
    return nnx.grad(lambda model: loss(model, batch, routing))(model)


@pytest.mark.parametrize("jitted", [False, True], ids=["plain", "jit"])
@pytest.mark.parametrize("routing", [Argmax(), AllOn(), SAMPLED], ids=["argmax", "all", "sampled"])
def test_a_loss_through_kernels_is_refused(model, routing, jitted):
    """Sampled forward passes run in plain JAX, but the logits of few tokens do not."""
    graphdef, routers, others = nnx.split(model, RouterParam, ...)

    def of(routers):
        return loss(nnx.merge(graphdef, routers, others), FEW, routing)

    with pytest.raises(NotImplementedError, match=MESSAGE):
        jax.grad(jax.jit(of) if jitted else of)(routers)


def test_taken_off_the_kernels_it_has_the_gradient_of_plain_jax(model):
    plain = tiny_model(WideConfig.for_model(tiny_config(), ffn_group_size=8))
    use_kernels(model, None)
    got, wanted = (gradient(one, FEW, SAMPLED) for one in (model, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(a, b)
    assert any(np.any(a) for a in jax.tree.leaves(got))


def test_training_of_many_tokens_needs_no_kernels(model):
    rows = SMALL_TOKENS // 8 + 1
    many = TokenBatch.from_lengths(jnp.tile(jnp.arange(8), (rows, 1)))
    assert any(np.any(x) for x in jax.tree.leaves(gradient(model, many, SAMPLED)))


def test_inference_inside_a_loss_over_other_parameters_is_fine(model):
    def of(scale):
        hidden = model(FEW, Argmax()).hidden
        return scale * model.logits(hidden).mean()

    assert jax.grad(of)(2.0) == pytest.approx(float(of(1.0)))


def test_the_guard_is_no_operation():
    arrays = {"a": jnp.ones(3), "b": (jnp.arange(2), None)}
    found = jax.jit(without_gradient).lower(arrays).as_text()
    assert "stablehlo" not in found
    assert jax.tree.structure(without_gradient(arrays)) == jax.tree.structure(arrays)
