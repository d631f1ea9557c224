"""The comparison of the kernel path with plain JAX, on a tiny model."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from eval import engine_check
from eval.e2e_runs import random_model
from eval.engine_check import BF16_LIMIT, TIE, Comparison, Found, compare
from eval.records import read_records
from tests.eval.test_bench_e2e import TINY
from tests.wide_jax.conftest import forward
from wide_jax import pruned
from wide_jax.batch import TokenBatch
from wide_jax.config import WideConfig
from wide_jax.hf.mapping import is_router
from wide_jax.hf.pretrained import build, tensors_of
from wide_jax.routing import AllOn, execute_margin

WIDE = WideConfig.for_model(TINY, ffn_group_size=16)
SOUND = Comparison(
    decisions=10,
    ties=3,
    float32=Found((1e-5,), flipped=2, apart=0),
    pieces=Found((1e-5, 0.0), flipped=0, apart=0),
    alone=Found((0.0, 1e-5), flipped=1, apart=0),
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
    for one in (found.float32, found.pieces, found.alone):
        assert one.flipped == one.apart == 0
        assert max(one.differences) < 1e-4
    assert len(found.float32.differences) == 1
    assert len(found.pieces.differences) == len(found.alone.differences) == 2 + engine_check.STEPS
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


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"float32": Found((1e-5,), flipped=3, apart=1)},
            "1 decisions of one pass differ that are",
        ),
        ({"float32": Found((2e-4,), flipped=0, apart=0)}, "logits of one pass differ by 2.00e-04"),
        ({"pieces": Found((NAN, 0.0), flipped=0, apart=0)}, "logits of pieces differ by nan"),
        ({"alone": Found((0.0, 0.2), flipped=0, apart=0)}, "one row's pieces differ by 2.00e-01"),
        ({"bf16_error": 0.061}, "bf16 error is 1.52 of dense's"),
    ],
)
def test_what_is_beyond_its_limit_is_a_problem(changes, problem):
    assert SOUND.problems() == []
    [found] = dataclasses.replace(SOUND, **changes).problems()
    assert problem in found


@pytest.mark.parametrize(("margin", "second"), [(0.5 * TIE, 9), (2.0 * TIE, 10)])
def test_only_a_tie_may_fall_the_other_way(margin, second, monkeypatch):
    """One decision of the second piece's first token, whose margin is just above its threshold.

    The pieces have lengths of their own, so that no program is one of another test's.
    """
    model = random_model(TINY, WIDE, dtype=jnp.float32)
    ids = jax.random.randint(jax.random.key(0), (2, 13 + second + 4), 0, 64)
    router, seen = model.model.layers[0].router_attention, []
    with jax.default_matmul_precision("float32"):
        logits = router(model.model.embed_tokens(ids))
    by = execute_margin(logits)[1, 13, 1]  # row 1, group 1, of layer 0
    bias = router.router.bias[...]
    router.router.bias[...] = bias.at[2].add(margin - by)  # its execute logit
    ask = pruned.norm_route_step

    def turning(x, *operands, **options):
        normed, mask, counter = ask(x, *operands, **options)
        if x.shape[0] == 2 * second and mask.shape[1] == WIDE.attn_groups(TINY) and not seen:
            seen.append(True)
            mask = mask.at[second, 1].set(~mask[second, 1])
        return normed, mask, counter

    monkeypatch.setattr(pruned, "norm_route_step", turning)
    found = compare(model, ids)
    assert seen
    tie = margin < TIE
    assert found.ties >= tie
    assert (found.pieces.flipped, found.pieces.apart) == (1, 0 if tie else 1)
    assert max(found.pieces.differences) < 1e-4  # the masks were given
    assert (found.alone.flipped, found.float32.flipped) == (0, 0)
    assert bool(found.problems()) != tie


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
        name, *both = re.split(r" {2,}| \| one row: ", line.strip())
        assert all(part.endswith("; 0 decisions, 0 of them no ties") for part in both)
        found[name] = [[float(x) for x in part.split(";")[0].split()] for part in both]
    found.pop("one pass")
    for differences in found["pieces"]:
        assert max(differences[:2]) < 1e-4 < min(differences[2:])
    mend = {name for name, both in found.items() if max(map(max, both)) < 1e-4}
    # Naming the rotation takes the step apart: `attention_step` is not run.
    assert mend == {"plain JAX", "all", "attention_step", "rope_cache"}
    assert set(found) - mend == {"pieces", "route_kv"}


def test_a_model_that_gives_nan_is_recorded_and_wrong(tmp_path, monkeypatch, capsys):
    nothing = Found((NAN,), flipped=0, apart=0)
    broken = dataclasses.replace(SOUND, float32=nothing, bf16_error=NAN)
    monkeypatch.setattr(engine_check, "random_model", lambda *arguments, **options: None)
    monkeypatch.setattr(engine_check, "compare", lambda model, ids: broken)
    file = tmp_path / "engine.jsonl"
    assert engine_check.main(engine_check.Args(json=file)) == 1
    assert "wrong: logits of one pass differ by nan" in capsys.readouterr().out
    [(_, record)] = read_records(file)
    assert record["float32_differences"] == [None]
    assert record["bf16_error"] is None
    assert record["alone_differences"] == [0.0, 1e-5]
    assert (record["ties"], record["float32_apart"], record["pieces_flipped"]) == (3, 0, 0)
