"""The masked model in plain torch, read off the method's description and nothing else.

It shares no code with the JAX model nor with transformers, and takes weights by Hugging Face name.
For every layer and token, with `True` = run:

    attn_out[h] *= mask_attn[group(h)]                       before o_proj
    (silu(x W_gate) * (x W_up))[c] *= mask_ffn[group(c)]     before down_proj

Biases of o_proj and down_proj are added once, whatever the mask. A router sees the residual
stream that enters its sublayer, before the norm: `D -> r -> 2 * groups`, logits `[group, class]`,
class 0 = run; a tie runs.
"""

import torch


def rms_norm(x, weight, eps):
    """x / rms(x) * weight over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x, cos, sin):
    """Turn pairs (i, i + d/2) of `[B, T, H, d]`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def forward(config, tensors, input_ids, angles, scaling, masks=None, routed=False):
    """Logits `[B, T, V]`, the masks used as two lists over layers, and the closest decision.

    Args:
        config: A dict with Hugging Face's keys; `windows` has the sliding window of each layer.
        tensors: Weights (and routers, if `routed`) by name.
        input_ids: `[B, T]`.
        angles: Inverse frequencies `[d/2]`.
        scaling: Factor on cos and sin.
        masks: (attention, ffn), each bool `[layers, B, T, groups]`; None: everything runs.
        routed: Take the masks from the routers' argmax.
    """
    rows, length = input_ids.shape
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d, eps = config["head_dim"], config["rms_norm_eps"]
    turns = torch.arange(length).double()[:, None] * angles.double()[None, :]
    cos = (turns.cos() * scaling).float()[None, :, None, :]
    sin = (turns.sin() * scaling).float()[None, :, None, :]
    position = torch.arange(length)

    def linear(x, name):
        y = x @ tensors[name + ".weight"].T
        return y + tensors[name + ".bias"] if name + ".bias" in tensors else y

    def decide(x, name):
        logits = linear(linear(x, name + ".compressor"), name + ".router")
        margin = logits.reshape(rows, length, -1, 2).diff(dim=-1)[..., 0]  # skip minus run
        closest.append(margin.abs().min().item())
        return margin <= 0

    closest = [float("inf")]
    x = tensors["model.embed_tokens.weight"][input_ids]
    used_attention, used_ffn = [], []
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        mask = decide(x, layer + "router_attention") if routed else None
        mask = masks[0][i] if masks is not None else mask
        used_attention.append(mask)
        normed = rms_norm(x, tensors[layer + "input_layernorm.weight"], eps)
        q = linear(normed, layer + "self_attn.q_proj").reshape(rows, length, heads, d)
        k = linear(normed, layer + "self_attn.k_proj").reshape(rows, length, kv_heads, d)
        v = linear(normed, layer + "self_attn.v_proj").reshape(rows, length, kv_heads, d)
        if layer + "self_attn.q_norm.weight" in tensors:
            q = rms_norm(q, tensors[layer + "self_attn.q_norm.weight"], eps)
            k = rms_norm(k, tensors[layer + "self_attn.k_norm.weight"], eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        seen = position[None, :] <= position[:, None]
        if config["windows"][i] is not None:
            seen &= position[None, :] > position[:, None] - config["windows"][i]
        outputs = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = q[:, :, head] @ k[:, :, kv].transpose(1, 2) / d**0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out = weights @ v[:, :, kv]
            if mask is not None:
                out = out * mask[:, :, head // (heads // mask.shape[-1]), None]
            outputs.append(out)
        x = x + linear(torch.cat(outputs, dim=-1), layer + "self_attn.o_proj")

        mask = decide(x, layer + "router_ffn") if routed else None
        mask = masks[1][i] if masks is not None else mask
        used_ffn.append(mask)
        normed = rms_norm(x, tensors[layer + "post_attention_layernorm.weight"], eps)
        gate, up = linear(normed, layer + "mlp.gate_proj"), linear(normed, layer + "mlp.up_proj")
        inner = gate * torch.sigmoid(gate) * up
        if mask is not None:
            inner = inner * mask.repeat_interleave(inner.shape[-1] // mask.shape[-1], dim=-1)
        x = x + linear(inner, layer + "mlp.down_proj")
    x = rms_norm(x, tensors["model.norm.weight"], eps)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return x @ head.T, (used_attention, used_ffn), min(closest)
