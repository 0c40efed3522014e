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
from sparse_dataflow.layers.layout_state import table_mark

X = jax.random.normal(jax.random.key(0), (4, 32))


def make(evolving=True, offset=0, **options):
    return sd.BlockSparseLinear(
        32, 32, density=0.5, block=8, offset=offset, evolving=evolving, rngs=nnx.Rngs(0), **options
    )


def run(layer):
    return np.asarray(nnx.jit(lambda layer, x: layer(x))(layer, X), np.float32)


def noise(scale):
    return lambda p: p + scale * jax.random.normal(jax.random.key(p.size), p.shape, p.dtype)


def decayed(p):
    """Returns parameters after steps whose decay is near a unit of their last place."""
    for _ in range(60):
        p = p - jnp.asarray(0.003, p.dtype) * p
    return p


def quantized(p, largest):
    scale = jnp.max(jnp.abs(p)) / largest
    return jnp.where(scale > 0, jnp.round(p / jnp.where(scale > 0, scale, 1)), 0) * scale


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
    "relative noise": lambda p: p * (1 + noise(0.1)(jnp.zeros_like(p))),
    "bfloat16 decayed": lambda p: decayed(p.astype(jnp.bfloat16)),
    "signs times the mean": lambda p: jnp.sign(p) * jnp.mean(jnp.abs(p)),
    "4 bits of the largest": lambda p: quantized(p, 7),
    "sorted": jnp.sort,
    "centred": lambda p: p - jnp.mean(p),
    "dropped": lambda p: p * jax.random.bernoulli(jax.random.key(p.size), 0.9, p.shape) / 0.9,
}


@pytest.mark.parametrize(
    "name",
    some(
        [*RULES], "tiny noise", "rounded to 4 bits", "set to zero", "signs", "float16",
        "relative noise", "4 bits of the largest", "sorted", "dropped",
    ),
)  # fmt: skip
def test_each_rule_on_all_parameters_leaves_it_finite(name):
    for offset in range(4):
        layer = make(offset=offset)
        nnx.update(layer, jax.tree.map(RULES[name], nnx.state(layer, nnx.Param)))
        assert np.isfinite(run(layer)).all() and np.isfinite(layer(X)).all()


@hypothesis.given(st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=3))
@hypothesis.settings(max_examples=12, deadline=None)
def test_rules_on_all_parameters_leave_it_finite(names):
    layer = make()
    for name in names:
        nnx.update(layer, jax.tree.map(RULES[name], nnx.state(layer, nnx.Param)))
    assert np.isfinite(run(layer)).all() and np.isfinite(layer(X)).all()


def penalised(order):
    def loss(layer):
        leaves = jax.tree.leaves(nnx.state(layer, nnx.Param))
        return target(layer) + 1e-2 * sum(jnp.sum(jnp.abs(leaf) ** order) for leaf in leaves)

    return loss


def target(layer, x=X):
    return jnp.mean((layer(x) - 1) ** 2)


def after(change):
    """Returns a transformation that applies a rule to all parameters after a step of Adam."""
    rule = lambda updates, params: jax.tree.map(lambda u, p: change(p + u) - p, updates, params)  # noqa: E731
    return optax.chain(optax.adam(1e-2), optax.stateless(rule))


private = optax.contrib.differentially_private_aggregate(1.0, 0.5, key=0)
TRAINING = {
    "gradient noise": (optax.chain(optax.add_noise(1.0, 0.0, 0), optax.adam(1e-2)), target),
    "private": (optax.chain(private, optax.adam(1e-2)), target),
    "clipped weights": (after(lambda p: jnp.clip(p, -0.1, 0.1)), target),
    "shrink and perturb": (after(lambda p: noise(0.05)(0.8 * p)), target),
    "parameter noise": (after(noise(0.02)), target),
    "relative noise": (after(RULES["relative noise"]), target),
    "absolute penalty": (optax.sgd(0.1), penalised(1)),
    "squared penalty": (optax.sgd(0.1), penalised(2)),
    "weight decay": (optax.adamw(1e-2, weight_decay=0.5), target),
    "signs": (optax.sign_sgd(1e-2), target),
    "lamb": (optax.lamb(1e-2), target),
    "lion": (optax.lion(1e-3), target),
    "accumulated": (optax.MultiSteps(optax.adam(1e-2), 2), target),
}


