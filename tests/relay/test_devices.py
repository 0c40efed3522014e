"""The relay over several processes has the losses of a single device."""

import json
import os

import numpy as np
import pytest
import relay_process
from ports import free_port

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.relay import relay_programs as programs

pytestmark = pytest.mark.slow


@pytest.fixture
def start(forks):
    def start(processes, number, ports, devices):
        count = f"--xla_force_host_platform_device_count={devices}"
        environment = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}"}
        arguments = processes, number, *ports
        return forks.start(relay_process.__file__, *arguments, environment=environment)

    return start


def printed(process):
    assert process.wait() == 0, process.stderr
    devices, losses = json.loads(process.stdout.splitlines()[-1])
    assert devices == 2
    return losses


@pytest.fixture(scope="module")
def alone():
    return relay_process.losses(None)


@pytest.mark.slow
def test_several_processes_train_one_model(start, alone):
    ports = free_port(), free_port()
    both = [start(2, number, ports, devices=1) for number in range(2)]
    losses = [printed(process) for process in both]
    assert losses[0] == losses[1]
    np.testing.assert_allclose(losses[0], alone, rtol=2e-6)


def test_an_indivisible_micro_batch_is_refused():
    with pytest.raises(UserError, match="4 sequences cannot be sharded over 3 devices"):
        programs.refuse_unsupported(relay_process.TRAINING, 3)
