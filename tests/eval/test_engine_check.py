"""The comparison of the kernel path with plain JAX, on a tiny model."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from eval import engine_check
from eval.e2e_runs import random_model
from eval.engine_check import BF16_LIMIT, Comparison, compare
from eval.records import read_records
from tests.eval.test_bench_e2e import TINY
from tests.wide_jax.conftest import forward
from wide_jax import pruned
from wide_jax.batch import TokenBatch
from wide_jax.config import WideConfig
from wide_jax.hf.mapping import is_router
from wide_jax.hf.pretrained import build, tensors_of
from wide_jax.routing import AllOn

WIDE = WideConfig.for_model(TINY, ffn_group_size=16)
SOUND = Comparison(
    decisions=10,
    float32_max_difference=1e-5,
    float32_flipped=0,
    float32_cached_differences=(1e-5, 0.0),
    float32_cached_max_difference=1e-5,
    float32_alone_differences=(0.0, 1e-5),
    bf16_error=0.03,
    bf16_plain_error=0.01,
    bf16_dense_error=0.04,
    bf16_flipped=0.0,
)


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
    assert found.float32_cached_max_difference == max(found.float32_cached_differences) < 1e-4
    assert len(found.float32_cached_differences) == 2 + engine_check.STEPS
    assert len(found.float32_alone_differences) == 2 + engine_check.STEPS
    assert max(found.float32_alone_differences) < 1e-4
    assert found.problems() == []
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
    found = dataclasses.replace(SOUND, **errors)
    monkeypatch.setattr(engine_check, "random_model", lambda *arguments, **options: None)
    monkeypatch.setattr(engine_check, "compare", lambda model, ids: found)
    file = tmp_path / "engine.jsonl"
    assert engine_check.main(engine_check.Args(json=file)) == 0
    printed = capsys.readouterr().out
    assert "plain 1.00e-02" in printed
    assert "error 4.00e-02; the kernels' is 0.75 of it, at most 1.5 expected" in printed
    [(_, record)] = read_records(file)
    assert {name: record[name] for name in errors} == errors


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"float32_flipped": 3}, "3 decisions differ"),
        ({"float32_max_difference": 2e-4}, "float32 logits differ by 2.00e-04"),
        ({"float32_cached_max_difference": float("nan")}, "logits in pieces differ by nan"),
        ({"float32_alone_differences": (0.0, 0.2)}, "of one row in pieces differ by 2.00e-01"),
        ({"bf16_error": 0.061}, "bf16 error is 1.52 of dense's"),
    ],
)
def test_what_is_beyond_its_limit_is_a_problem(changes, problem):
    assert SOUND.problems() == []
    [found] = dataclasses.replace(SOUND, **changes).problems()
    assert problem in found


def test_the_references_that_mend_a_step_tell_which_operation_is_at_fault(monkeypatch, capsys):
    """A fused attention that sees nothing: a step's logits are wrong, the prompts' are right."""
    monkeypatch.setattr(engine_check, "shape", lambda name: TINY)
    step = pruned.attention_step

    def broken(q, *operands, implementation, **options):
        out, keys, values = step(q, *operands, implementation=implementation, **options)
        return (out if implementation == "reference" else 0.0 * out), keys, values

    monkeypatch.setattr(pruned, "attention_step", broken)
    some = ("route_kv", "rope_cache", "attention_step")  # all of them take minutes here
    assert set(some) < set(engine_check.OPERATIONS)
    monkeypatch.setattr(engine_check, "OPERATIONS", some)
    args = engine_check.Args(layers=1, tokens=23, ffn_group_size=WIDE.ffn_group_size)
    assert engine_check.main(args) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    found = {}
    for line in lines:
        name, rows, alone = re.split(r" {2,}| \| one row: ", line.strip())
        found[name] = [[float(x) for x in part.split()] for part in (rows, alone)]
    for differences in found["float32, in pieces"]:
        assert max(differences[:2]) < 1e-4 < min(differences[2:])
    mend = {name for name, both in found.items() if max(map(max, both)) < 1e-4}
    # Naming the rotation takes the step apart: `attention_step` is not run.
    assert mend == {"plain JAX", "all", "attention_step", "rope_cache"}
    assert set(found) - mend == {"float32, in pieces", "route_kv"}


def test_a_model_that_gives_nan_is_recorded_and_wrong(tmp_path, monkeypatch, capsys):
    nan = float("nan")
    broken = dataclasses.replace(SOUND, float32_max_difference=nan, bf16_error=nan)
    monkeypatch.setattr(engine_check, "random_model", lambda *arguments, **options: None)
    monkeypatch.setattr(engine_check, "compare", lambda model, ids: broken)
    file = tmp_path / "engine.jsonl"
    assert engine_check.main(engine_check.Args(json=file)) == 1
    assert "wrong: float32 logits differ by nan" in capsys.readouterr().out
    [(_, record)] = read_records(file)
    assert record["float32_max_difference"] is record["bf16_error"] is None
    assert record["float32_alone_differences"] == [0.0, 1e-5]
