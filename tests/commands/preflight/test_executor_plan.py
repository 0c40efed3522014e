"""The memory that a report names is that of the plan by which the run was trained."""

import pytest
from marks import some

from sparse_dataflow.commands import devices
from sparse_dataflow.commands.planning import machine_report
from sparse_dataflow.commands.preflight import executor_plan, settling
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import machines
from sparse_dataflow.hardware.chips import GIB, Chip
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner import plan_memory
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants

CPU = Chip("this CPU", memory_bytes=2**40)
CONFIG = preset("mini").change(run__twin="no", training__batch=16)


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (1, {}),
        (1, {"training__micro_batches": 4, "model__remat": "full"}),
        (8, {"parallel__mesh": "fsdp:8", "training__micro_batches": 2}),
        (8, {"parallel__mesh": "data:2,fsdp:2,tensor:2", "training__micro_batches": 1}),
        (4, {"parallel__mesh": "data:2,stage:2", "training__micro_batches": 4}),
        (1, {"parallel__executor": "relay", "training__micro_batches": 2}),
        (4, {"parallel__executor": "relay", "parallel__stash": "host"}),
        (1, {"evolution__method": "sparse_to_dense"}),
    ],
)
def test_a_report_has_the_memory_of_the_plan(count, changes):
    settled = settling.settle(CONFIG.change(**changes), Machine(CPU, count, host=True))
    executor = devices.executor(settled.config, count)
    [model] = variants(settled.config)
    phases = [phase.priced_model for phase in model.phase_specs]
    sizes = executor_plan.memory_of(phases, model.training, executor, CPU)
    assert sum(sizes.values()) == pytest.approx(settled.chip_bytes, rel=1e-6)
    if count > 1 and not settled.relay:
        alone = plan_memory.training_bytes(settled.config.model, model.training).total
        assert sum(sizes.values()) < alone


@pytest.mark.parametrize("method", ["static", "sparse_to_dense"])
@pytest.mark.parametrize("at", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("executor", ["auto", "relay"])
def test_the_step_of_a_changing_model_is_the_mean_over_its_steps(method, at, executor):
    base = preset("1.3b", compute_dtype="bfloat16").change(
        run__twin="no", parallel__executor=executor, training__batch=8, training__micro_batches=4,
        model__remat="none" if executor == "relay" else "full",
    )  # fmt: skip
    machine = machines.parse("h200:1")
    sparse, dense = (settling.settle(c, machine).seconds for c in (base, base.dense()))
    config = base.change(evolution__method=method, evolution__at=at)
    if method == "static":
        assert settling.settle(config.change(evolution__at=0.5), machine).seconds == sparse
        return
    result = settling.settle(config, machine)
    assert result.seconds == pytest.approx(at * sparse + (1 - at) * dense)
    text = machine_report.text(machine_report.plan(config, machine))
    if executor == "auto":
        assert "extrapolated: no fitted run of this kind (block-sparse weights)" in text


@pytest.mark.parametrize("schedule", ["constant", "drop:0.5", "grow:0.25"])
def test_a_depth_schedule_makes_the_planned_step_shorter(schedule):
    config = preset("1.3b", compute_dtype="bfloat16").change(
        run__twin="no", parallel__executor="relay", training__batch=8, training__micro_batches=4
    )
    machine = machines.parse("h200:1")
    whole = settling.settle(config, machine)
    shorter = settling.settle(config.change(parallel__depth_schedule=schedule), machine)
    assert shorter.chip_bytes == whole.chip_bytes
    assert (shorter.seconds < 0.9 * whole.seconds) == (schedule != "constant")
    assert (shorter.seconds == whole.seconds) == (schedule == "constant")


@pytest.mark.parametrize("limit", some([28, 40, 90], 40))
def test_a_plan_of_an_absent_machine_keeps_to_the_memory_limit(limit):
    config = preset("13b", compute_dtype="bfloat16").change(
        run__twin="no", training__state_dtype="bfloat16", training__batch=64
    )
    machine = machines.parse("h200:1")
    plan = machine_report.plan(config.change(parallel__memory_limit=f"{limit}GiB"), machine)
    assert plan.settled.chip_bytes <= limit * GIB and plan.settled.machine == machine
    assert f"within parallel.memory_limit={limit}GiB" in machine_report.text(plan)
    with pytest.raises(UserError, match=r"parallel.memory_limit=2GiB: Training --scale=13b needs"):
        machine_report.plan(config.change(parallel__memory_limit="2GiB"), machine)


@pytest.mark.parametrize("scale", ["350m", "1.3b", "6.7b"])
def test_the_table_of_chips_has_the_step_of_the_relays_plan(scale):
    config = preset(scale, compute_dtype="bfloat16").change(
        run__twin="no", parallel__executor="relay", training__batch=8
    )
    plan = machine_report.plan(config, machines.parse("h200:1"))
    relay = plan.settled.relay
    assert plan.seconds == relay.step_seconds > max(relay.compute_seconds, relay.transfer_seconds)
    assert f"a step of {relay.step_seconds:,.3g} s" in machine_report.text(plan)
