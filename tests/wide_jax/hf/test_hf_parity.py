"""Every family against arrays made with torch and transformers (`tests/parity/make_golden.py`).

The arrays of masked and routed logits come from a plain torch restatement of the method.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.parity import cases
from wide_jax.batch import TokenBatch
from wide_jax.config import WideConfig
from wide_jax.generate import generate
from wide_jax.hf.config import config_from_hf, read_config
from wide_jax.hf.mapping import expected_router_tensors, expected_tensors
from wide_jax.hf.pretrained import from_pretrained
from wide_jax.hf.wide_folder import save_wide_model
from wide_jax.rope import attention_scaling, inverse_frequencies
from wide_jax.routing import AllOn, Argmax, Forced, Masks

GOLDEN = Path(__file__).parents[2] / "golden"
TOLERANCE = 1e-4  # float32 logits of order 1
# bfloat16 has 8 bits: two right implementations differ by about as much as each from float32.
BFLOAT16_RMS = 1.5  # times the RMS difference of transformers' bfloat16 from its float32

by_case = pytest.mark.parametrize("case", cases.CASES)


@functools.cache
def golden(case):
    return dict(np.load(GOLDEN / f"{case}.npz"))


def random_of(case, shapes):
    return {name: cases.random_tensor(case, name, shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """WIDE folders on sharded bases, one a case, made on first use."""
    root = tmp_path_factory.mktemp("parity")

    @functools.cache
    def make(case):
        base, target = root / case / "base", root / case / "wide"
        base.mkdir(parents=True)
        (base / "config.json").write_text(json.dumps(cases.CASES[case]))
        config = read_config(base)
        weights = random_of(case, expected_tensors(config))
        where = {}
        for number in (1, 2, 3):
            part = dict(list(weights.items())[number - 1 :: 3])
            file = f"model-{number:05d}-of-00003.safetensors"
            safetensors.numpy.save_file(part, base / file, metadata={"format": "pt"})
            where |= dict.fromkeys(part, file)
        index = json.dumps({"metadata": {}, "weight_map": where})
        (base / "model.safetensors.index.json").write_text(index)
        wide = wide_of(case, config)
        routers = random_of(case, expected_router_tensors(config, wide))
        save_wide_model(target, base=base, config=config, wide=wide, routers=routers)
        return target

    return make


def wide_of(case, config):
    heads, channels = cases.group_sizes(case)
    return WideConfig.for_model(
        config, attn_group_size=heads, ffn_group_size=channels, router_rank=cases.RANK
    )


@pytest.fixture(scope="module")
def model_of(folders):
    return functools.cache(lambda case, dtype: from_pretrained(folders(case), dtype=dtype))


@functools.partial(jax.jit, static_argnums=0)
def run(graphdef, state, ids, routing):
    model = nnx.merge(graphdef, state)
    output = model(TokenBatch.from_lengths(ids), routing)
    return model.logits(output.hidden), output.masks


def forward(model, case, routing):
    with jax.default_matmul_precision("highest"):
        return run(*nnx.split(model), jnp.asarray(cases.input_ids(case), jnp.int32), routing)


def assert_close(found, wanted):
    assert found.dtype == wanted.dtype == np.float32
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=TOLERANCE)


@by_case
def test_float32_logits(model_of, case):
    logits, _ = forward(model_of(case, "float32"), case, AllOn())
    assert_close(logits, golden(case)["logits"])


@by_case
def test_logits_under_random_masks(model_of, case):
    attention, ffn = (tuple(map(jnp.asarray, mask)) for mask in cases.random_masks(case))
    logits, _ = forward(model_of(case, "float32"), case, Forced(Masks(attention, ffn)))
    assert_close(logits, golden(case)["masked_logits"])
    assert np.abs(golden(case)["masked_logits"] - golden(case)["logits"]).max() > 0.5


@by_case
def test_routing_decisions_and_logits(model_of, case):
    logits, masks = forward(model_of(case, "float32"), case, Argmax())
    for found, name in ((masks.attention, "routed_attention"), (masks.ffn, "routed_ffn")):
        wanted = golden(case)[name]
        assert 0.1 < wanted.mean() < 0.9
        np.testing.assert_array_equal(np.stack(found), wanted)
    assert_close(logits, golden(case)["routed_logits"])


@by_case
def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(model_of, case):
    logits, _ = forward(model_of(case, "bfloat16"), case, AllOn())
    exact = golden(case)["logits"]
    theirs = golden(case)["logits_bfloat16"].view(ml_dtypes.bfloat16).astype(np.float32)

    def error(other):
        return np.sqrt(np.mean((np.asarray(other, np.float32) - exact) ** 2))

    assert error(logits) < BFLOAT16_RMS * error(theirs)


# One a family and kind of position (`make parity` does all). Not dynamic RoPE: its angles depend on
# the length, and a cache keeps the keys' first ones.
@pytest.mark.parametrize(
    "case", ["llama_bias", "llama_rope_llama3", "qwen2_yarn", "qwen2_window", "qwen3", "mistral"]
)
def test_greedy_tokens(model_of, case):
    prompts = cases.input_ids(case)[:, : cases.TOKENS // 2].tolist()
    made = generate(
        model_of(case, "float32"),
        prompts,
        max_new_tokens=cases.NEW_TOKENS,
        routing=AllOn(),
        stop_ids=(),
    )
    np.testing.assert_array_equal(made.tokens, golden(case)["greedy"])


@by_case
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("configs_*.json")), ids=lambda p: p.stem)
def test_configs_as_transformers_writes_them(case, path):
    saved = json.loads(path.read_text())[case]
    assert config_from_hf(saved) == config_from_hf(cases.CASES[case])


@pytest.mark.parametrize("name", cases.ROPES)
def test_rope_frequencies(name):
    head_dim, entries, length = cases.ROPES[name]
    sizes = {
        "vocab_size": 8,
        "hidden_size": head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = config_from_hf({"model_type": "llama", **sizes, **entries})
    found = inverse_frequencies(config.rope, head_dim, sequence_length=length)
    wanted = np.load(GOLDEN / "rope.npz")
    np.testing.assert_allclose(found, wanted[name], rtol=2e-6)
    assert attention_scaling(config.rope) == pytest.approx(float(wanted[f"{name}/scaling"]))
