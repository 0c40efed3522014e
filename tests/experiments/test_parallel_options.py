"""Every option of every executor trains the default pattern, as a user starts it."""

import dataclasses

import numpy as np
import pytest
from main_job import rows
from ports import free_port

from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.parallel import ONLY_RELAY, ParallelConfig
from sparse_dataflow.core.config.sparsity import SparsityConfig
from sparse_dataflow.core.layouts.patterns import make_layout

DEVICES = 2
RELAY = "--executor=relay"
STAGES, SHARDS = "--mesh=stage:2", "--mesh=fsdp:2"
EXPERTS = "--set=model.experts=2"
FOLDER, PORT = "FOLDER", "PORT"  # Replaced by a new folder and a free port.
ADDRESS = f"127.0.0.1:{PORT}"
ALONE = ["--set=parallel.processes=1"]

OPTIONS = {
    "executor": {"auto": [], "whole": [], "pipeline": [STAGES], "relay": []},
    "mesh": {f"{axis}:2": [] for axis in ("data", "fsdp", "tensor", "feature", "stage")},
    "zero": {str(level): [SHARDS] for level in range(4)},
    "experts": {"gather": [EXPERTS], "exchange": [EXPERTS, SHARDS]},
    "sub_batches": {"2": [SHARDS]},
    "schedule": {
        name: [STAGES, "--set=training.micro_batches=4", "--set=model.num_layers=4"]
        for name in ("gpipe", "1f1b", "interleaved:2", "zero_bubble")
    },
    "memory_limit": {"1GiB": []},
    "stash": {"device": [RELAY], "host": [RELAY]},
    "clipping": {"exact": [RELAY], "eager": [RELAY]},
    "server_dir": {FOLDER: [RELAY]},
    "depth_schedule": {each: [RELAY] for each in ("constant", "drop:0.25", "grow:0.5")},
    "coordinator": {ADDRESS: [*ALONE, "--set=parallel.process=0"]},
    "processes": {"1": []},
    "process": {"0": [*ALONE, f"--set=parallel.coordinator={ADDRESS}"]},
    "join_timeout": {"60": []},
    "heartbeat": {"20": []},
}
"""Field of `ParallelConfig` -> value -> the other flags that it needs."""

OTHER_RESULTS = ("eager", "drop:0.25", "grow:0.5")
"""Values with which later steps differ from those of one program."""

CASES = [(field, value) for field, values in OPTIONS.items() for value in values]


def run(job, folder, *flags, devices=1):
    """Returns the losses of three steps of the default pattern."""
    count = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    plan = job.plan(folder, "--twin=no", "--steps=3", "--set=run.eval_every=3", *flags)
    assert not any(flag.startswith(("--pattern", "--set=sparsity.pattern")) for flag in plan)
    done = job.start(*plan, environment=count)
    assert done.wait() == 0, done.stderr
    return [row["loss"] for row in rows(folder, "sparse") if row["kind"] in ("train", "final")]


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """Function (flags of the model) -> losses of one program on one device."""
    losses = {}

    def whole(*flags):
        if flags not in losses:
            losses[flags] = run(job, tmp_path_factory.mktemp("whole") / "run", *flags)
        return losses[flags]

    return whole


def test_the_table_has_every_option_and_every_choice():
    assert OPTIONS.keys() == {field.name for field in dataclasses.fields(ParallelConfig)}
    for setting in settings.settings(ParallelConfig):
        assert {*(setting.choices or ())} <= OPTIONS[setting.name].keys()
    assert all(RELAY in flags for name in ONLY_RELAY for flags in OPTIONS[name].values())


def test_the_default_pattern_has_groups():
    """Else the cases would not tell a layout with groups from one without."""
    layout = make_layout(SparsityConfig().pattern, 256, 512, block=16, density=0.25)
    assert layout.groups is not None


@pytest.mark.slow
@pytest.mark.parametrize("field, value", CASES, ids=["=".join(case) for case in CASES])
def test_an_option_trains_the_default_pattern(job, whole, tmp_path, field, value):
    flags = [f"--set=parallel.{field}={value}", *OPTIONS[field][value]]
    port = str(free_port())
    flags = [f.replace(FOLDER, str(tmp_path / "server")).replace(PORT, port) for f in flags]
    devices = DEVICES if any("mesh=" in flag for flag in flags) else 1
    losses = run(job, tmp_path / "run", *flags, devices=devices)
    expected = whole(*(flag for flag in flags if "model." in flag))
    assert len(losses) == len(expected) == 4
    if value in OTHER_RESULTS:
        assert losses[0] == pytest.approx(expected[0], rel=0.05)
        assert losses[-1] < losses[0]
    else:
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
