"""`evolve` changes the stored blocks of any model, and weights and moments follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.core.layouts.evolution import rigl_blocks
from sparse_dataflow.layers.layout_state import TABLES, layout_name, layout_variables


class Mlp(nnx.Module):
    def __init__(self, evolving=True, density=0.5):
        make = lambda *sides, seed: sd.BlockSparseLinear(  # noqa: E731
            *sides, density=density, block=8, evolving=evolving, rngs=nnx.Rngs(seed)
        )
        self.up, self.down = make(32, 64, seed=0), make(64, 32, seed=1)
        self.head = nnx.Linear(32, 3, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.head(self.down(jnp.tanh(self.up(x))))


def loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


BATCH = jax.random.normal(jax.random.key(0), (16, 32)), jnp.ones((16, 3))
ARGUMENTS = {
    "set": {"share": 0.25, "seed": 3},
    "rigl": {"share": 0.25, "loss": loss, "batch": BATCH},
    "gradual": {"density": 0.25},
}


def trained(model, steps=2):
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    step = nnx.jit(lambda model, optimizer: optimizer.update(model, nnx.grad(loss)(model, *BATCH)))
    for _ in range(steps):
        step(model, optimizer)
    return optimizer, step


def matrices(layer, *trees):
    """Dense matrices of values and of moments, at the layer's layout."""
    return [layer.layout.to_dense(np.asarray(values)) for values in trees]


def moments(optimizer, name):
    state = optimizer.opt_state[0]
    return [getattr(state, order)[name]["values"][...] for order in ("mu", "nu")]


@pytest.mark.parametrize("evolving", some([False, True], True))
@pytest.mark.parametrize("method", ARGUMENTS)
def test_blocks_that_stay_keep_weights_and_moments_and_new_ones_are_zero(method, evolving):
    model = Mlp(evolving)
    optimizer, step = trained(model)
    before = {}
    for name in ("up", "down"):
        layer = getattr(model, name)
        before[name] = layer.layout, matrices(layer, layer.values[...], *moments(optimizer, name))
    assert sd.evolve(model, optimizer, method, **ARGUMENTS[method]) is optimizer
    for name, (layout, dense) in before.items():
        layer = getattr(model, name)
        stays = np.kron(layout.mask & layer.layout.mask, np.ones((8, 8)))
        after = matrices(layer, layer.values[...], *moments(optimizer, name))
        for old, new in zip(dense, after, strict=True):
            np.testing.assert_array_equal(new, np.where(stays, old, 0))
        assert layer.layout != layout and layer.evolving == evolving
        assert layer.layout.density == (0.25 if method == "gradual" else 0.5)
        assert np.ptp(layer.layout.fan_in) == 0
    step(model, optimizer)


def test_an_optax_state_is_carried_as_an_nnx_optimizer_is():
    tx, model, other = optax.adam(1e-2), Mlp(), Mlp()
    optimizer = nnx.Optimizer(other, tx, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    gradients = nnx.grad(loss)(model, *BATCH)
    updates, state = tx.update(gradients, tx.init(params), params)
    nnx.update(model, optax.apply_updates(params, updates))
    optimizer.update(other, nnx.grad(loss)(other, *BATCH))
    state = sd.evolve(model, state, "set", share=0.25)
    sd.evolve(other, optimizer, "set", share=0.25)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(other))
    same = lambda a, b: np.testing.assert_array_equal(a, b)  # noqa: E731
    jax.tree.map(same, jax.tree.leaves(state), jax.tree.leaves(optimizer.opt_state))


@pytest.mark.parametrize("method", ["set", "rigl"])
def test_an_evolving_model_is_not_compiled_again(method):
    model, traces = Mlp(), []

    @nnx.jit
    def apply(model, x):
        traces.append(1)
        return model(x)

    apply(model, BATCH[0])
    sd.evolve(model, None, method, **ARGUMENTS[method])
    after = apply(model, BATCH[0])
    assert len(traces) == 1
    np.testing.assert_allclose(after, sd.densify(model)(BATCH[0]), atol=1e-5)


def test_rigl_reads_the_block_norms_of_the_dense_gradient():
    model = Mlp()
    dense = sd.densify(model)
    gradient = nnx.grad(loss)(dense, *BATCH)["up"]["kernel"][...]
    norms = np.sqrt(np.square(np.asarray(gradient)).reshape(4, 8, 8, 8).sum(axis=(1, 3)))
    layout, values = model.up.layout, np.asarray(model.up.values[...])
    stored = np.sqrt(np.square(values).sum(axis=(1, 2)))
    expected = rigl_blocks(layout, stored, norms, 0.25, 1, np.random.default_rng())
    sd.evolve(model, None, "rigl", **ARGUMENTS["rigl"])
    assert model.up.layout == expected


def test_a_gradual_schedule_begins_dense():
    model = Mlp(evolving=False, density=1)
    optimizer, _ = trained(model)
    largest = np.abs(np.asarray(model.up.values[...])).sum()
    for density in (0.5, 0.25):
        sd.evolve(model, optimizer, "gradual", density=density)
        assert model.up.layout.density == model.down.layout.density == density
        assert moments(optimizer, "up")[0].shape == (int(32 * density), 8, 8)
    assert np.abs(np.asarray(model.up.values[...])).sum() > 0.25 * largest


