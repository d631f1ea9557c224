"""The comparison of the kernel path with plain JAX, on a tiny model."""

import jax
import jax.numpy as jnp
import pytest

from eval import engine_check
from eval.e2e_runs import random_model
from eval.engine_check import BF16_LIMIT, Comparison, compare
from eval.records import read_records
from tests.eval.test_bench_e2e import TINY
from tests.wide_jax.conftest import forward
from wide_jax.batch import TokenBatch
from wide_jax.config import WideConfig
from wide_jax.hf.mapping import is_router
from wide_jax.hf.pretrained import build, tensors_of
from wide_jax.routing import AllOn

WIDE = WideConfig.for_model(TINY, ffn_group_size=16)


def dense_model(model, dtype):
    """The dense model of the same weights: it has nothing to make a mask with."""
    tensors = tensors_of(model, lambda name: not is_router(name))
    return build(TINY, None, {n: a.astype(dtype) for n, a in tensors.items()}, dtype=dtype)


def test_kernel_path_computes_the_model():
    model = random_model(TINY, WIDE, dtype=jnp.float32)
    ids = jax.random.randint(jax.random.key(0), (2, 24), 0, 64)
    found = compare(model, ids)
    assert found.decisions == 2 * 24 * 2 * (2 + 4)
    assert found.float32_max_difference < 1e-4
    assert found.float32_flipped == 0
    assert found.float32_cached_max_difference < 1e-4
    assert found.bf16_error <= BF16_LIMIT * found.bf16_plain_error
    assert 0 < found.bf16_plain_error < 0.1
    # The specification's own measure: what bf16 alone costs the dense model.
    assert found.bf16_error <= BF16_LIMIT * found.bf16_dense_error
    batch = TokenBatch.from_lengths(ids)
    with jax.default_matmul_precision("float32"):
        wanted, _ = forward(dense_model(model, jnp.float32), batch, AllOn())
    got, _ = forward(dense_model(model, jnp.bfloat16), batch, AllOn())
    error = jnp.linalg.norm(got.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
    assert found.bf16_dense_error == pytest.approx(float(error), rel=1e-3)
    # Masks change it by much more than that, so that the line above tells them apart.
    assert found.bf16_plain_error != pytest.approx(float(error), rel=1e-2)


def test_the_verdict_is_by_dense_bf16_and_all_errors_are_recorded(tmp_path, monkeypatch, capsys):
    errors = {"bf16_error": 0.03, "bf16_plain_error": 0.01, "bf16_dense_error": 0.04}
    found = Comparison(10, 1e-5, 0, 1e-5, **errors, bf16_flipped=0.0)
    monkeypatch.setattr(engine_check, "random_model", lambda *arguments, **options: None)
    monkeypatch.setattr(engine_check, "compare", lambda model, ids: found)
    file = tmp_path / "engine.jsonl"
    engine_check.main(engine_check.Args(json=file))
    printed = capsys.readouterr().out
    assert "plain 1.00e-02" in printed
    assert "error 4.00e-02; the kernels' is 0.75 of it, at most 1.5 expected" in printed
    [(_, record)] = read_records(file)
    assert {name: record[name] for name in errors} == errors
