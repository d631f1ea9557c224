"""The commands as a user runs them, on a tiny model."""

import importlib
import json

import numpy as np
import pytest

from eval.records import read_records
from eval.speed import PhaseSpeed, SpeedShape, Speedup
from eval.text import read_text, tokenize
from eval.windows import disjoint_windows
from wide_jax.cli.main import COMMANDS, main
from wide_jax.config import WideConfig
from wide_jax.generate import generate, padded_sizes
from wide_jax.hf.config import read_config
from wide_jax.hf.pretrained import from_pretrained, save_pretrained
from wide_jax.hf.tokenizer import load_tokenizer, text_encoder
from wide_jax.memory import estimate_memory


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WIDE_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_compile_cache(monkeypatch):
    """Tests must not leave JAX's cache pointing into a test's folder."""
    monkeypatch.setattr("wide_jax.cli.start.keep_compiled_programs", lambda console: None)


@pytest.fixture
def wide_folder(model_folder, tmp_path):
    wide = WideConfig.for_model(read_config(model_folder), ffn_group_size=8)
    model = from_pretrained(model_folder, wide=wide, seed=3)
    return save_pretrained(model, tmp_path / "wide", base=model_folder)


def run_demo(model_folder, text_file, *more):
    files = ["--model", str(model_folder), "--data", str(text_file)]
    sizes = ["--updates", "3", "--tokens-per-update", "32", "--ffn-group-size", "8"]
    figures = ["--eval-windows", "1", "--new-tokens", "4", "--prompt", "the quick"]
    return main(["demo", *files, *sizes, *figures, *more])


def test_demo_trains_evaluates_saves_and_generates(model_folder, text_file, tmp_path, capsys):
    figures, out = tmp_path / "demo.json", tmp_path / "wide"
    code = run_demo(model_folder, text_file, "--json", str(figures), "--out", str(out))
    assert code == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "not a benchmark" in printed.replace("\n", " ")
    record = json.loads(figures.read_text())
    assert set(record["variants"]) == {"dense", "WIDE", "depth routing"}
    for name in ("WIDE", "depth routing"):
        variant = record["variants"][name]
        assert len(variant["history"]) == 3
        accounting = variant["perplexity"]["accounting"]
        assert (
            accounting["tokens"]
            == record["variants"]["dense"]["perplexity"]["accounting"]["tokens"]
        )
        assert all(0 <= accounting[kind] <= 1 for kind in ("attention", "ffn"))
    generated = record["generated"]
    assert generated["WIDE"]["tokens"] == generated["WIDE, loaded back"]["tokens"]
    assert from_pretrained(out).wide.ffn_group_size == 8
    # The base of the saved folder is the given model, byte for byte.
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / file).read_bytes() == (model_folder / file).read_bytes()


def test_demo_runs_again_in_its_own_folder_but_not_over_a_users(
    model_folder, text_file, tmp_path, cache, capsys
):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    assert run_demo(model_folder, text_file, "--out", str(taken)) == 1
    assert "taken" in capsys.readouterr().err
    assert (taken / "notes.txt").read_text() == "mine"
    assert not (cache / "demo").exists()  # refused before the long work


