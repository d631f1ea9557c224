"""Layer errors against dense: zero when nothing is skipped, known when everything is."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from eval.errors import PARTS, layer_errors, plot_errors
from eval.perplexity import PerplexityConfig
from eval.text import TokenizedText
from tests.eval.conftest import TINY
from wide_jax.batch import TokenBatch
from wide_jax.model import attention_inputs
from wide_jax.routing import AllOn, Argmax, Forced, Masks

CONFIG = PerplexityConfig("disjoint", 16, batch_size=2)


@pytest.fixture(scope="module")
def text():
    ids = np.random.default_rng(0).integers(3, 50, 48).astype(np.int32)
    return TokenizedText((ids,), 10, 100)


def test_nothing_skipped_is_no_error(wide_model, text):
    found = layer_errors(wide_model, text, CONFIG, routing=AllOn())
    for part in PARTS:
        assert found.error[part] == (0.0, 0.0)
        assert found.cosine[part] == pytest.approx((1.0, 1.0), abs=1e-6)
    assert (found.tokens, found.accounting.flops) == (48, 0.0)


def test_everything_skipped_leaves_the_embedding(wide_model, text):
    # Masks of one batch shape; bias-free sublayers then add exactly nothing.
    off = Forced(
        Masks(
            tuple(jnp.zeros((2, 16, 2), bool) for _ in range(2)),
            tuple(jnp.zeros((2, 16, 4), bool) for _ in range(2)),
        )
    )
    found = layer_errors(wide_model, text, CONFIG, routing=off)
    for part in ("attention", "ffn"):
        assert found.error[part] == (1.0, 1.0)
        assert found.cosine[part] == (0.0, 0.0)
    assert found.accounting.flops == 1.0


def test_the_accumulated_stream_is_that_of_the_model(wide_model, text):
    found = layer_errors(wide_model, text, CONFIG)
    difference = norm = cosine = 0.0
    for row in text.documents[0].reshape(3, 16):
        batch = TokenBatch.from_lengths(jnp.asarray(row)[None])
        streams = []
        for routing in (Argmax(), AllOn()):
            x = wide_model.model.embed_tokens(batch.input_ids)
            shared = attention_inputs(TINY, batch, None)
            for layer in wide_model.model.layers:
                x, _, _ = layer(x, shared, None, routing)
            streams.append(np.asarray(x[0], np.float64))
        pruned, dense = streams
        difference += ((pruned - dense) ** 2).sum()
        norm += (dense**2).sum()
        sizes = np.linalg.norm(pruned, axis=1) * np.linalg.norm(dense, axis=1)
        cosine += ((pruned * dense).sum(axis=1) / sizes).sum()
    assert found.error["stream"][-1] == pytest.approx(np.sqrt(difference / norm), rel=1e-4)
    assert found.cosine["stream"][-1] == pytest.approx(cosine / 48, rel=1e-4)
    assert 0 < found.error["stream"][0] < 10
    assert 0 < found.accounting.flops < 1


def test_batch_size_changes_nothing_and_json_is_plain(wide_model, text, tmp_path):
    one = layer_errors(wide_model, text, PerplexityConfig("disjoint", 16, batch_size=1))
    two = layer_errors(wide_model, text, CONFIG)
    for part in PARTS:
        assert one.error[part] == pytest.approx(two.error[part], rel=1e-5)
    data = json.loads(json.dumps(two.to_json()))
    assert data == two.to_json()
    assert "relative L2 error to dense: attention worst" in two.line()
    for name in ("errors.svg", "errors.png"):
        plot_errors(data["layers"], tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_an_empty_text_is_refused(wide_model):
    with pytest.raises(ValueError, match=r"no window to run: the text has 1 token"):
        layer_errors(wide_model, TokenizedText((np.array([3], np.int32),), 1, 1), CONFIG)
