"""Write the golden arrays of `tests/golden/` with torch and transformers.

    python -m tests.parity.make_golden [FOLDER]

Runs in the environment of `make parity`, never in the project's own (which has no torch).
Beside the arrays, `configs_*.json` has every case's `config.json` as transformers itself writes it.
Every array of a case: `logits` (transformers, float32), `logits_bfloat16` (its bits, as
uint16), `greedy` (new tokens),
`masked_logits` (random masks) and `routed_logits` with the masks `routed_attention`, `routed_ffn`
(routers' argmax), the last three from the plain torch restatement.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from tests.parity import cases, restatement

GOLDEN = Path(__file__).parents[1] / "golden"
MARGIN = 5e-4  # no greedy choice may be closer than this, or rounding could decide it
ROUTER_MARGIN = 2e-4  # and no routing decision closer than this


def make_all(folder: Path) -> None:
    """Every case's arrays and the RoPE frequencies, into `folder`."""
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases.CASES:
        np.savez_compressed(folder / f"{case}.npz", **make_case(case))
        print(f"{case}: done", flush=True)
    np.savez_compressed(folder / "rope.npz", **make_ropes())
    spelling = "".join(transformers.__version__.split(".")[:2])
    configs = {case: saved_config(case) for case in cases.CASES}
    text = json.dumps(configs, indent=1, sort_keys=True) + "\n"
    (folder / f"configs_{spelling}.json").write_text(text)


def make_case(case: str) -> dict[str, np.ndarray]:
    """The golden arrays of one case."""
    raw, ids = cases.CASES[case], torch.from_numpy(cases.input_ids(case))
    with tempfile.TemporaryDirectory() as scratch:
        model = hf_model(case, Path(scratch))
        with torch.no_grad():
            logits = model(ids).logits
            half = hf_model(case, Path(scratch), torch.bfloat16)(ids).logits
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        if raw["tie_word_embeddings"]:
            del tensors["lm_head.weight"]
        config = raw | {"windows": windows(raw)}
        angles, scaling = rope_of(model, cases.TOKENS)
        with torch.no_grad():
            ours, _, _ = restatement.forward(config, tensors, ids, angles, scaling)
            difference = (ours - logits).abs().max().item()
            assert difference < 1e-4, f"{case}: restatement differs from transformers: {difference}"
            masks = tuple(torch.from_numpy(mask) for mask in cases.random_masks(case))
            masked, _, _ = restatement.forward(config, tensors, ids, angles, scaling, masks)
            tensors |= routers(case)
            routed, used, closest = restatement.forward(
                config, tensors, ids, angles, scaling, routed=True
            )
        assert closest > ROUTER_MARGIN, f"{case}: a routing decision is too close: {closest}"
    return {
        "logits": logits.numpy(),
        "logits_bfloat16": half.view(torch.uint16).numpy(),
        "greedy": greedy(model, ids, logits).numpy(),
        "masked_logits": masked.numpy(),
        "routed_logits": routed.numpy(),
        "routed_attention": torch.stack(used[0]).numpy(),
        "routed_ffn": torch.stack(used[1]).numpy(),
    }


def hf_model(case: str, folder: Path, dtype: torch.dtype = torch.float32):
    """transformers' model of a case, loaded from files with the case's weights."""
    folder = folder / "model"
    if not folder.exists():
        folder.mkdir()
        raw = cases.CASES[case]
        (folder / "config.json").write_text(json.dumps(raw))
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
        if raw["tie_word_embeddings"]:
            shapes.pop("lm_head.weight", None)
        tensors = {
            name: torch.from_numpy(cases.random_tensor(case, name, tuple(meta.shape)))
            for name, meta in shapes.items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype
    )
    return model.eval()


def saved_config(case: str) -> dict:
    """`config.json` as this transformers writes it itself."""
    with tempfile.TemporaryDirectory() as scratch:
        hf_model(case, Path(scratch)).save_pretrained(Path(scratch) / "saved")
        return json.loads((Path(scratch) / "saved" / "config.json").read_text())


def windows(raw: dict) -> list[int | None]:
    """The sliding window of each layer, by what transformers' config classes say."""
    layers = range(raw["num_hidden_layers"])
    if raw["model_type"] == "mistral":
        return [raw["sliding_window"] for _ in layers]
    if not raw.get("use_sliding_window"):
        return [None for _ in layers]
    types = raw.get("layer_types") or [
        "sliding_attention" if i >= raw["max_window_layers"] else "full_attention" for i in layers
    ]
    return [raw["sliding_window"] if t == "sliding_attention" else None for t in types]


def rope_of(model, length: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and scaling as the model has them for `length` tokens."""
    rotary = model.model.rotary_emb
    rotary(torch.zeros(1, length, 1), torch.arange(length)[None])
    return rotary.inv_freq, rotary.attention_scaling


def greedy(model, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """New tokens by argmax over full forward passes (no cache), `[rows, NEW_TOKENS]`."""
    prompt = ids[:, : cases.TOKENS // 2]
    row = prompt
    for _ in range(cases.NEW_TOKENS):
        with torch.no_grad():
            best = model(row).logits[:, -1].topk(2)
        gap = (best.values[:, 0] - best.values[:, 1]).min().item()
        assert gap > MARGIN, f"a greedy choice is closer than {MARGIN}: {gap}; change the weights"
        row = torch.cat([row, best.indices[:, :1]], dim=1)
    return row[:, prompt.shape[1] :]


def routers(case: str) -> dict[str, torch.Tensor]:
    """Random router tensors of a case."""
    raw, (heads, channels) = cases.CASES[case], cases.group_sizes(case)
    groups = {
        "attention": raw["num_attention_heads"] // heads,
        "ffn": raw["intermediate_size"] // channels,
    }
    tensors = {}
    for layer in range(raw["num_hidden_layers"]):
        for module, count in groups.items():
            prefix = f"model.layers.{layer}.router_{module}."
            shapes = {
                "compressor.weight": (cases.RANK, raw["hidden_size"]),
                "compressor.bias": (cases.RANK,),
                "router.weight": (2 * count, cases.RANK),
                "router.bias": (2 * count,),
            }
            for name, shape in shapes.items():
                array = cases.random_tensor(case, prefix + name, shape)
                tensors[prefix + name] = torch.from_numpy(array)
    return tensors


def make_ropes() -> dict[str, np.ndarray]:
    """Inverse frequencies (float32) and scaling of well-known models, by transformers."""
    arrays = {}
    for name, (head_dim, entries, length) in cases.ROPES.items():
        config = transformers.LlamaConfig(
            hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, **entries
        )
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        rotary(torch.zeros(1, 1, 1), torch.tensor([[length - 1]]))
        arrays[name] = rotary.inv_freq.numpy()
        arrays[f"{name}/scaling"] = np.float64(rotary.attention_scaling)
    return arrays


if __name__ == "__main__":
    make_all(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
