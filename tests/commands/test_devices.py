"""Which flags make a pipeline, and what contradicts it; no device of these meshes is there."""

import dataclasses

import pytest

from sparse_dataflow.commands import command_line, devices
from sparse_dataflow.commands.request import NAMED
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pipeline.pipelined import Pipelined
from sparse_dataflow.runs.run_config import SIZES


def executor(*arguments):
    [request] = command_line.arguments(["toy", *arguments], tuple(NAMED), None)
    return devices.executor(request.config(), described=0)


def test_a_mesh_with_stages_is_a_pipeline_and_others_are_not():
    made = executor(
        "--scale=13b", "--mesh=stage:4,tensor:2", "--set=parallel.schedule=interleaved:2"
    )
    assert isinstance(made, Pipelined) and made.schedule == "interleaved"
    assert made.division.layers == (5,) * 8
    assert "stage:4,tensor:2" in made.describe()
    assert "--set parallel.schedule=interleaved:2" in made.describe()
    assert type(executor("--scale=13b", "--mesh=data:4,tensor:2")) is Sharded
    assert isinstance(executor("--scale=13b", "--mesh=stage:3", "--executor=pipeline"), Pipelined)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh=stage:2", "--executor=whole"], "legal: --executor=pipeline, or the axes"),
        (
            ["--mesh=fsdp:2", "--executor=pipeline"],
            "through stages; legal with stage:2",
        ),
        (
            ["--mesh=fsdp:2", "--set=parallel.schedule=gpipe"],
            "parallel.schedule=.* is the order of a pipeline; legal with stage:2",
        ),
        (
            ["--mesh=stage:2", "--set=parallel.schedule=2f2b"],
            "2f2b is unknown; legal: gpipe, 1f1b.*interleaved:2",
        ),
        (["--mesh=stage:2", "--set=parallel.schedule=interleaved:0"], "interleaved:0 is unknown"),
        (
            ["--mesh=stage:2", "--set=parallel.schedule=1f1b:2"],
            "hold one chunk; legal: 1f1b, or interleaved:2",
        ),
        (["--mesh=stage:4"], r"2 layers.*stage:4 with 1 chunks.*legal stages: 1, 2\."),
        (["--mesh=stage:2", "--set=parallel.schedule=interleaved:2"], "legal stages: 1"),
    ],
)
def test_flags_that_contradict_a_pipeline_are_refused_in_words(arguments, message):
    with pytest.raises(UserError, match=message):
        executor("--scale=pico", *arguments)


@pytest.mark.parametrize(
    ("arguments", "micro_batches", "message"),
    [
        (
            ["--set=parallel.schedule=interleaved"],
            3,
            "3 micro-batches.*legal: multiples of 2, such as 4",
        ),
        (
            ["--set=parallel.schedule=interleaved"],
            1,
            "1 micro-batches.*legal: multiples of 2, such as 2",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_anything_runs(
    arguments, micro_batches, message
):
    made = executor("--scale=pico", "--mesh=stage:2", *arguments)
    training = TrainingConfig(1, 6, 64, micro_batches)
    with pytest.raises(UserError, match=message):
        made.check(SIZES["pico"], training)


@pytest.mark.parametrize("mesh", ["stage:2,feature:2", "stage:2,context:2", "stage:2"])
def test_stages_have_the_other_axes_and_sub_batches(mesh, capsys):
    """`--describe` plans them too."""
    [request] = command_line.arguments(
        ["toy", "--scale=pico", "--block=16", f"--mesh={mesh}", "--set=parallel.sub_batches=2"],
        tuple(NAMED),
        None,
    )
    devices.describe(request.config())
    assert "parallel.sub_batches=2" in capsys.readouterr().out


@pytest.mark.parametrize("mesh", ["--mesh=fsdp:2", "--mesh=stage:2,fsdp:2"])
def test_sub_batches_divide_the_sequences_of_a_device(mesh):
    made = executor("--scale=pico", mesh, "--set=parallel.sub_batches=2")
    assert "--set parallel.sub_batches=2" in made.describe()
    model = SIZES["pico"]
    made.check(model, TrainingConfig(1, 8, 16, micro_batches=2))
    with pytest.raises(UserError, match=r"not divide the 3 sequences of a micro.*legal: 1, 3"):
        made.check(model, TrainingConfig(1, 6, 16))
    with pytest.raises(UserError, match=r"experts=2 with parallel.sub_batches=2, which"):
        made.check(dataclasses.replace(model, experts=2), TrainingConfig(1, 8, 16))
