"""A tiny model folder with a real (byte-level) tokenizer, as a user would have on disk."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.wide_jax.conftest import tiny_config, tiny_model
from wide_jax.hf.pretrained import tensors_of
from wide_jax.hf.save import save_model


def byte_tokenizer() -> Tokenizer:
    """One token a byte (ids 3 to 258) after three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {letter: 3 + number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    # transformers refuses a Llama whose hidden size is not a multiple of its heads
    changes = {"vocab_size": 259, "bos_token_id": 1, "hidden_size": 48}
    config, model = tiny_config(**changes), tiny_model(**changes)
    save_model(folder, config, tensors_of(model))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def text_file(tmp_path):
    """Sixteen documents of words."""
    file = tmp_path / "text.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps"]
    lines = []
    for document in range(16):
        text = " ".join(words[(document * 7 + i * i) % len(words)] for i in range(60))
        lines.append(json.dumps({"text": f"{document}: {text}"}))
    file.write_text("\n".join(lines) + "\n")
    return file
