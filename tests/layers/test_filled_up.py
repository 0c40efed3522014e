"""Layers whose features the block does not divide compute what the dense kernel computes."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.core.layouts.patterns import has_layout
from sparse_dataflow.layers.block_sparse_linear import filled_up

SHAPES = [(37, 60, 8), (64, 30, 16), (19, 48, 12)]
each_shape = pytest.mark.parametrize(("inputs", "outputs", "block"), some(SHAPES, 19))


def layer_of(inputs, outputs, block, **options):
    density = 1 if inputs == 37 else 0.5
    return sd.BlockSparseLinear(
        inputs, outputs, block=block, density=density, rngs=nnx.Rngs(0), **options
    )


def filling(layer):
    """The stored weights of features that the layer does not have."""
    kernel = np.zeros((layer.layout.in_features, layer.layout.out_features))
    block, values = layer.layout.block, np.asarray(layer.values[...])
    for value, row, col in zip(values, layer.layout.rows, layer.layout.cols):
        kernel[row * block :, col * block :][:block, :block] = value
    kernel[: layer.in_features, : layer.out_features] = 0
    return kernel


def test_any_features_can_have_blocks_that_divide_none():
    layer = sd.BlockSparseLinear(100, 50, block=32, pattern="cyclic", density=0.5, rngs=nnx.Rngs(0))
    assert layer.layout.in_features == 128 and layer.layout.out_features == 64
    assert layer(jnp.ones((2, 3, 100))).shape == (2, 3, 50)
    # 49 x 19 and 19 x 7 blocks have no balanced layouts of these densities.
    for shape, density, grid in (((784, 300), 0.125, (56, 24)), ((300, 100), 0.25, (20, 8))):
        layer = sd.BlockSparseLinear(*shape, block=16, density=density, rngs=nnx.Rngs(0))
        assert layer.layout.mask.shape == grid
    with pytest.raises(sd.UserError, match="12 x 786 blocks of 64; legal: multiples of 1/6"):
        sd.BlockSparseLinear(768, 50257, rngs=nnx.Rngs(0))
    layer = sd.BlockSparseLinear(100, 50, block=32, pattern="cyclic", density=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(sd.UserError, match=r"reads \[..., 100\]"):
        layer(jnp.ones((2, 128)))


@hypothesis.given(
    st.integers(8, 40), st.integers(16, 700), st.sampled_from([8, 16]), st.sampled_from([4, 8, 3])
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_the_padded_width_grows_with_the_width_whether_the_block_divides_it_or_not(
    inputs, outputs, block, ring
):
    widths = [filled_up((8 * inputs, outputs + n), block, 1 / ring)[1] for n in range(3 * block)]
    assert widths == sorted(widths)
    assert all(0 <= w - (outputs + n) for n, w in enumerate(widths))
    side = 8 * inputs // block * block
    if has_layout(side // block, outputs // block, 1 / ring) and side and outputs >= block:
        exact = side, outputs // block * block
        assert filled_up(exact, block, 1 / ring) == exact


@pytest.mark.parametrize(
    "shape, density", some([((64, 296), 0.5), ((96, 88), 0.25), ((56, 40), 0.5)], (96, 88))
)
def test_a_width_that_the_block_divides_is_filled_up_where_the_density_needs_it(shape, density):
    layer = sd.BlockSparseLinear(*shape, block=8, density=density, rngs=nnx.Rngs(0))
    assert layer.layout.density == density and layer.layout.mask.size > shape[0] * shape[1] / 64
    x = jax.random.normal(jax.random.key(0), (3, shape[0]))
    np.testing.assert_allclose(layer(x), sd.densify(layer)(x), atol=1e-5)


@each_shape
@pytest.mark.parametrize("evolving", some([False, True], True))
def test_product_and_gradients_are_those_of_the_dense_kernel(inputs, outputs, block, evolving):
    layer = layer_of(inputs, outputs, block, evolving=evolving)
    dense = sd.densify(layer)
    assert dense.kernel.shape == (inputs, outputs)
    x = jax.random.normal(jax.random.key(1), (5, inputs))
    weights = jax.random.normal(jax.random.key(2), (5, outputs))

    def loss(module, x):
        return jnp.sum(module(x) * weights)

    np.testing.assert_allclose(layer(x), dense(x), rtol=1e-5, atol=1e-5)
    _, dx = nnx.value_and_grad(loss, argnums=1)(layer, x)
    _, expected = nnx.value_and_grad(loss, argnums=1)(dense, x)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5)
    dense_gradient = np.asarray(nnx.grad(loss)(dense, x).kernel[...])
    layer.values[...] = nnx.grad(loss)(layer, x)["values"][...]
    stored = np.asarray(sd.densify(layer).kernel[...])
    mask = np.kron(layer.layout.mask, np.ones((block, block)))[:inputs, :outputs]
    np.testing.assert_allclose(stored, dense_gradient * mask, rtol=1e-5, atol=1e-5)
    assert not filling(layer).any()


@each_shape
def test_training_and_evolution_leave_the_filling_zero(inputs, outputs, block):
    layer = layer_of(inputs, outputs, block, evolving=True)
    optimizer = nnx.Optimizer(layer, optax.adamw(0.1), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (5, inputs))

    def loss(module, x):
        return jnp.mean(jnp.square(module(x) - 1))

    for method in ("set", "rigl"):
        optimizer.update(layer, nnx.grad(loss)(layer, x))
        measured = {"loss": loss, "batch": (x,)} if method == "rigl" else {}
        sd.evolve(layer, optimizer, method, share=0.3, **measured)
        optimizer.update(layer, nnx.grad(loss)(layer, x))
        assert not filling(layer).any()
        np.testing.assert_allclose(layer(x), sd.densify(layer)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", some(["magnitude", "random"], "magnitude"))
def test_a_model_of_odd_sizes_is_replaced_at_density_1_by_the_same_function(pattern):
    linears = [nnx.Linear(30, 50, rngs=nnx.Rngs(0)), nnx.Linear(50, 17, rngs=nnx.Rngs(1))]
    model = nnx.Sequential(*linears)
    sparse = sd.sparsify(model, pattern, density=1, block=16)
    x = jax.random.normal(jax.random.key(1), (4, 30))
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-5)
    halves = sd.sparsify(model, pattern, density=0.5, block=16)
    np.testing.assert_allclose(halves(x), sd.densify(halves)(x), rtol=1e-5, atol=1e-5)
    assert sum(sd.erk_densities(model, 0.5, block=16).values()) > 0


def test_outputs_of_a_last_block_have_the_variance_of_the_others():
    layer = sd.BlockSparseLinear(
        552, 1048, block=64, density=1 / 3, use_bias=False, rngs=nnx.Rngs(0)
    )
    y = layer(jax.random.normal(jax.random.key(1), (2000, 552)))
    variances = np.var(np.asarray(y), axis=0)
    assert abs(variances[1024:].mean() / variances[:1024].mean() - 1) < 0.1
    assert abs(variances.mean() - 1) < 0.1


@pytest.mark.parametrize(("inputs", "outputs", "block"), [(40, 64, 32), (37, 60, 8), (17, 33, 16)])
def test_a_layer_that_stores_all_blocks_has_the_kernel_that_is_drawn(inputs, outputs, block):
    """What fills up the last block is no input, so that it scales no weight."""
    kernel = np.random.default_rng(0).normal(size=(inputs, outputs)).astype(np.float32)
    layer = sd.BlockSparseLinear(
        inputs,
        outputs,
        block=block,
        density=1,
        kernel_init=lambda *_: jnp.asarray(kernel),
        rngs=nnx.Rngs(0),
    )
    dense = layer.layout.to_dense(np.asarray(layer.values[...]))[:inputs, :outputs]
    np.testing.assert_allclose(dense, kernel, rtol=1e-6)
