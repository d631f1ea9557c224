import numpy as np
import pytest
import safetensors.numpy

from wide_jax.hf.check import check_folder
from wide_jax.hf.load import CheckpointError
from wide_jax.hf.wide_folder import save_wide_model


def test_a_sound_model_has_no_problems(tmp_path, folder, config, wide, routers):
    seen = []
    assert check_folder(folder, progress=lambda done, total: seen.append((done, total))) == []
    assert seen[-1][0] == seen[-1][1] > 0
    save_wide_model(tmp_path / "wide", base=folder, config=config, wide=wide, routers=routers)
    assert check_folder(tmp_path / "wide") == []
    (tmp_path / "wide" / "wide_routers.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing file"):
        check_folder(tmp_path / "wide")


def test_every_suspicious_tensor_is_named(folder, weights):
    weights["lm_head.weight"][3, 4] = np.nan
    weights["model.layers.0.mlp.up_proj.weight"][:] = 0
    weights["model.layers.1.mlp.up_proj.weight"] *= 1e4
    weights["model.norm.weight"] *= 1e-4
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    problems = check_folder(folder)
    assert len(problems) == 4
    text = "\n".join(problems)
    assert "lm_head.weight holds NaN" in text
    assert "model.layers.0.mlp.up_proj.weight is all zeros" in text
    assert "model.layers.1.mlp.up_proj.weight has RMS" in text
    assert "model.norm.weight has RMS 9.97e-05, expected 0.005 to 300" in text
