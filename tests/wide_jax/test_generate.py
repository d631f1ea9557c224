"""Generation: equal to a forward pass without a cache, ragged rows, stopping, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.wide_jax.conftest import forward, tiny_config, tiny_model
from wide_jax.batch import TokenBatch
from wide_jax.cache import KVCache
from wide_jax.config import RopeConfig, WideConfig
from wide_jax.engine import use_kernels
from wide_jax.generate import (
    DecodeSettings,
    Prepared,
    _decode_until,
    decode_until,
    first_draw,
    generate,
    padded_sizes,
)
from wide_jax.kernels import Kernels
from wide_jax.routing import AllOn, Argmax
from wide_jax.sampling import Sampler

PROMPTS = [[5, 9, 11], [3, 1, 4, 1, 5, 9, 2]]


def greedy_without_cache(model, prompt, new_tokens, routing):
    ids, log_probs = list(prompt), []
    for _ in range(new_tokens):
        padded = jnp.array([ids + [0] * (16 - len(ids))])
        batch = TokenBatch.from_lengths(padded, jnp.array([len(ids)]))
        logits = forward(model, batch, routing)[0][0, len(ids) - 1]
        ids.append(int(logits.argmax()))
        log_probs.append(float(jax.nn.log_softmax(logits)[ids[-1]]))
    return ids[len(prompt) :], log_probs


@pytest.mark.parametrize("routing", [AllOn(), Argmax()])
def test_case_B1_ragged_greedy_equals_each_row_without_cache(wide_model, routing):
    result = generate(wide_model, PROMPTS, max_new_tokens=8, routing=routing, stop_ids=())
    assert result.steps == 8
    for row, prompt in enumerate(PROMPTS):
        tokens, log_probs = greedy_without_cache(wide_model, prompt, 8, routing)
        assert result.tokens[row].tolist() == tokens
        np.testing.assert_allclose(result.log_probs[row], log_probs, atol=1e-4)


def test_prefill_in_chunks_gives_the_same_rows(wide_model):
    whole = generate(wide_model, PROMPTS, max_new_tokens=6, stop_ids=())
    for chunk in (2, 3, 7):
        pieces = generate(wide_model, PROMPTS, max_new_tokens=6, stop_ids=(), prefill_chunk=chunk)
        np.testing.assert_array_equal(pieces.tokens, whole.tokens)
        np.testing.assert_allclose(pieces.log_probs, whole.log_probs, atol=1e-4)


def test_a_row_does_not_depend_on_its_batch_or_on_cache_length(wide_model):
    sampler = Sampler(temperature=0.8, top_p=0.9)
    options = {"sampler": sampler, "stop_ids": ()}
    both = generate(wide_model, PROMPTS, max_new_tokens=5, seeds=[7, 8], **options)
    alone = generate(wide_model, PROMPTS[1:], max_new_tokens=5, seeds=[8], **options)
    longer = generate(wide_model, PROMPTS[1:], max_new_tokens=40, seeds=[8], **options)
    assert both.tokens[1].tolist() == alone.tokens[0].tolist()
    assert longer.tokens[0, :5].tolist() == alone.tokens[0].tolist()


@pytest.mark.parametrize("kernels", [None, Kernels()], ids=["plain JAX", "kernels"])
def test_prompts_of_very_different_lengths_give_alone_what_they_give_together(wide_model, kernels):
    """Alone the short one is padded to 16 tokens, in the batch to the long one's 128."""
    model = nnx.clone(wide_model)
    use_kernels(model, kernels)
    draw = np.random.default_rng(3)
    prompts = [draw.integers(3, 61, count).tolist() for count in (9, 100)]
    widths = [padded_sizes(len(prompt), 20)[0] for prompt in prompts]
    assert widths == [16, 128]
    options = {"max_new_tokens": 20, "stop_ids": ()}
    together = generate(model, prompts, **options)
    alone = [generate(model, [prompt], **options) for prompt in prompts]
    for row, single in enumerate(alone):
        assert single.tokens[0].tolist() == together.tokens[row].tolist()
        np.testing.assert_allclose(single.log_probs[0], together.log_probs[row], atol=1e-4)
    # Padding neither skips nor runs anything that is counted, whatever its share is.
    for phase, tokens in (("prefill_usage", 9 + 100), ("decode_usage", 2 * 19)):
        short, long, both = (getattr(result, phase).to_host() for result in (*alone, together))
        assert both.tokens == tokens
        assert 0 < both.ffn.sum() < tokens * both.ffn_groups * len(both.ffn)
        sums = zip(jax.tree.leaves(short + long), jax.tree.leaves(both), strict=True)
        assert all((apart == at_once).all() for apart, at_once in sums)


