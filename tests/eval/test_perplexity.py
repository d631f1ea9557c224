"""Perplexity against a plain computation; windows (D1), batch size (D4), units (D6)."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eval.perplexity import PerplexityConfig, evaluate_perplexity
from eval.scoring import bucket, compile_together, score_rows, score_windows, scorer
from eval.text import TokenizedText
from eval.windows import rolling_windows
from tests.eval.conftest import TINY, tiny_model
from wide_jax.accounting import account, usage
from wide_jax.batch import TokenBatch
from wide_jax.routing import AllOn, Argmax

P = 1


def text_of(*documents, words=7, size=31) -> TokenizedText:
    return TokenizedText(tuple(np.asarray(d, np.int32) for d in documents), words, size)


def random_text(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return text_of(*(rng.integers(3, 50, n) for n in lengths))


@pytest.mark.parametrize("window", [4, 5, 10, 16])
def test_case_D1_a_uniform_model_costs_log_50_a_token_in_every_window(uniform_model, window):
    config = PerplexityConfig(rule="rolling", window=window, prefix_token=P)
    result = evaluate_perplexity(uniform_model, text_of(range(10)), config)
    assert result.negative_log_likelihood == pytest.approx(39.1202, abs=1e-3)
    assert result.token_perplexity == pytest.approx(50.0, rel=1e-5)
    assert result.scored_tokens == 10


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_case_D4_padding_is_never_scored(uniform_model, batch_size):
    windows = [w for n in (3, 7, 3) for w in rolling_windows(range(n), 16, P)]
    found = {}
    for batch in score_windows(
        uniform_model, windows, routing=AllOn(), batch_size=batch_size, limit=16
    ):
        for index, score in zip(batch.indices, batch.scores, strict=True):
            found[index] = score.log_probs.sum()
    assert found == pytest.approx({0: -11.7361, 1: -27.3842, 2: -11.7361}, abs=1e-4)


def test_shapes_compiled_together_are_those_that_scoring_runs(wide_model):
    lengths = (3, 40, 50, 64)  # 1 row of 32 and 3 of 64: a batch of 2, and 1 more
    windows = [w for n in lengths for w in rolling_windows([3] * n, 64, P)]
    compiled = []

    def note(event, duration, **_):
        compiled.append(event.endswith("backend_compile_duration"))

    score_rows.clear_cache()
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        compile_together(scorer(wide_model, Argmax()), [(64, 1, 2), (32, 1, 1)])
        assert sum(compiled) >= 2
        compiled.clear()
        for _ in score_windows(wide_model, windows, routing=Argmax(), batch_size=2, limit=64):
            pass
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert sum(compiled) == 0


@pytest.mark.parametrize("rule", ["disjoint", "rolling"])
def test_case_D4_nothing_depends_on_the_batch_size(wide_model, rule):
    text = random_text(70, 33, 5, 100, 64)
    results = [
        evaluate_perplexity(
            wide_model, text, PerplexityConfig(rule, 32, batch_size=size, prefix_token=P)
        )
        for size in (1, 2, 5)
    ]
    for result in results[1:]:
        assert result.token_perplexity == pytest.approx(results[0].token_perplexity, rel=1e-5)
        assert result.accounting == results[0].accounting


def test_values_equal_a_plain_forward_pass(wide_model):
    text = random_text(12, 40)
    config = PerplexityConfig("rolling", 16, batch_size=3, prefix_token=P)
    result = evaluate_perplexity(wide_model, text, config)
    loss, used = 0.0, None

    @jax.jit
    def plain_forward(batch):
        output = wide_model(batch, Argmax())
        log_probs = jax.nn.log_softmax(wide_model.logits(output.hidden)[0])
        return log_probs, usage(output.masks, batch.real, batch.positions + 1, TINY)

    for ids in text.documents:
        for window in rolling_windows(ids, 16, P):
            batch = TokenBatch.from_lengths(jnp.asarray(window.inputs)[None])
            log_probs, part = plain_forward(batch)
            every = np.asarray(log_probs)[np.arange(len(window.targets)), window.targets]
            loss -= every[window.scored].sum()
            used = part.to_host() if used is None else used + part.to_host()
    assert result.negative_log_likelihood == pytest.approx(loss, rel=1e-5)
    assert result.token_perplexity == pytest.approx(math.exp(loss / 52), rel=1e-5)
    expected = account(used, TINY, wide_model.wide, weight_bytes=4, kv_bytes=4)
    assert result.accounting == expected
    assert 0.05 < result.accounting.flops < 0.95  # both kinds of decisions were met


def test_case_D6_every_perplexity_has_its_unit(uniform_model):
    text = text_of(range(10), words=8, size=20)
    result = evaluate_perplexity(
        uniform_model, text, PerplexityConfig("rolling", 16, prefix_token=P)
    )
    loss = 10 * math.log(50)
    assert result.word_perplexity == pytest.approx(math.exp(loss / 8), rel=1e-5)
    assert result.byte_perplexity == pytest.approx(math.exp(loss / 20), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(loss / 20 / math.log(2), rel=1e-5)
    assert result.token_perplexity_stderr is None  # one window has no spread
    for unit in ("token perplexity 50.00 over 10 tokens", "word perplexity", "byte perplexity"):
        assert unit in result.line()
    assert "1 rolling windows of 16, stride 16" in result.line()
    # Partly scored: the text's loss is the scored mean times its tokens.
    result = evaluate_perplexity(uniform_model, text, PerplexityConfig("disjoint", 4))
    assert (result.scored_tokens, result.windows) == (6, 2)
    assert result.word_perplexity == pytest.approx(math.exp(loss / 8), rel=1e-5)


def test_the_standard_error_is_that_of_the_windows(dense_model):
    text = random_text(32 * 16)
    result = evaluate_perplexity(dense_model, text, PerplexityConfig("disjoint", 32))
    losses = np.array(
        [
            -score.log_probs.sum()
            for batch in score_windows(
                dense_model,
                rolling_windows(text.documents[0], 32, P),
                routing=AllOn(),
                batch_size=1,
                limit=32,
            )
            for score in batch.scores
        ]
    )
    assert len(losses) == result.windows == 16
    rough = np.std(losses / 32, ddof=1) / 4 * result.token_perplexity
    assert result.token_perplexity_stderr == pytest.approx(rough, rel=0.5)


def test_a_dense_run_skips_nothing_and_says_what_it_ran(wide_model):
    result = evaluate_perplexity(
        wide_model, random_text(20), PerplexityConfig("disjoint", 8), routing=AllOn()
    )
    assert set(result.accounting.summary().values()) == {0.0}
    assert (result.accounting.tokens, result.accounting.mean_keys) == (16, 4.5)


def test_the_chunked_head_changes_nothing(dense_model, monkeypatch):
    monkeypatch.setattr("eval.scoring.LOGITS_CHUNK", 7)
    text = random_text(90)
    config = PerplexityConfig("disjoint", 30)
    score_rows.clear_cache()
    chunked = evaluate_perplexity(dense_model, text, config)
    monkeypatch.setattr("eval.scoring.LOGITS_CHUNK", 512)
    score_rows.clear_cache()
    whole = evaluate_perplexity(dense_model, text, config)
    assert chunked.token_perplexity == pytest.approx(whole.token_perplexity, rel=1e-6)


def test_one_compile_a_shape_over_batches_and_calls(dense_model):
    score_rows.clear_cache()
    seen = []
    for seed in range(2):
        evaluate_perplexity(
            dense_model,
            random_text(100, seed=seed),
            PerplexityConfig("disjoint", 10, batch_size=4),
            progress=lambda *args: seen.append(args),
        )
    assert score_rows._cache_size() == 1
    assert [args[:2] for args in seen] == [(4, 10), (8, 10), (10, 10)] * 2
    assert all(1 < perplexity < math.inf for *_, perplexity in seen)


def test_max_windows_takes_the_first(dense_model):
    text = random_text(64)
    first = evaluate_perplexity(dense_model, text, PerplexityConfig("disjoint", 16, max_windows=2))
    alone = evaluate_perplexity(
        dense_model, text_of(text.documents[0][:32]), PerplexityConfig("disjoint", 16)
    )
    assert first.negative_log_likelihood == alone.negative_log_likelihood
    assert first.windows == 2


def test_bf16_runs_with_its_own_element_sizes():
    model = tiny_model(seed=3)
    low = tiny_model(seed=3)
    for _, variable in nnx.to_flat_state(nnx.state(low, nnx.Param)):
        variable[...] = variable[...].astype(jnp.bfloat16)
    text = random_text(60)
    results = [evaluate_perplexity(m, text, PerplexityConfig("disjoint", 20)) for m in (model, low)]
    assert results[1].token_perplexity == pytest.approx(results[0].token_perplexity, rel=0.1)


def test_buckets_are_few_and_hold_their_rows():
    sizes = {bucket(n, 200) for n in range(1, 201)}
    assert sizes == {32, 64, 128, 200}
    assert all(bucket(n, 200) >= n for n in range(1, 201))
    assert bucket(10, 16) == 16


def test_json_is_plain(dense_model):
    result = evaluate_perplexity(dense_model, random_text(40), PerplexityConfig("disjoint", 8))
    data = json.loads(json.dumps(result.to_json()))
    assert data == result.to_json()
    assert data["config"]["stride"] == 8
    assert data["accounting"]["flops"] == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 1}, "window=1 must be at least 2"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"max_windows": 0}, "max_windows=0 must be at least 1"),
        ({"rule": "rolling"}, "needs a prefix_token"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PerplexityConfig(**settings)


def test_bad_input_is_refused_with_its_numbers(dense_model):
    with pytest.raises(ValueError, match=r"nothing to score: the text has 1 token"):
        evaluate_perplexity(dense_model, text_of([5]))
    with pytest.raises(ValueError, match=r"window of 256 .* max_position_embeddings=128"):
        evaluate_perplexity(dense_model, random_text(300), PerplexityConfig(window=256))
    with pytest.raises(ValueError, match=r"window 0 has ids from 3 to 50, outside .*=50"):
        evaluate_perplexity(dense_model, text_of([3, 50]), PerplexityConfig(window=8))


def test_a_broken_model_is_not_given_a_perplexity():
    model = tiny_model()
    model.model.norm.weight[...] = model.model.norm.weight[...] * jnp.nan
    with pytest.raises(FloatingPointError, match="window 0"):
        evaluate_perplexity(model, random_text(20), PerplexityConfig(window=10))
