"""Weights that are only a product of two factors: value, size, scale, updates and refusals."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import some
from small_models import DENSE, shapes_of

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.projection import draw, linear, with_threshold
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.optim import muon
from sparse_dataflow.core.optim.optimizers import learning_rate_multipliers, make_optimizer
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.weights.low_rank import LowRank, spectral_bound
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.interchange.equivalent_forms import dense_form
from sparse_dataflow.planner import memory
from sparse_dataflow.relay.relay_executor import RelayExecutor
from sparse_dataflow.runs.equal_cost import equal_cost_model, stored_parameters
from sparse_dataflow.runs.run_config import preset

SPEC = LinearSpec("low_rank", "low_rank", density=0.25)
MODEL = DENSE.with_linears(SPEC)


def arbitrary(model, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(0, 0.2, s.shape).astype(np.float32), shapes_of(model))


@pytest.mark.parametrize("sides", [(64, 256), (256, 64)])
def test_factors_are_drawn_with_the_spectral_norms_of_a_dense_weight(sides):
    """That of a_factor is about the root of its outputs over its inputs; see `LowRank.draw`."""
    scales = []
    normal = lambda shape, scale: scales.append(scale) or np.zeros(shape)  # noqa: E731
    LowRank.draw(SPEC, sides, 0.5, normal)
    rank = LowRank.inner_width(SPEC, sides)
    assert scales == pytest.approx([math.sqrt(rank) / sides[0], 0.5 / math.sqrt(rank)])


@pytest.mark.parametrize("projection", ["qkv", "mlp_out"])
def test_a_layer_and_its_gradient_equal_the_dense_weight_in_float64(projection):
    drawn = jax.eval_shape(lambda: draw(MODEL, projection, gain=1.0, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape.shape) for name, shape in drawn.items()}
    inputs, outputs = MODEL.projection_shape(projection)
    assert set(params) == {"a_factor", "b_factor", "bias"}
    x, dy = rng.normal(size=(2, 5, inputs)), rng.normal(size=(2, 5, outputs))
    a, b = params["a_factor"], params["b_factor"]
    with jax.enable_x64(True):
        apply = lambda params, x: linear(MODEL, projection, params)(x)  # noqa: E731
        y, backward = jax.vjp(apply, params, x)
        gradients, dx = backward(jnp.asarray(dy))
    np.testing.assert_allclose(y, x @ (a @ b) + params["bias"], rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(dx, dy @ (a @ b).T, rtol=1e-12, atol=1e-10)
    weight_gradient = np.einsum("bti,bto->io", x, dy)
    np.testing.assert_allclose(gradients["a_factor"], weight_gradient @ b.T, rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(gradients["b_factor"], a.T @ weight_gradient, rtol=1e-12, atol=1e-10)


def test_a_threshold_lets_small_inputs_of_the_product_count_as_zeros():
    layer = linear(MODEL, "mlp_in", draw(MODEL, "mlp_in", gain=1.0, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(1, 3, 32)).astype(np.float32)
    masked = np.where(np.abs(x) <= 0.5, 0, x)
    y = with_threshold(layer, np.float32(0.5))(x)
    np.testing.assert_allclose(y, layer(masked), rtol=1e-5, atol=1e-5)


@settings(max_examples=6)
@given(st.integers(1, 40), st.integers(1, 6), st.floats(1e-3, 1))
def test_factors_store_the_density_and_are_counted_exactly(heads, times, density):
    spec = dataclasses.replace(SPEC, density=density)
    width = 16 * heads
    model = ModelConfig(1, width, heads, times * width, vocab_size=8, max_len=8, linears={})
    model = model.with_linears(spec)
    sizes = 0
    for name in model.projections:
        sides, rank = model.projection_shape(name), model.inner_width(name)
        assert 1 <= rank <= min(sides)
        # Half a rank is rounded, or half of RANK_MULTIPLE of at least 16 RANK_MULTIPLE.
        wanted = density * math.prod(sides)
        assert abs(rank * sum(sides) - wanted) <= max(sum(sides), wanted / 32)
        sizes += rank * sum(sides)
    params = shapes_of(model)
    assert memory.matrix_count(model) == stored_parameters(model) == sizes
    assert cost.parameter_count(model) == sum(leaf.size for leaf in jax.tree.leaves(params))
    forward = cost.flops_per_token(model, 8, training=False)
    assert forward.projections == pytest.approx(2 * sizes)


@pytest.mark.slow
def test_the_initial_product_has_the_spectral_norm_of_a_dense_weight():
    """Within a factor of 2, as spectra of random factors differ; its variance is r / in of it."""
    model = ModelConfig(2, 128, 4, 512, vocab_size=8, max_len=8)
    key = jax.random.key(0)
    dense, factors = (
        jax.jit(lambda config=config: gpt.init(config, key))()["blocks"]
        for config in (model, model.with_linears(SPEC))
    )
    norm = lambda weight: np.linalg.svd(weight, compute_uv=False)[:, 0]  # noqa: E731
    for name in model.projections:
        product = np.matmul(*(np.asarray(factors[name][leaf]) for leaf in LowRank.leaves()))
        kernel = np.asarray(dense[name]["kernel"])
        share = model.with_linears(SPEC).inner_width(name) / model.projection_shape(name)[0]
        np.testing.assert_allclose(
            np.std(product), share**0.5 * np.std(kernel), rtol=0.05, err_msg=name
        )
        assert np.all(np.abs(np.log2(norm(product) / norm(kernel))) < 1.2), name


matrices = st.builds(
    lambda m, n, seed: np.random.default_rng(seed).normal(size=(3, m, n)).astype(np.float32),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 10**6),
)


@settings(max_examples=20)
@given(matrices, st.sampled_from([np.asarray, jnp.asarray]))
def test_the_spectral_bound_is_above_the_norm_and_near_it(stack, array):
    stack[0] *= 1e-6
    norms = np.linalg.svd(stack, compute_uv=False)[:, 0]
    bounds = np.asarray(spectral_bound(array(stack)))[:, 0, 0]
    most = min(stack.shape[1:]) ** (1 / 64)
    assert np.all((bounds >= norms * (1 - 1e-4)) & (bounds <= norms * most * (1 + 1e-4)))
    assert not np.any(spectral_bound(array(np.zeros_like(stack))))


@pytest.mark.parametrize("scale", some([0.01, 1.0, 30.0], 0.01))
def test_a_muon_step_moves_the_product_by_at_most_the_norm_of_a_dense_step(scale):
    """Spectron's bound, whatever the norms of the factors; large factors come near it."""
    rate = 0.02
    training = TrainingConfig(20, 4, 8, weight_decay=0.0, optimizer="muon", sparse_rate=4.0)
    optimizer, params = make_optimizer(MODEL, training), arbitrary(MODEL)
    params = jax.tree.map(lambda leaf: scale * leaf, params)
    updates, _ = jax.jit(functools.partial(optimizer.update, learning_rate=-1.0))(
        arbitrary(MODEL, 1), optimizer.init(params), params
    )
    for name in MODEL.projections:
        before, moves = params["blocks"][name], updates["blocks"][name]
        after = {leaf: before[leaf] - rate * moves[leaf] for leaf in LowRank.leaves()}
        change = after["a_factor"] @ after["b_factor"] - before["a_factor"] @ before["b_factor"]
        norms = np.linalg.svd(np.asarray(change), compute_uv=False)[:, 0]
        # Newton-Schulz leaves singular values of at most 1.2.
        bound = 1.2 * rate * muon.RMS * math.sqrt(max(MODEL.projection_shape(name)))
        assert np.all(norms < bound), name
        if scale == 30:
            assert np.all(norms > 0.3 * bound), name


