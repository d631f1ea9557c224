"""Host memory of loading and converting, measured. Run with `-s` to see the figures."""

import json
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest

from wide_jax.config import ModelConfig
from wide_jax.hf.config import config_to_hf
from wide_jax.hf.convert import convert
from wide_jax.hf.load import find_weights, load_weights
from wide_jax.hf.mapping import expected_tensors
from wide_jax.hf.safetensors_file import CHUNK_BYTES
from wide_jax.hf.save import write_weights

MIB = 1 << 20
CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=4096,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """About 190 MiB of float32 in shards of 64 MiB; the largest tensor has 32 MiB."""
    folder = tmp_path_factory.mktemp("memory")
    (folder / "config.json").write_text(json.dumps(config_to_hf(CONFIG)))
    rng = np.random.default_rng(0)
    weights = {
        name: rng.random(shape, np.float32) for name, shape in expected_tensors(CONFIG).items()
    }
    write_weights(folder, weights, shard_bytes=64 * MIB)
    return folder


@pytest.fixture(scope="module")
def sizes(folder):
    stored = [tensor.nbytes for tensor in find_weights(folder, CONFIG).values()]
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return {"model": sum(stored), "tensor": max(stored), "shard": max(shards)}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_peak_of_a_process_that_loads_is_the_model_plus_one_tensor(folder, sizes):
    # VmHWM, not ru_maxrss: that one is inherited from the process that starts this one.
    code = f"""
        import jax, re
        from wide_jax.hf.config import read_config
        from wide_jax.hf.load import load_weights
        jax.block_until_ready(jax.numpy.zeros(1))
        config = read_config({str(folder)!r})
        peak = lambda: int(re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
        before = peak()
        weights = load_weights({str(folder)!r}, config)
        print((peak() - before) * 1024)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    added, allowed = int(run.stdout), sizes["model"] + sizes["tensor"]
    print(f"loading {sizes['model'] / MIB:.0f} MiB added {added / MIB:.0f} MiB at the peak")
    assert 0.9 * sizes["model"] < added < allowed + 6 * CHUNK_BYTES


def staged(action):
    """Peak bytes of numpy arrays alive during `action`: what the host holds beside the devices."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("spec", [("x",), (None, "x"), ()], ids=["rows", "columns", "replicated"])
def test_placing_on_devices_stages_at_most_one_tensor(folder, sizes, spec, monkeypatch):
    """A CPU "device" keeps its arrays in host memory, so the transfer is stood in for."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    moved = []

    def sharding_for(name, shape):
        axes = spec if len(shape) == 2 else ()
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    def transfer(shape, sharding, part):
        moved.append(sum(part(i).nbytes for i in sharding.devices_indices_map(shape).values()))
        return jax.numpy.zeros(())

    monkeypatch.setattr(jax, "make_array_from_callback", transfer)
    peak = staged(lambda: load_weights(folder, CONFIG, sharding_for=sharding_for))
    shard = sizes["shard"]
    print(f"placing held {peak / MIB:.1f} MiB on the host; largest shard {shard / MIB:.1f} MiB")
    assert sum(moved) >= sizes["model"]
    assert peak < sizes["tensor"] + 3 * CHUNK_BYTES
    assert peak < 1.2 * shard


def test_converting_holds_at_most_one_tensor(folder, sizes, tmp_path):
    peak = staged(lambda: convert(folder, tmp_path / "out", dtype="bfloat16"))
    print(f"converting held {peak / MIB:.1f} MiB; largest tensor {sizes['tensor'] / MIB:.1f} MiB")
    assert peak < sizes["tensor"] + 3 * CHUNK_BYTES
