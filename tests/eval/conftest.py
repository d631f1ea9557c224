"""Tiny models shared by the evaluation's tests."""

import dataclasses

import pytest
from flax import nnx

from wide_jax.config import ModelConfig, WideConfig
from wide_jax.model import WideForCausalLM

TINY = ModelConfig(
    model_type="llama",
    vocab_size=50,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_ids=(2,),
    pad_token_id=2,
)


def tiny_model(wide: WideConfig | None = None, seed: int = 0, **changes) -> WideForCausalLM:
    """Random weights, large enough that tokens matter."""
    model = WideForCausalLM(dataclasses.replace(TINY, **changes), wide, rngs=nnx.Rngs(seed))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if variable[...].ndim == 2 and "router" not in ".".join(map(str, path)):
            variable[...] = variable[...] * 15.0
    return model


@pytest.fixture(scope="session")
def dense_model() -> WideForCausalLM:
    return tiny_model()


@pytest.fixture(scope="session")
def wide_model() -> WideForCausalLM:
    return tiny_model(WideConfig.for_model(TINY, ffn_group_size=8, router_rank=4))


@pytest.fixture(scope="session")
def uniform_model() -> WideForCausalLM:
    """Gives each of 50 tokens the same probability: its head is zero."""
    model = tiny_model()
    model.lm_head.weight[...] = model.lm_head.weight[...] * 0.0
    return model


@pytest.fixture(scope="session")
def tokenizer():
    """One token a character: <unk> 0, <s> 1, </s> 2, then letters and signs."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    signs = "abcdefghijklmnopqrstuvwxyz ABQ:.?\n#0123456789=_-"[:47]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{c: 3 + i for i, c in enumerate(signs)}}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    built.decoder = decoders.Fuse()
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
    )
