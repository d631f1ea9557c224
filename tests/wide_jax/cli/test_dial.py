"""`wide dial` meets its target on the text, stores it, and takes it back."""

import json

import numpy as np
import pytest
from rich.console import Console

from pallas_kernels._common.device import H200
from wide_jax.cli.dial import parse_targets
from wide_jax.cli.main import main
from wide_jax.cli.models import load_model
from wide_jax.config import WideConfig
from wide_jax.dial import CLOSE, MOST, Goal, meet
from wide_jax.generate import generate
from wide_jax.hf.config import read_config
from wide_jax.hf.pretrained import from_pretrained, save_pretrained, sparsity_hints
from wide_jax.hf.wide_folder import load_wide_info, set_thresholds
from wide_jax.kernels import SparsityHints
from wide_jax.routing import MODULES

TARGETS = {"attention": 0.3, "ffn": 0.35}  # of a training, as the folder has them


@pytest.fixture
def wide_folder(model_folder, tmp_path):
    wide = WideConfig.for_model(read_config(model_folder), ffn_group_size=8)
    model = from_pretrained(model_folder, wide=wide, seed=3)
    return save_pretrained(model, tmp_path / "wide", base=model_folder, targets=TARGETS)


def evaluated(folder, text_file, tmp_path):
    """Perplexity's accounting of the same windows, by another command."""
    file = tmp_path / "figures.json"
    options = ["--window", "64", "--max-windows", "16", "--json", str(file)]
    assert main(["eval", "ppl", "--data", str(text_file), "--model", str(folder), *options]) == 0
    return json.loads(file.read_text())["accounting"]


def dial(folder, text_file, *options):
    shared = ["--data", str(text_file), "--window", "64", "--windows", "16"]
    return main(["dial", "--model", str(folder), *shared, *options])


def test_a_target_is_met_stored_and_taken_back(wide_folder, text_file, tmp_path):
    untouched = evaluated(wide_folder, text_file, tmp_path)
    assert abs(untouched["flops"] - 0.25) > 0.02
    assert dial(wide_folder, text_file, "--target", "flops=0.25") == 0
    dialled = evaluated(wide_folder, text_file, tmp_path)
    assert abs(dialled["flops"] - 0.25) < 0.01
    stored = json.loads((wide_folder / "wide_config.json").read_text())
    assert stored["attention_threshold"] == stored["ffn_threshold"] != 0
    for module in MODULES:
        assert stored["rates"][module] == pytest.approx(dialled[module], abs=1e-6)
    # A second dial starts from the first one's thresholds, and modules can be set apart.
    assert dial(wide_folder, text_file, "--target", "attention=0.6", "ffn=0.2") == 0
    apart = evaluated(wide_folder, text_file, tmp_path)
    assert abs(apart["attention"] - 0.6) < 0.02
    assert abs(apart["ffn"] - 0.2) < 0.02
    assert main(["dial", "--model", str(wide_folder), "--reset"]) == 0
    assert evaluated(wide_folder, text_file, tmp_path) == untouched


def generated(folder):
    """What masks skip of two prompts and of what follows them, as fractions by phase and module."""
    prompts = [[7 * n % 256 + 3 for n in range(count)] for count in (40, 25)]
    result = generate(from_pretrained(folder), prompts, max_new_tokens=16, stop_ids=())
    found = {}
    for phase, used in (("prefill", result.prefill_usage), ("decode", result.decode_usage)):
        assert used is not None  # the folder has routers
        groups = {"attention": used.attn_groups, "ffn": used.ffn_groups}
        for module in MODULES:
            skipped = np.asarray(getattr(used, module), np.float64)
            pairs = float(used.tokens) * groups[module] * len(skipped)
            found[phase, module] = skipped.sum() / pairs
    return found


def test_generate_skips_what_was_dialled(wide_folder, text_file):
    untouched = generated(wide_folder)
    assert all(0.3 < rate < 0.7 for rate in untouched.values())
    for goal, sign in ((0.9, 1), (0.1, -1)):  # a higher threshold skips more, a lower one less
        assert dial(wide_folder, text_file, "--target", f"attention={goal}", f"ffn={goal}") == 0
        wide = load_wide_info(wide_folder).wide
        assert sign * wide.attention_threshold > 0
        assert sign * wide.ffn_threshold > 0
        for (phase, module), rate in generated(wide_folder).items():
            assert sign * (rate - untouched[phase, module]) > 0.2, (phase, module, rate)
            assert abs(rate - goal) < 0.15, (phase, module, rate)  # another text: about as much
    assert main(["dial", "--model", str(wide_folder), "--reset"]) == 0
    assert generated(wide_folder) == untouched


