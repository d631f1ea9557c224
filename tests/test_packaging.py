"""What a user installs: names, contents, pins, and an import that is quick and starts no device."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements}


def test_wheel_has_the_four_packages_and_no_results(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    top = {file.split("/")[0] for file in files if ".dist-info" not in file}
    assert top == {"wide_jax", "pallas_kernels", "train", "eval"}
    assert not [file for file in files if "results" in file or file.endswith((".npz", ".gz"))]
    assert "pallas_kernels/tuned/nvidia_h200.json" in files
    entry_points = next(file for file in files if file.endswith("entry_points.txt"))
    assert "wide = wide_jax.cli.main:main" in zipfile.ZipFile(wheel).read(entry_points).decode()


def test_plain_install_brings_neither_torch_nor_cuda_nor_triton():
    plain = names(PROJECT["dependencies"])
    assert not plain & {"torch", "triton", "jax-triton", "jax-cuda13-plugin"}
    assert all("torch" not in names(extra) for extra in EXTRAS.values())
    assert "[" not in "".join(PROJECT["dependencies"])  # no extra of another package


def test_gpu_extra_pins_what_works_together():
    pins = {re.match(r"[\w-]+", pin)[0]: pin for pin in EXTRAS["gpu"]}
    assert "cuda13" in pins["jax"]
    assert "<0.12" in pins["jax"]
    assert {"jax-triton", "triton"} <= set(pins)


def test_oldest_constraints_are_the_lower_ends():
    lines = (ROOT / "tests/constraints/oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    for requirement in PROJECT["dependencies"] + EXTRAS["test"] + EXTRAS["eval"]:
        name, lower = re.match(r"([\w-]+)(?:>=|==)([\d.]+)", requirement).groups()
        assert pinned[name] == lower
        assert re.search(r"[<=]\d|==", requirement.split(">=")[-1]) or name == "pip"


@pytest.mark.parametrize("package", ["wide_jax", "pallas_kernels", "train", "eval"])
def test_import_is_quick_and_starts_no_device(package):
    code = (
        f"import time; start = time.perf_counter(); import {package}; "
        "seconds = time.perf_counter() - start\n"
        "import sys; bridge = sys.modules.get('jax._src.xla_bridge')\n"
        "assert bridge is None or not bridge._backends, 'a device was started'\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "print(seconds)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_every_python_file_is_free_of_machine_paths():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.split():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".sh") and path.is_file():
            assert not re.search(r"/(?:root|home)/\w", path.read_text()), name