def test_under_adam_a_factor_learns_at_the_rate_of_what_it_reads():
    for model in (MODEL, dataclasses.replace(MODEL, parametrization="supar")):
        training = TrainingConfig(20, 4, 8, sparse_rate=4.0)
        rates = learning_rate_multipliers(model, training, shapes_of(model))["blocks"]["qkv"]
        dense = dataclasses.replace(model, linears={})
        dense_rate = learning_rate_multipliers(dense, training, shapes_of(dense))
        dense_rate = dense_rate["blocks"]["qkv"]["kernel"]
        share = model.inner_width("qkv") / 32
        times = 4 ** (math.log(share) / math.log(1 / 8)) / (share if model.supar else 1)
        assert rates["a_factor"] == pytest.approx(dense_rate)
        assert rates["b_factor"] == pytest.approx(times * dense_rate)
        with_muon = dataclasses.replace(training, optimizer="muon")
        by_muon = learning_rate_multipliers(model, with_muon, shapes_of(model))["blocks"]["qkv"]
        dense_rates = learning_rate_multipliers(dense, with_muon, shapes_of(dense))["blocks"]["qkv"]
        assert by_muon["a_factor"] == by_muon["b_factor"] == pytest.approx(dense_rates["kernel"])


def test_newton_schulz_is_counted_for_both_factors():
    step = lambda m, n: 2 * m * (2 * m * n + m * m)  # noqa: E731
    total = sum(
        step(*sorted((side, MODEL.inner_width(name))))
        for name in MODEL.projections
        for side in MODEL.projection_shape(name)
    )
    assert cost.orthogonalization_flops(MODEL) == pytest.approx(muon.STEPS * 2 * total)


def test_the_dense_form_computes_the_same():
    params = arbitrary(MODEL)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 10), np.int32)
    dense, kernels = dense_form(MODEL, params)
    expected = jax.jit(lambda p: whole.logits(MODEL, weights_of(MODEL, p, {}), tokens))(params)
    actual = jax.jit(lambda p: whole.logits(dense, weights_of(dense, p, {}), tokens))(kernels)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evolution__method": "rigl"}, "evolution.method=rigl.*legal with it: static, shared"),
        ({"evolution__method": "gradual"}, "which is no part of a dense weight"),
        ({"sparsity__budget": "qkv:0.5x"}, "sparsity.budget=qkv.*legal with it: uniform"),
        ({"sparsity__rank": 4}, "rank=4 does not go with low-rank weights; legal: block-sparse"),
        ({"sparsity__hadamard": 4}, "hadamard=4 does not go with low-rank weights"),
        ({"run__init_from": "folder"}, "run.init_from with sparsity.pattern=low_rank"),
    ],
)
def test_what_needs_blocks_or_given_weights_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        preset("pico").change(sparsity__pattern="low_rank", **changes)


def test_models_and_forms_without_factors_are_refused(tmp_path):
    words = "does not go with low-rank weights; legal: "
    with pytest.raises(UserError, match=f"mlp_in of experts {words}another"):
        dataclasses.replace(MODEL, experts=4)
    with pytest.raises(UserError, match=r"model\.precision=int8 .* low-rank.*legal: compute_dtype"):
        dataclasses.replace(MODEL, precision="int8")
    RelayExecutor().check(MODEL, TrainingConfig(20, 4, 8))
    RelayExecutor().check(MODEL, TrainingConfig(20, 4, 8, optimizer="muon"))
    with pytest.raises(UserError, match=f"form=sparse {words}form=dense"):
        huggingface.write(tmp_path / "sparse", "sparse", MODEL, {}, None, context=8, card="")
    with pytest.raises(UserError, match=f"a width of equal cost {words}block-sparse"):
        equal_cost_model(MODEL, stored_parameters, 10_000, density=0.25)