def test_kernels_are_told_the_rates_that_were_dialled(wide_folder, text_file, monkeypatch):
    """As generate loads a model and as the commands do, `wide bench e2e` among them."""

    def hints():
        with monkeypatch.context() as patched:
            patched.setattr("wide_jax.engine.current_device", lambda: H200)
            patched.setattr("wide_jax.engine.triton_support.available", lambda: True)
            loaded = from_pretrained(wide_folder)
            command = load_model(Console(quiet=True), str(wide_folder), dtype="bfloat16")
        assert command.model.kernels == loaded.kernels is not None
        return loaded.kernels.hints

    assert hints() == SparsityHints(**TARGETS)
    assert dial(wide_folder, text_file, "--target", "attention=0.6", "ffn=0.2") == 0
    rates = load_wide_info(wide_folder).rates
    assert rates == pytest.approx({"attention": 0.6, "ffn": 0.2}, abs=0.02)
    assert hints() == SparsityHints(**rates)  # what was measured, not what was asked for
    assert main(["dial", "--model", str(wide_folder), "--reset"]) == 0
    assert hints() == SparsityHints(**TARGETS)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ((), "give one of paper"),
        (("flops=0.4", "paper=0.2"), "give one of paper"),
        (("flops=0.4", "ffn=0.2"), "give one of paper"),
        (("speed=2",), "unknown figure 'speed'"),
        (("flops=half",), "expected a fraction"),
        (("flops=1.0",), "at least 0 and below 1"),
    ],
)
def test_targets_that_make_no_sense_are_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        parse_targets(targets, one_router=False)


def test_one_router_takes_figures_of_both_modules_only():
    with pytest.raises(ValueError, match="one router decides for both modules: give one of paper"):
        parse_targets(("ffn=0.2",), one_router=True)
    assert parse_targets(("paper=0.2",), one_router=True) == [Goal(MODULES, "paper", 0.2)]


def test_an_export_keeps_what_was_dialled_and_a_dial_keeps_what_it_does_not_know(
    wide_folder, tmp_path
):
    file = wide_folder / "wide_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"note": "mine"}))
    rates = {"attention": 0.5, "ffn": 0.25}
    set_thresholds(wide_folder, attention=0.5, ffn=-0.25, rates=rates)
    assert json.loads(file.read_text())["note"] == "mine"
    assert main(["export", str(wide_folder), str(tmp_path / "exported")]) == 0
    info = load_wide_info(tmp_path / "exported")
    assert (info.wide.attention_threshold, info.wide.ffn_threshold) == (0.5, -0.25)
    assert info.rates == rates
    assert sparsity_hints(tmp_path / "exported") == SparsityHints(0.5, 0.25)
    with pytest.raises(ValueError, match="ffn_threshold=nan must be finite"):
        set_thresholds(wide_folder, attention=0.0, ffn=float("nan"), rates={})


def test_a_folder_without_routers_is_refused_before_it_is_loaded(model_folder, capsys):
    assert main(["dial", "--model", str(model_folder), "--target", "flops=0.4"]) == 1
    assert "no wide_config.json" in capsys.readouterr().err


def test_a_missing_text_is_refused_before_the_model_is_loaded(wide_folder, capsys):
    (wide_folder / "wide_routers.safetensors").unlink()  # loading would say so
    assert dial(wide_folder, "no/such.txt", "--target", "flops=0.4") == 1
    assert "no/such.txt" in capsys.readouterr().err


def coupled(calls, *, ffn_sees_attention):
    """What is skipped when the FFN's rate also depends on attention's masks; keeps the calls."""

    def skipped(biases):
        calls.append(biases)
        attention = 1 / (1 + np.exp(1.0 + biases["attention"]))
        ffn = 1 / (1 + np.exp(2.0 + biases["ffn"] - ffn_sees_attention * attention))
        return {"attention": attention, "ffn": ffn}

    return skipped


@pytest.mark.parametrize(("ffn_sees_attention", "most"), [(1.0, 7), (40.0, 24)])
def test_search_finds_coupled_targets(ffn_sees_attention, most):
    calls = []
    skipped = coupled(calls, ffn_sees_attention=ffn_sees_attention)
    found = meet([Goal(("attention",), "attention", 0.7), Goal(("ffn",), "ffn", 0.3)], skipped)
    assert found.after == pytest.approx({"attention": 0.7, "ffn": 0.3}, abs=CLOSE)
    assert len(calls) <= most
    assert found.after == skipped(found.biases)
    assert found.before == skipped({"attention": 0.0, "ffn": 0.0})


@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
def test_search_takes_the_nearest_where_a_figure_jumps_over_its_value(spread):
    """A static router has as many rates as it has groups."""
    margins = spread * np.random.default_rng(0).normal(size=90)

    def skipped(biases):
        return {"paper": float((margins + biases["ffn"] < 0).mean())}

    found = meet([Goal(MODULES, "paper", 0.255)], skipped)
    assert found.after["paper"] == pytest.approx(23 / 90)
    assert found.biases["attention"] == found.biases["ffn"]


def test_search_ends_where_a_value_cannot_be_reached():
    calls = []

    def skipped(biases):
        calls.append(biases)
        return {"ffn": 0.2 if biases["ffn"] < 0 else 0.1, "attention": 0.5}

    goals = [Goal(("attention",), "attention", 0.5), Goal(("ffn",), "ffn", 0.9)]
    assert meet(goals, skipped).after["ffn"] == 0.2
    assert len(calls) <= MOST
