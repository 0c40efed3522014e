"""`sd.evolve` carries the state of any optax optimizer, of one or several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.core.layouts.evolution import block_sources

X = jax.random.normal(jax.random.key(0), (8, 32))


def make(evolving, block=8):
    return nnx.List([
        sd.BlockSparseLinear(
            32, 64, density=0.5, block=block, evolving=evolving, rngs=nnx.Rngs(0)
        ),
        nnx.Linear(64, 3, rngs=nnx.Rngs(1)),
    ])  # fmt: skip


def loss(model):
    return jnp.mean((model[1](jnp.tanh(model[0](X))) - 1) ** 2)


def step(model, optimizer):
    optimizer.update(model, nnx.grad(loss)(model))


TRANSFORMS = {
    "muon": lambda: optax.contrib.muon(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adafactor with momentum": lambda: optax.adafactor(
        1e-2, min_dim_size_to_factor=4, momentum=0.9
    ),
    "masked": lambda: optax.masked(
        optax.adam(1e-2), lambda params: jax.tree.map(lambda a: a.ndim > 1, params)
    ),
    "lookahead-like chain": lambda: optax.chain(
        optax.scale_by_adam(), optax.trace(0.9), optax.ema(0.9), optax.scale(-1e-2)
    ),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "multi-steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


@pytest.mark.parametrize("evolving", some([False, True], True))
@pytest.mark.parametrize("name", some([*TRANSFORMS], "muon", "adafactor", "masked", "multi-steps"))
def test_training_goes_on_after_evolution(name, evolving):
    model = make(evolving)
    optimizer = nnx.Optimizer(model, TRANSFORMS[name](), wrt=nnx.Param)
    for seed in range(2):
        step(model, optimizer)
        sd.evolve(model, optimizer, "set", share=0.3, seed=seed)
        step(model, optimizer)
    assert np.isfinite(loss(model))


def follows(old, new, sources, axis):
    """Whether an array [.., new, ..] has what `sources` says of [.., old, ..], and else zeros."""
    old, new = (np.moveaxis(np.asarray(each), axis, 0) for each in (old, new))
    expected = np.where(
        (sources >= 0).reshape(-1, *(1,) * (old.ndim - 1)), old[np.maximum(sources, 0)], 0
    )
    return np.array_equal(new, expected)


@pytest.mark.parametrize("evolving", [False, True])
@pytest.mark.parametrize("block", some([8, 16], 16))
def test_each_axis_of_stored_blocks_follows_and_no_other(evolving, block):
    """32 x 64 at density 1/2 in blocks of 8 stores 16 blocks; of 16, 4."""
    model = make(evolving, block)
    sm3 = nnx.Optimizer(model, optax.sm3(1e-2), wrt=nnx.Param)
    factored = nnx.Optimizer(model, optax.adafactor(1e-2, min_dim_size_to_factor=4), wrt=nnx.Param)
    gradient = nnx.grad(loss)(model)
    for optimizer in (sm3, factored):
        optimizer.update(model, gradient)

    def read():
        vectors, (factors, *_) = sm3.opt_state[0].mu[0]["values"], factored.opt_state
        return (
            [vectors.get_raw_value()[axis] for axis in range(3)],
            [getattr(factors, name)[0]["values"][...] for name in ("v_row", "v_col")],
        )

    (vectors, factors), before = read(), model[0].layout
    assert sd.evolve(model, [sm3, factored], "set", share=0.3, seed=1) == [sm3, factored]
    (new_vectors, new_factors), sources = read(), block_sources(before, model[0].layout)
    assert (sources < 0).any()
    assert follows(vectors[0], new_vectors[0], sources, 0)
    for old, new in zip(vectors[1:], new_vectors[1:]):
        np.testing.assert_array_equal(old, new)
    full = model[0].values.shape
    for name, (old, new) in zip(("v_row", "v_col"), zip(factors, new_factors)):
        # optax: v_row has no largest axis, v_col no second largest; ties go by position.
        order = np.argsort(full)
        missing = order[-1] if name == "v_row" else order[-2]
        if missing == 0:
            np.testing.assert_array_equal(old, new)
        else:
            assert follows(old, new, sources, 0)


@pytest.mark.parametrize("wrap", [list, tuple, lambda each: dict(zip("ab", each))])
@pytest.mark.parametrize("evolving", some([False, True], True))
def test_several_optimizers_follow_together(wrap, evolving):
    model = make(evolving)
    sparse = lambda path, leaf: isinstance(leaf, nnx.Param) and path[0] == 0  # noqa: E731
    others = lambda path, leaf: isinstance(leaf, nnx.Param) and path[0] == 1  # noqa: E731
    optimizers = [
        nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param),
        nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=sparse),
        nnx.Optimizer(model, optax.adam(1e-2), wrt=others),
    ]
    gradient = nnx.grad(loss)(model)
    moments = lambda: [  # noqa: E731
        optimizers[0].opt_state[0].mu[0]["values"][...],
        optimizers[1].opt_state[0].trace[0]["values"][...],
    ]
    optimizers[0].update(model, gradient)
    optimizers[1].update(model, nnx.grad(loss, argnums=nnx.DiffState(0, sparse))(model))
    old, layout = moments(), model[0].layout
    wrapped = wrap(optimizers)
    assert sd.evolve(model, wrapped, "set", share=0.3) is wrapped
    sources = block_sources(layout, model[0].layout)
    for before, after in zip(old, moments()):
        assert follows(before, after, sources, 0)
    optimizers[0].update(model, nnx.grad(loss)(model))


def test_states_without_their_optimizer_follow_in_dicts_too():
    model, tx = make(False), optax.adam(1e-2)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    gradient = nnx.to_pure_dict(nnx.grad(loss)(model))
    _, state = tx.update(gradient, tx.init(params), params)
    old, layout = state[0].mu[0]["values"], model[0].layout
    (new, same), sources = sd.evolve(model, [state, None], "set", share=0.3), None
    sources = block_sources(layout, model[0].layout)
    assert same is None and follows(old, new[0].mu[0]["values"], sources, 0)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert jax.tree.structure(new[0].mu) == jax.tree.structure(params)


def test_a_state_that_would_be_stale_is_refused_and_nothing_changes():
    model = make(False)
    params = nnx.state(model, nnx.Param)
    other = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0))])
    layout = model[0].layout
    for state, words in (
        (nnx.Optimizer(other, optax.adam(1e-2), wrt=nnx.Param), "none of them is of 0.values"),
        (optax.adam(1e-2).init(jax.tree.leaves(params)), "none of them is of 0.values"),
        ([model], "A List is no optimizer; legal: an nnx.Optimizer"),
        (
            optax.adafactor(1e-2, min_dim_size_to_factor=4).init(params),
            r"v_.*values has shape .* its axis of blocks is not known; legal: .* nnx.Optimizer",
        ),
    ):
        with pytest.raises(sd.UserError, match=words):
            sd.evolve(model, state, "set", share=0.3)
    assert model[0].layout == layout


def test_a_stack_of_different_layouts_does_not_become_static():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def build(rngs):
        return sd.BlockSparseLinear(32, 32, density=0.5, block=8, evolving=True, rngs=rngs)

    stack = build(nnx.Rngs(0))
    sd.evolve(stack, None, "set", share=0.3)
    with pytest.raises(sd.UserError, match="layers of the stack have different layouts"):
        sd.evolve(stack, None, "static")
