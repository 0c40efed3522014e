"""Pruning to a pattern: features change places, the function stays, the pattern's blocks remain."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from marks import some
from models import BYTES, DENSE, logits, random_model

import sparse_dataflow as sd
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import feature_order, pattern_pruning, width
from sparse_dataflow.interchange.starting_point import StartingPoint, initial_state_from
from sparse_dataflow.runs.families import FAMILIES
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variant

TRAINING = TrainingConfig(steps=2, batch=2, sequence=8, learning_rate=1e-3)
TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8)


def pruned(config, pattern="monarch", density=0.5, block=8):
    names = [name for name in config.projections if name not in ("k", "v")]
    return config.with_linears(LinearSpec("block_sparse", pattern, density, block), names)


def start_of(config, params=None, tables=None):
    if params is None:
        params, tables = random_model(config)
    return StartingPoint(config, merged(params, tables), BYTES, {})


def dense_weights(model, state):
    layouts = stacks.layouts_of(model, state.rest)
    return {
        name: np.stack(
            [
                lay.to_dense(v)
                for lay, v in zip(layer_layouts, state.params["blocks"][name]["values"])
            ]
        )
        for name, layer_layouts in layouts.items()
    }


@pytest.mark.parametrize(
    "family",
    some(["gpt", "gpt, grouped queries", *FAMILIES], "gpt, grouped queries", "phi"),
)
def test_features_change_places_and_the_logits_stay(family):
    heads = 4 if family == "gpt" else 2
    shape = dict(FAMILIES.get(family, {})) | {"num_kv_heads": heads}
    config = dataclasses.replace(DENSE, **shape)
    params, _ = random_model(config)
    order = feature_order.search(config, params, model_layouts.layouts(pruned(config)))
    moved = width.reordered(config, params, order.sources)
    assert not np.array_equal(order.sources[0].stream, np.arange(config.d_model))
    expected, actual = (logits(config, each, {}, TOKENS) for each in (params, moved))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("pattern", ["monarch", "shuffle", "random"])
def test_the_search_reports_what_the_layouts_store(pattern):
    params, _ = random_model(DENSE)
    layouts = model_layouts.layouts(pruned(DENSE, pattern))
    order = feature_order.search(DENSE, params, layouts)
    shares = []
    for each in (params, width.reordered(DENSE, params, order.sources)):
        kernels = {name: np.asarray(each["blocks"][name]["kernel"]) for name in layouts}
        stored = sum(
            np.square(layout.from_dense(kernels[name][layer])).sum()
            for name, layer_layouts in layouts.items()
            for layer, layout in enumerate(layer_layouts)
        )
        shares.append(stored / sum(np.square(kernel).sum() for kernel in kernels.values()))
    np.testing.assert_allclose((order.before, order.after), shares, rtol=1e-5)
    assert order.after > order.before


def test_groups_that_were_shuffled_are_found_again():
    """Weights whose features form the pattern's groups, in an unknown order, lose nothing."""
    model = pruned(DENSE, density=0.5)
    params, _ = random_model(DENSE)
    rng = np.random.default_rng(3)
    layouts = model_layouts.layouts(model)
    for name, layer_layouts in layouts.items():
        kernel = np.array(params["blocks"][name]["kernel"])
        for layer, layout in enumerate(layer_layouts):
            kernel[layer] = layout.to_dense(layout.from_dense(kernel[layer]))
        params["blocks"][name] = {**params["blocks"][name], "kernel": kernel}
    expected = logits(DENSE, params, {}, TOKENS)
    unshuffled = width.Sources.of(DENSE, DENSE)
    stream = unshuffled.stream
    shuffled = [
        unshuffled._replace(stream=stream, hidden=rng.permutation(DENSE.d_ff)) for _ in range(2)
    ]
    params = width.reordered(DENSE, params, shuffled)
    state = initial_state_from(start_of(DENSE, params, {}), model, TRAINING, prune_to="pattern")
    actual = logits(model, state.params, jax.tree.map(np.asarray, state.rest), TOKENS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("pattern", ["monarch", "shuffle"])
def test_the_stored_blocks_are_those_of_the_pattern(pattern):
    model = pruned(DENSE, pattern)
    state = initial_state_from(start_of(DENSE), model, TRAINING, prune_to="pattern")
    assert stacks.layouts_of(model, state.rest) == model_layouts.layouts(model)
    assert all(lay.groups for layers in model_layouts.layouts(model).values() for lay in layers)


def test_weights_that_have_the_blocks_keep_every_bit():
    grouped = pruned(DENSE)
    start = start_of(grouped)
    state = initial_state_from(start, grouped, TRAINING, prune_to="pattern")
    same = jax.tree.map(np.array_equal, state.merged, start.params)
    assert all(jax.tree.leaves(same))


def test_sparser_groups_are_made_of_groups():
    before, after = pruned(DENSE, density=0.5), pruned(DENSE, density=0.25)
    state = initial_state_from(start_of(before), after, TRAINING, prune_to="pattern")
    assert stacks.layouts_of(after, state.rest) == model_layouts.layouts(after)
    kernels, all_stored = dense_weights(after, state), start_of(before).params["blocks"]
    for name, kernel in kernels.items():
        assert set(np.abs(kernel[kernel != 0])) <= set(np.abs(np.ravel(all_stored[name]["values"])))


def test_the_search_is_no_worse_than_the_best_exchange_of_two():
    """No exchange of two features of one MLP would store more."""
    model = pruned(DENSE)
    params, _ = random_model(DENSE)
    layouts = {
        n: lay for n, lay in model_layouts.layouts(model).items() if n in ("mlp_in", "mlp_out")
    }
    order = feature_order.search(DENSE, params, layouts)
    moved = width.reordered(DENSE, params, order.sources)
    for layer in range(2):
        masks = {n: np.kron(layouts[n][layer].mask, np.ones((8, 8))) for n in layouts}
        squares = {n: np.square(np.asarray(moved["blocks"][n]["kernel"][layer])) for n in layouts}
        sums = squares["mlp_in"].T @ masks["mlp_in"] + squares["mlp_out"] @ masks["mlp_out"].T
        for a, b in itertools.combinations(range(DENSE.d_ff), 2):
            gain = sums[a, b] + sums[b, a] - sums[a, a] - sums[b, b]
            assert gain <= 1e-4 * sums.max()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (DENSE, pruned(DENSE), ""),
        (
            DENSE,
            DENSE.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8, hadamard=4)),
            r"sparsity.hadamard=4 mixes .* legal: sparsity.hadamard=0, or run.prune_to=blocks",
        ),
        (
            pruned(DENSE, "random"),
            pruned(DENSE, "monarch"),
            r"as many blocks of \w+ as the pattern monarch, but others; legal: run.prune_to=blocks",
        ),
    ],
)
def test_what_cannot_be_pruned_to_a_pattern_is_refused(old, new, message):
    params, tables = random_model(old)
    if not message:
        pattern_pruning.refuse(old, tables, new)
        return
    with pytest.raises(UserError, match=message):
        pattern_pruning.refuse(old, tables, new)
    with pytest.raises(UserError, match=message):
        initial_state_from(start_of(old, params, tables), new, TRAINING, prune_to="pattern")


