"""`wide check` refuses what would be worthless to train on."""

import shutil

import numpy as np
import pytest
import safetensors.numpy

from wide_jax.cli import check
from wide_jax.cli.main import main


@pytest.fixture
def broken(model_folder, tmp_path):
    """A function that copies the model with one tensor changed."""

    def change(name, edit):
        folder = tmp_path / "broken"
        shutil.copytree(model_folder, folder)
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        tensors[name] = edit(tensors[name])
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder

    return change


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (np.zeros_like, "all zeros"),
        (lambda x: np.full_like(x, np.nan), "NaN or infinity"),
        (lambda x: x * 1e6, "RMS"),
        (lambda x: x[:-1], "shape"),
    ],
)
def test_bad_tensors_are_named(broken, edit, words, capsys):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = broken(name, edit)
    assert main(["check", "--model", str(folder), "--no-perplexity"]) == 1
    error = capsys.readouterr().err
    assert name in error
    assert words in error


def test_untrained_weights_pass_the_files_but_not_the_perplexity(model_folder, capsys, monkeypatch):
    monkeypatch.setattr(check, "_has_torch", lambda: False)
    assert main(["check", "--model", str(model_folder), "--no-perplexity"]) == 0
    assert main(["check", "--model", str(model_folder), "--windows", "1"]) == 1
    captured = capsys.readouterr()
    assert "no reference run" in captured.out
    assert "expected 1.5 to 150" in captured.err