def test_dynamic_rope_does_not_depend_on_the_length_of_the_cache():
    rope = RopeConfig("dynamic", factor=4.0, original_max_position_embeddings=16)
    model = tiny_model(rope=rope, max_position_embeddings=16)
    alone = greedy_without_cache(model, [5, 9, 11], 4, AllOn())[0]
    result = generate(model, [[5, 9, 11]], max_new_tokens=4, routing=AllOn(), stop_ids=())
    assert result.rows() == [alone]  # the cache has 32 slots


def test_streamed_tokens_are_the_same_tokens_in_order(wide_model):
    whole = generate(wide_model, PROMPTS, max_new_tokens=7, stop_ids=())
    end = int(whole.tokens[0, 3])  # row 0 stops early
    whole = generate(wide_model, PROMPTS, max_new_tokens=7, stop_ids=[end])
    pieces = []
    streamed = generate(
        wide_model,
        PROMPTS,
        max_new_tokens=7,
        stop_ids=[end],
        on_tokens=pieces.append,
        stream_every=3,
    )
    np.testing.assert_array_equal(streamed.tokens, whole.tokens)
    np.testing.assert_array_equal(streamed.log_probs, whole.log_probs)
    for row, tokens in enumerate(whole.rows()):
        assert [token for piece in pieces for token in piece[row]] == tokens
    assert len(pieces) > 1


def test_a_prepared_model_stays_what_it_was(wide_model):
    model = nnx.clone(wide_model)
    first = generate(model, PROMPTS, max_new_tokens=5, stop_ids=())
    ready = Prepared.of(model)
    norm = model.model.norm.weight
    norm[...] = -norm[...]
    changed = generate(model, PROMPTS, max_new_tokens=5, stop_ids=())
    again = generate(ready, PROMPTS, max_new_tokens=5, stop_ids=())
    np.testing.assert_array_equal(again.log_probs, first.log_probs)
    np.testing.assert_array_equal(again.tokens, first.tokens)
    assert (changed.tokens != first.tokens).any()


def test_usage_counts_prefill_and_decode_apart(wide_model):
    result = generate(wide_model, PROMPTS, max_new_tokens=4, stop_ids=())
    assert result.prefill_usage is not None
    assert result.decode_usage is not None
    assert float(result.prefill_usage.tokens) == 10
    assert float(result.decode_usage.tokens) == 6  # the last drawn token is never run
    dense = generate(wide_model, PROMPTS, max_new_tokens=4, routing=AllOn(), stop_ids=())
    assert dense.prefill_usage is None


@pytest.mark.parametrize("pad", [0, 2])
def test_case_B6_rows_end_apart_and_nothing_runs_after_the_last(pad):
    eos = 2
    table = jnp.array(
        [[11, eos, 40, 41, 42, 43], [12, 13, 14, 15, eos, 44]]  # draws of rows 0 and 1
    )
    calls = []

    def forward(token, active, cache):
        jax.debug.callback(lambda: calls.append(1))
        count = cache.lengths[0] + 1
        logits = jax.nn.one_hot(table[:, count], 61) * 9.0
        return logits, KVCache(cache.layers, cache.lengths + 1), None

    config = tiny_config()
    keys, temperature = jax.vmap(jax.random.key)(jnp.arange(2)), jnp.zeros(2)
    settings = DecodeSettings(Sampler(), max_new_tokens=10, stop_ids=(eos,), pad_id=pad)
    state = first_draw(
        jax.nn.one_hot(table[:, 0], 61) * 9.0,
        KVCache.empty(config, 2, 4, jnp.float32),
        keys,
        temperature,
        settings,
        seen=None,
        no_usage=None,
    )
    state = decode_until(forward, state, keys, temperature, settings, jnp.int32(10))
    jax.effects_barrier()
    assert state.tokens[0].tolist() == [11, eos] + [pad] * 8
    assert state.tokens[1].tolist() == [12, 13, 14, 15, eos] + [pad] * 5
    assert state.lengths.tolist() == [2, 5]
    assert int(state.step) == 5
    assert len(calls) == 4  # the first draw is from the prompt's logits
    expected = 9.0 - np.log(np.exp(9.0) + 60)
    np.testing.assert_allclose(state.log_probs[0], [expected] * 2 + [0.0] * 8, atol=1e-5)
    np.testing.assert_allclose(state.log_probs[1], [expected] * 5 + [0.0] * 5, atol=1e-5)


