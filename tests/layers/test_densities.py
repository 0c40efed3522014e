"""Densities by the Erdős-Rényi rule and the cubic schedule, against their formulas."""

import math

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples

import sparse_dataflow as sd
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.block_sparse_linear import filled_up


def model_of(shapes):
    return nnx.Sequential(
        *(nnx.Linear(i, o, use_bias=False, rngs=nnx.Rngs(n)) for n, (i, o) in enumerate(shapes))
    )


sides = st.integers(1, 16).map(lambda blocks: 8 * blocks)


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=5), st.floats(0.05, 1.0))
def test_densities_are_legal_and_store_at_most_the_budget(shapes, density):
    densities = sd.erk_densities(model_of(shapes), density, block=8)
    assert list(densities) == [f"layers.{n}" for n in range(len(shapes))]
    # A layer of a single block is filled up to more at densities that divide it.
    legal = [sd.legal_densities(*filled_up(sides, 8, density), 8) for sides in shapes]
    assert all(d in options for d, options in zip(densities.values(), legal))
    stored = sum(d * i * o for d, (i, o) in zip(densities.values(), shapes))
    # What no layer can go below is stored whatever the budget.
    least = sum(options[0] * i * o for options, (i, o) in zip(legal, shapes))
    budget = density * sum(i * o for i, o in shapes)
    assert stored <= max(budget, least) * (1 + 1e-6) + least


def test_the_rule_is_that_of_the_papers_where_every_density_is_legal():
    """With blocks of one feature and square weights, (i + o) / (i o) is 2 / side."""
    shapes = [(240, 240), (120, 120), (60, 60)]
    densities = sd.erk_densities(model_of(shapes), 0.1, block=1)
    weights = np.array([i * o for i, o in shapes])
    rule = np.array([(i + o) / (i * o) for i, o in shapes])
    expected = rule * 0.1 * weights.sum() / (rule * weights).sum()
    steps = np.array([1 / i for i, _ in shapes])
    assert (np.abs(np.array(list(densities.values())) - expected) <= steps).all()


def test_small_weights_are_dense_and_the_rest_has_what_is_left():
    shapes = [(256, 256), (256, 256), (16, 16)]
    densities = sd.erk_densities(model_of(shapes), 0.5, block=16)
    assert densities["layers.2"] == 1.0
    # 65,408 of the 65,664 weights are left for two layers of 65,536, in steps of 4,096.
    assert sorted([densities["layers.0"], densities["layers.1"]]) == [0.4375, 0.5]


def test_a_model_is_made_with_them():
    model = model_of([(64, 256), (256, 64)])
    densities = sd.erk_densities(model, 0.25, block=16, where=lambda path, _: path == "layers.1")
    assert list(densities) == ["layers.1"]
    sparse = sd.sparsify(
        model, density=densities, block=16, where=lambda path, _: path in densities
    )
    assert sparse.layers[1].layout.density == densities["layers.1"]


def no_product():
    return nnx.Sequential(nnx.Einsum("ab,bc->a", (64, 32), rngs=nnx.Rngs(0)))


def test_attention_stacks_and_abstract_models_have_densities():
    attention = nnx.MultiHeadAttention(4, 64, qkv_features=64, rngs=nnx.Rngs(0), decode=False)
    assert set(sd.erk_densities(attention, 0.5, block=16).values()) == {0.5}
    stack = nnx.vmap(lambda key: nnx.Linear(32, 64, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
    )
    assert sd.erk_densities(stack, 0.5, block=8) == {"": 0.5}
    shapes = nnx.eval_shape(lambda: model_of([(64, 256), (256, 256)]))
    assert sd.erk_densities(shapes, 0.25, block=16) == {"layers.0": 0.5, "layers.1": 0.1875}


def test_the_cubic_schedule():
    of = lambda step, **more: sd.cubic_density(step, first=10, last=110, end=0.2, **more)  # noqa: E731
    assert of(0) == of(10) == 1.0 and of(110) == of(10**9) == pytest.approx(0.2)
    for step in range(10, 111, 7):
        done = (step - 10) / 100
        assert of(step) == pytest.approx(0.2 - 0.8 * (done - 1) ** 3)  # Equation 1, in densities.
        rounded = of(step, parts=16)
        assert rounded * 16 == round(rounded * 16) and 0 <= rounded - of(step) < 1 / 16
    assert all(of(n, parts=8) >= of(n + 1, parts=8) for n in range(120))
    assert math.isclose(of(10, start=0.5), 0.5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sd.erk_densities(model_of([(16, 16)]), 0.0), "above 0 and at most 1"),
        (
            lambda: sd.erk_densities(model_of([(16, 16)]), math.nan),
            "density=nan is not legal",
        ),
        (lambda: sd.erk_densities(model_of([(16, 24)]), 0.5, block=20), "layers.0: .*legal"),
        (lambda: sd.erk_densities(nnx.Sequential(), 0.5), "no linear"),
        (lambda: sd.erk_densities(no_product(), 0.5), "ab,bc->a is no product .* leave it out"),
        (lambda: sd.cubic_density(1, first=5, last=5, end=0.5), "legal: 6 or more"),
        (lambda: sd.cubic_density(1, first=0, last=5, end=0.5, parts=-1), "legal: 0 or more"),
        (lambda: sd.cubic_density(1, first=0, last=5, end=0.0), "out of order"),
        (lambda: sd.cubic_density(1, first=0, last=5, end=0.5, start=0.25), "out of order"),
    ],
)
def test_bad_input_is_refused_in_words(call, words):
    with pytest.raises(UserError, match=words):
        call()
