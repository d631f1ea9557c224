"""`wide convert` from the command line; `tests/wide_jax/hf` tests what it writes."""

import safetensors.numpy

from wide_jax.cli.main import main


def test_convert_shards_and_back_is_bit_equal(model_folder, tmp_path, capsys):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    assert main(["convert", str(model_folder), str(parts), "--shard-bytes", "60000"]) == 0
    assert len(list(parts.glob("*.safetensors"))) > 1
    assert main(["convert", str(parts), str(whole)]) == 0
    original = safetensors.numpy.load_file(model_folder / "model.safetensors")
    again = safetensors.numpy.load_file(whole / "model.safetensors")
    assert {name: array.tobytes() for name, array in original.items()} == {
        name: array.tobytes() for name, array in again.items()
    }
    assert main(["convert", str(parts), str(whole)]) == 1
    assert "whole" in capsys.readouterr().err
