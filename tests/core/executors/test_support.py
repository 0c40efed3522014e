"""The table of what trains on which devices is what is refused, in every cell."""

import pathlib

import pytest

from sparse_dataflow.commands import devices
from sparse_dataflow.commands.library import preset
from sparse_dataflow.core.executors import executor
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.variants import variants

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "devices.md"
BASE = preset("pico").change(sparsity__block=16, run__twin="no", training__steps=20)
WAYS = {
    executor.ROWS: {"parallel__mesh": "data:2,fsdp:2"},
    executor.CONTEXT: {"parallel__mesh": "context:2"},
    executor.TENSOR: {"parallel__mesh": "tensor:2"},
    executor.FEATURE: {"parallel__mesh": "feature:2"},
    executor.STAGE: {"parallel__mesh": "stage:2"},
    executor.RELAY: {"parallel__executor": "relay"},
    executor.RELAY_DEPTH: {
        "parallel__executor": "relay",
        "parallel__depth_schedule": "grow:0.5",
    },
    executor.RELAY_DEVICES: {"parallel__executor": "relay", "parallel__mesh": "data:2"},
    executor.RELAY_EAGER: {"parallel__executor": "relay", "parallel__clipping": "eager"},
}
OPTIONS = {
    "`evolution.method=shared_to_own`": {"evolution__method": "shared_to_own"},
    "`training.skip_spikes`": {"training__skip_spikes": 4.0},
    "`model.experts`": {"model__experts": 4},
    executor.OPTIMIZERS: {"training__optimizer": "lion", "evolution__method": "sparse_to_dense"},
}


SET = {"evolution__method": "set", "evolution__every": 2}


def check(config, way):
    count = 2 if way == executor.RELAY_DEVICES else 0
    devices.check(devices.executor(config, described=count), config, variants(config))


def refused(option, way):
    """Returns the words of the refusal of an option in a way; "" where it is legal."""
    try:
        check(BASE.change(**OPTIONS[option], **WAYS[way]), way)
    except UserError as error:
        return str(error)
    return ""


def test_every_rule_has_an_example():
    assert {rule.option for rule in executor.RULES} == set(OPTIONS)
    assert tuple(WAYS) == executor.WAYS


@pytest.mark.parametrize("way", executor.WAYS)
def test_nothing_else_is_refused(way):
    check(BASE.change(**WAYS[way]), way)


@pytest.mark.parametrize("way", executor.WAYS)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_table_lists_what_is_refused(option, way):
    rows = executor.support_table().splitlines()
    row = next(line for line in rows if line.startswith(f"| {option} |"))
    cells = row.strip("| ").split(" | ")[1].split(", ")
    words = refused(option, way)
    listed = (
        cells == ["any executor"] or way in cells or (way.startswith("relay") and "relay" in cells)
    )
    assert listed == bool(words), words
    if words:
        assert "legal" in words


@pytest.mark.parametrize("way", executor.WAYS)
def test_state_of_parts_of_a_block_is_refused_everywhere(way):
    with pytest.raises(UserError, match="legal"):
        check(BASE.change(training__optimizer="optax:sm3", **SET, **WAYS[way]), way)


def test_the_page_has_the_table():
    assert len(executor.support_table().splitlines()) - 2 <= 6
    assert executor.support_table() in PAGE.read_text(encoding="utf-8")
