"""The check of a card's kernels: it passes what is right and catches what is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from eval.card_check import CardCase, cases, judge
from wide_jax.cli.check_kernels import row
from wide_jax.cli.main import main

ON_GPU = jax.default_backend() == "gpu"


def cheap(m):
    """Cases that also run on a CPU: not those whose dense form is cuDNN's."""
    return [c for c in cases("smollm2-135m", m, "half") if c.op != "attention_decode"]


@pytest.mark.parametrize("m", [1, 37])
def test_every_operation_is_covered_and_right(m):
    found = {case.op: judge(case) for case in cheap(m)}
    ops = {"gemm_mn", "swiglu_up", "gemm_k", "project_qkv", "rope_cache", "norm_route", "rms_norm"}
    of_a_step = {"route_kv", "attention_step"}
    assert {op.split()[0] for op in found} >= ops | (of_a_step if m == 1 else set())
    assert "rope_cache (no queries)" in found
    rotating = {"attention_prefill (rotated)", "attention_prefill (normed)"}
    assert rotating & found.keys() == (rotating if m > 1 else set())
    for verdict in found.values():
        assert verdict.passed, verdict
        assert row(verdict)[-1] == "[green]ok[/green]"


def test_a_wrong_value_a_nan_and_a_crash_are_caught():
    right = next(iter(cheap(37)))

    def broken(change):
        def run(implementation):
            outputs = right.run("reference")
            return outputs if implementation is not None else change(outputs)

        return judge(dataclasses.replace(right, run=run))

    assert broken(lambda outputs: outputs).passed
    assert not broken(lambda outputs: (outputs[0].at[3].multiply(2),)).passed
    assert not broken(lambda outputs: (outputs[0].at[0, 0].set(jnp.nan),)).passed
    crashed = broken(lambda outputs: 1 / 0)
    assert not crashed.passed
    assert "ZeroDivisionError" in crashed.problem
    assert row(crashed)[-1] == "[red]wrong[/red]"


def test_flipped_decisions_count():
    def run(implementation):
        mask = jnp.zeros((10, 10), bool)
        return (mask if implementation == "reference" else mask.at[0].set(True),)

    case = CardCase("norm_route", "any", 10, "half", run, has_dense=False)
    verdict = judge(case)
    assert verdict.error == pytest.approx(0.1)
    assert not verdict.passed


@pytest.mark.skipif(ON_GPU, reason="there is a GPU to check")
def test_without_a_gpu_the_command_says_so(capsys):
    assert main(["check", "kernels"]) == 1
    assert "no usable gpu device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--models", "gpt-2"), "unknown models gpt-2; known: "),
        (("--patterns", "stripes"), "unknown patterns stripes; known: all_on"),
        (("--tokens", "37", "0"), "--tokens 0: a call has at least one token"),
        (("--patterns",), "nothing to check"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_runs(options, message, capsys):
    assert main(["check", "kernels", *options]) == 1
    assert message in capsys.readouterr().err
