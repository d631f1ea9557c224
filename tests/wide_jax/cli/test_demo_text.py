"""The demo's text: nothing that is evaluated was trained on."""

from wide_jax.cli.demo_text import python_reference, split_documents


def paragraphs(documents):
    return [" ".join(p.split()) for document in documents for p in document.split("\n\n")]


def test_no_paragraph_is_in_both_parts_or_twice():
    text = python_reference()
    train, held_out = paragraphs(text.train), paragraphs(text.held_out)
    assert not set(train) & set(held_out)
    assert len(set(train)) == len(train)
    assert len(set(held_out)) == len(held_out)
    assert sum(map(len, text.train)) > 250_000
    assert sum(map(len, text.held_out)) > 20_000


def test_repeated_paragraphs_stay_in_the_held_out_part():
    text = split_documents("two", ["a\n\nshared  words\n\nb", "b"], ["shared words\n\nc"])
    assert text.train == ("a\n\nb",)
    assert text.held_out == ("shared words\n\nc",)
