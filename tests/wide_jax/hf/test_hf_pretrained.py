import dataclasses
import functools
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.wide_jax.hf.conftest import random_tensors
from wide_jax.batch import TokenBatch
from wide_jax.hf.convert import convert
from wide_jax.hf.hub import push_to_hub
from wide_jax.hf.load import CheckpointError, load_weights
from wide_jax.hf.mapping import expected_tensors, is_router
from wide_jax.hf.peft import LoRA, MergeWarning
from wide_jax.hf.pretrained import build, from_pretrained, new_routers, save_pretrained, tensors_of
from wide_jax.hf.wide_folder import save_wide_model
from wide_jax.params import BaseParam, RouterParam
from wide_jax.routing import AllOn, Argmax

IDS = np.arange(10, dtype=np.int32).reshape(2, 5)


def logits(model, routing):
    output = model(TokenBatch.from_lengths(jnp.asarray(IDS)), routing)
    return np.asarray(model.logits(output.hidden), np.float32)


def test_out_and_in_again_is_bit_equal(tmp_path, folder, wide):
    model = from_pretrained(folder, wide=wide, seed=3)
    out = save_pretrained(model, tmp_path / "out", base=folder, targets={"ffn": 0.25})
    again = from_pretrained(out)
    assert again.wide == wide
    before, after = tensors_of(model), tensors_of(again)
    assert set(before) == set(after)
    for name, array in before.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(after[name]), err_msg=name)
    np.testing.assert_array_equal(logits(model, Argmax()), logits(again, Argmax()))
    dense = from_pretrained(out, dense=True)
    assert dense.wide is None
    np.testing.assert_array_equal(logits(dense, AllOn()), logits(from_pretrained(folder), AllOn()))


def test_parameters_keep_their_types_and_routers_are_float32(folder, wide):
    model = from_pretrained(folder, wide=wide, dtype="bfloat16")
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        router = any("router_" in str(part) for part in path)
        assert isinstance(variable, RouterParam if router else BaseParam)
        assert variable[...].dtype == (jnp.float32 if router else jnp.bfloat16)


def test_dense_models_and_changed_weights(tmp_path, folder, weights):
    model = from_pretrained(folder)
    same = save_pretrained(model, tmp_path / "same", base=folder)
    for name in ("model.safetensors", "config.json"):
        assert (same / name).exists()
    model.model.norm.weight[...] = model.model.norm.weight[...] + 1
    changed = save_pretrained(model, tmp_path / "changed", base=folder, weights_changed=True)
    stored = safetensors.numpy.load_file(changed / "model.safetensors")
    np.testing.assert_array_equal(stored["model.norm.weight"], weights["model.norm.weight"] + 1)
    unchanged = safetensors.numpy.load_file(same / "model.safetensors")
    np.testing.assert_array_equal(unchanged["model.norm.weight"], weights["model.norm.weight"])


def test_new_routers_depend_on_the_seed_only(config, wide):
    first, again, other = (new_routers(config, wide, seed=s) for s in (0, 0, 1))
    name = "model.layers.1.router_ffn.compressor.weight"
    np.testing.assert_array_equal(first[name], again[name])
    assert not np.array_equal(first[name], other[name])
    bound = (3 / config.hidden_size) ** 0.5
    assert 0.9 * bound < np.abs(first[name]).max() <= bound
    assert not np.any(first["model.layers.1.router_ffn.compressor.bias"])


def test_tensors_that_do_not_fit_the_module_are_named(folder, config):
    tensors = load_weights(folder, config)
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"missing \['model\.norm\.weight'\]"):
        build(config, None, tensors, dtype=jnp.float32)


def test_wide_and_dense_exclude_each_other(folder, wide):
    with pytest.raises(ValueError, match="one of them"):
        from_pretrained(folder, wide=wide, dense=True)


@pytest.fixture
def lora(config):
    factors = {}
    for name, (out, size) in {
        "model.layers.0.self_attn.q_proj": (144, 72),
        "model.layers.1.mlp.down_proj": (72, 80),
    }.items():
        pair = random_tensors({"A": (2, size), "B": (out, 2)}, seed=out)
        factors[name] = (pair["A"], pair["B"])
    return LoRA(rank=2, alpha=8.0, factors=factors)


