"""In a bfloat16 model, sums over tokens accumulate in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from marks import some
from small_models import (
    DENSE,
    EACH_KIND,
    GEMMA2,
    GEMMA3,
    LOW_RANK,
    NEWER,
    SPARSE,
    arbitrary_params,
    tables_of,
    tokens_of,
)

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.ops.derivatives import broadcast_like, lookup, lookup_and_table
from sparse_dataflow.runs.families import FAMILIES

MODELS = {
    "gpt3": {},
    "opt": FAMILIES["opt"],
    "llama": FAMILIES["llama"],
    "qwen2": FAMILIES["qwen2"],
    "qwen3": FAMILIES["qwen3"],
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    **NEWER,
    "sparse": {"linears": SPARSE.linears},
    "low rank": {"linears": LOW_RANK.linears},
    "each kind": {"linears": EACH_KIND.linears},
    "experts": {"experts": 4, "top_k": 2, "shared_expert": 1, "shared_gate": True},
    "scanned": {"linears": SPARSE.linears, "remat": "full"},
}


@pytest.mark.parametrize(
    "name", some([*MODELS], "gpt3", "gemma3", "each kind", "experts", "scanned")
)
def test_no_gradient_sums_tokens_in_bfloat16(name):
    config = dataclasses.replace(DENSE, compute_dtype="bfloat16", **MODELS[name])

    def gradient(params, tables, tokens):
        return whole.loss_and_gradients(config, params, tables, Batch.from_windows(tokens))

    arguments = arbitrary_params(config), tables_of(config), tokens_of(config)
    program = jax.make_jaxpr(gradient)(*arguments)
    assert not sorted(set(_narrow_sums(program.jaxpr)))


def _narrow_sums(jaxpr):
    """Yields the sums of more than four bfloat16 numbers that are accumulated in bfloat16."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(
            equation.params.values(), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _narrow_sums(inner)
        result = equation.outvars[0].aval
        if getattr(result, "dtype", None) != jnp.bfloat16:
            continue
        name, first = equation.primitive.name, equation.invars[0].aval
        if name in ("reduce_sum", "cumsum") and first.size > 4 * result.size:
            yield f"{name} {first} -> {result} {equation.source_info.name_stack}"
        if name in ("scatter-add", "scatter_add"):
            yield f"{name} {equation.invars[2].aval} -> {result} {equation.source_info.name_stack}"


@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_of_shared_parameters_are_exact_sums(jitted):
    rng = np.random.default_rng(0)
    rows, dy = rng.integers(0, 5, (8, 512)), rng.uniform(0.5, 1, (8, 512, 6)).astype(jnp.bfloat16)
    bias, table = jnp.zeros(6), jnp.zeros((5, 6), jnp.bfloat16)

    def value(bias, table):
        return jnp.sum(dy * (broadcast_like(bias, dy) + lookup(table, rows)), dtype=jnp.float32)

    gradient = jax.grad(value, (0, 1))
    bias_gradient, table_gradient = (jax.jit(gradient) if jitted else gradient)(bias, table)
    dy = dy.astype(float)
    np.testing.assert_allclose(bias_gradient, dy.sum((0, 1)), rtol=1e-6)
    expected = np.stack([dy[rows == row].sum(0) for row in range(5)])
    np.testing.assert_allclose(table_gradient.astype(float), expected, rtol=2**-8)


def test_lookup_has_a_forward_mode_and_float64():
    with jax.enable_x64(True):
        table, rows = jnp.arange(12.0).reshape(4, 3), jnp.array([[1, 3, 3], [0, 1, 3]])
        check_grads(lambda table: lookup(table, rows) ** 2, (table,), 2)
        assert lookup(table, rows).dtype == jnp.float64


@pytest.fixture(params=["cpu", "gpu"])
def platform(request, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: request.param)
    return request.param


@pytest.mark.parametrize(("length", "tokens"), some([(3, 40), (17, 5), (64, 64)], 3))
def test_the_gradients_of_a_lookup_and_of_the_table_add_up(platform, length, tokens):
    rng = np.random.default_rng(length)
    table, dy, dtable = (rng.normal(size=(n, 4)) for n in (length, tokens, length))
    rows = rng.integers(0, length, tokens)

    def loss(table):
        looked_up, table = lookup_and_table(table, rows)
        return jnp.sum(looked_up * dy) + jnp.sum(table * dtable)

    with jax.enable_x64(True):
        gradient = jax.grad(loss)(jnp.asarray(table))
        check_grads(lambda table: lookup_and_table(table, rows), (jnp.asarray(table),), 2)
    np.add.at(dtable, rows, dy)
    np.testing.assert_allclose(gradient, dtable, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_tied_table_is_one_scatter_into_that_of_its_product(platform):
    def loss(table, x, rows):
        looked_up, table = lookup_and_table(table, rows)
        return jnp.sum(jnp.sin(looked_up @ x)) + jnp.sum(jnp.cos(table @ x))

    arguments = jnp.ones((50, 8)), jnp.ones((8, 2)), jnp.arange(5)
    equations = str(jax.make_jaxpr(jax.grad(loss))(*arguments))
    assert equations.count("scatter-add[") == 1
    assert "f32[50,8] = broadcast_in_dim" not in equations  # A table of zeros.
    assert "add_any" not in equations
