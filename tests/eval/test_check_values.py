"""The embedded model's known perplexity, where its weights and the data are on this machine."""

from pathlib import Path

import pytest

from eval.check_values import (
    PERPLEXITIES,
    WIKITEXT,
    WIKITEXT_TOKENS,
    load_embedded,
    perplexity_record,
    wikitext,
)
from eval.perplexity import evaluate_perplexity
from eval.records import check_record

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def needs_embedded_model_and_data():
    from wide_jax.hf.cache import cache_dir
    from wide_jax.hf.embedded import EMBEDDED_MODEL

    folder = cache_dir() / "models" / EMBEDDED_MODEL.key
    if not (folder / "config.json").exists():
        pytest.skip("the embedded model is not in the cache folder: `make demo` puts it there")
    if not (DATA / WIKITEXT).exists():
        pytest.skip(f"../shared/data/{WIKITEXT} is not here")


def test_wikitext_ids_and_perplexity_of_the_first_12_windows():
    needs_embedded_model_and_data()
    model, tokenizer, name = load_embedded()
    text = wikitext(DATA, tokenizer)
    assert text.tokens == WIKITEXT_TOKENS
    config, expected = PERPLEXITIES["first"]
    result = evaluate_perplexity(model, text, config)
    assert result.scored_tokens == 12 * 1023
    assert result.token_perplexity == pytest.approx(expected, abs=0.01)
    check_record(perplexity_record(name, result), "record")
