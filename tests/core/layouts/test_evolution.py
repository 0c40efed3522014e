"""Evolution methods: which blocks are dropped and grown, when, and the models of the phases."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.config.layer_groups import layer_linear
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import METHOD_NAMES, EvolutionConfig
from sparse_dataflow.core.layouts import evolution
from sparse_dataflow.core.layouts.evolution import (
    METHODS,
    Method,
    block_sources,
    exchanged_share,
    largest_blocks,
    phase_specs,
    register,
)
from sparse_dataflow.core.layouts.model_layouts import projection_layout
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

SPARSE = LinearSpec("block_sparse", "monarch", density=0.125, block=8)
LOWEST = LinearSpec("block_sparse", "monarch", density=0.0625, block=8)
DENSITIES = [0.125, 0.375, 0.0625]
MODEL = ModelConfig(2, 128, 4, 256, vocab_size=40, max_len=8).with_linears(SPARSE)


def test_block_sources_name_the_old_slot_of_each_block():
    old, new = (make_layout("random", 64, 64, 8, 0.25, offset) for offset in (0, 1))
    for slot, (row, col) in enumerate(zip(new.rows, new.cols)):
        source = block_sources(old, new)[slot]
        assert (source >= 0) == old.mask[row, col]
        assert source < 0 or (old.rows[source], old.cols[source]) == (row, col)


def test_the_exchanged_share_falls_along_a_cosine_and_ends():
    config = EvolutionConfig("rigl", every=10, at=0.5, share=0.4)
    shares = {step: exchanged_share(config, step, 200) for step in range(200)}
    due = {step for step, share in shares.items() if share > 0}
    assert due == set(range(10, 100, 10))
    assert shares[50] == pytest.approx(0.2)
    assert all(shares[a] > shares[a + 10] for a in range(10, 90, 10)) and shares[10] < 0.4
    for method in ("static", "sparse_to_dense", "gradual"):
        assert not any(exchanged_share(EvolutionConfig(method), s, 500) for s in range(500))


@given(
    method=st.sampled_from(["set", "rigl"]),
    share=st.floats(1e-6, 0.99),
    at=st.floats(0.1, 0.9),
    every=st.integers(1, 40),
    updates=st.integers(1, 30),
    stored=st.integers(1, 3000),
)
def test_the_first_update_exchanges_a_block_of_every_weight(
    method, share, at, every, updates, stored
):
    config = EvolutionConfig(method, every=every, at=at, share=share)
    steps = math.ceil((every * updates + 1) / at)
    counts, nominal = (
        [
            round(exchanged_share(config, step, steps, *weight) * stored)
            for step in range(every, steps, every)
        ]
        for weight in ((stored,), ())
    )
    assert counts[0] == max(1, nominal[0])
    assert counts == sorted(counts, reverse=True)
    if share * stored >= 2 and nominal[0]:
        assert counts == nominal
    assert not any(exchanged_share(config, step, steps, stored) for step in (0, steps - 1 + every))


def test_the_largest_blocks_are_a_balanced_layout_inside_the_stored_blocks():
    norms = np.random.default_rng(0).random((8, 16))
    wide = largest_blocks(norms, 4, degree=4)
    narrow = largest_blocks(norms, 4, degree=2, stored=wide.mask)
    assert wide.balanced and narrow.balanced
    assert (wide.density, narrow.density) == (0.5, 0.25)
    assert wide.mask[narrow.mask].all()
    assert norms[wide.mask].mean() > norms[~wide.mask].mean()


@pytest.mark.parametrize("method", ["set", "rigl"])
def test_exchanged_layouts_have_wide_tables_from_the_start(method):
    (phase,) = phase_specs(MODEL, EvolutionConfig(method, max_fan_out=2.5))
    assert phase.runtime_layouts
    layout = projection_layout(phase.model, "qkv", layer=0)
    assert layout == projection_layout(MODEL, "qkv", layer=0) and layout.balanced
    assert layout.tables().out_index.shape[1] == 2.5 * layout.fan_out[0]
    assert layout.tables().in_index.shape[1] == layout.fan_in[0]


def test_gradual_halves_along_the_cubic_schedule():
    phases = phase_specs(MODEL, EvolutionConfig("gradual", at=0.5))
    densities = [phase.model.linear("qkv").density for phase in phases]
    assert densities == [1, 0.5, 0.25, 0.125]
    assert not phases[0].model.sparse_projections and phases[-1].model == MODEL
    assert phases[0].start == 0
    for (before, after), phase in zip(itertools.pairwise(densities), phases[1:]):
        # arXiv 1710.01878, equation 1, of densities.
        cubic = 1 / 8 + (1 - 1 / 8) * (1 - phase.start / 0.5) ** 3
        assert cubic == pytest.approx((before + after) / 2)
    mean = np.dot(np.diff([phase.start for phase in phases] + [0.5]) / 0.5, densities)
    assert mean == pytest.approx(1 / 8 + (1 - 1 / 8) / 4, rel=0.05)
    assert [phase.runtime_layouts for phase in phases] == [False, True, True, True]


@pytest.mark.parametrize("density", [1 / 16, 3 / 16, 5 / 16, 15 / 16])
def test_gradual_phases_are_legal_at_any_density(density):
    model = MODEL.with_linears(dataclasses.replace(SPARSE, pattern="cyclic", density=density))
    phases = phase_specs(model, EvolutionConfig("gradual"))
    assert phases[-1].model == model and not phases[0].model.sparse_projections
    assert [phase.start for phase in phases] == sorted(phase.start for phase in phases)
    for phase in phases[1:]:
        spec = phase.model.linear("qkv")
        assert math.isclose(spec.density * 16, round(spec.density * 16))


def test_gradual_halves_each_layer_from_where_it_stores_all():
    model = dataclasses.replace(MODEL, num_layers=3, density_by_depth=(1.0, 3.0, 0.5))
    phases = phase_specs(model, EvolutionConfig("gradual", at=0.5))
    assert not phases[0].model.sparse_projections and phases[-1].model == model
    densities = [
        [layer_linear(phase.model, "mlp_out", layer).density for layer in range(3)]
        for phase in phases
    ]
    assert densities == [[1, 1, 1], [1, 1, 0.5], [0.5, 1, 0.25], [0.25, 0.75, 0.125], DENSITIES]
    uniform = phase_specs(MODEL.with_linears(LOWEST), EvolutionConfig("gradual", at=0.5))
    assert [phase.start for phase in phases] == [phase.start for phase in uniform]


def test_sparse_to_dense_changes_the_model_once():
    ranked = MODEL.with_linears(dataclasses.replace(SPARSE, rank=4), ["mlp_in"])
    sparse, dense = phase_specs(ranked, EvolutionConfig("sparse_to_dense", at=0.6))
    assert sparse.model == ranked and not dense.model.sparse_projections
    assert dense.model.linear("mlp_in") == LinearSpec(turned_dense=True)
    assert dense.start == 0.6


def test_some_projections_become_dense_first():
    config = EvolutionConfig("sparse_to_dense", at=0.6, first=["mlp_in", "mlp_out"])
    first, second, third = phase_specs(MODEL, config)
    assert first.model == MODEL and (first.start, second.start, third.start) == (0.0, 0.6, 0.8)
    assert set(second.model.sparse_projections) == {"qkv", "attn_out"}
    assert third.model == phase_specs(MODEL, EvolutionConfig("sparse_to_dense"))[1].model


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        *(
            (
                MODEL,
                {"method": "sparse_to_dense", "first": first},
                "some of the sparse projections, but not all",
            )
            for first in (PROJECTIONS,)
        ),
        (MODEL, {"method": "grow"}, "evolution.method=grow is unknown. Legal: static"),
        (MODEL, {"method": "rigl", "every": 0}, "it must be from 1 to"),
        (MODEL, {"method": "rigl", "at": 1.0}, r"\[0, 1\)"),
        (MODEL, {"method": "rigl", "share": 1.0}, r"\(0, 1\)"),
        (MODEL, {"method": "rigl", "max_fan_out": 1.0}, "above 1"),
        (MODEL, {"method": "set", "row_shards": 3}, "the 16 input blocks of .*; legal: 1, 2, 4"),
        (MODEL.with_linears(LinearSpec()), {"method": "set"}, "needs a sparse projection"),
        (
            dataclasses.replace(MODEL, density_by_depth=(1.0, 1 / SPARSE.density)),
            {"method": "rigl"},
            "cannot add or remove a block in attn_out",
        ),
        (
            dataclasses.replace(
                MODEL.with_linears(dataclasses.replace(SPARSE, density=0.25), ["mlp_in"]),
                density_by_depth=(1.0, 3.0),
            ),
            {"method": "gradual"},
            "gradual with per-layer densities needs equal densities of all projections",
        ),
        *(
            (
                MODEL.with_linears(dataclasses.replace(SPARSE, density=1.0), ["mlp_out"]),
                {"method": method},
                f"{method} cannot add or remove a block in mlp_out",
            )
            for method in ("set", "rigl", "gradual", "sparse_to_dense")
        ),
    ],
)
def test_illegal_methods_and_models_are_refused(model, fields, words):
    with pytest.raises(UserError, match=words):
        phase_specs(model, EvolutionConfig(**fields))


def test_a_registered_method_is_used(monkeypatch):
    monkeypatch.setattr(evolution, "METHODS", dict(METHODS))
    method = Method(update=lambda layout, norms, gradients, share, shards, rng: layout)
    register("mine", method)
    assert phase_specs(MODEL, EvolutionConfig("mine"))[0].runtime_layouts
    with pytest.raises(ValueError, match="already"):
        register("mine", method)
    METHOD_NAMES.remove("mine")
