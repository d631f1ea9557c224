"""`wide doctor` finds what cannot work (cases F1 and F4)."""

import pytest

from pallas_kernels._common.device import H200
from wide_jax.cli import doctor
from wide_jax.cli.main import main

GOOD = {"jax": "0.11.2", "jaxlib": "0.11.2"}


@pytest.mark.parametrize(
    ("versions", "level"),
    [
        (GOOD, "ok"),
        (GOOD | {"jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"}, "ok"),
        ({"jax": "0.12.0.1", "jaxlib": "0.12.0"}, "ok"),
        (GOOD | {"jax-cuda13-plugin": "0.12.0"}, "fault"),
        (GOOD | {"jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.1"}, "fault"),
        ({"jax": "0.12.0", "jaxlib": "0.11.2"}, "fault"),
    ],
)
def test_case_F1_disagreeing_versions_are_a_fault_that_names_both(versions, level):
    finding = doctor.plugin_agreement(versions.get)
    assert finding.level == level
    for name, version in versions.items():
        assert f"{name} {version}" in finding.text


def test_case_F1_a_gpu_asked_for_and_missing_is_a_fault_and_exit_code_1(capsys):
    assert main(["doctor", "--platform", "gpu"]) == 1
    captured = capsys.readouterr()
    assert "none usable" in captured.out
    assert "1 fault(s): gpu devices" in captured.err


def test_case_F4_missing_kernel_packages_are_a_note_not_a_fault():
    found = {finding.subject: finding for finding in doctor.versions(GOOD.get)}
    assert found["triton"].level == found["jax-triton"].level == "note"
    assert "gpu extra" in found["triton"].text
    assert found["flax"].level == "fault"


def test_a_healthy_machine_reports_every_part_and_exits_0(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for subject in ("python", "jax", "devices", "gemm_mn, prefill", "cache", "embedded model"):
        assert f" {subject}: " in printed


def test_a_models_plan_names_what_each_operation_runs_and_why(model_folder, capsys):
    assert main(["doctor", "--model", str(model_folder)]) == 0
    assert "is not a CUDA device: plain JAX" in capsys.readouterr().out.replace("\n", " ")
    found = doctor.model_plan(str(model_folder), batch=1, tokens=256, device=H200)
    subjects = [finding.subject for finding in found[1:]]
    step = "rotation, cache, attention (attention_step)"
    for phase, attention in (("prefill", "attention (attention_prefill)"), ("decode", step)):
        for part in ("q (gemm_mn)", attention, "gate and up (swiglu_up)"):
            assert f"{phase}, {part}" in subjects
    assert all("measured" in finding.text for finding in found[1:])
