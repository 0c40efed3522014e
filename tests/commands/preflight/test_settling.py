"""The plan of a run on this machine: kept where it is given, printed where it is chosen."""

import re

import pytest

from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB, Chip
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.runs.run_config import preset

MINI = preset("mini").change(run__twin="no", training__batch=64)


def needed(**changes):
    config = MINI.change(**changes)
    return settling.settle(
        config, Machine(Chip("cpu", memory_bytes=2**40), 1, host=True)
    ).chip_bytes


def settled(config, size):
    return settling.settled(config, Chip("this CPU", memory_bytes=int(size)))


def test_a_cpu_with_room_settles_to_one_micro_batch_without_remat(capsys):
    config = settled(MINI, 2**40)
    assert config == MINI.without_auto()
    printed = capsys.readouterr().err
    assert re.fullmatch(
        r"planned: training.micro_batches=1 model.remat=none, by the compiler .* GiB\n", printed
    )


def test_the_memory_of_a_tight_plan_is_told_by_kind(capsys):
    settled(MINI, 2 * needed())
    printed = capsys.readouterr().err
    assert re.search(r"iB on the fullest device\n +parameters +\d", printed)


def test_a_config_without_auto_is_checked_and_stays(capsys):
    config = MINI.change(training__micro_batches=4, model__remat="full")
    assert settled(config, 2**40) == config
    assert "planned" not in capsys.readouterr().err
    with pytest.raises(UserError, match=r"Training --scale=mini needs .* on this CPU"):
        settled(config, GIB // 2)


def test_little_memory_is_met_by_micro_batches():
    whole = needed(training__micro_batches=1, model__remat="none")
    config = settled(MINI, 0.6 * whole / 0.9)
    assert (config.training.micro_batches, config.model.remat) != (1, "none")
    changes = {"training__micro_batches": config.training.micro_batches}
    assert needed(model__remat=config.model.remat, **changes) <= 0.6 * whole


def test_a_memory_limit_gets_micro_batches_and_leaves_each_blocks_remat_to_its_plan():
    whole = needed(training__micro_batches=1, model__remat="none")
    config = settled(MINI.change(parallel__memory_limit=str(int(0.6 * whole))), 2**40)
    assert config.model.remat == "auto" and config.training.micro_batches >= 1
    # `settled_remat` names the nearest feasible limit.
    tiny = MINI.change(parallel__memory_limit="1MiB")
    assert settled(tiny, 2**40) == tiny


def test_a_memory_limit_of_the_relay_is_settled_at_once():
    """Its blocks have one kind of remat, so that nothing is left to choose."""
    whole = MINI.change(parallel__executor="relay")
    config = settled(whole.change(parallel__memory_limit="1.3GiB"), 2**40)
    assert config.model.remat == "none" and config.training.micro_batches >= 1
    with pytest.raises(UserError, match="memory_limit=1MiB: the relay needs"):
        settled(whole.change(parallel__memory_limit="1MiB"), 2**40)


def test_what_does_not_fit_names_a_scale_that_does():
    with pytest.raises(UserError, match=r"the largest scale that fits is --scale=") as refused:
        settled(preset("13b").change(training__batch=8), 1.2 * GIB)
    scale = re.search(r"fits is --scale=(\w+)\.", str(refused.value))[1]
    assert settled(preset(scale), 1.2 * GIB).training.micro_batches >= 1


CPU = Chip("this CPU", peak_flops={"float32": 6e10}, memory_bytes=2**45, bandwidth=4e10)


@pytest.mark.parametrize("scale, batch, twin, named", [
    ("pico", 200_000, "no", ["sparse"]),
    ("pico", 20_000, "yes", ["dense"]),
    ("nano", 4_000, "narrow", ["sparse", "dense", "narrow"]),
    ("nano", 8, "yes", []),
])  # fmt: skip
def test_a_step_of_more_than_a_minute_is_announced(scale, batch, twin, named, capsys):
    changes = {"training__batch": batch, "run__twin": twin, "run__grace": 7}
    settling.settled(preset(scale).change(**changes), CPU)
    said = capsys.readouterr().err
    notes = [
        line for line in said.splitlines() if line.startswith("note: by the plan a step takes")
    ]
    assert len(notes) == bool(named)
    for note in notes:
        assert re.findall(r"\((\w+)\)", note) == named and "--grace=7 seconds" in note


def test_a_chip_without_known_rates_announces_nothing(capsys):
    settled(preset("nano").change(training__batch=100_000), 2**50)
    assert "note:" not in capsys.readouterr().err