def test_eval_ppl_prints_units_and_accounting(model_folder, text_file, tmp_path, capsys):
    figures = tmp_path / "ppl.json"
    arguments = ["eval", "ppl", "--model", str(model_folder), "--data", str(text_file)]
    assert main([*arguments, "--window", "64", "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    for words in ("token perplexity", "word perplexity", "byte perplexity", "stride 64", "FLOPs"):
        assert words in printed
    record = json.loads(figures.read_text())
    assert record["token_perplexity"] > 1
    assert record["config"]["stride"] == 64
    assert record["fingerprint"].startswith("sha256:")
    assert record["versions"]["jax"]
    assert record["recipe"] == {"method": "dense"}
    records = tmp_path / "eval.jsonl"
    recording = ["--rule", "rolling", "--record", str(records)]
    assert main([*arguments, "--window", "64", *recording]) == 0
    (line,) = records.read_text().splitlines()
    assert json.loads(line)["metric"] == "token_perplexity"
    assert json.loads(line)["recipe"]["rule"] == "rolling"
    assert json.loads(line)["recipe"]["dtype"] == "float32"  # what ran, not "checkpoint"


def test_on_a_gpu_eval_ppl_adds_the_speedup_on_the_text_it_evaluated(
    wide_folder, text_file, tmp_path, monkeypatch, capsys
):
    records = tmp_path / "eval.jsonl"
    arguments = ["eval", "ppl", "--model", str(wide_folder), "--data", str(text_file)]
    arguments += ["--window", "64", "--record", str(records)]
    timed = []

    def measure(model, ids):
        timed.append(np.asarray(ids))
        phase = PhaseSpeed(1.5, 2.0, 3.0, "dense", 2.0, {}, {})
        return Speedup(SpeedShape(), phase, phase)

    monkeypatch.setattr("wide_jax.cli.eval_ppl.measure_speedup", measure)
    assert main(arguments) == 0  # a CPU: nothing to gain
    assert not timed
    monkeypatch.setattr("eval.speed.jax.default_backend", lambda: "gpu")
    assert main(arguments) == 0
    assert "prefill 1.50x (ideal 2.00x; 2.000 ms, dense 3.000)" in capsys.readouterr().out
    assert main([*arguments, "--no-timing"]) == 0
    assert main([*arguments, "--dense"]) == 0
    tokens = tokenize(
        read_text(text_file), text_encoder(load_tokenizer(wide_folder)), join=True
    ).documents[0]
    windows = disjoint_windows(tokens, 64)
    assert [ids.tolist() for ids in timed] == [np.concatenate([w.inputs for w in windows]).tolist()]
    found = [record for _, record in read_records(records)]
    assert [r["speedup"] and r["speedup"]["decode"]["measured"] for r in found] == [
        None, 1.5, None, None,
    ]  # fmt: skip
    layers = read_config(wide_folder).num_hidden_layers
    assert [len(r["layers"]["ffn"]) for r in found] == [layers] * 4
    assert any(found[0]["layers"]["ffn"])


def test_generate_prints_text_and_respects_seeds(model_folder, tmp_path, capsys):
    figures = tmp_path / "generated.json"
    arguments = ["generate", "--model", str(model_folder), "--prompt", "the", "--json"]
    more = ["--max-new-tokens", "5", "--temperature", "1", "--samples", "2", "--seed", "3"]
    assert main([*arguments, str(figures), *more]) == 0
    first = json.loads(figures.read_text())["tokens"]
    assert len(first) == 2
    assert main([*arguments, str(figures), *more]) == 0
    assert json.loads(figures.read_text())["tokens"] == first
    capsys.readouterr()


def change_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ((), "float32"),
        (("--dense",), "float32"),
        (("--chat",), "bfloat16"),
        (("--samples", "3", "--prefill-chunk", "5"), "bfloat16"),
    ],
    ids=["routers", "dense", "chat", "samples in pieces"],
)
def test_generate_says_its_memory_before_any_weight_is_loaded(
    options, dtype, wide_folder, monkeypatch, capsys
):
    template = "{% for message in messages %}<s>{{ message['content'] }}, please{% endfor %}"
    change_json(wide_folder / "tokenizer_config.json", chat_template=template)
    change_json(wide_folder / "config.json", torch_dtype=dtype)
    monkeypatch.setattr("wide_jax.memory.GIB", 2**10)  # or all of a tiny model's would be 0.00
    before, ran = [], []

    def load(*arguments, **settings):
        before.append(capsys.readouterr().out)
        return from_pretrained(*arguments, **settings)

    def run(model, prompts, **settings):
        ran.append((model, prompts))
        return generate(model, prompts, **settings)

    monkeypatch.setattr("wide_jax.cli.models.from_pretrained", load)
    monkeypatch.setattr("wide_jax.cli.generate.generate", run)
    arguments = ["generate", "--model", str(wide_folder), "--prompt", "the quick brown fox"]
    assert main([*arguments, "--max-new-tokens", "3", *options]) == 0
    assert "memory" not in capsys.readouterr().out
    # What is loaded and run then is what the line was about.
    [(model, prompts)] = ran
    chunk = 5 if "--prefill-chunk" in options else None
    width, capacity = padded_sizes(len(prompts[0]), 3, chunk)
    weight = model.model.embed_tokens.weight[...]
    assert weight.dtype == dtype
    assert (model.wide is None) == ("--dense" in options)
    expected = estimate_memory(
        model.config,
        model.wide,
        batch=len(prompts),
        piece=chunk or width,
        capacity=capacity,
        element_bytes=weight.dtype.itemsize,
    )
    [shown] = before
    assert [line for line in shown.splitlines() if "memory" in line] == [expected.line()]


