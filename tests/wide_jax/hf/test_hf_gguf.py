import json

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.wide_jax.hf.conftest import random_tensors
from wide_jax.config import ModelConfig, RopeConfig
from wide_jax.hf.config import read_config
from wide_jax.hf.gguf import TENSORS, GGUFError, convert_gguf, unpermute
from wide_jax.hf.load import CheckpointError, load_weights
from wide_jax.hf.mapping import expected_tensors
from wide_jax.hf.tokenizer import load_tokenizer

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=0 + 3 + 256 + 2,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(rope_theta=1e5),
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
    pad_token_id=0,
)
QK = {"q_proj": CONFIG.num_attention_heads, "k_proj": CONFIG.num_key_value_heads}


def permute(rows, heads):
    """What llama.cpp's converter does, written as its source has it."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def byte_level_tokens():
    """The 256 characters of byte-level BPE, as GPT-2 defines them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def gguf_name(name):
    for old, new in TENSORS.items():
        for layer in ("", *map(str, range(CONFIG.num_hidden_layers))):
            if new.format(i=layer) == name:
                return old.format(i=layer)
    raise KeyError(name)


def write(
    path,
    weights,
    kind_of=lambda name: Kind.F32,
    *,
    architecture="llama",
    pre="smollm",
    model="gpt2",
    extra=None,
):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(CONFIG.rope.rope_theta)
    tokens = ["<unk>", "<s>", "</s>", *byte_level_tokens(), "ab", "12"]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 258)
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for key, value in (extra or {}).items():
        writer.add_float32(key, value)
    for name, array in weights.items():
        head = QK.get(name.split(".")[-2])
        stored = permute(array, head) if head else array
        kind = kind_of(name) if array.ndim == 2 else Kind.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tensors():
    return random_tensors(expected_tensors(CONFIG))


def test_unpermute_inverts_the_converters_permutation():
    rows = np.arange(3 * 8 * 2).reshape(24, 2)
    np.testing.assert_array_equal(unpermute(permute(rows, 3), 3), rows)
    np.testing.assert_array_equal(unpermute(permute(rows[:, 0], 3), 3), rows[:, 0])
    one_head = unpermute(np.arange(8), 1)
    np.testing.assert_array_equal(one_head, [0, 2, 4, 6, 1, 3, 5, 7])


def test_float32_comes_through_bit_by_bit(tmp_path, tensors):
    folder = convert_gguf(write(tmp_path / "m.gguf", tensors), tmp_path / "hf", readme="hello\n")
    assert read_config(folder) == CONFIG
    loaded = load_weights(folder, CONFIG)
    for name, array in tensors.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), array, err_msg=name)
    assert (folder / "README.md").read_text() == "hello\n"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.F16], ids=lambda k: k.name)
def test_quantised_weights_equal_the_librarys_dequantisation(tmp_path, tensors, kind):
    path = write(tmp_path / "m.gguf", tensors, lambda name: kind)
    loaded = load_weights(convert_gguf(path, tmp_path / "hf"), CONFIG)
    for name, array in tensors.items():
        expected = array
        if array.ndim == 2:
            quantised = gguf.quants.quantize(array, kind)  # by row: permuting rows changes nothing
            expected = np.float32(gguf.quants.dequantize(quantised, kind)).reshape(array.shape)
            assert 0 < np.abs(expected - array).max() < 0.05
        np.testing.assert_array_equal(np.asarray(loaded[name]), expected, err_msg=name)


def test_tokenizer_splits_digits_and_keeps_special_tokens(tmp_path, tensors):
    tokenizer = load_tokenizer(convert_gguf(write(tmp_path / "m.gguf", tensors), tmp_path / "hf"))
    ids = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *byte_level_tokens(), "ab"])}
    encoded = tokenizer("ab12</s>é")["input_ids"]
    first, second = (ids[c] for c in ("1", "2"))
    assert encoded[:4] == [ids["ab"], first, second, 2]
    assert tokenizer.decode(encoded) == "ab12</s>é"
    assert tokenizer.decode(encoded, skip_special_tokens=True) == "ab12é"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "ab"


def test_without_the_digits_step_digits_merge(tmp_path, tensors):
    path = write(tmp_path / "m.gguf", tensors, pre="gpt-2")
    tokenizer = load_tokenizer(convert_gguf(path, tmp_path / "hf"))
    assert tokenizer("12")["input_ids"] == [CONFIG.vocab_size - 1]


def test_untied_head_and_attention_biases(tmp_path, tensors):
    shapes = {"lm_head.weight": (CONFIG.vocab_size, 64)}
    for layer in range(2):
        for part, rows in {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}.items():
            shapes[f"model.layers.{layer}.self_attn.{part}.bias"] = (rows,)
    tensors |= random_tensors(shapes, seed=1)
    folder = convert_gguf(write(tmp_path / "m.gguf", tensors), tmp_path / "hf")
    config = read_config(folder)
    assert (config.tie_word_embeddings, config.qkv_bias, config.o_bias) == (False, True, True)
    loaded = load_weights(folder, config)
    for name, array in tensors.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), array, err_msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma2"}, "architecture='gemma2', supported: 'llama'"),
        ({"pre": "qwen2"}, "pre='qwen2', supported: gpt-2, smollm"),
        ({"model": "llama"}, "tokenizer.ggml.model='llama'"),
        ({"extra": {"llama.attn_logit_softcapping": 50.0}}, "llama.attn_logit_softcapping=50.0"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, tensors, options, message):
    path = write(tmp_path / "m.gguf", tensors, **options)
    with pytest.raises(GGUFError) as caught:
        convert_gguf(path, tmp_path / "hf")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "hf").exists()


def test_unknown_quantisations_and_tensors_are_named_together(tmp_path, tensors, monkeypatch):
    monkeypatch.setattr("wide_jax.hf.gguf.QUANTISATIONS", ("F32",))
    odd = "model.layers.0.mlp.up_proj.weight"
    monkeypatch.setitem(TENSORS, "blk.{i}.attn_sinks.weight", "model.layers.{i}.sinks")
    tensors["model.layers.0.sinks"] = np.zeros(4, np.float32)
    path = write(tmp_path / "m.gguf", tensors, lambda n: Kind.Q8_0 if n == odd else Kind.F32)
    monkeypatch.delitem(TENSORS, "blk.{i}.attn_sinks.weight")
    with pytest.raises(CheckpointError) as caught:
        convert_gguf(path, tmp_path / "hf")
    assert sorted(caught.value.problems) == [
        "blk.0.attn_sinks.weight is not a tensor of this architecture",
        "blk.0.ffn_up.weight has quantisation Q8_0, supported: F32",
    ]


def test_missing_tensors_are_named(tmp_path, tensors):
    del tensors["model.norm.weight"]
    path = write(tmp_path / "m.gguf", tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        convert_gguf(path, tmp_path / "hf")


def test_not_a_gguf_file(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"not one")
    with pytest.raises(GGUFError, match="not a readable GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
