"""Density budgets: by name, by depth, and illegal ones."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.config.layer_groups import layer_linear
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.allocation import allocate, allocation_table
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

SEQUENCE = 64


def sparse(scale="nano", pattern="cyclic", density=0.125, block=64, projections=PROJECTIONS):
    spec = LinearSpec("block_sparse", pattern, density, block)
    return SIZES[scale].with_linears(spec, projections)


def flops(model):
    return cost.flops_per_token(model, SEQUENCE).sections


def projection_flops(model):
    return sum(flops(model)[name] for name in PROJECTIONS)


def test_masked_rows_are_a_word_of_their_own_in_the_table():
    rows = LinearSpec("masked", "masked", 0.5, 1, block_outputs=16)
    table = allocation_table(SIZES["nano"].with_linears(rows, PROJECTIONS), flops)
    assert "0.5 blocks of 1 x 16" in table


def test_uniform_changes_nothing():
    model = sparse()
    assert allocate(model, "uniform") is model
    assert allocate(SIZES["nano"], "depth:2x,1x") == SIZES["nano"]


def test_named_densities():
    model = allocate(sparse(), "qkv:0.25,mlp_in:0.5")
    assert {n: model.linear(n).density for n in PROJECTIONS} == {
        "qkv": 0.25,
        "attn_out": 0.125,
        "mlp_in": 0.5,
        "mlp_out": 0.125,
    }


def test_named_multiples_of_the_density():
    model = allocate(sparse(), "qkv:0.5x,attn_out:0.5x,mlp_in:1.5x")
    densities = {n: model.linear(n).density for n in PROJECTIONS}
    assert densities == {"qkv": 1 / 16, "attn_out": 1 / 16, "mlp_in": 3 / 16, "mlp_out": 1 / 8}
    cells = {n: math.prod(model.projection_shape(n)) for n in PROJECTIONS}
    assert sum(densities[n] * cells[n] for n in cells) == sum(cells.values()) / 8


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("qkv:9x", "'qkv:9x' is not a density in"),
        ("compute", "'compute' names no projection; legal: uniform, depth:1.5x"),
        ("mlp:0.5", "'mlp:0.5' names no projection"),
        ("attn_out:0.5", "attn_out, which is dense; legal: mlp_in, mlp_out, qkv"),
        ("qkv:0", "'qkv:0' is not a density in"),
        ("qkv:half", "'qkv:half' is not a density in"),
        (
            "depth:1.5,0.5",
            "'1.5' is not a multiple of --density; legal: numbers above 0",
        ),
        ("depth:0x,2x", "'0x' is not a multiple"),
        ("depth:", "'' is not a multiple"),
        ("depth:infx,1x", "'infx' is not a multiple"),
        ("depth:1x,2x,1x", "3 parts of the depth, which do not divide 2 layers; legal: 1, 2"),
        ("depth:1.3x,0.7x", r"1.3x of 0.125 gives \w+ a density of 0.1625, .* 1x, 1.5x"),
        ("qkv:0.25depth:1x,1x", "'qkv:0.25depth:1x' is not a density in"),
        ("qkv:0.75,depth:1.5x,0.5x", "1.5x of 0.75 gives qkv a density of 1.125"),
        ("qkv:0.5,qkv:0.25", "names qkv twice; legal: one density for each"),
        ("depth:9x,1x", r"9x of 0.125 gives \w+ a density of 1.125, .*: 8x"),
    ],
)
def test_an_illegal_budget_is_refused(budget, words):
    model = sparse(projections=("qkv", "mlp_in", "mlp_out"))
    with pytest.raises(UserError, match=words):
        allocate(model, budget)


@pytest.mark.parametrize("budget", ["qkv:0.25,mlp_in:0.75", "mlp_out:0.5x", "attn_out:1"])
def test_masked_weights_have_densities_by_name(budget):
    model = sparse(pattern="masked", density=0.5).with_linears(LinearSpec("masked", "masked", 0.5))
    expected = {name: 0.5 for name in PROJECTIONS}
    for item in budget.split(","):
        name, text = item.split(":")
        expected[name] = 0.25 if text == "0.5x" else float(text)
    allocated = allocate(model, budget)
    assert {n: allocated.linear(n).density for n in PROJECTIONS} == expected
    with pytest.raises(UserError, match="legal for masked ones: uniform, or densities by"):
        allocate(model, "depth:1.5x,0.5x")


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["0.5x", "1x", "1.5x", "2x"]), min_size=1, max_size=4))
def test_parts_of_the_depth_have_equal_numbers_of_layers(texts):
    layers = 12
    model = dataclasses.replace(sparse(density=1 / 4), num_layers=layers)
    allocated = allocate(model, f"depth:{','.join(texts)}")
    multipliers = [float(text[:-1]) for text in texts for _ in range(layers // len(texts))]
    for layer, multiplier in enumerate(multipliers):
        assert layer_linear(allocated, "qkv", layer).density == multiplier / 4
    mean = sum(multipliers) / layers
    assert projection_flops(allocated) == pytest.approx(mean * projection_flops(model))


def test_densities_by_name_are_multiplied_by_depth():
    model = allocate(sparse(), "qkv:0.25,mlp_in:2x,depth:1.5x,0.5x")
    expected = {"qkv": 1 / 4, "attn_out": 1 / 8, "mlp_in": 1 / 4, "mlp_out": 1 / 8}
    for layer, multiple in ((0, 1.5), (1, 0.5)):
        densities = {name: layer_linear(model, name, layer).density for name in PROJECTIONS}
        assert densities == {name: multiple * each for name, each in expected.items()}


def test_the_table_has_layer_groups_and_mean_densities():
    model = allocate(sparse(projections=("qkv", "mlp_in")), "depth:2x,1x")
    *rows, mean = (line.split() for line in allocation_table(model, flops).splitlines())
    assert [row[:4] for row in rows[1:6:4]] == [["1", "to", "1", "qkv"], ["2", "to", "2", "qkv"]]
    assert [row[5] for row in rows[1:6:4]] == ["0.25", "0.125"]
    assert [row[6:9] for row in rows[1:6:4]] == [["192", "of", "768"], ["96", "of", "768"]]
    assert sum(float(row[-1].rstrip("%")) for row in rows[1:]) == pytest.approx(100, abs=0.4)
    assert mean == "mean density over 2 layers: qkv 0.1875, mlp_in 0.1875".split()


def test_the_table_has_every_projection_and_its_share():
    model = sparse(projections=("qkv", "mlp_in", "mlp_out"))
    text = allocation_table(model, flops)
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows] == ["projection", *PROJECTIONS]
    assert rows[1][1:6] == ["16x48", "0.125", "96", "of", "768"]
    assert "dense" in rows[2]
    assert sum(float(row[-1].rstrip("%")) for row in rows[1:]) == pytest.approx(100, abs=0.2)
