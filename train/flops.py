"""What a step has to compute, for MFU: no weight gradients of the frozen base are counted."""

from wide_jax.config import ModelConfig, WideConfig

# Dense peak, FLOP/s, by the dtype of the matrix products and a part of the device's kind.
PEAKS = {("bfloat16", "H200"): 990e12, ("bfloat16", "H100"): 990e12, ("bfloat16", "A100"): 312e12}


def step_flops_per_token(
    config: ModelConfig, wide: WideConfig, sequence_length: int, *, lora_rank: int = 0
) -> float:
    """Needed FLOPs per token of one update, masks counted as all on (training runs everything).

    Linear maps: 2 per weight forward and 2 backward (the gradient by the input only). Attention at
    mean n = (T + 1) / 2 visible keys: 4 n Hq d forward, 8 n Hq d backward. Trained maps (routers,
    LoRA factors): 2 forward, 4 backward. Recomputation is not counted.
    """
    hidden, layers, head = config.hidden_size, config.num_hidden_layers, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    inner = config.intermediate_size
    frozen = layers * hidden * (2 * queries + 2 * keys + 3 * inner) + hidden * config.vocab_size
    outputs = 2 * (wide.attn_groups(config) + wide.ffn_groups(config))
    trained = layers * wide.router_rank * (2 * hidden + outputs)
    trained += layers * lora_rank * (7 * hidden + 2 * queries + 2 * keys + 3 * inner)
    attention = layers * queries * (sequence_length + 1) / 2
    return 4.0 * frozen + 6.0 * trained + 12.0 * attention


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """The device's dense peak in FLOP/s, or None where it is not known."""
    for (known_dtype, known_kind), peak in PEAKS.items():
        if known_dtype == dtype and known_kind in device_kind:
            return peak
    return None
