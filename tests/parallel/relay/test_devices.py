"""The relay over several devices or processes has the losses of a single device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import relay_process
from ports import free_port

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.parallel.relay import programs

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def start(processes, number, ports, devices):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, relay_process.__file__, *map(str, (processes, number, *ports))],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def alone():
    return relay_process.losses(None)


@pytest.mark.slow
def test_several_devices_share_each_micro_batch(alone):
    np.testing.assert_allclose(printed(start(1, 0, (0, 0), devices=2)), alone, rtol=2e-6)


@pytest.mark.slow
def test_several_processes_train_one_model(alone):
    ports = free_port(), free_port()
    both = [start(2, number, ports, devices=1) for number in range(2)]
    losses = [printed(process) for process in both]
    assert losses[0] == losses[1]
    np.testing.assert_allclose(losses[0], alone, rtol=2e-6)


def test_an_indivisible_micro_batch_is_refused():
    with pytest.raises(UserError, match="4 sequences cannot be sharded over 3 devices"):
        programs.refuse_unsupported(relay_process.TRAINING, 3)
