"""Masked dense weights: single weights, N of M and blocks, chosen, exchanged, trained and saved."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, some
from small_models import whole_logits, whole_loss_and_gradients

import sparse_dataflow as sd
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.block_gradients import mask_gradient_norms
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.layouts.evolution import METHODS, phase_specs
from sparse_dataflow.core.model.partition import merged, trained_and_rest
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training.step import initial_state, make_train_step
from sparse_dataflow.core.training.transitions import change_model, update_layouts
from sparse_dataflow.core.weights.masked import Masked
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.equivalent_forms import dense_form
from sparse_dataflow.runs.run_config import preset

MODEL = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=16)
TRAINING = TrainingConfig(20, 4, 8, learning_rate=1e-2)
SINGLE = LinearSpec("masked", "masked", density=0.25, block=1)
SPECS = {
    "single weights": SINGLE,
    "2 of 4": dataclasses.replace(SINGLE, density=0.5, span=4),
    "blocks of 8": dataclasses.replace(SINGLE, block=8),
    "rows of 8": dataclasses.replace(SINGLE, block_outputs=8),
    "blocks of 4, 1 of 2": dataclasses.replace(SINGLE, block=4, density=0.5, span=2),
}
each_spec = pytest.mark.parametrize("name", some([*SPECS], "blocks of 4, 1 of 2"))
drawn_specs = st.builds(
    lambda block, outputs, span, kept: dataclasses.replace(
        SINGLE, block=block, block_outputs=outputs, span=span, density=kept / (span or 8)
    ),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((0, 1, 8)),
    st.sampled_from((0, 4, 8)),
    st.integers(1, 3),
)
TOKENS = np.random.default_rng(0).integers(0, 40, (4, 9), np.int32)
BATCH = Batch.from_windows(TOKENS)


def counts(mask, spec):
    """Stored blocks of each output in every span, in numpy; the mask is whole blocks."""
    mask = np.asarray(mask)
    rows, columns = spec.block_sides
    grid = mask.reshape(mask.shape[0] // rows, rows, mask.shape[1] // columns, columns)
    assert np.all(grid.all((1, 3)) == grid.any((1, 3)))
    blocks = grid[:, 0, :, 0]
    return blocks.reshape(-1, spec.span or len(blocks), blocks.shape[1]).sum(1)


def expected_count(spec, inputs):
    return round((spec.span or inputs // spec.block) * spec.density)


@settings(max_examples=examples(30), deadline=None)
@given(drawn_specs, st.integers(0, 10**6))
def test_the_best_are_those_of_a_loop(spec, seed):
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(32, 16)).astype(np.float32)
    mask = np.asarray(Masked.best(Masked.scores(jnp.asarray(kernel), spec), spec))
    assert np.all(counts(mask, spec) == max(1, expected_count(spec, 32)))
    side, span, columns = spec.block, spec.span or 32 // spec.block, spec.block_sides[1]
    for out, first in itertools.product(range(0, 16, columns), range(0, 32 // side, span)):
        norms = [
            np.square(kernel[row * side : (row + 1) * side, out : out + columns]).sum()
            for row in range(first, first + span)
        ]
        stored = [bool(mask[row * side, out]) for row in range(first, first + span)]
        least = min(norm for norm, s in zip(norms, stored) if s)
        assert all(norm <= least + 1e-6 for norm, s in zip(norms, stored) if not s)


@settings(max_examples=examples(30), deadline=None)
@given(drawn_specs, st.integers(0, 10**6), st.integers(0, 60), st.sampled_from((0.0, 1.0)))
def test_an_exchange_is_that_of_the_best_pairs(spec, seed, count, gain):
    """A loop in numpy: each output and span offers its smallest against its best absent block."""
    rng = np.random.default_rng(seed)
    blocks = spec.weight.grid(spec, (32, 16))
    mask = jax.jit(Masked.best, static_argnums=1)(jnp.asarray(rng.random(blocks)), spec)
    norms, growth = rng.random(blocks).astype("f4"), rng.random(blocks).astype("f4")
    exchange = jax.jit(functools.partial(Masked.exchanged, spec=spec, gain=gain))
    after = np.asarray(exchange(mask, jnp.asarray(norms), jnp.asarray(growth), count=count))
    assert np.all(counts(after, spec) == counts(mask, spec))
    stored = np.array(np.asarray(mask)[:: spec.block, :: spec.block_sides[1]])
    span = spec.span or blocks[0]
    loss = np.sort(norms[stored])[:count].sum() or 1
    profit = np.sort(growth[~stored])[::-1][:count].sum() or 1
    pairs = []
    for out, first in itertools.product(range(blocks[1]), range(0, blocks[0], span)):
        rows = range(first, first + span)
        drops = sorted((row for row in rows if stored[row, out]), key=lambda r: norms[r, out])
        grows = sorted((row for row in rows if not stored[row, out]), key=lambda r: -growth[r, out])
        for drop, grow in zip(drops, grows):
            cost = norms[drop, out] / loss - gain * growth[grow, out] / profit
            pairs.append((cost, drop, grow, out))
    for _, drop, grow, out in sorted(pairs)[:count]:
        stored[drop, out], stored[grow, out] = False, True
    assert np.array_equal(after[:: spec.block, :: spec.block_sides[1]], stored)


@each_spec
def test_training_changes_nothing_outside_of_the_mask(name):
    model, spec = MODEL.with_linears(SPECS[name]), SPECS[name]
    state = initial_state(model, TRAINING)
    step, losses = jax.jit(make_train_step(model, TRAINING)), []
    masks = jax.tree.map(np.asarray, state.rest)
    for _ in range(8):
        state, report = step(state, BATCH, 1e-2)
        losses.append(float(report.loss))
    assert losses[-1] < losses[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, masks, state.rest))
    for projection in model.projections:
        kernel = np.asarray(state.params["blocks"][projection]["kernel"])
        mask = masks["blocks"][projection]["mask"]
        assert not kernel[~mask].any() and kernel[mask].all()
        for layer in mask:
            assert np.all(counts(layer, spec) == expected_count(spec, len(layer)))


def test_a_masked_model_is_the_dense_model_with_zeros():
    """Loss and gradients are those of a dense model whose kernels are multiplied by the masks."""
    model = MODEL.with_linears(SINGLE)
    state = initial_state(model, TRAINING)

    def dense_loss(params):
        kernels = jax.tree.map(jnp.asarray, params)
        for name in model.projections:
            mask = state.rest["blocks"][name]["mask"]
            module = kernels["blocks"][name]
            kernels["blocks"][name] = {**module, "kernel": module["kernel"] * mask}
        metrics, _ = whole.loss_and_gradients(MODEL, kernels, (), BATCH)
        return metrics["loss"].total

    metrics, gradients = whole_loss_and_gradients(model, state.params, state.rest, BATCH)
    expected, slopes = jax.jit(jax.value_and_grad(dense_loss))(state.params)
    np.testing.assert_allclose(metrics["loss"].number(), expected, rtol=1e-6)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradients, slopes
    )


def test_rigl_reads_the_gradient_of_the_dense_weight():
    model = MODEL.with_linears(SINGLE)
    state = initial_state(model, TRAINING)
    params = merged(state.params, state.rest)
    dense, kernels = dense_form(model, params)
    _, slopes = whole_loss_and_gradients(dense, kernels, (), BATCH)
    loss = SINGLE_DEVICE.loss_and_gradients
    norms = mask_gradient_norms(loss, model, state.params, state.rest, BATCH)
    for name in model.projections:
        expected = np.abs(slopes["blocks"][name]["kernel"])
        np.testing.assert_allclose(norms[name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", some(["set", "rigl"], "rigl"))
@each_spec
def test_an_update_moves_weights_and_their_moments(method, name):
    spec = SPECS[name]
    model = phase_specs(MODEL.with_linears(spec), EvolutionConfig(method))[0].model
    state = initial_state(model, TRAINING)
    step = jax.jit(make_train_step(model, TRAINING))
    state, _ = step(state, BATCH, 1e-2)
    norms = None
    if METHODS[method].reads_gradients:
        loss = SINGLE_DEVICE.loss_and_gradients
        norms = jax.device_get(mask_gradient_norms(loss, model, state.params, state.rest, BATCH))
    before = jax.device_get(state)
    after = update_layouts(
        state, model, METHODS[method].update, lambda _: 0.5, norms, 1, METHODS[method].mask_gain
    )
    adam = next(entry for entry in after.moments if hasattr(entry, "mu"))
    for projection in model.projections:
        old = before.rest["blocks"][projection]["mask"]
        new = np.asarray(after.rest["blocks"][projection]["mask"])
        assert (old != new).any() and old.sum() == new.sum()
        kernel = np.asarray(after.params["blocks"][projection]["kernel"])
        stays = old & new
        assert np.array_equal(kernel[stays], before.params["blocks"][projection]["kernel"][stays])
        for array in (kernel, *(t["blocks"][projection]["kernel"] for t in (adam.mu, adam.nu))):
            assert not np.asarray(array)[~stays].any()
    step(after, BATCH, 1e-2)


def test_an_update_keeps_what_an_optimizer_knows_of_a_whole_weight():
    """Counts of an optimizer of `factories` stay, and are not freed with the old arrays."""
    model = MODEL.with_linears(SINGLE)
    training = dataclasses.replace(TRAINING, optimizer="lion")
    state = initial_state(model, training)
    step = jax.jit(make_train_step(model, training))
    for _ in range(2):
        state, report = step(state, BATCH, 1e-3)
        state = update_layouts(state, model, METHODS["set"].update, 0.5)
    assert np.isfinite(report.loss)


def test_an_update_needs_no_new_program():
    model = MODEL.with_linears(SINGLE)
    state, traces = initial_state(model, TRAINING), []
    plain = make_train_step(model, TRAINING)

    @jax.jit
    def step(state, batch):
        traces.append(None)
        return plain(state, batch, 1e-2)

    for _ in range(3):
        state, _ = step(state, BATCH)
        state = update_layouts(state, model, METHODS["set"].update, 0.5)
    assert len(traces) == 1


@each_spec
@pytest.mark.parametrize("method", ["gradual", "sparse_to_dense"])
def test_a_model_turns_sparse_and_dense(method, name):
    """Phases keep the largest weights, or all of them; what they compute with follows."""
    spec = SPECS[name]
    specs = phase_specs(MODEL.with_linears(spec), EvolutionConfig(method))
    state = initial_state(specs[0].model, TRAINING)
    for old, new in itertools.pairwise(s.model for s in specs):
        expected = whole_logits(old, weights_of(old, state.merged), TOKENS[:, :-1])
        before = jax.device_get(state.params)
        state = change_model(state, old, new)
        _, report = jax.jit(make_train_step(new, TRAINING))(state, BATCH, 1e-3)
        assert np.isfinite(report.loss)
        if method == "sparse_to_dense":
            actual = whole_logits(new, weights_of(new, state.merged), TOKENS[:, :-1])
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
            assert state.rest == ()
            continue
        for projection in new.projections:
            linear = new.linear(projection)
            mask = state.rest["blocks"][projection]["mask"]
            kernel = before["blocks"][projection]["kernel"]
            best = Masked.best(Masked.scores(jnp.asarray(kernel), linear), linear)
            assert np.array_equal(mask, best)


def test_parameters_and_masks_are_parted_and_merged():
    params = {"embed": {"tokens": 1}, "blocks": ({"qkv": {"kernel": 2, "mask": 3}}, {"v": {}})}
    model = MODEL.with_linears(SINGLE)
    trained, tables = trained_and_rest(model, params)
    assert trained["blocks"][0] == {"qkv": {"kernel": 2}}
    assert tables == {"blocks": ({"qkv": {"mask": 3}}, {})}
    assert merged(trained, tables)["blocks"][0] == params["blocks"][0]
    assert trained_and_rest(model, {"embed": {"tokens": 1}}) == ({"embed": {"tokens": 1}}, ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sparsity__block": 48}, "not whole blocks of 48"),
        ({"sparsity__block": "1x7"}, "not whole blocks of 1 x 7"),
        (
            {"sparsity__pattern": "monarch", "sparsity__block": "64x8"},
            "block=64x8 does not",
        ),
        ({"sparsity__block": 1, "sparsity__span": 3}, "in spans of 3 .*; legal: sides"),
        ({"sparsity__block": 1, "sparsity__span": 4, "sparsity__density": 0.3}, "multiples of 1/4"),
    ],
)
def test_masks_that_do_not_exist_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        config = preset("pico").change(**{"sparsity__pattern": "masked", **changes})
        config.model.with_linears(next(iter(config.sparsity.linears(config.model).values())))


def test_parameters_of_a_masked_model_are_its_leaves_without_masks():
    """So `jax.grad`, optax and `jax.tree` see numbers alone, and masks stay with the model."""
    config = preset("pico").change(sparsity__pattern="masked", sparsity__block=1)
    model = sd.init(config, jax.random.key(0))
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(model))
    halved = jax.tree.map(lambda leaf: leaf / 2, model)
    for name, module in model.params["blocks"].items():
        if "mask" in module:
            assert np.array_equal(halved.params["blocks"][name]["mask"], module["mask"])
    other = sd.init(config.change(training__seed=1), jax.random.key(1))
    assert jax.tree.structure(model) == jax.tree.structure(halved) != jax.tree.structure(other)


@pytest.mark.parametrize(
    ("width", "names"), some([(2, ("mlp_in",)), (8, ("qkv", "mlp_out")), (32, ())], 8)
)
def test_a_mask_of_transformed_inputs_computes_the_dense_function(width, names):
    """A mask of everything loses nothing, and the way back merges the transform in again."""
    names = names or MODEL.projections
    spec = dataclasses.replace(SINGLE, density=1.0, hadamard=width)
    masked = MODEL.with_linears(spec, names)
    state = initial_state(MODEL, TRAINING, SINGLE_DEVICE)
    logits = lambda model, state: np.asarray(  # noqa: E731
        whole_logits(model, weights_of(model, merged(state.params, state.rest), {}), TOKENS)
    )
    exact = logits(MODEL, state)
    state = change_model(state, MODEL, masked)
    np.testing.assert_allclose(logits(masked, state), exact, atol=1e-4)
    state = change_model(state, masked, MODEL)
    np.testing.assert_allclose(logits(MODEL, state), exact, atol=1e-4)


def test_without_gain_the_smallest_stored_weights_go():
    """Whatever grows in their place; as SET asks."""
    spec = LinearSpec("masked", "masked", 0.5, block=1)
    rng = np.random.default_rng(0)
    mask = np.stack([rng.permutation(16) < 8 for _ in range(12)], axis=1)
    norms = np.where(mask, rng.uniform(0.9, 1, mask.shape), 0)
    growth = rng.uniform(1, 9, mask.shape) * (np.arange(12) % 2)  # Half of the outputs gain more.
    after = np.asarray(Masked.exchanged(mask, norms, growth, spec, 10, 0.0))
    dropped = norms[mask & ~after]
    assert sorted(dropped) == sorted(norms[mask])[:10]
    assert (after.sum(0) == 8).all()
