"""A real, tiny Llama whose greedy text is published (llama2.c, doc/stories260K.md)."""

from pathlib import Path

import pytest

from wide_jax.generate import generate
from wide_jax.hf.pretrained import from_pretrained
from wide_jax.hf.tokenizer import load_tokenizer
from wide_jax.routing import AllOn

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "models" / "stories260K"
TEXT = """\
Once upon a time, there was a little girl named Lily. She loved to play outside in the park. \
One day, she saw a big, red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. She said, \
"I want to play with your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she said, "I'm sorry, mom. I didn't know what to do." Her mom \
said, "Don't worry, Lily. We can help you."""


@pytest.mark.skipif(not FOLDER.exists(), reason=f"{FOLDER.name} is not in ../shared/data/models")
def test_greedy_text_of_a_real_model_is_the_published_one():
    model, tokenizer = from_pretrained(FOLDER), load_tokenizer(FOLDER)
    made = generate(model, [[model.config.bos_token_id]], max_new_tokens=256, routing=AllOn())
    assert tokenizer.decode(made.rows()[0]) == TEXT