def test_an_adapter_beside_the_model_is_merged_on_loading_or_left_out(
    tmp_path, folder, config, wide, routers, weights, lora
):
    out = tmp_path / "wide"
    info = save_wide_model(
        out, base=folder, config=config, wide=wide, routers=routers, adapter=lora
    )
    assert info.lora == "adapter"
    name = "model.layers.0.self_attn.q_proj"
    found = tensors_of(from_pretrained(out))[f"{name}.weight"]
    a, b = lora.factors[name]
    np.testing.assert_allclose(found, weights[f"{name}.weight"] + 4 * b @ a, atol=1e-6)
    plain = tensors_of(from_pretrained(out, adapter=False), lambda n: not is_router(n))
    for key, array in weights.items():
        np.testing.assert_array_equal(np.asarray(plain[key]), array)
    small = dataclasses.replace(lora, alpha=0.01)
    save_wide_model(
        out, base=folder, config=config, wide=wide, routers=routers, adapter=small, overwrite=True
    )
    with pytest.warns(MergeWarning, match="bfloat16 loses"):
        half = tensors_of(from_pretrained(out, dtype="bfloat16"))
    assert half[f"{name}.weight"].dtype == jnp.bfloat16


def test_convert_to_another_dtype_and_back(tmp_path, folder, config, weights):
    half = convert(folder, tmp_path / "half", dtype="bfloat16", shard_bytes=20_000)
    assert (half / "model.safetensors.index.json").exists()
    full = convert(half, tmp_path / "full", dtype="float32")
    loaded = load_weights(full, config)
    assert set(loaded) == set(expected_tensors(config))
    for name, array in loaded.items():
        rounded = np.asarray(jnp.asarray(weights[name], jnp.bfloat16), np.float32)
        np.testing.assert_array_equal(np.asarray(array), rounded)
    with pytest.raises(ValueError, match="float8"):
        convert(folder, tmp_path / "x", dtype="float8")
    with pytest.raises(FileExistsError):
        convert(folder, full)


class RecordingApi:
    """Stands for `huggingface_hub.HfApi`: records what would be uploaded."""

    calls: ClassVar[list] = []

    def __init__(self, token):
        self.commit = type("Commit", (), {"commit_url": "address"})

    def create_repo(self, repo_id, **options):
        self.calls.append((repo_id, options))

    def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
        assert ignore_patterns == ["adapter_config.json"]
        self.calls.append((repo_id, folder_path))
        return self.commit

    def upload_file(self, *, repo_id, path_in_repo, path_or_fileobj, commit_message):
        self.calls.append((path_in_repo, json.loads(path_or_fileobj)))
        return self.commit


@pytest.fixture
def uploads(monkeypatch):
    RecordingApi.calls.clear()
    monkeypatch.setattr("huggingface_hub.HfApi", RecordingApi)
    return RecordingApi.calls


def test_only_whole_models_are_pushed(tmp_path, folder, config, wide, routers, uploads):
    save = functools.partial(save_wide_model, config=config, wide=wide, routers=routers)
    out = tmp_path / "wide"
    save(out, base=folder)
    assert push_to_hub(out, "me/model") == "address"
    assert uploads == [("me/model", {"private": True, "exist_ok": True}), ("me/model", out)]
    (out / "wide_routers.safetensors").unlink()
    with pytest.raises(CheckpointError):
        push_to_hub(out, "me/model")
    save(tmp_path / "delta", base=folder, include_base=False)
    with pytest.raises(ValueError, match="export it with the base"):
        push_to_hub(tmp_path / "delta", "me/model")
    assert len(uploads) == 2


def test_a_pushed_adapter_names_the_repository_as_its_base(
    tmp_path, folder, config, wide, routers, lora, uploads
):
    out = tmp_path / "wide"
    save_wide_model(out, base=folder, config=config, wide=wide, routers=routers, adapter=lora)
    here = json.loads((out / "adapter_config.json").read_text())
    assert here["base_model_name_or_path"] == str(out)
    push_to_hub(out, "me/model")
    assert uploads[-1] == ("adapter_config.json", here | {"base_model_name_or_path": "me/model"})


def test_placed_by_a_sharding(folder, wide):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = from_pretrained(folder, wide=wide, sharding_for=lambda name, shape: sharding)
    assert all(len(array.sharding.device_set) == 8 for array in tensors_of(model).values())
