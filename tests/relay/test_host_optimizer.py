"""AdamW and Muon on the host equal those of optax."""

import functools
import itertools

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from marks import some

from sparse_dataflow.core.optim import muon
from sparse_dataflow.relay import host_optimizer
from sparse_dataflow.relay.host_optimizer import Leaf, Rates


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("size", [1, 1000, host_optimizer.PIECE + 3])
def test_updates_equal_those_of_optax(size, in_place):
    rng = np.random.default_rng(size)
    draw = lambda: rng.normal(size=size).astype(np.float32)  # noqa: E731
    leaf = Leaf(draw(), np.zeros(size, np.float32), np.zeros(size, np.float32))
    chain = optax.chain(optax.scale_by_adam(0.9, 0.95, 1e-8), optax.add_decayed_weights(0.1))
    theirs, moments = leaf.parameter.copy(), chain.init(leaf.parameter)
    for count in range(1, 6):
        gradient, rate = draw(), 1e-2 / count
        updates, moments = chain.update(0.5 * gradient, moments, theirs)
        theirs = theirs - rate * updates
        after = leaf if in_place else Leaf(*(np.empty_like(a) for a in leaf))
        copy = np.empty(size, ml_dtypes.bfloat16)
        host_optimizer.update(leaf, gradient, Rates(count, 0.5, rate, 0.1), after, copy)
        leaf = after
        np.testing.assert_allclose(leaf.parameter, theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(copy, leaf.parameter.astype(ml_dtypes.bfloat16))
    np.testing.assert_allclose(leaf.nu, moments[0].nu, rtol=1e-5)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("size", [64, host_optimizer.PIECE + 64])
def test_bfloat16_moments_are_computed_in_float32_and_rounded(size, optimizer, in_place):
    """As the moments of `optim.optimizers`: rounded to nearest even after each update."""
    rng = np.random.default_rng(size)
    draw = lambda: rng.normal(size=size).astype(np.float32)  # noqa: E731
    rounded = lambda array: array.astype(ml_dtypes.bfloat16).astype(np.float32)  # noqa: E731
    names = ("mu", "nu") if optimizer == "adamw" else ("mu",)
    function = host_optimizer.update
    if optimizer == "muon":
        matrices = muon.Matrices((8, 8))
        function = functools.partial(host_optimizer.update_matrices, matrices=matrices)
    start = draw()
    exact = Leaf(start.copy(), *(np.zeros(size, np.float32) for _ in names))
    stored = Leaf(start.copy(), *(np.zeros(size, ml_dtypes.bfloat16) for _ in names))
    for number in range(1, 5):
        gradient, rates = draw(), Rates(number, 0.5, 1e-2, 0.1)
        after = stored if in_place else Leaf(*(np.empty_like(a) for a in stored if a is not None))
        function(stored, gradient, rates, after)
        stored = after
        function(exact, gradient, rates, exact)
        for name in names:
            moment = getattr(exact, name)
            moment[:] = rounded(moment)
            np.testing.assert_array_equal(getattr(stored, name).astype(np.float32), moment)
        np.testing.assert_array_equal(stored.parameter, exact.parameter)


@pytest.mark.parametrize("in_place", some([True, False], True))
@pytest.mark.parametrize("shape", [(1, 24, 40), (70, 48, 48), (600, 8, 16)])
def test_updates_of_matrices_equal_those_of_optax(shape, in_place):
    """A dense kernel, and stacks in more than one piece."""
    count, *matrix = shape
    size, rng = count * matrix[0] * matrix[1], np.random.default_rng(count)
    draw = lambda: rng.normal(size=size).astype(np.float32)  # noqa: E731
    chain = optax.contrib.muon(
        1.0,
        weight_decay=0.1,
        muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2),
        consistent_rms=0.2,
    )
    leaf = Leaf(draw(), np.zeros(size, np.float32))
    theirs = leaf.parameter.reshape(shape).copy()
    moments = chain.init(theirs)
    for number in range(1, 5):
        # The direction of an update has no scale, so that the same clip in every step is none.
        gradient, rate, clip = draw(), 1e-2 / number, 1 / number
        updates, moments = chain.update(clip * gradient.reshape(shape), moments, theirs)
        theirs = theirs + rate * updates
        after = leaf if in_place else Leaf(*(np.empty_like(a) for a in leaf[:2]))
        copy = np.empty(size, ml_dtypes.bfloat16)
        rates = Rates(number, clip, rate, 0.1)
        matrices = muon.Matrices(tuple(matrix))
        host_optimizer.update_matrices(leaf, gradient, rates, after, copy, matrices=matrices)
        leaf = after
        np.testing.assert_allclose(leaf.parameter.reshape(shape), theirs, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(copy, leaf.parameter.astype(ml_dtypes.bfloat16))


@given(st.integers(1, 10**4), st.integers(1, 9), st.sampled_from([1, 64, 1000, 10**6]))
def test_pieces_cover_all_matrices_once(matrices, count, unit):
    size = matrices * unit
    slices = list(host_optimizer.pieces(size, count, unit))
    assert slices[0].start == 0 and slices[-1].stop == size
    assert all(piece.start % unit == 0 for piece in slices)
    assert all(first.stop == second.start for first, second in itertools.pairwise(slices))


@given(st.integers(0, 2**32 - 1))
@example(0x7FFFFFFF)
@example(0xFFFFFFFF)
@example(0xFF800000)
def test_rounding_to_bfloat16_is_numpys(bits):
    value = np.array([bits], np.uint32).view(np.float32)
    out = np.empty(1, ml_dtypes.bfloat16)
    host_optimizer.narrow(value, out)
    with np.errstate(over="ignore"):
        expected = value.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(out.astype(np.float32), expected)
    np.testing.assert_array_equal(host_optimizer.widen(out), out.astype(np.float32))


def test_square_sums_read_both_dtypes():
    x = np.random.default_rng(0).normal(size=(300, 700)).astype(np.float32)
    narrow = x.astype(jax.numpy.bfloat16)
    for array in (x, narrow):
        exact = np.sum(np.square(array.astype(np.float64)))
        assert host_optimizer.square_sum(array) == pytest.approx(exact, rel=1e-5)
