"""Activations against formulas in numpy's float64; derivatives against a complex step."""

import ast
import contextlib
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reader
import pytest
from activation_formulas import FORMULAS
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from marks import examples

import sparse_dataflow
from sparse_dataflow.core.config import activations
from sparse_dataflow.core.config.activations import ACTIVATIONS, Activation, fused_names, register
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.ops.activation import activation, times_derivative, value_and_derivative
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import architectures


def precision(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


@settings(max_examples=examples(40))
@given(
    hnp.arrays(np.float64, (2, 8), elements=st.floats(-8, 8, width=32)),
    st.sampled_from(["float64", "float32", "bfloat16"]),
    st.sampled_from(sorted(ACTIVATIONS)),
)
def test_value_and_gradient(numbers, dtype, name):
    exact, step = FORMULAS[name], 1e-30
    with precision(dtype):
        x = jnp.asarray(numbers, dtype)
        y, pull = jax.vjp(activation(name), x)
        results = [y, *pull(jnp.full_like(x, 2))]
        if name in fused_names():
            results += value_and_derivative(name, x)
        if name in fused_names() and dtype != "float64":
            results.append(times_derivative(name, y, x))
        assert all(result.shape == x.shape and result.dtype == x.dtype for result in results)
        wide = np.asarray(x, np.float64)
        values = [np.asarray(result, np.float64) for result in results]
    slope = exact(wide + 1j * step).imag / step
    expected = exact(wide), 2 * slope, exact(wide), slope, values[0] * slope
    eps = float(jnp.finfo(dtype).eps)
    # 1 - tanh² has the rounding error of a number near 1, which the slope magnifies.
    tolerance = 8 * eps * (1 + np.abs(wide)) * (1 + wide**2 / 7)
    for value, right in zip(values, expected):
        error = np.abs(value - right) / np.maximum(1, np.abs(values[0]))
        assert np.all(error <= tolerance), (name, (error / tolerance).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_far_from_zero_a_gelu_is_x_or_zero(dtype):
    x = jnp.asarray([-1e4, -30, 30, 1e4], dtype)
    value, slope = value_and_derivative("gelu", x)
    np.testing.assert_array_equal(value, jnp.maximum(x, 0))
    np.testing.assert_array_equal(slope, jnp.asarray([0, 0, 1, 1], dtype))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_backward_pass_saves_only_the_input(name):
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    residuals = jax.tree.leaves(jax.vjp(activation(name), x)[1])
    assert sum(leaf.size for leaf in residuals) == x.size


def test_autodiff_of_a_formula_saves_more():
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    plain = jax.tree.leaves(jax.vjp(lambda x: value_and_derivative("gelu", x)[0], x)[1])
    assert sum(leaf.size for leaf in plain) > x.size


@pytest.mark.parametrize("name", numpy_reader.ACTIVATIONS)
def test_the_reader_of_model_cards_agrees(name):
    x = np.linspace(-6, 6, 97, dtype=np.float32)
    read = numpy_reader.activation({"activation": name}, x)
    assert read.dtype == x.dtype
    np.testing.assert_allclose(activation(name)(x), read, atol=2e-6)


@pytest.fixture
def table(monkeypatch):
    """The table, which a test may change."""
    monkeypatch.setattr(activations, "ACTIVATIONS", rows := dict(ACTIVATIONS))
    names = list(activations.ACTIVATION_NAMES)
    yield rows
    activations.ACTIVATION_NAMES[:] = names


@pytest.mark.parametrize(
    ("facts", "missing"),
    [
        ({}, "name"),
        ({"name": "two words", "fused": False, "function": abs}, "name"),
        ({"name": "mine", "function": abs}, "fused"),
        ({"name": "mine", "fused": True, "function": abs}, "value_and_derivative"),
        ({"name": "mine", "fused": True, "value_and_derivative": 3}, "value_and_derivative"),
        ({"name": "mine", "fused": False}, "function"),
        ({"name": "mine", "fused": False, "function": "abs"}, "function"),
    ],
)
def test_a_row_that_lacks_a_fact_is_refused_with_its_name(table, facts, missing):
    with pytest.raises(UserError, match=f"lacks {missing}; legal: name, fused=True"):
        register(Activation(**facts))
    assert table == ACTIVATIONS


def test_a_taken_name_is_refused():
    with pytest.raises(UserError, match="'relu2' exists; legal: a name that is not one of gelu"):
        register(ACTIVATIONS["relu2"])


def test_a_registered_activation_is_legal_in_a_model(table):
    register(Activation("identity", True, lambda x: (x, x * 0 + 1)))
    model = ModelConfig(1, 8, 2, 32, 64, 16, activation="identity")
    assert model.activation == "identity"
    assert "identity" in table
    with pytest.raises(UserError, match=f"Legal: {', '.join(ACTIVATIONS)}, identity"):
        dataclasses.replace(model, activation="unknown")


def test_transformers_names_are_those_of_its_own_table():
    table = pytest.importorskip("transformers.activations").ACT2FN
    names = [theirs for row in ACTIVATIONS.values() for theirs in row.exported]
    assert set(names) <= set(table) and set(names) == set(architectures._ACTIVATIONS)


def test_no_other_file_lists_or_compares_activations():
    """One table.  Readers of exports stand alone: who runs them may not have this package."""
    package = Path(sparse_dataflow.__file__).parent
    reader = "interchange/serving/run_in_torch.py"
    home = {package / name for name in ("core/config/activations.py", reader)}
    lists = []
    for path in set(package.rglob("*.py")) - home:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if names := _names(node):
                lists.append(f"{path.relative_to(package)}:{node.lineno}: {names}")
    assert not lists


def _names(node):
    """Activations that code compares with a value, or lists two or more of."""
    if isinstance(node, ast.Compare):
        values, least = [node.left, *node.comparators], 1
    elif isinstance(node, ast.Dict):
        values, least = node.keys, 2
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        values, least = node.elts, 2
    else:
        return []
    names = [v.value for v in values if isinstance(v, ast.Constant) and v.value in ACTIVATIONS]
    return names if len(names) >= least else []


@pytest.mark.parametrize("name", fused_names())
def test_a_bfloat16_activation_of_a_cpu_rounds_once(name):
    x = jnp.linspace(-6, 6, 257, dtype=jnp.bfloat16)
    y, pull = jax.vjp(activation(name), x)
    wide = np.asarray(x, np.float64)
    slope = FORMULAS[name](wide + 1e-30j).imag / 1e-30
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    for got, exact in ((y, FORMULAS[name](wide)), (pull(jnp.ones_like(x))[0], slope)):
        error = np.abs(np.asarray(got, np.float64) - exact)
        assert np.all(error[wide != 0] <= (eps * np.abs(exact) / 2 + 1e-5)[wide != 0])
