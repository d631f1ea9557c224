import dataclasses
import json
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from wide_jax.hf.config import read_config
from wide_jax.hf.load import CheckpointError, find_weights, load_weights
from wide_jax.hf.save import atomic_folder, fingerprint, save_model


def read_independently(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_out_is_bit_equal_for_an_independent_reader(tmp_path, folder, config, weights):
    device = load_weights(folder, config)
    out = save_model(tmp_path / "out", config, device, files_from=folder)
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in folder.iterdir())
    assert_same(read_independently(out), weights)
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert_same(load_weights(out, read_config(out)), weights)


def test_shards_with_an_index(tmp_path, folder, config, weights):
    limit = 30_000
    out = save_model(tmp_path / "out", config, weights, shard_bytes=limit)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    for file in files:
        tensors = safetensors.numpy.load_file(file)
        assert all(index["weight_map"][name] == file.name for name in tensors)
        assert sum(t.nbytes for t in tensors.values()) <= limit or len(tensors) == 1
    assert_same(read_independently(out), weights)
    assert_same(load_weights(out, read_config(out)), weights)


def test_bfloat16_is_written_and_config_says_so(tmp_path, folder, config, weights):
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()}
    out = save_model(tmp_path / "out", config, half, files_from=folder)
    assert_same(read_independently(out), half)
    assert read_config(out) == dataclasses.replace(config, dtype="bfloat16")


def test_config_of_another_model_is_not_mixed_in(tmp_path, folder, config, weights):
    other = dataclasses.replace(config, rms_norm_eps=1e-3)
    with pytest.raises(ValueError, match="rms_norm_eps"):
        save_model(tmp_path / "out", other, weights, files_from=folder)
    assert not (tmp_path / "out").exists()


def test_wrong_names_and_shapes_are_reported_together(tmp_path, config, weights):
    del weights["model.norm.weight"]
    weights["extra"] = np.zeros(1, np.float32)
    weights["lm_head.weight"] = weights["lm_head.weight"].T
    with pytest.raises(CheckpointError) as caught:
        save_model(tmp_path / "out", config, weights)
    assert len(caught.value.problems) == 3
    assert list(tmp_path.iterdir()) == []


def test_never_overwrites_unasked(tmp_path, config, weights):
    target = tmp_path / "out"
    save_model(target, config, weights)
    with pytest.raises(FileExistsError, match="exists"):
        save_model(target, config, weights)
    changed = {name: array + 1 for name, array in weights.items()}
    save_model(target, config, changed, overwrite=True)
    assert_same(read_independently(target), changed)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_only_models_are_overwritten(tmp_path, config, weights):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="does not look like a model"):
        save_model(tmp_path / "home", config, weights, overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "mine"


def test_an_empty_folder_is_no_hindrance(tmp_path, config, weights):
    (tmp_path / "out").mkdir()
    save_model(tmp_path / "out", config, weights)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_failure_leaves_the_old_model_and_no_litter(tmp_path, config, weights):
    target = save_model(tmp_path / "out", config, weights)
    before = (target / "model.safetensors").read_bytes()

    def fail():
        with atomic_folder(target, overwrite=True) as fresh:
            (fresh / "config.json").write_text("{}")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert (target / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_rights_of_the_folder_follow_the_umask(tmp_path):
    with atomic_folder(tmp_path / "out"):
        pass
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask


def test_fingerprint_is_of_the_weights_not_of_the_files(tmp_path, folder, config, weights):
    of_arrays = fingerprint(weights)
    assert of_arrays.startswith("sha256:")
    assert fingerprint(dict(reversed(weights.items()))) == of_arrays
    assert fingerprint(find_weights(folder, config)) == of_arrays
    assert fingerprint({name: jnp.asarray(array) for name, array in weights.items()}) == of_arrays
    out = save_model(tmp_path / "out", config, weights, shard_bytes=30_000)
    assert fingerprint(find_weights(out, config)) == of_arrays
    changed = weights | {"model.norm.weight": weights["model.norm.weight"] + np.float32(1e-3)}
    assert fingerprint(changed) != of_arrays
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()}
    assert fingerprint(half) != of_arrays


def test_fingerprint_as_documented():
    import hashlib

    array = np.array([[1, 2]], np.float32)
    text = b"a F32 [1, 2]\n" + array.tobytes() + b"b BF16 [1]\n" + b"\x80\x3f"
    found = fingerprint({"b": np.ones(1, ml_dtypes.bfloat16), "a": array})
    assert found == "sha256:" + hashlib.sha256(text).hexdigest()