@pytest.mark.parametrize(
    "name", some(list(TRAINING), "private", "relative noise", "absolute penalty")
)
def test_training_and_evolution_stay_finite_and_write_the_mark_anew(name):
    transformation, loss = TRAINING[name]
    layer = make()
    optimizer = nnx.Optimizer(layer, transformation, wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer):
        if name == "private":  # Gradients of examples.
            graph, params, rest = nnx.split(layer, nnx.Param, ...)
            example_loss = lambda p, x: loss(nnx.merge(graph, p, rest), x[None])  # noqa: E731
            gradient = jax.vmap(jax.grad(example_loss), (None, 0))(params, X)
        else:
            gradient = nnx.grad(loss)(layer)
        optimizer.update(layer, gradient)
        return loss(layer)

    for seed in range(2):
        losses = [float(step(layer, optimizer)) for _ in range(4)]
        assert np.isfinite(losses).all()
        assert np.allclose(run(layer), sd.densify(nnx.Sequential(layer))(X), atol=1e-4)
        sd.evolve(layer, optimizer, "set", share=0.3, seed=seed)
        np.testing.assert_array_equal(layer.table_mark[...], table_mark(layer.stored_layout))
    with pytest.raises(sd.UserError, match="another layout than its values"):
        other = make(offset=1)
        nnx.update(other, nnx.state(layer, nnx.Param))
        other(X)


@pytest.mark.parametrize("evolving", [False, True])
def test_averages_of_one_layout_compute_and_of_two_layouts_are_refused(evolving):
    layer = make(evolving)
    moving = nnx.EMA(layer, 0.9, only=nnx.Param)
    averaged, states = moving.apply_to(layer), []
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2, weight_decay=0.1), wrt=nnx.Param)

    def train():
        optimizer.update(layer, nnx.grad(target)(layer))
        states.append(jax.tree.map(jnp.copy, nnx.state(layer, nnx.Param)))
        moving.update(layer)
        uniform = make(evolving)
        nnx.update(uniform, jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *states))
        return averaged, uniform

    for _ in range(5):
        for each in train():
            assert np.isfinite(run(each)).all() and np.isfinite(each(X)).all()
    sd.evolve(layer, optimizer, "set", share=0.3, seed=1)
    with pytest.raises((sd.UserError, ValueError), match="layout"):
        train()[0](X)
    states.pop(0)
    with pytest.raises((sd.UserError, ValueError), match="layout"):
        train()[1](X)


def test_the_mark_adds_nothing_to_a_norm_or_a_penalty():
    mark = np.asarray(make().table_mark[...])
    assert np.all(mark > 0) and np.sum(mark**2) == 0 and 1 + mark.sum() == 1
    np.testing.assert_array_equal(mark.astype("bfloat16").astype("float32"), mark)


SCALINGS = [
    lambda a: a,
    lambda a: 0.37 * a,
    lambda a: 0.999**50 * a,
    lambda a: a.astype("bfloat16"),
]


@pytest.mark.parametrize("change", SCALINGS)
def test_parameters_of_another_layout_are_refused_also_scaled(change):
    for offset in (1, 2, 3):
        layer = make()
        nnx.update(layer, jax.tree.map(change, nnx.state(make(offset=offset), nnx.Param)))
        with pytest.raises(sd.UserError, match="another layout than its values"):
            layer(X)
        assert np.isnan(run(layer)).all()


@pytest.mark.parametrize("unit", [1, 2.0**-100])
def test_a_state_with_a_mark_of_an_older_version_computes_the_same(unit):
    layer, state = make(), nnx.state(make())
    older = unit * np.array([1.25, 1.5, 1.0, 1.875, 1.125, 1.75, 1.0, 1.625], np.float32)
    state["table_mark"] = jax.tree.map(lambda mark: jnp.asarray(older), state["table_mark"])
    nnx.update(layer, state)
    np.testing.assert_array_equal(layer(X), make()(X))
    np.testing.assert_array_equal(run(layer), run(make()))


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


@pytest.mark.parametrize("evolving", [False, True])
@pytest.mark.parametrize("method", some(["set", "gradual"], "gradual"))
def test_a_model_that_evolved_is_restored_into_an_abstract_one(tmp_path, evolving, method):
    arguments = {"share": 0.3} if method == "set" else {"density": 0.25}
    build = lambda: nnx.List([make(evolving), nnx.relu, make(evolving, offset=1)])  # noqa: E731
    model = build()
    sd.evolve(model, None, method, **arguments)
    abstract = nnx.eval_shape(build)
    sd.set_layouts(abstract, sd.layouts(model))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(model))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(abstract, checkpointer.restore(tmp_path / "state", nnx.state(abstract)))
    for a, b in zip(abstract, model):
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
