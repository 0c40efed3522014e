"""Names of the axes of state arrays: by hand, and by what permuted rows do to a state."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some
from places import TESTS

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.optim import factories
from sparse_dataflow.core.optim.weight_state import (
    WEIGHT_AXES,
    WeightState,
    axis_names,
    names_by_size,
    partial_axes,
)

ENTRIES = ("row", "column")
UNFACTORED = ((), ("constant",), ("constant",), ENTRIES)
"""Adafactor's count, rows, columns and moments of a matrix that it does not factor."""

SHAPES = [(129, 128), (128, 129), (128, 128), (130, 130), (127, 200), (2, 1), (1, 1)]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(TESTS / "core/training"), *sys.path])


def names(optimizer, shape):
    return axis_names(TrainingConfig(steps=1, optimizer=optimizer), shape)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # The first is of rows if there are at most as many rows as columns.
        ((128, 300), ((), ("row",), ("column",), ("constant",))),
        ((50257, 768), ((), ("column",), ("row",), ("constant",))),
        ((128, 128), ((), ("row",), ("column",), ("constant",))),
        ((512, 512), ((), ("row",), ("column",), ("constant",))),
        ((129, 128), ((), ("column",), ("row",), ("constant",))),
        ((127, 4096), UNFACTORED),
        ((4096, 127), UNFACTORED),
        ((1, 1), UNFACTORED),
        ((256,), ((), ("constant",), ("constant",), ("entry",))),
        ((1,), ((), ("constant",), ("constant",), ("entry",))),
        ((), ((), ("constant",), ("constant",), ())),
    ],
)
def test_axes_of_adafactor(shape, expected):
    assert names("adafactor", shape) == expected


@pytest.mark.parametrize("side", [1, 2, 300])
def test_axes_that_no_moment_has(side):
    assert names("optax:sm3", (side, side)) == (("row",), ("column",), ENTRIES)
    assert names("factories_of_users:adds_noise", (side, side)) == ((), ("constant",))
    assert names("factories_of_users:kronecker", (side, side)) == (("row",) * 2, ("column",) * 2)
    assert names("factories_of_users:flat_state", (side, side)) == (("unknown",),)


@pytest.mark.parametrize(
    "optimizer", some(["adafactor", "optax:sm3", "optax:novograd", "lion"], "adafactor", "lion")
)
def test_a_named_axis_moves_with_the_axis_of_the_weight(optimizer):
    training = TrainingConfig(steps=1, optimizer=optimizer)
    rng = np.random.default_rng(0)

    def after(arrays):
        transformation = factories.transformation(training, 1e-2, 0.1)
        gradient, weight = map(jnp.asarray, arrays)
        _, state = transformation.update(gradient, transformation.init(weight), weight)
        return list(map(np.asarray, jax.tree.leaves(state)))

    for shape, axis in itertools.product(SHAPES, (0, 1)):
        arrays = rng.standard_normal((2, *shape)).astype(np.float32)
        order = rng.permutation(shape[axis])
        before, moved = after(arrays), after(arrays.take(order, axis + 1))
        for array, other, array_names in zip(
            before, moved, axis_names(training, shape), strict=True
        ):
            for i, name in enumerate(array_names):
                if name == WEIGHT_AXES[2][axis]:
                    array = array.take(order, i)
            np.testing.assert_allclose(other, array, rtol=1e-5, atol=1e-6)


def test_a_state_is_a_tuple_to_paths_and_keeps_its_names():
    state = WeightState((np.zeros(3), np.zeros((3, 2))), (("row",), ENTRIES))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path({"a": state})]
    assert paths == ["['a'][0]", "['a'][1]"]
    mapped = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree))(state)
    assert type(mapped) is WeightState and mapped.names == state.names
    counts = WeightState((np.zeros(2), np.zeros(2)), (("constant",), ("row",)))
    assert [a[0] for a in counts.map(lambda a: a + 1, lambda a: a + 2)] == [2, 1]


def test_sizes_name_axes_that_have_one_reading():
    assert names_by_size((256,), (256, 768)) == ("row",)
    assert names_by_size((96, 96), (96, 96)) == ENTRIES
    assert names_by_size((1,), (257, 128)) == ("constant",)
    with pytest.raises(ValueError, match="name the axes"):
        names_by_size((96,), (96, 96))


@pytest.mark.parametrize("block", [1, 8, 128])
def test_only_moments_and_counts_move_with_a_block(block):
    partial = lambda name: partial_axes(TrainingConfig(steps=1, optimizer=name), (block, block))  # noqa: E731
    assert partial("lion") is partial("optax.contrib:muon") is None
    assert partial("adafactor") == (None if block < 128 else ("row",))
    assert partial("optax:sm3") is not None
