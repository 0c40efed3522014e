"""Handles on a layer that changes: they see all of the change, or say why not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import some

import sparse_dataflow as sd

each_kind = pytest.mark.parametrize("evolving", [False, True])
X = jax.random.normal(jax.random.key(1), (16, 32))


def other_layouts():
    layouts = [sd.make_layout("random", *sides, 8, 0.5, 7) for sides in ((32, 64), (64, 32))]
    return {f"layers.{2 * number}": each.mask[None] for number, each in enumerate(layouts)}


def loss(model):
    return jnp.mean((model(X) - 1) ** 2)


def make(evolving):
    rngs = nnx.Rngs(0)
    dense = nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 32, rngs=rngs))
    return sd.sparsify(dense, density=0.5, block=8, evolving=evolving)


@nnx.jit
def compiled(model):
    return model(X)


def merged(model):
    graph, state = nnx.split(model)
    return lambda: nnx.merge(graph, state)(X)


def pure(model):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    apply = jax.jit(lambda params, rest: nnx.merge(graph, params, rest)(X))
    return lambda: apply(params, rest)


def viewed(model):
    return nnx.view(model, deterministic=True, raise_if_not_found=False)


HANDLES = {
    "view": lambda model: (lambda view: lambda: view(X))(viewed(model)),
    "view, compiled": lambda model: (lambda view: lambda: compiled(view))(viewed(model)),
    "cached partial": lambda model: nnx.cached_partial(compiled, model),
    "merged": merged,
    "split, compiled": pure,
    "kernel of a view": lambda model: (
        lambda view: (
            lambda: (
                jax.nn.relu(X @ view.layers[0].kernel[...] + view.layers[0].bias[...])
                @ view.layers[2].kernel[...]
                + view.layers[2].bias[...]
            )
        )
    )(viewed(model)),
    "densified view": lambda model: (lambda view: lambda: sd.densify(view)(X))(viewed(model)),
}

CHANGES = {
    "set": lambda model: sd.evolve(model, None, "set", share=0.4, seed=1),
    "rigl": lambda model: sd.evolve(model, None, "rigl", share=0.4, loss=loss),
    "gradual": lambda model: sd.evolve(model, None, "gradual", density=0.25),
    "static, then set": lambda model: [
        sd.evolve(model, None, method, **({"seed": 1} if method == "set" else {}))
        for method in ("static", "set")
    ],
    "set_layouts": lambda model: sd.set_layouts(model, other_layouts()),
}


@pytest.mark.parametrize("change", some(list(CHANGES), "set", "static, then set", "set_layouts"))
@each_kind
def test_a_handle_computes_what_the_changed_model_does_or_is_refused(evolving, change):
    model, before = make(evolving), {}
    handles = {name: handle(model) for name, handle in HANDLES.items()}
    for name, handle in handles.items():
        before[name] = handle()
        np.testing.assert_allclose(before[name], model(X), atol=1e-5)
    CHANGES[change](model)
    follows = evolving and not change.startswith("static")
    for name, handle in handles.items():
        if follows:
            np.testing.assert_allclose(handle(), model(X), atol=1e-5, err_msg=name)
            continue
        with pytest.raises(sd.UserError, match="after this handle"):
            handle()
    assert np.isfinite(np.asarray(model(X))).all()


@pytest.mark.parametrize("change", some(list(CHANGES), "set"))
def test_a_change_through_a_handle_is_one_of_the_model(change):
    model = make(True)
    view = viewed(model)
    CHANGES[change](view)
    if change.startswith("static"):
        with pytest.raises(sd.UserError, match="after this handle"):
            model(X)
    else:
        np.testing.assert_array_equal(model(X), view(X))


@each_kind
def test_layouts_that_stay_leave_handles_as_they_are(evolving):
    model = make(evolving)
    view = viewed(model)
    sd.set_layouts(model, sd.layouts(model))
    sd.evolve(model, None, "gradual", density=0.75)
    np.testing.assert_array_equal(view(X), model(X))
    assert view.layers[0].values is model.layers[0].values


def test_a_state_of_the_old_layout_in_an_older_handle_leaves_the_model_alone():
    model = make(False)
    view, saved = viewed(model), jax.tree.map(jnp.copy, nnx.state(model))
    old = view(X)
    sd.evolve(model, None, "set", share=0.4)
    new = model(X)
    nnx.update(view, saved)
    np.testing.assert_array_equal(view(X), old)
    np.testing.assert_array_equal(model(X), new)


def test_a_copy_stays_as_it_was():
    for evolving in (False, True):
        model = make(evolving)
        copy, old = nnx.clone(model), model(X)
        sd.evolve(model, None, "set", share=0.4)
        np.testing.assert_array_equal(copy(X), old)


def trained(evolving, cached, evolve, tx=None):
    """Returns the losses of four steps, with a change of the layouts after the second."""
    model = make(evolving)
    optimizer = nnx.Optimizer(model, tx or optax.adam(3e-2), wrt=nnx.Param)

    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    step = nnx.jit(step, donate_argnames=("optimizer",))
    call = nnx.cached_partial(step, model, optimizer) if cached else lambda: step(model, optimizer)
    losses = []
    for number in range(4):
        if number == 2 and evolve:
            sd.evolve(model, optimizer, "set", share=0.4, seed=1)
        losses.append(float(call()))
    return losses, nnx.to_pure_dict(nnx.state(optimizer)), nnx.to_pure_dict(nnx.state(model))


TRANSFORMATIONS = {
    "adam": optax.adam(3e-2),
    "averaged": optax.chain(optax.adamw(3e-2), optax.ema(0.9)),
    "every second step": optax.MultiSteps(optax.adam(3e-2), 2),
}


@pytest.mark.parametrize("name", some(list(TRANSFORMATIONS), "adam"))
def test_a_cached_step_trains_the_changed_model_and_its_optimizer(name):
    plain, cached = (trained(True, each, True, TRANSFORMATIONS[name]) for each in (False, True))
    np.testing.assert_allclose(plain[0], cached[0], rtol=1e-5)
    for first, second in zip(*(jax.tree.leaves(each[1:]) for each in (plain, cached)), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-6)


def test_a_cached_step_of_static_layouts_is_refused_after_a_change():
    with pytest.raises(sd.UserError, match="after this handle"):
        trained(False, True, True)


def test_a_change_that_fails_changes_nothing(monkeypatch):
    model = make(True)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    before = jax.tree.map(np.asarray, (nnx.state(model), nnx.state(optimizer)))
    last, prepare = model.layers[2], sd.BlockSparseLinear.prepare_layouts

    def failing(layer, *arguments):
        if layer is last:
            raise MemoryError
        return prepare(layer, *arguments)

    monkeypatch.setattr(sd.BlockSparseLinear, "prepare_layouts", failing)
    with pytest.raises(MemoryError):
        sd.evolve(model, optimizer, "set")
    after = nnx.state(model), nnx.state(optimizer)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, after))
