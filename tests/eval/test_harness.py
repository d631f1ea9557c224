"""The harness's requests answered (cases D1, D4), against plain forward passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.eval.conftest import TINY, tiny_model
from wide_jax.batch import TokenBatch
from wide_jax.config import WideConfig
from wide_jax.routing import AllOn, Argmax

pytest.importorskip("lm_eval", reason="the harness is an extra: pip install '.[eval]'")

from lm_eval.api.instance import Instance

from eval.harness import HarnessConfig, WideLM


def lm_of(model, tokenizer, **settings):
    return WideLM(model, tokenizer, config=HarnessConfig(progress=False, **settings))


def requests_of(kind, *arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=i)
        for i, args in enumerate(arguments)
    ]


@pytest.fixture(scope="module")
def logits_of(wide_model):
    """Log-probabilities `[T, V]` of one unpadded row."""
    run = jax.jit(lambda batch: wide_model.logits(wide_model(batch, Argmax()).hidden))

    def compute(ids):
        padded = jnp.zeros((1, 64), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids))
        batch = TokenBatch.from_lengths(padded, jnp.array([len(ids)]))
        return np.asarray(jax.nn.log_softmax(run(batch)[0]))[: len(ids)]

    return compute


PAIRS = [("ab c", " de"), ("ab c", " dea"), ("abcd", "e"), ("", "fgh"), ("q ", "r"), ("abcd", "f")]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_case_D4_loglikelihoods_are_those_of_each_request_alone(
    wide_model, tokenizer, logits_of, batch_size
):
    lm = lm_of(wide_model, tokenizer, batch_size=batch_size)
    found = lm.loglikelihood(requests_of("loglikelihood", *PAIRS), disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(PAIRS, found, strict=True):
        kept = context.rstrip()  # spaces at its end belong to the continuation
        before = tokenizer.encode(kept) or [lm.prefix_token_id]
        after = tokenizer.encode(context[len(kept) :] + continuation)
        log_probs = logits_of([*before, *after])
        rows = np.arange(len(before) - 1, len(before) + len(after) - 1)
        assert total == pytest.approx(log_probs[rows, after].sum(), abs=1e-4)
        assert greedy == (log_probs[rows].argmax(axis=1) == after).all()


def test_case_D4_equal_inputs_with_continuations_of_one_and_two_tokens(uniform_model, tokenizer):
    lm = lm_of(uniform_model, tokenizer, batch_size=4)
    found = lm.loglikelihood(
        requests_of("loglikelihood", ("abc", "d"), ("ab", "cd"), ("abc", "d")), disable_tqdm=True
    )
    assert [total for total, _ in found] == pytest.approx(
        [-np.log(50), -2 * np.log(50), -np.log(50)], abs=1e-4
    )
    prefill, _ = lm.store.ran()
    assert prefill.tokens == 3  # the row "abc" ran once for all of them


def test_case_D1_rolling_loglikelihood_of_a_uniform_model(uniform_model, tokenizer):
    for window in (4, 16):
        lm = lm_of(uniform_model, tokenizer, batch_size=2, max_length=window)
        found = lm.loglikelihood_rolling(
            requests_of("loglikelihood_rolling", ("abcdefghij",), ("",), ("abc",))
        )
        assert found == pytest.approx([-39.1202, 0.0, -11.7361], abs=1e-3)


def test_a_long_context_is_cut_on_the_left(wide_model, tokenizer, logits_of):
    lm = lm_of(wide_model, tokenizer, max_length=8)
    [(total, _)] = lm.loglikelihood(
        requests_of("loglikelihood", ("abcdefghijklmnop", "qr")), disable_tqdm=True
    )
    kept = tokenizer.encode("abcdefghijklmnopqr")[-9:]
    log_probs = logits_of(kept[:-1])
    assert total == pytest.approx(log_probs[6, kept[7]] + log_probs[7, kept[8]], abs=1e-4)
    with pytest.raises(ValueError, match="9 tokens, more than max_length=8"):
        lm.loglikelihood(requests_of("loglikelihood", ("a", "bcdefghij")), disable_tqdm=True)


def greedy_text(logits_of, tokenizer, prompt, count):
    ids = tokenizer.encode(prompt)
    new = []
    for _ in range(count):
        token = int(logits_of([*ids, *new])[-1].argmax())
        if token == tokenizer.eos_token_id:
            break
        new.append(token)
    return tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_generation_equals_step_by_step_and_ends_at_its_stop_string(
    wide_model, tokenizer, logits_of, batch_size
):
    prompts = ["abc", "hello you", "q:", "zz top"]
    whole = [greedy_text(logits_of, tokenizer, p, 24) for p in prompts]
    lm = lm_of(wide_model, tokenizer, batch_size=batch_size)
    settings = {"until": [], "max_gen_toks": 24, "do_sample": False}
    found = lm.generate_until(requests_of("generate_until", *((p, settings) for p in prompts)))
    assert found == whole
    stop = whole[1][3:5]  # two characters from the middle of the second text
    settings = {"until": [stop], "max_gen_toks": 24}
    cut = lm.generate_until(requests_of("generate_until", *((p, settings) for p in prompts)))
    assert cut == [text.split(stop)[0] for text in whole]
    assert len(cut[1]) <= 3


def test_generation_accounts_for_prefill_and_decode_apart(tokenizer):
    # Skip everything (a bias on "skip") and count by hand.
    wide = WideConfig.for_model(TINY, ffn_group_size=8, router_rank=4)
    model = tiny_model(wide)
    for layer in model.model.layers:
        for router in (layer.router_attention, layer.router_ffn):
            bias = router.router.bias[...].reshape(-1, 2).at[:, 1].set(1e4)
            router.router.bias[...] = bias.reshape(-1)
    lm = lm_of(model, tokenizer, batch_size=3)
    settings = {"until": [], "max_gen_toks": 20}
    texts = lm.generate_until(requests_of("generate_until", ("abc", settings), ("ab", settings)))
    prefill, decode = lm.store.ran()
    assert (prefill.tokens, prefill.keys) == (5, 1 + 2 + 3 + 1 + 2)
    assert prefill.accounting(model).summary() == dict.fromkeys(
        prefill.accounting(model).summary(), 1.0
    )
    assert decode.accounting(model).flops == 1.0
    # An embedding alone repeats its own successor; no stop id is drawn, so 20 tokens ran each.
    assert all(texts)
    assert decode.tokens == decode.usage.tokens == 40
    assert decode.keys == decode.usage.keys[0] == sum(range(4, 24)) + sum(range(3, 23))


def test_a_dense_run_counts_tokens_without_masks(dense_model, tokenizer):
    lm = lm_of(dense_model, tokenizer)
    assert isinstance(lm.routing, AllOn)
    lm.loglikelihood(requests_of("loglikelihood", ("abc", "de")), disable_tqdm=True)
    prefill, decode = lm.store.ran()
    assert (prefill.tokens, prefill.keys, decode.tokens) == (4, 10, 0)
    assert prefill.accounting(dense_model).flops == 0.0


def test_sampling_is_seeded_by_the_request(wide_model, tokenizer):
    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    asked = requests_of("generate_until", *((p, settings) for p in ("abc", "abc", "hello")))
    runs = [lm_of(wide_model, tokenizer, batch_size=size).generate_until(asked) for size in (1, 3)]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]  # a repeat is another draw


def test_chat_templates_and_tokens(dense_model, tokenizer):
    lm = lm_of(dense_model, tokenizer)
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert lm.apply_chat_template(history) == "user: hi\nassistant: "  # the template has no system
    assert lm.apply_chat_template(history, add_generation_prompt=False) == "user: hi"
    assert lm.chat_template(True) == tokenizer.chat_template
    assert lm.tok_encode("<s>ab") == [1, 3, 4]
    assert (lm.prefix_token_id, lm.eot_token_id) == (1, 2)


def test_bad_settings_are_refused(dense_model, tokenizer):
    with pytest.raises(ValueError, match=r"max_length=4096 .* max_position_embeddings=128"):
        lm_of(dense_model, tokenizer, max_length=4096)
    lm = lm_of(dense_model, tokenizer)
    with pytest.raises(ValueError, match=r"max_gen_toks=256 leaves no room .* max_length=128"):
        lm.generate_until(requests_of("generate_until", ("abc", {"until": []})))
    with pytest.raises(ValueError, match="not supported: num_beams"):
        lm.generate_until(
            requests_of("generate_until", ("abc", {"max_gen_toks": 4, "num_beams": 2}))
        )


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        HarnessConfig().batch_size = 2
