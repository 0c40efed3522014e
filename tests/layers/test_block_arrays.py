"""The functions of stored blocks as arrays agree with numpy, with each other and with the layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_dataflow as sd


def layout_of(seed=0, rows=4, columns=8, block=8, density=0.5):
    return sd.make_layout("random", rows * block, columns * block, block, density, seed)


def masked(kernel, layout):
    """Returns a kernel with zeros where no block is stored, by numpy."""
    return kernel * np.kron(layout.mask, np.ones((layout.block, layout.block)))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    block=st.sampled_from([1, 2, 4, 8]),
    stack=st.sampled_from([(), (3,), (2, 2)]),
    short=st.booleans(),
)
def test_joining_what_was_cut_is_the_masked_kernel(seed, block, stack, short):
    layout = layout_of(seed, block=block)
    shape = layout.in_features - (short and block > 1), layout.out_features
    kernel = np.random.default_rng(seed).normal(size=(*stack, *shape)).astype(np.float32)
    values = sd.cut_blocks(kernel, layout)
    assert values.shape == (*stack, layout.nnz, block, block)
    missing = [(0, 0)] * len(stack) + [(0, layout.in_features - shape[0]), (0, 0)]
    expected = masked(np.pad(kernel, missing), layout)[..., : shape[0], :]
    np.testing.assert_array_equal(sd.join_blocks(values, layout, shape), expected)


def test_each_layer_of_a_stack_may_have_its_own_layout():
    layouts = [layout_of(seed) for seed in range(3)]
    kernels = np.random.default_rng(0).normal(size=(3, 32, 64)).astype(np.float32)
    values = sd.cut_blocks(kernels, layouts)
    expected = np.stack([masked(*pair) for pair in zip(kernels, layouts)])
    np.testing.assert_array_equal(sd.join_blocks(values, layouts), expected)


@pytest.mark.parametrize("density", [0.25, 0.5, 1.0])
def test_a_layer_of_the_package_has_the_values_that_the_function_draws(density):
    layout, init = layout_of(3, density=density), nnx.initializers.he_normal()
    layer = sd.BlockSparseLinear(32, 64, layout=layout, kernel_init=init, rngs=nnx.Rngs(0))
    values = sd.draw_blocks(nnx.Rngs(0).params(), layout, init)
    np.testing.assert_array_equal(values, layer.values[...])
    x = jax.random.normal(jax.random.key(0), (5, 32))
    np.testing.assert_array_equal(sd.block_sparse_matmul(x, values, layout), layer(x))


def test_gradients_of_cutting_and_joining_are_each_other():
    layout = layout_of(1)
    values = sd.draw_blocks(jax.random.key(0), layout)
    kernel = jax.random.normal(jax.random.key(1), (32, 64))
    _, pull = jax.vjp(lambda v: sd.join_blocks(v, layout), values)
    np.testing.assert_array_equal(pull(kernel)[0], sd.cut_blocks(kernel, layout))
    _, pull = jax.vjp(lambda k: sd.cut_blocks(k, layout), kernel)
    np.testing.assert_array_equal(pull(values)[0], sd.join_blocks(values, layout))


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_set_keeps_the_bits_of_blocks_that_stay_and_drops_the_smallest(seed):
    layout = layout_of(seed, density=0.25)
    values = np.asarray(sd.draw_blocks(jax.random.key(seed), layout))
    new, move = sd.evolve_blocks(layout, values, "set", share=0.25, seed=seed)
    count = round(0.25 * layout.nnz)
    dropped = layout.mask & ~new.mask
    assert dropped.sum() == count and (new.fan_in == layout.fan_in).all()
    norms = np.sqrt((values**2).sum((1, 2)))
    order = np.argsort(norms)
    is_dropped = dropped[layout.rows, layout.cols]
    assert set(np.flatnonzero(is_dropped)) == set(order[:count])
    before = np.asarray(sd.join_blocks(values, layout))
    after = np.asarray(sd.join_blocks(move(values), new))
    both = np.kron(layout.mask & new.mask, np.ones((8, 8))).astype(bool)
    np.testing.assert_array_equal(after[both], before[both])
    assert not after[~both].any()


def test_rigl_grows_where_the_dense_gradient_is_largest():
    layout = layout_of(2, density=0.25)
    values = sd.draw_blocks(jax.random.key(0), layout)
    column = 5
    absent = np.flatnonzero(~layout.mask[:, column])[1]
    gradient = np.zeros((32, 64), np.float32)
    gradient[absent * 8 : absent * 8 + 8, column * 8 : column * 8 + 8] = 1.0
    new, _ = sd.evolve_blocks(layout, values, "rigl", share=0.01, gradient=gradient)
    assert new.mask[absent, column] and (new.mask ^ layout.mask).sum() == 2


@pytest.mark.parametrize("make", [optax.adam, optax.sgd, optax.contrib.muon])
def test_optax_moves_the_moments_of_a_plain_dict(make):
    layout = layout_of(4)
    params = {"values": sd.draw_blocks(jax.random.key(0), layout), "bias": jnp.zeros(64)}
    tx = make(1e-2, momentum=0.9) if make is optax.sgd else make(1e-2)
    state = tx.init(params)
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    params = optax.apply_updates(params, updates)
    layout, move = sd.evolve_blocks(layout, params["values"], share=0.2, seed=1)
    moves = {"values": move, "bias": lambda array: array}
    params = jax.tree.map(lambda f, array: f(array), moves, params)
    is_masked = lambda leaf: isinstance(leaf, optax.MaskedNode)  # noqa: E731
    carry = lambda leaf, f: leaf if is_masked(leaf) else f(leaf)  # noqa: E731
    state = optax.tree_map_params(tx, carry, state, moves, is_leaf=is_masked)
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    moved = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == params["values"].shape]
    assert moved and all(bool(jnp.isfinite(leaf).all()) for leaf in moved)


WRONG = {
    "a larger kernel": (lambda layout: sd.cut_blocks(jnp.ones((33, 64)), layout), "32, 64"),
    "values of another layout": (lambda layout: sd.join_blocks(jnp.ones((3, 8, 8)), layout), "16,"),
    "no layout": (lambda layout: sd.cut_blocks(jnp.ones((32, 64)), layout.mask), "BlockLayout"),
    "two layouts of three layers": (
        lambda layout: sd.cut_blocks(jnp.ones((3, 32, 64)), [layout] * 2), "1 or 3, one a layer"
    ),
    "an unknown method": (
        lambda layout: sd.evolve_blocks(layout, jnp.ones((16, 8, 8)), "static"), "legal: rigl, set"
    ),
    "no gradient": (
        lambda layout: sd.evolve_blocks(layout, jnp.ones((16, 8, 8)), "rigl"), "32, 64"
    ),
    "a negative seed": (
        lambda layout: sd.evolve_blocks(layout, jnp.ones((16, 8, 8)), seed=-1), "0 or more"
    ),
    "a traced array": (
        lambda layout: jax.jit(lambda v: sd.evolve_blocks(layout, v)[1](v))(jnp.ones((16, 8, 8))),
        "not inside jit",
    ),
    "moments of another shape": (
        lambda layout: sd.evolve_blocks(layout, jnp.ones((16, 8, 8)))[1](jnp.ones((16, 8))), "16, 8"
    ),
    "a kernel without inputs": (lambda layout: sd.cut_blocks(np.zeros((0, 64)), layout), "0, 64"),
    "layout None": (lambda layout: sd.cut_blocks(jnp.ones((32, 64)), None), "BlockLayout"),
    "kernel None": (lambda layout: sd.cut_blocks(None, layout), "kernel is NoneType; legal: an"),
    "words": (lambda layout: sd.join_blocks(np.array(["a"]), layout), "values is ndarray; legal"),
    "values that are not finite": (
        lambda layout: sd.evolve_blocks(layout, jnp.full((16, 8, 8), jnp.nan)), "not finite"
    ),
    "a gradient that is not finite": (
        lambda layout: sd.evolve_blocks(
            layout, jnp.ones((16, 8, 8)), "rigl", gradient=jnp.full((32, 64), jnp.inf)
        ),
        "not finite",
    ),
    "a gradient that nothing reads": (
        lambda layout: sd.evolve_blocks(layout, jnp.ones((16, 8, 8)), gradient=jnp.ones((32, 64))),
        "reads no gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name):
    call, words = WRONG[name]
    with pytest.raises(sd.UserError, match=words):
        call(layout_of())
