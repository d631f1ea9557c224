import dataclasses
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from wide_jax.hf.config import read_config
from wide_jax.hf.load import CheckpointError, load_weights
from wide_jax.hf.wide_folder import (
    WideConfigError,
    base_folder,
    is_wide_folder,
    load_wide_info,
    load_wide_routers,
    save_wide_model,
    verify_base,
)


@pytest.fixture
def saved(tmp_path, folder, config, wide, routers):
    target = tmp_path / "wide"
    save_wide_model(
        target,
        base=folder,
        config=config,
        wide=wide,
        routers=routers,
        budget="separate",
        targets={"attention": 0.25, "ffn": 0.25},
        training={"updates": 250},
    )
    return target


def edit(folder, **changes):
    path = folder / "wide_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_base_files_are_copied_byte_by_byte_and_routers_come_back(
    saved, folder, config, wide, routers
):
    names = {p.name for p in saved.iterdir()}
    base = {p.name for p in folder.iterdir()}
    assert names == base | {"wide_config.json", "wide_routers.safetensors"}
    for name in base:
        assert (saved / name).read_bytes() == (folder / name).read_bytes()
    assert is_wide_folder(saved)
    assert not is_wide_folder(folder)
    info = load_wide_info(saved)
    assert info.wide == wide
    assert (info.budget, dict(info.targets)) == ("separate", {"attention": 0.25, "ffn": 0.25})
    assert info.training == {"updates": 250}
    loaded = load_wide_routers(saved, config, wide)
    independent = safetensors.numpy.load_file(saved / "wide_routers.safetensors")
    assert set(loaded) == set(independent) == set(routers)
    for name, array in routers.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), array)
        np.testing.assert_array_equal(independent[name], array)
    verify_base(saved, config, info)


def test_the_wide_folder_is_a_dense_model(saved, config, weights):
    assert read_config(saved) == config
    loaded = load_weights(saved, config)
    np.testing.assert_array_equal(
        loaded["model.embed_tokens.weight"], weights["model.embed_tokens.weight"]
    )


def test_a_wide_folder_can_be_the_base_of_another(tmp_path, saved, config, wide, routers):
    other = {name: array + 1 for name, array in routers.items()}
    save_wide_model(tmp_path / "next", base=saved, config=config, wide=wide, routers=other)
    assert load_wide_info(tmp_path / "next").training == {}
    loaded = load_wide_routers(tmp_path / "next", config, wide)
    name = next(iter(routers))
    np.testing.assert_array_equal(loaded[name], other[name])


def test_changed_weights_are_written_and_fingerprinted(
    tmp_path, folder, config, wide, routers, weights
):
    merged = {name: array * 2 for name, array in weights.items()}
    target = tmp_path / "merged"
    info = save_wide_model(
        target, base=folder, config=config, wide=wide, routers=routers, weights=merged
    )
    verify_base(target, config, info)
    assert info.lora == load_wide_info(target).lora == "merged"
    copied = save_wide_model(
        tmp_path / "copy", base=target, config=config, wide=wide, routers=routers
    )
    assert copied == info
    loaded = load_weights(target, config)
    np.testing.assert_array_equal(loaded["lm_head.weight"], merged["lm_head.weight"])
    shutil.copy(folder / "model.safetensors", target / "model.safetensors")
    with pytest.raises(WideConfigError, match="the routers belong to base weights sha256:"):
        verify_base(target, config, info)


def test_only_the_delta(tmp_path, folder, config, wide, routers):
    target = tmp_path / "run"
    save_wide_model(
        target, base=folder, config=config, wide=wide, routers=routers, include_base=False
    )
    assert {p.name for p in target.iterdir()} == {"wide_config.json", "wide_routers.safetensors"}
    assert base_folder(target) == folder.resolve()
    info = load_wide_info(target)
    verify_base(target, config, info)
    folder.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"base\.path"):
        base_folder(target)


def test_never_overwrites_unasked(saved, folder, config, wide, routers):
    arguments = dict(base=folder, config=config, wide=wide, routers=routers)
    with pytest.raises(FileExistsError):
        save_wide_model(saved, **arguments)
    save_wide_model(saved, **arguments, overwrite=True)
    assert load_wide_info(saved).budget is None


def test_wrong_routers_are_refused(tmp_path, saved, folder, config, wide, routers):
    other = dataclasses.replace(wide, router_rank=8)
    with pytest.raises(CheckpointError, match=r"expected \[8, 72\]"):
        save_wide_model(tmp_path / "x", base=folder, config=config, wide=other, routers=routers)
    with pytest.raises(CheckpointError, match=r"expected \[8, 72\]"):
        load_wide_routers(saved, config, other)
    half = {name: array.astype(np.float16) for name, array in routers.items()}
    safetensors.numpy.save_file(half, saved / "wide_routers.safetensors")
    with pytest.raises(CheckpointError, match="dtype F16, expected F32"):
        load_wide_routers(saved, config, wide)
    (saved / "wide_routers.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing file"):
        load_wide_routers(saved, config, wide)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version=2, expected 1"),
        ({"ffn_group_size": 48}, "ffn_group_size=48 must divide"),
        ({"router_rank": "32"}, "router_rank='32', expected a whole number"),
        ({"router_rank": 0}, "router_rank=0"),
        ({"base": None}, "wide_config.json"),
        ({"base": {}}, "fingerprint"),
    ],
)
def test_wide_config_is_validated(saved, changes, message):
    edit(saved, **changes)
    with pytest.raises(WideConfigError, match=message):
        load_wide_info(saved)


def test_wide_config_of_another_model_is_refused(saved, config):
    other = dataclasses.replace(config, hidden_size=144, num_hidden_layers=3)
    with pytest.raises(WideConfigError, match=r"num_hidden_layers=2 \(the model's is 3\)"):
        load_wide_info(saved, other)


def test_missing_wide_config_is_named(folder):
    with pytest.raises(FileNotFoundError, match=r"wide_config\.json is missing"):
        load_wide_info(folder)
