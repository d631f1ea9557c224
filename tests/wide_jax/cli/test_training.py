"""`wide calibrate`, `wide recover` and `wide export`, one after the other, on a tiny model."""

import json
import warnings

import numpy as np
import pytest
import safetensors.numpy

from wide_jax.cli.main import main


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    monkeypatch.setenv("WIDE_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("wide_jax.cli.start.keep_compiled_programs", lambda console: None)


def test_calibrate_recover_export(model_folder, text_file, tmp_path, capsys):
    data = ["--data", str(text_file), "--updates", "2", "--sequences-per-update", "1"]
    sizes = ["--sequence-length", "32", "--logits-chunk", "32", "--threshold-rows", "2"]
    first, second, target = tmp_path / "first", tmp_path / "second", tmp_path / "exported"
    model = ["--model", str(model_folder), "--ffn-group-size", "8"]
    code = main(["calibrate", *model, *data, *sizes, "--log-every", "1", "--out", str(first)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "tokenising ..." in printed.out
    [line] = [line for line in printed.out.splitlines() if line.startswith("update 2: loss")]
    parts = ("budget", "sampled masks skip attention", "argmax attention", "parameters", "FLOPs")
    for part in (*parts, "bytes", "temperature", "rate", "gradient", "tokens/s"):
        assert part in line
    assert main(["recover", "--run", str(first), *data, *sizes, "--out", str(second)]) == 0
    assert (second / "model" / "adapter_model.safetensors").exists()
    capsys.readouterr()

    assert main(["export", str(first), str(target)]) == 0
    for file in ("model.safetensors", "config.json"):  # stage 1 leaves the base alone
        assert (target / file).read_bytes() == (model_folder / file).read_bytes()
    assert main(["export", str(second), str(target)]) == 1
    assert "exported" in capsys.readouterr().err  # never overwritten unasked

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="merging the LoRA changes the weights")
        assert main(["export", str(second), str(target), "--overwrite"]) == 0
    assert "dense mode is another model" in " ".join(capsys.readouterr().out.split())
    merged = safetensors.numpy.load_file(target / "model.safetensors")
    base = safetensors.numpy.load_file(model_folder / "model.safetensors")
    assert set(merged) == set(base)
    assert any(not np.array_equal(merged[name], base[name]) for name in base)
    assert json.loads((target / "wide_config.json").read_text())["format_version"] == 1
    figures, drawing = tmp_path / "errors.json", tmp_path / "errors.svg"
    errors = ["eval", "errors", "--model", str(target), "--data", str(text_file)]
    more = ["--window", "32", "--max-windows", "2", "--json", str(figures), "--plot", str(drawing)]
    record = tmp_path / "errors.jsonl"
    assert main([*errors, *more, "--record", str(record)]) == 0
    assert len(json.loads(figures.read_text())["layers"]["stream"]["error"]) == 2
    assert "<svg" in drawing.read_text()
    assert main(["report", str(record), "--out", str(tmp_path / "report")]) == 0
    shown = json.loads((tmp_path / "report" / "figures" / "layers-error-0.json").read_text())
    [stream] = [line for line in shown["series"] if line["name"] == "stream"]
    assert [point["y"] for point in stream["points"]] == json.loads(figures.read_text())["layers"][
        "stream"
    ]["error"]
    assert main(["generate", "--model", str(target), "--prompt", "a", "--max-new-tokens", "2"]) == 0


def test_implausible_weights_are_refused_before_training(model_folder, text_file, tmp_path, capsys):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    tensors = safetensors.numpy.load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = np.nan
    safetensors.numpy.save_file(tensors, broken / "model.safetensors")
    out = tmp_path / "out"
    code = main(["calibrate", "--model", str(broken), "--data", str(text_file), "--out", str(out)])
    assert code == 1
    assert "model.norm.weight" in capsys.readouterr().err
    assert not out.exists()
