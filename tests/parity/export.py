"""The project's side of the parity check: exported folders and JAX's numbers for every case.

    python -m tests.parity.export FOLDER

Runs in the project's environment. Per case, `FOLDER/CASE` gets `base` (three shards, written with
the safetensors library), `wide` (routers beside it), `adapter` (a LoRA beside it), `merged` (the
same LoRA merged), `again` (`wide` loaded and saved with its weights written anew) and `jax.npz`.
"""

import functools
import json
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from tests.parity import cases
from wide_jax.batch import TokenBatch
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.generate import generate
from wide_jax.hf.config import read_config
from wide_jax.hf.load import find_weights
from wide_jax.hf.mapping import expected_router_tensors, expected_tensors
from wide_jax.hf.peft import LoRA, MergeWarning, merge
from wide_jax.hf.pretrained import from_pretrained, save_pretrained
from wide_jax.hf.wide_folder import save_wide_model
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Argmax, Forced, Masks, Routing


def export_case(case: str, folder: Path) -> None:
    """Write everything of one case."""
    config = write_base(case, folder / "base")
    heads, channels = cases.group_sizes(case)
    wide = WideConfig.for_model(
        config, attn_group_size=heads, ffn_group_size=channels, router_rank=cases.RANK
    )
    routers = random_of(case, expected_router_tensors(config, wide))
    save = functools.partial(
        save_wide_model, base=folder / "base", config=config, wide=wide, routers=routers
    )
    save(folder / "wide")
    lora = random_lora(case, config)
    save(folder / "adapter", adapter=lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MergeWarning)  # that is what is measured here
        merged = merge(find_weights(folder / "base", config), lora, config)
        save(folder / "merged", weights=merged)
    model = from_pretrained(folder / "wide")
    save_pretrained(model, folder / "again", base=folder / "wide", weights_changed=True)

    attention, ffn = (tuple(map(jnp.asarray, mask)) for mask in cases.random_masks(case))
    routed, masks = forward(model, case, Argmax())
    half = forward(from_pretrained(folder / "wide", dtype="bfloat16"), case, AllOn())[0]
    arrays = {
        "logits": forward(model, case, AllOn())[0],
        "logits_bfloat16": np.float32(half),
        "masked_logits": forward(model, case, Forced(Masks(attention, ffn)))[0],
        "routed_logits": routed,
        "routed_attention": np.stack(masks.attention),
        "routed_ffn": np.stack(masks.ffn),
        "merged_logits": forward(from_pretrained(folder / "merged"), case, AllOn())[0],
        "adapter_logits": forward(from_pretrained(folder / "adapter"), case, AllOn())[0],
    }
    if "dynamic" not in case:  # its angles depend on the length, a cache keeps the keys' first ones
        prompts = cases.input_ids(case)[:, : cases.TOKENS // 2].tolist()
        made = generate(
            model, prompts, max_new_tokens=cases.NEW_TOKENS, routing=AllOn(), stop_ids=()
        )
        arrays["greedy"] = made.tokens
    np.savez(folder / "jax.npz", **{name: np.asarray(array) for name, array in arrays.items()})


def write_base(case: str, folder: Path) -> ModelConfig:
    """A Hugging Face folder in three shards, written without the project's code."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(cases.CASES[case]))
    config = read_config(folder)
    weights = list(random_of(case, expected_tensors(config)).items())
    where = {}
    for number in (1, 2, 3):
        file = f"model-{number:05d}-of-00003.safetensors"
        part = dict(weights[number - 1 :: 3])
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(array.nbytes for _, array in weights)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return config


def random_lora(case: str, config: ModelConfig) -> LoRA:
    """An adapter on all seven linear maps of every layer, of a size that changes logits clearly."""
    factors = {}
    for name, shape in expected_tensors(config).items():
        if "_proj.weight" in name:
            module = name.removesuffix(".weight")
            a = cases.random_tensor(case, f"{module}/lora_A", (3, shape[1]))
            b = cases.random_tensor(case, f"{module}/lora_B", (shape[0], 3))
            factors[module] = (a, b)
    return LoRA(rank=3, alpha=6.0, factors=factors)


def random_of(case: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The case's random tensors of the given names and shapes."""
    return {name: cases.random_tensor(case, name, shape) for name, shape in shapes.items()}


@functools.partial(jax.jit, static_argnums=0)
def run(graphdef, state, ids, routing):
    """Logits and masks of a forward pass without a cache."""
    model = nnx.merge(graphdef, state)
    output = model(TokenBatch.from_lengths(ids), routing)
    return model.logits(output.hidden), output.masks


def forward(model: WideForCausalLM, case: str, routing: Routing):
    """`run` on the case's tokens at full precision."""
    with jax.default_matmul_precision("highest"):
        return run(*nnx.split(model), jnp.asarray(cases.input_ids(case), jnp.int32), routing)


if __name__ == "__main__":
    for name in cases.CASES:
        export_case(name, Path(sys.argv[1]) / name)
        print(f"exported {name}", flush=True)
