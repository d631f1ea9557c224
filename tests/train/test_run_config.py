"""One config from YAML, overrides, the command line and Python."""

import pytest

from train.run_config import (
    FREE,
    CalibrateConfig,
    RecoverConfig,
    differences,
    dump,
    from_dict,
    load,
    parse,
    to_dict,
)


def test_what_is_dumped_loads_as_the_same_config(tmp_path):
    config = CalibrateConfig(
        model="owner/name", data=("a.jsonl", "b.jsonl"), out=tmp_path / "run", sparsity=0.3,
        distill="beside", budget="flops",
    )  # fmt: skip
    dump(config, tmp_path / "config.yaml")
    assert load(CalibrateConfig, tmp_path / "config.yaml") == config
    assert from_dict(CalibrateConfig, to_dict(config)) == config


def test_overrides_win_over_the_file_and_options_over_both(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("sparsity: 0.5\nupdates: 100\ndata: text.jsonl\nlearning_rate: 2e-3\n")
    config = load(CalibrateConfig, file, ["updates=7", "alpha=3", "budget=bytes"])
    assert (config.sparsity, config.updates, config.alpha) == (0.5, 7, 3.0)
    assert isinstance(config.alpha, float)
    assert (config.data, config.learning_rate) == (("text.jsonl",), 2e-3)
    argv = ["--sparsity", "0.25", "--data", "x", "y", "updates=7", "--config", str(file)]
    parsed = parse(CalibrateConfig, argv, prog="wide calibrate")
    assert (parsed.sparsity, parsed.updates, parsed.data) == (0.25, 7, ("x", "y"))
    assert parsed.learning_rate == 2e-3


def test_yaml_reads_off_as_false_and_we_read_it_as_off(tmp_path):
    assert load(CalibrateConfig, None, ["distill=off"]).distill == "off"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sparcity=0.5", r"CalibrateConfig has no settings \['sparcity'\]; it has sparsity"),
        ("updates=many", "updates='many' must be of type int"),
        ("updates=2.5", "updates=2.5 must be of type int"),
        ("updates=true", "updates=True must be of type int"),
        ("remat=1", "remat=1 must be of type bool"),
        ("packing=tight", r"packing='tight' must be one of \('packed'"),
        ("sparsity=x", "sparsity='x' must be of type float"),
        ("updates", "'updates' must be key=value"),
        ("save_every=0", "save_every=0 must be at least 1"),
    ],
)
def test_wrong_overrides_are_refused_by_name(override, message):
    with pytest.raises(ValueError, match=message):
        load(CalibrateConfig, None, [override])


@pytest.mark.parametrize("kind", [CalibrateConfig, RecoverConfig])
def test_help_says_where_settings_can_come_from_and_what_each_is(kind, capsys):
    with pytest.raises(SystemExit):
        parse(kind, ["--help"], prog="wide")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--config FILE" in shown
    assert "key=value" in shown
    assert "Scale by alpha" in shown or kind is CalibrateConfig


def test_a_file_that_is_no_mapping_is_refused(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold `key: value` lines, not a list"):
        load(CalibrateConfig, tmp_path / "list.yaml")


def test_stage_2_defaults_are_the_methods():
    config = RecoverConfig()
    assert (config.lora_rank, config.lora_alpha, config.lora_dropout) == (16, 32.0, 0.1)
    assert config.learning_rate == 2e-4


def test_differences_name_what_decides_the_numbers_and_nothing_else():
    one, other = to_dict(CalibrateConfig()), to_dict(CalibrateConfig(seed=1, remat=True, fsdp=2))
    assert differences(one, other) == ["seed: 0, not 1"]
    assert set(to_dict(CalibrateConfig())) >= FREE