@pytest.mark.parametrize("evolving", some([False, True], True))
def test_scanned_layers_evolve_each_or_together(evolving):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def build(rngs):
        return sd.BlockSparseLinear(32, 32, density=0.5, block=8, evolving=evolving, rngs=rngs)

    scan = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    stack, x = build(nnx.Rngs(0)), BATCH[0]
    optimizer = nnx.Optimizer(stack, optax.adam(1e-2), wrt=nnx.Param)
    mean = lambda stack, x: jnp.mean(scan(x, stack) ** 2)  # noqa: E731
    optimizer.update(stack, nnx.grad(mean)(stack, x))
    sd.evolve(stack, optimizer, "rigl", share=0.25, loss=mean, batch=(x,))
    assert len(set(stack.layouts())) == (3 if evolving else 1)
    assert optimizer.opt_state[0].mu["values"].shape == stack.values.shape == (3, 8, 8, 8)
    optimizer.update(stack, nnx.grad(mean)(stack, x))
    np.testing.assert_allclose(scan(x, stack), scan(x, sd.densify(stack)), atol=1e-5)


def test_static_ends_evolution_and_specialises():
    model = Mlp()
    sd.evolve(model, None, "set", share=0.25)
    before, layouts = model(BATCH[0]), [model.up.layout, model.down.layout]
    sd.evolve(model, None, "static")
    assert not model.up.evolving and [model.up.layout, model.down.layout] == layouts
    assert sorted(nnx.state(model)["up"]) == ["bias", layout_name(layouts[0]), "values"]
    assert not set(TABLES) & set(nnx.state(model)["up"])
    np.testing.assert_allclose(model(BATCH[0]), before, atol=1e-5)


def test_where_selects_layers():
    model = Mlp()
    layouts = model.up.layout, model.down.layout
    sd.evolve(model, None, "set", share=0.25, where=lambda path, layer: path == "up")
    assert model.up.layout != layouts[0] and model.down.layout == layouts[1]


def test_what_does_not_fit_is_refused_in_words_and_changes_nothing():
    model = Mlp()
    layouts = model.up.layout, model.down.layout
    state = optax.adam(1e-2).init(nnx.state(model, nnx.Param))
    other = optax.adam(1e-2).init(nnx.state(Mlp(density=0.25), nnx.Param))
    for arguments, message in (
        ((state, "rigl"), "give `loss`, a function of the model"),
        ((state, "magnitude"), "legal: gradual, rigl, set, static"),
        ((state, "gradual"), r"down: Density 0 has no balanced layout .* multiples of 1/4"),
        ((other, "set"), r"mu.* has shape \(8, 8, 8\) and the layer stores 16 blocks"),
    ):
        with pytest.raises(sd.UserError, match=message):
            sd.evolve(model, *arguments)
    with pytest.raises(sd.UserError, match=r"share is 2; legal: in \(0, 1\)"):
        sd.evolve(model, state, "set", share=2)
    with pytest.raises(sd.UserError, match=r"`where` selects no .* legal: down, up"):
        sd.evolve(model, where=lambda path, layer: False)
    assert (model.up.layout, model.down.layout) == layouts


@pytest.mark.parametrize("method", ["set", "rigl"])
@pytest.mark.parametrize(
    "sides, density", some([((64, 64), 0.25), ((32, 96), 0.5), ((128, 32), 0.5)], (32, 96))
)
def test_a_share_below_a_block_exchanges_one_of_each_layer(method, sides, density):
    layer = sd.BlockSparseLinear(*sides, density=density, block=16, rngs=nnx.Rngs(0))
    before = layer.layout
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, sides[0])), jnp.float32)
    loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    sd.evolve(layer, None, method, share=1e-3, loss=loss, batch=(x,), seed=2)
    assert (layer.layout.mask & ~before.mask).sum() == 1


@pytest.mark.parametrize("seed", range(3))
def test_layers_that_are_alike_get_blocks_of_their_own(seed):
    make = lambda: sd.BlockSparseLinear(  # noqa: E731
        64, 64, pattern="cyclic", density=0.25, block=8, evolving=True, rngs=nnx.Rngs(0)
    )
    model = nnx.List([make(), make()])
    sd.evolve(model, None, "set", share=0.5, seed=seed)
    assert model[0].layout != model[1].layout


@pytest.mark.parametrize("small", some([3.7, 4.0, 4.9], 3.7, 4.9))
def test_a_stack_that_shares_a_layout_drops_the_blocks_of_least_squares(small):
    """Of the two blocks of an output, one has equal norms in both layers and one all in one."""
    layer = sd.BlockSparseLinear(4, 4, density=1, block=2, use_bias=False, rngs=nnx.Rngs(0))
    values = np.zeros((2, 4, 2, 2), np.float32)
    values[:, [0, 3], 0, 0] = small / 2**0.5
    values[0, [1, 2], 0, 0] = 5
    layer.values.set_value(jnp.asarray(values))
    entry = layout_variables([layer.static_layout], False, (2,), jnp.float32)
    setattr(layer, *next(iter(entry.items())))
    sd.evolve(layer, None, "gradual", density=0.5)
    assert layer.static_layout.rows.tolist() == [1, 0]
