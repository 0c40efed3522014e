"""Weights of two block-diagonal factors: value, size, rates, matrices of Muon, refusals."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import DENSE, shapes_of

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.optim import muon
from sparse_dataflow.core.optim.optimizers import learning_rate_multipliers
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.weights.block_tensor_train import BlockTensorTrain
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.equal_cost import stored_parameters
from sparse_dataflow.runs.run_config import preset

SPEC = LinearSpec("block_tensor_train", "block_tensor_train", density=0.5, block=8)
MODEL = DENSE.with_linears(SPEC)


def reference(first, second, rank):
    """Returns the matrix, block by block: block (p, t) is the product of two factors."""
    in_blocks, block, _ = first.shape
    out_blocks = len(second)
    matrix = np.zeros((in_blocks * block, out_blocks * block))
    for p, t in itertools.product(range(in_blocks), range(out_blocks)):
        left = first[p, :, t * rank : (t + 1) * rank]
        right = second[t, p * rank : (p + 1) * rank]
        matrix[p * block : (p + 1) * block, t * block : (t + 1) * block] = left @ right
    return matrix


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.data())
def test_every_block_is_the_product_of_two_factors(inputs, outputs, block, rank, data):
    rank = min(rank, block)
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    spec = dataclasses.replace(SPEC, block=block, density=min(1.0, 2 * rank / block))
    rank = BlockTensorTrain.block_rank(spec)
    sides = inputs * block, outputs * block
    shapes = BlockTensorTrain.shapes(spec, sides)
    first, second = (rng.normal(size=shape) for shape in shapes.values())
    x = rng.normal(size=(2, 3, sides[0]))
    matrix = reference(first, second, rank)
    with jax.enable_x64(True):
        weight = BlockTensorTrain(jnp.asarray(first), jnp.asarray(second))
        np.testing.assert_allclose(weight.dense(), matrix, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(x @ weight, x @ matrix, rtol=1e-10, atol=1e-10)


def test_flops_and_parameters_are_those_of_the_two_products():
    sizes = 0
    for name in MODEL.projections:
        inputs, outputs = MODEL.projection_shape(name)
        # Rank 2: every input meets two numbers of each output block, and every output of each
        # input block.
        sizes += 2 * (inputs * outputs // 8 + outputs * inputs // 8)
    assert stored_parameters(MODEL) == MODEL.num_layers * sizes
    forward = cost.flops_per_token(MODEL, 8, training=False)
    assert forward.projections == pytest.approx(2 * MODEL.num_layers * sizes)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_under_supar_a_factor_learns_by_the_length_that_its_blocks_sum_over(optimizer):
    """Adam by its inverse; Muon, whose updates of larger matrices are smaller, by its root."""
    training = TrainingConfig(20, 4, 8, optimizer=optimizer)
    dense, model = (dataclasses.replace(each, parametrization="supar") for each in (DENSE, MODEL))
    dense_rate = learning_rate_multipliers(dense, training, shapes_of(dense))
    dense_rate = dense_rate["blocks"]["qkv"]["kernel"]
    rates = learning_rate_multipliers(model, training, shapes_of(model))["blocks"]["qkv"]
    power = 0.5 if optimizer == "muon" else 1.0
    for name, length in (("in_factor", 8), ("out_factor", 2 * DENSE.d_model // 8)):
        assert rates[name] == pytest.approx(dense_rate * (DENSE.d_model / length) ** power)


def test_newton_schulz_is_counted_for_every_block():
    step = lambda m, n: 2 * m * (2 * m * n + m * m)  # noqa: E731
    total = 0
    for name in MODEL.projections:
        for count, *shape in BlockTensorTrain.shapes(SPEC, MODEL.projection_shape(name)).values():
            total += count * step(*sorted(shape))
    expected = muon.STEPS * MODEL.num_layers * total
    assert cost.orthogonalization_flops(MODEL) == pytest.approx(expected)


@pytest.mark.parametrize("sides", [(64, 256), (256, 64)])
def test_drawn_outputs_have_the_variance_of_a_dense_weight(sides):
    rng = np.random.default_rng(0)
    arrays = BlockTensorTrain.draw(SPEC, sides, 0.5, lambda s, scale: rng.normal(0, scale, s))
    matrix = np.asarray(BlockTensorTrain(**arrays).dense())
    assert (matrix**2).sum(0).mean() == pytest.approx(0.5**2, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sparsity__block": 48}, "Blocks of 48 do not divide"),
        ({"evolution__method": "rigl"}, "evolution.method=rigl.*legal with it: static, shared"),
        ({"sparsity__hadamard": 4}, "hadamard=4 does not go with block tensor-train weights"),
        ({"run__init_from": "folder"}, "run.init_from with sparsity.pattern=block_tensor_train"),
    ],
)
def test_what_it_does_not_have_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        config = preset("pico").change(sparsity__pattern="block_tensor_train", **changes)
        config.model.with_linears(config.sparsity.linears(config.model)["qkv"])


def test_a_rank_above_the_block_is_refused():
    # With blocks of 1 a rank of 1 stores twice the dense weights.
    assert BlockTensorTrain.block_rank(dataclasses.replace(SPEC, block=1)) == 1
    assert math.isclose(2 / 8 * BlockTensorTrain.block_rank(SPEC), SPEC.density)
