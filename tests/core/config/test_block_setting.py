"""`sparsity.block` is one setting for squares and rectangles."""

import pytest

from sparse_dataflow.commands import command_line, request
from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.model import DENSE
from sparse_dataflow.core.config.sparsity import SparsityConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import RunConfig, preset

BASE = preset("pico").change(sparsity__pattern="masked")


@pytest.mark.parametrize(
    ("spelling", "block", "sides"),
    [
        (16, 16, (16, 16)),
        ("16", 16, (16, 16)),
        ("8x8", 8, (8, 8)),
        ("1x16", "1x16", (1, 16)),
        ("16x1", "16x1", (16, 1)),
        ("4x64", "4x64", (4, 64)),
    ],
)
def test_every_spelling_is_one_value(spelling, block, sides):
    for config in (BASE.change(sparsity__block=spelling), settings.changed(
        BASE, {"sparsity.block": str(spelling)}
    )):  # fmt: skip
        assert config.sparsity.block == block
        spec = next(iter(config.sparsity.linears(config.model).values()))
        assert spec.block_sides == sides
        assert RunConfig.from_json(config.to_json()) == config
        assert "block_outputs" not in config.to_json()["sparsity"]


@pytest.mark.parametrize(
    "text",
    ["1x0", "0", "x16", "16x", "1x2x3", "-1", "1.5", "1X16", "1 x 16", "", "99999999", "1x٣"],
)
def test_other_texts_are_refused_with_the_legal_ones(text):
    with pytest.raises(UserError, match=r"^sparsity.block=.* side of a square, .* INPUTSxOUTPUTS"):
        settings.changed(BASE, {"sparsity.block": text})
    with pytest.raises(UserError, match=r"sparsity.block=.* INPUTSxOUTPUTS"):
        SparsityConfig(block=text)


@pytest.mark.parametrize(
    ("block", "outputs", "now"), [(1, 16, "1x16"), (8, 1, "8x1"), (16, 0, 16), (4, 4, 4)]
)
def test_a_config_of_an_earlier_version_keeps_its_block(block, outputs, now):
    fields = BASE.to_json()
    fields["sparsity"] |= {"block": block, "block_outputs": outputs}
    assert RunConfig.from_json(fields).sparsity.block == now


def test_the_earlier_setting_is_refused_by_name():
    with pytest.raises(UserError, match=r"no setting sparsity.block_outputs; "):
        settings.changed(BASE, {"sparsity.block_outputs": 16})


def test_the_flag_takes_a_rectangle():
    flags = ["toy", "--scale=pico", "--pattern=masked", "--block=1x16"]
    [parsed] = command_line.arguments(flags, tuple(request.NAMED), None, {})
    assert parsed.config().sparsity.block == "1x16"


def test_a_pattern_that_stores_everything_is_the_dense_model():
    config = preset("pico").change(sparsity__pattern="dense", sparsity__block=32)
    assert set(config.sparsity.linears(config.model).values()) == {DENSE}