def test_stop_ids_come_from_the_config_and_can_be_a_list(wide_model):
    free = generate(wide_model, PROMPTS[:1], max_new_tokens=6, stop_ids=())
    third = int(free.tokens[0, 2])
    first_seen = free.tokens[0].tolist().index(third)
    stopped = generate(wide_model, PROMPTS[:1], max_new_tokens=6, stop_ids=[60, third])
    assert stopped.rows() == [free.tokens[0, : first_seen + 1].tolist()]


def test_repetition_penalty_counts_the_prompt(wide_model):
    ordinary = generate(wide_model, [[5]], max_new_tokens=12, stop_ids=())
    strict = generate(
        wide_model, [[5]], max_new_tokens=12, stop_ids=(), sampler=Sampler(repetition_penalty=1e9)
    )
    tokens = strict.rows()[0]
    assert len({5, *tokens}) == 13
    assert tokens != ordinary.rows()[0]


def test_non_finite_logits_are_an_error_that_names_row_and_step():
    model = tiny_model(WideConfig(3, 8))
    embedding = model.model.embed_tokens.weight
    embedding[...] = embedding[...].at[17].set(jnp.nan)
    with pytest.raises(FloatingPointError, match=r"row 1.*new token 0"):
        generate(model, [[5], [17]], max_new_tokens=3)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "empty"),
        ([[]], {}, "prompt 0 has no tokens"),
        ([[5], [61]], {}, "prompt 1: token id 61"),
        ([[5] * 510], {"max_new_tokens": 3}, "max_position_embeddings=512"),
        ([[5]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[5]], {"seeds": [1, 2]}, "seeds has 2 entries"),
        ([[5]], {"temperatures": [float("nan")]}, "temperature=nan"),
        ([[5]], {"prefill_chunk": 0}, "prefill_chunk=0"),
        ([[5]], {"stream_every": 0}, "stream_every=0"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(wide_model, prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(wide_model, prompts, **{"max_new_tokens": 2, **settings})


def test_a_cache_too_small_is_refused(wide_model):
    cache = KVCache.empty(wide_model.config, 1, 8, jnp.float32)
    cache.check_room(8)
    with pytest.raises(ValueError, match="8 slots"):
        cache.check_room(9)


def test_the_first_token_waits_for_no_step(wide_model):
    """It is drawn from the prompt's logits: the loop's program is not even there yet."""
    _decode_until.clear_cache()  # other tests run models of these very shapes
    first = generate(wide_model, PROMPTS, max_new_tokens=1, stop_ids=())
    streamed = []
    generate(wide_model, PROMPTS, max_new_tokens=1, stop_ids=(), on_tokens=streamed.append)
    assert streamed == [first.rows()]
    assert _decode_until._cache_size() == 0
    shown = []

    def on_tokens(new):
        shown.append((new, _decode_until._cache_size()))

    made = generate(
        wide_model, PROMPTS, max_new_tokens=3, stop_ids=(), on_tokens=on_tokens, stream_every=1
    )
    assert [compiled for _, compiled in shown] == [0, 1, 1]
    assert shown[0][0] == first.rows() == [row[:1] for row in made.rows()]