def test_memory_is_said_even_where_the_weights_cannot_be_loaded(wide_folder, capsys):
    for file in ("model.safetensors", "wide_routers.safetensors"):
        (wide_folder / file).unlink()
    arguments = ["generate", "--model", str(wide_folder), "--prompt", "the"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "memory, about: " in printed.out
    assert "wide_routers.safetensors: missing file" in printed.err
    assert main([*arguments, "--dense"]) == 1
    printed = capsys.readouterr()
    assert "memory, about: " in printed.out
    assert "model.safetensors" in printed.err
    change_json(wide_folder / "config.json", hidden_size=-1)  # what it needs to know is wrong
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "memory" not in printed.out
    assert "hidden_size" in printed.err


def test_a_prompt_that_cannot_run_is_refused_before_weights_are_read(wide_folder, capsys):
    (wide_folder / "wide_routers.safetensors").unlink()
    arguments = ["generate", "--model", str(wide_folder), "--prompt", "the"]
    assert main([*arguments, "--max-new-tokens", "100000"]) == 1
    printed = capsys.readouterr()
    assert "max_new_tokens=100000 it passes max_position_embeddings" in printed.err
    assert "memory" not in printed.out


def test_a_model_without_chat_template_says_so(model_folder, capsys):
    assert main(["generate", "--model", str(model_folder), "--prompt", "hi", "--chat"]) == 1
    assert "chat template" in capsys.readouterr().err


def test_case_F1_a_gpu_that_is_not_there_is_an_error(model_folder, text_file, capsys):
    arguments = ["--model", str(model_folder), "--data", str(text_file), "--platform", "gpu"]
    assert main(["eval", "ppl", *arguments]) == 1
    error = capsys.readouterr().err
    assert "no usable gpu" in error
    assert "wide-jax[gpu]" in error


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nonsense"], 2, "unknown command 'nonsense'"),
        (["eval", "nonsense"], 2, "unknown command 'eval nonsense'"),
        (["eval", "ppl", "--data", "missing.txt"], 1, "missing.txt"),
        (["generate", "--prompt", "a", "--model", "no/such/folder"], 1, "no/such/folder"),
        (["generate", "--prompt", "a", "--temperature", "-1"], 1, "temperature=-1"),
        (["generate", "--prompt", "a", "--samples", "0"], 1, "samples=0"),
        (["generate", "--prompt", "a", "--prefill-chunk", "0"], 1, "prefill_chunk=0"),
        (["demo", "--json", "no_folder/x.json"], 1, "no_folder"),
        (["calibrate", "--config", "no_such.yaml"], 1, "no_such.yaml"),
        (["calibrate", "sparsity=much"], 1, "sparsity='much' must be of type float"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, code, message, capsys):
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_every_option(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    module = importlib.import_module(COMMANDS[name][0])
    assert module.Args.__doc__.split(".")[0].split("\n")[0] in printed
    for field in module.Args.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in printed or f" {field.upper()} " in printed


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(text_file, monkeypatch, capsys):
    errors = ["eval", "errors", "--data", str(text_file), "--model", "no/model", "--plot"]
    assert main([*errors, "x.bmp"]) == 1
    assert "its ending must be one of .svg, .png, .pdf" in capsys.readouterr().err
    monkeypatch.setattr("wide_jax.cli.extras.importlib.util.find_spec", lambda name: None)
    for arguments in ([*errors, "x.svg"], ["report", str(text_file)]):
        assert main(arguments) == 1
        assert "matplotlib is not installed: install the eval extra" in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert f"wide {name}" in printed
        assert summary in printed