def test_programs_are_specialised_to_the_pattern():
    config = preset("pico").change(run__init_from="somewhere")
    for prune_to, runtime in (("blocks", True), ("pattern", False)):
        sparse = variant(config.change(run__prune_to=prune_to), "sparse")
        assert sparse.phase_specs[0].runtime_layouts == runtime


def test_a_pattern_without_weights_is_refused():
    with pytest.raises(UserError, match=r"run.prune_to=pattern .* legal with run.init_from"):
        preset("pico").change(run__prune_to="pattern")


def test_only_blocks_of_equal_groups_are_those_of_a_pattern():
    for pattern, grouped in (("monarch", True), ("random", False)):
        model = pruned(DENSE, pattern)
        assert pattern_pruning.is_grouped(model, random_model(model)[1]) == grouped
    model = pruned(DENSE)
    layouts = model_layouts.layouts(model)
    layouts["mlp_in"][1] = make_layout("random", DENSE.d_model, DENSE.d_ff, 8, 0.5, 1)
    assert not pattern_pruning.is_grouped(model, stacks.stored_layouts(model, layouts))
    assert not pattern_pruning.is_grouped(DENSE, {})


@pytest.mark.parametrize(
    ("pattern", "prune_to"), some([("monarch", "pattern"), ("random", "blocks")], "monarch")
)
def test_a_run_from_groups_keeps_them(tmp_path, pattern, prune_to):
    config = sd.preset("pico").change(
        model__num_layers=1, model__d_model=64, model__num_heads=2, model__d_ff=128,
        sparsity__pattern=pattern, sparsity__density=0.25,
    )  # fmt: skip
    folder = sd.save(sd.init(config, jax.random.key(0)), tmp_path / "model", form="sparse")
    assert sd.preset(folder).run.prune_to == prune_to
