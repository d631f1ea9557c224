"""GGUF files of the Llama architecture to a Hugging Face folder, without torch.

Weights become float32, bit-equal to what the `gguf` library dequantises. Two things differ between
the formats beside the names: llama.cpp's converter permutes the rows of q and k for its interleaved
rotary layout (undone here per head), and the tokenizer is stored as bare vocabulary and merges.
"""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from wide_jax.config import ModelConfig, RopeConfig
from wide_jax.hf.config import config_to_hf
from wide_jax.hf.load import CheckpointError, Progress
from wide_jax.hf.mapping import expected_tensors
from wide_jax.hf.save import atomic_folder, check_target, check_weights, write_json, write_weights

# GGUF name -> Hugging Face name.
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blk.{i}.attn_q.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blk.{i}.attn_k.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blk.{i}.attn_v.bias": "model.layers.{i}.self_attn.v_proj.bias",
    "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.attn_output.bias": "model.layers.{i}.self_attn.o_proj.bias",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
}
QUANTISATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

# `tokenizer.ggml.pre` -> whether digits are split one by one before the GPT-2 pattern.
PRE_TOKENIZERS = {"gpt-2": False, "smollm": True}

# Entries of the architecture that are understood; any other could change the arithmetic.
_KNOWN = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
)
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF


class GGUFError(ValueError):
    """A GGUF file that cannot be converted exactly; the message names the file and the reasons."""


