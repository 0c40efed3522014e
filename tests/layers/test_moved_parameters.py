"""Rules that move every parameter leave a layer finite; another layout's state is still refused."""

import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from marks import some

import sparse_dataflow as sd

X = jax.random.normal(jax.random.key(0), (4, 32))


def make(evolving=True, offset=0, **options):
    return sd.BlockSparseLinear(
        32, 32, density=0.5, block=8, offset=offset, evolving=evolving, rngs=nnx.Rngs(0), **options
    )


def run(layer):
    return np.asarray(nnx.jit(lambda layer, x: layer(x))(layer, X), np.float32)


def noise(scale):
    return lambda p: p + scale * jax.random.normal(jax.random.key(p.size), p.shape, p.dtype)


RULES = {
    "tiny noise": noise(1e-9),
    "large noise": noise(10.0),
    "non-negative": lambda p: jnp.maximum(p, 0),
    "rounded to 4 bits": lambda p: jnp.round(p * 8) / 8,
    "set to zero": jnp.zeros_like,
    "signs": jnp.sign,
    "normalised": lambda p: p / (1e-2 + jnp.linalg.norm(p)),
    "float16": lambda p: p.astype(jnp.float16),
    "half of it": lambda p: 0.5 * p,
    "shifted": lambda p: p + 1,
}


@hypothesis.given(st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=3))
@hypothesis.settings(max_examples=12, deadline=None)
def test_rules_on_all_parameters_leave_it_finite(names):
    layer = make()
    for name in names:
        nnx.update(layer, jax.tree.map(RULES[name], nnx.state(layer, nnx.Param)))
    assert np.isfinite(run(layer)).all() and np.isfinite(layer(X)).all()


@pytest.mark.parametrize(
    "name", some(["adamw", "sgd with noise", "lamb", "lion", "penalty"], "adamw", "sgd with noise")
)
def test_training_and_evolution_after_noise_stay_finite(name):
    noisy = optax.chain(optax.add_noise(1.0, 0.0, 0), optax.adam(1e-2))
    transform = {"adamw": optax.adamw(1e-2), "lamb": optax.lamb(1e-2), "lion": optax.lion(1e-3)}
    layer = make()
    optimizer = nnx.Optimizer(layer, transform.get(name, noisy), wrt=nnx.Param)

    def loss(layer):
        norms = sum(jnp.sum(a**2) for a in jax.tree.leaves(nnx.state(layer, nnx.Param)))
        return jnp.mean((layer(X) - 1) ** 2) + 1e-3 * norms * (name == "penalty")

    for seed in range(3):
        optimizer.update(layer, nnx.grad(loss)(layer))
        sd.evolve(layer, optimizer, "set", share=0.3, seed=seed)
    assert np.isfinite(run(layer)).all()


def test_the_mark_adds_nothing_to_a_norm_or_a_penalty():
    mark = np.asarray(make().table_mark[...])
    assert np.all(mark > 0) and np.sum(mark**2) == 0 and 1 + mark.sum() == 1


SCALINGS = [lambda a: a, lambda a: 0.37 * a, lambda a: a.astype("bfloat16")]


@pytest.mark.parametrize("change", SCALINGS)
def test_parameters_of_another_layout_are_refused_also_scaled(change):
    for offset in (1, 2, 3):
        layer = make()
        nnx.update(layer, jax.tree.map(change, nnx.state(make(offset=offset), nnx.Param)))
        with pytest.raises(sd.UserError, match="another layout than its values"):
            layer(X)
        assert np.isnan(run(layer)).all()


def test_a_state_from_before_marks_were_tiny_computes_the_same():
    layer, state = make(), nnx.state(make())
    state["table_mark"] = jax.tree.map(lambda mark: mark * 2.0**100, state["table_mark"])
    nnx.update(layer, state)
    np.testing.assert_array_equal(layer(X), make()(X))


@pytest.mark.parametrize("evolving", [False, True])
def test_linen_keeps_what_names_the_layout_with_the_parameters(evolving):
    def layer(offset):
        return nnx.bridge.to_linen(
            sd.BlockSparseLinear, 32, 32, density=0.5, block=8, offset=offset, evolving=evolving
        )

    variables = layer(0).init(jax.random.key(0), X)
    params = {"params": variables["params"]}
    np.testing.assert_array_equal(layer(0).apply(params, X), layer(0).apply(variables, X))
    for offset in (1, 2, 3):
        with warnings.catch_warnings(), pytest.raises(sd.UserError, match="legal: "):
            warnings.simplefilter("ignore")  # flax's, of the key of another layout.
            layer(offset).apply(params, X)
    tx = optax.adamw(1e-2)
    gradient = jax.grad(lambda p: jnp.mean(layer(0).apply({**variables, "params": p}, X) ** 2))(
        params["params"]
    )
    updates, _state = tx.update(gradient, tx.init(params["params"]), params["params"])
    stepped = optax.apply_updates(params["params"], updates)
    assert np.isfinite(layer(0).apply({**variables, "params": stepped}, X)).all()


@pytest.mark.parametrize("evolving", [False, True])
@pytest.mark.parametrize("method", some(["set", "gradual"], "set"))
def test_a_model_that_evolved_is_restored_into_a_fresh_one(tmp_path, evolving, method):
    arguments = {"share": 0.3} if method == "set" else {"density": 0.25}
    build = lambda: nnx.List([make(evolving), nnx.relu, make(evolving, offset=1)])  # noqa: E731
    model = build()
    sd.evolve(model, None, method, **arguments)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layouts", sd.layouts(model))
        checkpointer.save(tmp_path / "state", nnx.state(model, nnx.Param))
    fresh = build()
    with ocp.StandardCheckpointer() as checkpointer:
        sd.set_layouts(fresh, checkpointer.restore(tmp_path / "layouts"))
        state = checkpointer.restore(tmp_path / "state", nnx.state(fresh, nnx.Param))
    nnx.update(fresh, state)
    for a, b in zip(fresh, model):
        np.testing.assert_array_equal(a(X), b(X))


def test_layouts_that_do_not_fit_are_refused_and_change_nothing():
    model = nnx.List([make(False), make(False, offset=1)])
    before, saved = [layer.layout for layer in model], sd.layouts(model)
    for wrong, words in (
        ({"0": saved["0"]}, "The layouts are of 0; legal: 0, 1"),
        ({**saved, "1": saved["1"][:, :2]}, r"1: the layouts have shape \(1, 2, 4\); legal: "),
        ({**saved, "0": saved["0"][0]}, r"0: the layouts have shape \(4, 4\); legal: \(1, 4, 4\)"),
    ):
        with pytest.raises(sd.UserError, match=words):
            sd.set_layouts(model, wrong)
    assert [layer.layout for layer in model] == before
