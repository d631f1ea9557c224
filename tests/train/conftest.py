"""A tiny model folder with a tokenizer, and a text, as runs take them."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.train.tiny import VOCAB, tiny_model
from wide_jax.hf.mapping import is_router
from wide_jax.hf.pretrained import tensors_of
from wide_jax.hf.save import save_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A dense model with a word-level tokenizer: words w0 to w61, an unknown and an end token."""
    folder = tmp_path_factory.mktemp("model") / "dense"
    model = tiny_model()
    save_model(folder, model.config, tensors_of(model, lambda name: not is_router(name)))
    words = {"<unk>": 0, "<end>": 1} | {f"w{n}": n + 2 for n in range(VOCAB - 2)}
    built = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=built, unk_token="<unk>", eos_token="<end>"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """60 documents of 5 to 64 words as JSON lines."""
    file = tmp_path_factory.mktemp("text") / "documents.jsonl"
    lines = []
    for number in range(60):
        words = [f"w{(number * 7 + 3 * place) % 62}" for place in range(5 + number)]
        lines.append(json.dumps({"text": " ".join(words), "number": number}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