def convert_gguf(
    file: str | Path,
    target: str | Path,
    *,
    readme: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Convert one GGUF file to a Hugging Face folder with float32 weights and its tokenizer.

    Tensors are dequantised and written one at a time. `readme` becomes the folder's README.md.

    Raises:
        GGUFError: an architecture, quantisation, tokenizer or feature that is not supported, by
            name.
        CheckpointError: tensors that are missing, unknown or misshapen, all together.
        FileExistsError: see `atomic_folder`.
    """
    from gguf import GGUFReader

    file = Path(file)
    check_target(target, overwrite=overwrite)
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, OSError) as error:
        raise GGUFError(f"{file}: not a readable GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = read_config(file, fields, {tensor.name for tensor in reader.tensors})
    weights = read_tensors(file, reader.tensors, config)
    tokenizer, tokenizer_config = read_tokenizer(file, fields)
    special = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "pad_token_id": config.pad_token_id,
    }
    with atomic_folder(target, overwrite=overwrite) as folder:
        write_json(folder / "config.json", config_to_hf(config))
        write_json(
            folder / "generation_config.json", {k: v for k, v in special.items() if v is not None}
        )
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        write_json(folder / "tokenizer_config.json", tokenizer_config)
        if readme is not None:
            (folder / "README.md").write_text(readme, encoding="utf-8")
        write_weights(folder, weights, progress=progress)
    return Path(target)


def read_config(file: Path, fields: dict[str, Any], names: set[str]) -> ModelConfig:
    """The architecture from GGUF's key-value entries and tensor names."""
    problems = []
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise GGUFError(f"{file}: general.architecture={architecture!r}, supported: 'llama'")
    own = {k.removeprefix("llama."): v for k, v in fields.items() if k.startswith("llama.")}
    problems += [f"llama.{key}={own[key]!r} is not understood" for key in own if key not in _KNOWN]
    needed = (*_KNOWN[:6], "attention.layer_norm_rms_epsilon")
    problems += [f"llama.{key} is missing" for key in needed if key not in own]
    if problems:
        raise GGUFError(f"{file}: " + "; ".join(problems))
    heads = own["attention.head_count"]
    head_dim = own.get("attention.key_length", own["embedding_length"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise GGUFError(f"{file}: llama.{key}={own[key]}, expected the head size {head_dim}")
    eos, attention_bias = fields.get("tokenizer.ggml.eos_token_id"), "blk.0.attn_q.bias" in names
    return ModelConfig(
        model_type="llama",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=own["embedding_length"],
        intermediate_size=own["feed_forward_length"],
        num_hidden_layers=own["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=own["attention.head_count_kv"],
        head_dim=head_dim,
        max_position_embeddings=own["context_length"],
        rms_norm_eps=_decimal(own["attention.layer_norm_rms_epsilon"]),
        rope=RopeConfig(rope_theta=_decimal(own.get("rope.freq_base", 10_000.0))),
        tie_word_embeddings="output.weight" not in names,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=() if eos is None else (eos,),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


@dataclasses.dataclass(frozen=True)
class QuantisedTensor:
    """One tensor of a GGUF file; `np.asarray` dequantises it to float32 in HF's layout."""

    stored: Any  # gguf.ReaderTensor: memory-mapped
    shape: tuple[int, ...]
    permuted_heads: int | None  # q and k: the number of heads whose rows llama.cpp permuted
    dtype = np.dtype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        from gguf import quants

        values = quants.dequantize(self.stored.data, self.stored.tensor_type)
        values = np.asarray(values, np.float32).reshape(self.shape)
        if self.permuted_heads is not None:
            values = unpermute(values, self.permuted_heads)
        return values if dtype is None else values.astype(dtype)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row permutation of q and k (or of their biases), head by head.

    ```
    HF row of a head:    0   1  …  d/2-1 | d/2  …  d-1     pair i = rows (i, i + d/2)
    GGUF row of it:      0   2  …  d-2   | 1    …  d-1     pair i = rows (2i, 2i + 1)
    ```
    """
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def read_tensors(file: Path, stored: list[Any], config: ModelConfig) -> dict[str, QuantisedTensor]:
    """The file's tensors under their Hugging Face names, in the table's order, not yet read."""
    patterns = [
        (re.compile(re.escape(old).replace(re.escape("{i}"), r"(\d+)")), new)
        for old, new in TENSORS.items()
    ]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found, problems = {}, []
    for tensor in stored:
        kind = tensor.tensor_type.name
        if kind not in QUANTISATIONS:
            problems.append(
                f"{tensor.name} has quantisation {kind}, supported: {', '.join(QUANTISATIONS)}"
            )
        matches = [(m, new) for old, new in patterns if (m := old.fullmatch(tensor.name))]
        if not matches:
            problems.append(f"{tensor.name} is not a tensor of this architecture")
            continue
        match, new = matches[0]
        name = new.format(i=match[1]) if match.groups() else new
        shape = tuple(int(n) for n in reversed(tensor.shape))
        found[name] = QuantisedTensor(tensor, shape, heads.get(name.split(".")[-2]))
    if problems:
        raise CheckpointError(file, problems)
    expected = expected_tensors(config)
    check_weights(file, found, expected)
    return {name: found[name] for name in expected}


def read_tokenizer(file: Path, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """`tokenizer.json` as text and `tokenizer_config.json`, from GGUF's byte-level BPE.

    Raises:
        GGUFError: another kind of tokenizer or pre-tokenizer, by name.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = fields.get("tokenizer.ggml.model"), str(fields.get("tokenizer.ggml.pre"))
    problems = []
    if kind != "gpt2":
        problems.append(f"tokenizer.ggml.model={kind!r}, supported: 'gpt2' (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        problems.append(f"tokenizer.ggml.pre={pre!r}, supported: {', '.join(PRE_TOKENIZERS)}")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if fields.get(f"tokenizer.ggml.{key}"):
            problems.append(f"tokenizer.ggml.{key}=True is not supported")
    if problems:
        raise GGUFError(f"{file}: " + "; ".join(problems))
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise GGUFError(f"{file}: tokenizer.ggml.tokens has a token twice")
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if PRE_TOKENIZERS[pre] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    pairs = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in pairs if k == _USER_DEFINED])
    config = {
        # The generic class takes tokenizer.json as it is; GPT2Tokenizer may rebuild it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for short, long in names.items():
        number = fields.get(f"tokenizer.ggml.{long}_token_id")
        if number is not None:
            config[f"{short}_token"] = tokens[number]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    # Indented and with plain characters, as the files on the hub are.
    text = json.dumps(json.loads(tokenizer.to_str()), indent=2, ensure_ascii=False) + "\n"
    return text, config


def _decimal(value: float) -> float:
    """A float32 entry as the decimal number that was meant: 9.999999747e-06 is 1e-5."""
    number = float(str(np.float32(value)))
    return number if math.isfinite(number) else value
