"""Tiny random models of every family, described once for both sides of the parity check.

Used by the project's tests (JAX, no torch) and by the scripts that run beside it with torch and
transformers. Shapes are chosen to catch mix-ups: heads 9/3 and 14/2, `head_dim` that is not
`D / Hq`, `F` that is no multiple of 128, RoPE scaling that bites within the test's few tokens.

Weights come from the tensor's name, so nobody has to store them and their order does not matter.
numpy's legacy `RandomState` is frozen: it draws the same numbers in every version.
"""

import zlib

import numpy as np

ROWS, TOKENS, NEW_TOKENS = 2, 32, 12
RANK = 4

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
_COMMON = {
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
_NINE_THREE = {
    "hidden_size": 90,
    "intermediate_size": 176,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
}
_FOURTEEN_TWO = {
    "hidden_size": 112,
    "intermediate_size": 144,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
_SHORT = {"max_position_embeddings": 24}
_LONG = {"max_position_embeddings": 96}


def _model(model_type: str, *parts: dict, **extra) -> dict:
    merged: dict = {"model_type": model_type, **_COMMON}
    for part in parts:
        merged.update(part)
    return merged | extra


# Hugging Face `config.json` of each model, in the spelling of transformers 4.57.
CASES: dict[str, dict] = {
    "llama": _model("llama", _NINE_THREE, _LONG),
    "llama_tied": _model("llama", _FOURTEEN_TWO, _LONG, tie_word_embeddings=True, rope_theta=1e5),
    "llama_bias": _model("llama", _FOURTEEN_TWO, _LONG, attention_bias=True, mlp_bias=True),
    "llama_rope_llama3": _model("llama", _NINE_THREE, _LONG, rope_scaling=_LLAMA3),
    "llama_rope_linear": _model(
        "llama", _NINE_THREE, _LONG, rope_scaling={"type": "linear", "factor": 2.5}
    ),
    "llama_rope_dynamic": _model(
        "llama", _NINE_THREE, _SHORT, rope_scaling={"type": "dynamic", "factor": 2.0}
    ),
    "qwen2": _model("qwen2", _FOURTEEN_TWO, _LONG, tie_word_embeddings=True),
    "qwen2_yarn": _model(
        "qwen2",
        _NINE_THREE,
        _LONG,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    ),
    "qwen2_window": _model(
        "qwen2",
        _FOURTEEN_TWO,
        _LONG,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
    "qwen3": _model("qwen3", _NINE_THREE, _LONG, head_dim=32),
    "qwen3_bias_window": _model(
        "qwen3",
        _FOURTEEN_TWO,
        _LONG,
        head_dim=32,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mistral": _model("mistral", _NINE_THREE, _LONG, sliding_window=7),
}

# RoPE of well-known models: (head_dim, config.json entries, sequence length).
ROPES: dict[str, tuple[int, dict, int]] = {
    "smollm2": (64, {"rope_theta": 1e5, "max_position_embeddings": 8192}, 1),
    "llama2_linear": (
        128,
        {
            "rope_theta": 1e4,
            "max_position_embeddings": 4096,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        1,
    ),
    "llama2_dynamic": (
        128,
        {
            "rope_theta": 1e4,
            "max_position_embeddings": 4096,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        10_000,
    ),
    "llama3.1": (
        128,
        {
            "rope_theta": 5e5,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        1,
    ),
    "llama3.2": (
        64,
        {
            "rope_theta": 5e5,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        1,
    ),
    "qwen2.5_yarn": (
        128,
        {
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        1,
    ),
    "yarn_all_fields": (
        64,
        {
            "rope_theta": 1e4,
            "max_position_embeddings": 163840,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.707,
                "mscale_all_dim": 1.0,
                "truncate": False,
            },
        },
        1,
    ),
}


# Other routers where the first ones decide too narrowly for a test.
ROUTER_SEEDS = {"llama_tied": 2, "llama_rope_linear": 1}


def random_tensor(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight of a case, float32: around 1 for norms, around 0 otherwise."""
    seed = ROUTER_SEEDS.get(case, 0) if "router_" in name else 0
    draw = np.random.RandomState(zlib.crc32(f"{case}/{name}".encode()) ^ seed)
    draw = draw.standard_normal(shape)
    if "norm" in name:
        return np.float32(1 + 0.2 * draw)
    if "router_" in name:
        return np.float32(draw / (shape[-1] ** 0.5 if len(shape) > 1 else 10))
    return np.float32((0.5 if "embed" in name else 0.12) * draw)


def input_ids(case: str) -> np.ndarray:
    """Token ids, int64 `[ROWS, TOKENS]`."""
    state = np.random.RandomState(zlib.crc32(case.encode()))
    return state.randint(0, CASES[case]["vocab_size"], (ROWS, TOKENS)).astype(np.int64)


def group_sizes(case: str) -> tuple[int, int]:
    """Heads an attention group, channels an FFN group: one KV head's queries, and 16."""
    config = CASES[case]
    return config["num_attention_heads"] // config["num_key_value_heads"], 16


def random_masks(case: str) -> tuple[np.ndarray, np.ndarray]:
    """True = run; bool `[layers, ROWS, TOKENS, groups]` of attention and FFN, about half on.

    Token 0 of row 0 has everything on, token 1 everything off.
    """
    config, (heads, channels) = CASES[case], group_sizes(case)
    state = np.random.RandomState(zlib.crc32(f"{case}/masks".encode()))
    masks = []
    for groups in (
        config["num_attention_heads"] // heads,
        config["intermediate_size"] // channels,
    ):
        mask = state.uniform(size=(config["num_hidden_layers"], ROWS, TOKENS, groups)) < 0.5
        mask[:, 0, 0], mask[:, 0, 1] = True, False
        masks.append(mask)
    return masks[0], masks[1]
