"""Two processes with two devices each train the run that one process trains."""

import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from train import metrics
from train.run import calibrate_main, start_processes
from train.run_config import CalibrateConfig, from_dict

CODE = """
import sys
from train import data
from train.run import calibrate_main
from train.run_config import CalibrateConfig, parse
stack = data.stack_rows
data.stack_rows = lambda rows: (print("rows in a batch:", len(rows)), stack(rows))[1]
calibrate_main(parse(CalibrateConfig, sys.argv[1:], prog="test"))
"""


def test_two_processes_train_what_one_does(model_folder, text_file, tmp_path):
    settings = {
        "model": str(model_folder), "data": str(text_file), "cache_dir": str(tmp_path / "tokens"),
        "updates": 3, "sequences_per_update": 8, "sequence_length": 16, "ffn_group_size": 16,
        "router_rank": 4, "log_every": 1, "save_every": 2,
    }  # fmt: skip
    calibrate_main(from_dict(CalibrateConfig, settings | {"out": str(tmp_path / "one")}))

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spread = {"out": tmp_path / "two", "distributed": "true", "data_parallel": 2, "fsdp": 2}
    arguments = [f"{key}={value}" for key, value in (settings | spread).items()]
    started = []
    for number in range(2):
        environment = os.environ | {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2 "
            "--xla_backend_optimization_level=0",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(number),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
    for process in started:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        # Half of the devices, half of the rows: nobody reads what its devices do not hold.
        assert set(re.findall(r"rows in a batch: (\d+)", output)) == {"4"}
    one, two = (
        [line["lm_loss"] for line in metrics.read(tmp_path / out) if line["kind"] == "train"]
        for out in ("one", "two")
    )
    assert len(one) == 3
    np.testing.assert_allclose(two, one, rtol=1e-5)
    assert (tmp_path / "two" / "model" / "wide_routers.safetensors").is_file()


def test_a_half_given_multi_process_start_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES, JAX_PROCESS_ID must be set too"):
        start_processes()
