import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from tests.wide_jax.hf.conftest import random_tensors
from wide_jax.hf.load import CheckpointError, load_weights
from wide_jax.hf.mapping import expected_tensors
from wide_jax.hf.safetensors_file import SafetensorsError, read_header, write_file

Q0 = "model.layers.0.self_attn.q_proj.weight"


def save_sharded(folder, weights, cut):
    """Two shards with their index; `cut` tensors go into the first."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = list(weights)
    files = {
        "model-00001-of-00002.safetensors": names[:cut],
        "model-00002-of-00002.safetensors": names[cut:],
    }
    for file, part in files.items():
        safetensors.numpy.save_file({n: weights[n] for n in part}, folder / file)
    where = {name: file for file, part in files.items() for name in part}
    write_index(folder, where)
    return where


def write_index(folder, where):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def problems_of(folder, config):
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder, config)
    assert str(folder) in str(caught.value)
    return caught.value.problems


def assert_equal(loaded, weights):
    assert set(loaded) == set(weights)
    for name, array in weights.items():
        assert loaded[name].dtype == array.dtype, name
        np.testing.assert_array_equal(np.asarray(loaded[name]), array, err_msg=name)


def test_single_file_is_loaded_bit_by_bit(folder, config, weights):
    seen = []
    loaded = load_weights(folder, config, progress=lambda done, total: seen.append((done, total)))
    assert_equal(loaded, weights)
    assert list(loaded) == list(expected_tensors(config))
    total = sum(w.nbytes for w in weights.values())
    assert len(seen) == len(weights)
    assert seen[-1] == (total, total)


def test_shards_give_the_same(folder, config, weights):
    save_sharded(folder, weights, 7)
    assert_equal(load_weights(folder, config), weights)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_kept_or_converted(folder, config, dtype):
    weights = random_tensors(expected_tensors(config), dtype)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    assert_equal(load_weights(folder, config), weights)
    wanted = {name: array.astype(np.float32) for name, array in weights.items()}
    assert_equal(load_weights(folder, config, dtype=jnp.float32), wanted)


def test_every_problem_is_reported_together(folder, config, weights):
    del weights["model.norm.weight"]
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1]
    weights[Q0] = weights[Q0].astype(np.int8)
    weights["model.layers.2.mlp.up_proj.weight"] = np.zeros((80, 72), np.float32)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    problems = "\n".join(problems_of(folder, config))
    assert len(problems.splitlines()) == 4
    for pattern in (
        r"model\.norm\.weight is missing, expected shape \[72\]",
        r"model\.safetensors: lm_head\.weight has shape \[95, 72\], expected \[96, 72\]",
        re.escape(f"model.safetensors: {Q0} has dtype I8, expected one of F32, BF16, F16"),
        r"model\.layers\.2\.mlp\.up_proj\.weight \[80, 72\] is not a tensor of this model",
    ):
        assert re.search(pattern, problems), pattern


def test_case_A6_bias_in_the_file_with_the_flag_false(folder, config, weights):
    weights["model.layers.1.mlp.down_proj.bias"] = np.zeros(72, np.float32)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    (problem,) = problems_of(folder, config)
    assert "model.layers.1.mlp.down_proj.bias is in the file" in problem
    assert "mlp_bias" in problem


def test_tied_head_may_be_stored_when_equal(folder, config, weights):
    import dataclasses

    tied = dataclasses.replace(config, tie_word_embeddings=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    assert "lm_head.weight" not in load_weights(folder, tied)
    weights["lm_head.weight"] = weights["lm_head.weight"] + np.float32(1e-3)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    (problem,) = problems_of(folder, tied)
    assert "lm_head.weight differs from model.embed_tokens.weight" in problem


def test_missing_shard_and_index_quarrels(folder, config, weights):
    where = save_sharded(folder, weights, 7)
    first, second = sorted(set(where.values()))
    (folder / second).unlink()
    problems = problems_of(folder, config)
    assert problems[0].startswith(f"{second}: missing file")
    assert f"{len(weights) - 7} tensors" in problems[0]

    save_sharded(folder, weights, 7)
    extra = {n: weights[n] for n in list(weights)[6:]}
    safetensors.numpy.save_file(extra, folder / second)
    (problem,) = problems_of(folder, config)
    assert "is a duplicate; also in " + first in problem

    where = save_sharded(folder, weights, 7)
    write_index(folder, where | {Q0: second})
    (problem,) = problems_of(folder, config)
    assert f"{Q0} expected there" in problem
    assert f"found in {first}" in problem

    del where[Q0]
    write_index(folder, where)
    (problem,) = problems_of(folder, config)
    assert f"{Q0} is not listed" in problem


def test_index_must_stay_in_its_folder(folder, config, weights):
    where = save_sharded(folder, weights, 7)
    write_index(folder, where | {Q0: "../elsewhere.safetensors"})
    (problem,) = problems_of(folder, config)
    assert "outside the folder" in problem
    (folder / "model.safetensors.index.json").write_text("[]")
    (problem,) = problems_of(folder, config)
    assert "weight_map" in problem


def test_no_weights_or_two_kinds(folder, config, weights):
    (folder / "model.safetensors.index.json").write_text("{}")
    (problem,) = problems_of(folder, config)
    assert "both" in problem
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin"):
        load_weights(folder, config)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_files_cut_short_are_found_before_anything_is_read(folder, config, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    problems = problems_of(folder, config)
    assert "cut short" in problems[0]


def test_names_stored_twice_are_refused(tmp_path):
    entry = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b'{"a":' + entry + b',"a":' + entry + b"}"
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(SafetensorsError, match="stored twice: a"):
        read_header(tmp_path / "x")


@pytest.mark.parametrize(
    "index",
    [
        (),
        (slice(2, 5),),
        (slice(None), slice(3, 9)),
        (slice(1, 6), slice(0, 2), slice(1, 3)),
        (slice(4, 4),),
    ],
)
def test_slices_of_a_stored_tensor(tmp_path, monkeypatch, index):
    monkeypatch.setattr("wide_jax.hf.safetensors_file.CHUNK_BYTES", 200)
    array = np.arange(7 * 10 * 4, dtype=np.float32).reshape(7, 10, 4)
    write_file(tmp_path / "x", {"pad": np.ones(3, np.int8), "a": array})
    stored = read_header(tmp_path / "x")["a"]
    np.testing.assert_array_equal(stored.read_slice(index), array[index])
    assert b"".join(chunk.tobytes() for chunk in stored.chunks()) == array.tobytes()


def test_scalar_and_empty_tensors(tmp_path):
    arrays = {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 3), np.float32)}
    write_file(tmp_path / "x", arrays)
    stored = read_header(tmp_path / "x")
    for name, array in arrays.items():
        np.testing.assert_array_equal(stored[name].read(), array)
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "x")["scalar"], 2.5)


@pytest.mark.parametrize("spec", [("x",), (None, "x"), ()], ids=["rows", "columns", "replicated"])
def test_placed_on_eight_devices_reading_only_their_parts(folder, config, weights, spec):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    asked = {}

    def sharding_for(name, shape):
        asked[name] = shape
        fits = len(shape) >= len(spec) and all(n % 8 == 0 for n in shape)
        return NamedSharding(mesh, PartitionSpec(*spec) if fits else PartitionSpec())

    loaded = load_weights(folder, config, sharding_for=sharding_for, dtype=jnp.bfloat16)
    assert asked == expected_tensors(config)
    assert all(len(a.sharding.device_set) == 8 for a in loaded.values())
    part = loaded["lm_head.weight"].addressable_shards[0].data.shape
    assert part == {0: (96, 72), 1: (12, 72), 2: (96, 9)}[len(spec)]
    expected = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()}
    assert_equal(loaded, expected)
