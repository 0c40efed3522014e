"""Linear classes of libraries are replaced without a registration, by the rows of the table.

The classes here are copies of the libraries' own, by name; `make optional` has the real ones.
"""

import importlib.metadata
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.layers import libraries


def draw(shape):
    return nnx.initializers.normal(0.1)(jax.random.key(sum(shape)), shape, jnp.float32)


class Einsum(nnx.Module):
    def __init__(self, einsum_str, shape):
        self.einsum_str, self.shape, self.w = einsum_str, shape, nnx.Param(draw(shape))

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x, self.w[...])


class DenseGeneral(nnx.Module):
    def __init__(self, inputs, outputs, axis, use_bias):
        self.in_features_shape, self.out_features_shape = inputs, outputs
        self.axis, self.kernel_scale = axis, None
        self.kernel = nnx.Param(draw((*inputs, *outputs)))
        self.bias = nnx.Param(draw(outputs)) if use_bias else None

    def __call__(self, inputs, _initializing=False, out_sharding=None):
        axes = tuple(axis % inputs.ndim for axis in self.axis), tuple(range(len(self.axis)))
        y = jax.lax.dot_general(inputs, self.kernel[...], (axes, ((), ())))
        return y if self.bias is None else y + self.bias[...]


class ParallelLinear(nnx.Module):
    def __init__(self, use_bias, scale=1.0):
        self.kernel, self.use_bias, self.scale = nnx.Param(draw((32, 48))), use_bias, scale
        self.bias = nnx.Param(draw((48,))) if use_bias else None

    def __call__(self, inputs, w=None):
        y = inputs @ self.kernel[...] * self.scale
        return y if self.bias is None else y + self.bias[...]


class ShardedLinear(nnx.Module):
    def __init__(self, use_bias):
        self.kernel = nnx.Param(draw((32, 48)))
        self.bias = nnx.Param(draw((48,))) if use_bias else nnx.data(jnp.zeros(48))

    def __call__(self, x, *, out_sharding):
        return jnp.matmul(x, self.kernel[...], out_sharding=out_sharding) + self.bias


MODULES = {
    "tunix.models.llama3.model.Einsum": (lambda: Einsum("BTD,DNH->BTNH", (32, 4, 8)), (2, 3, 32)),
    "tunix.models.gemma.model.Einsum": (lambda: Einsum("BTNH,NHD->BTD", (4, 8, 32)), (2, 3, 4, 8)),
    "maxtext.layers.linears.DenseGeneral": (
        lambda: DenseGeneral((32,), (4, 8), (-1,), True), (2, 3, 32)
    ),
    "of two axes: maxtext.layers.linears.DenseGeneral": (
        lambda: DenseGeneral((4, 8), (32,), (-2, -1), False), (2, 4, 8)
    ),
    "easydel.layers.linears._linear.ColumnParallelLinear": (
        lambda: ParallelLinear(True), (2, 3, 32)
    ),
    "easydel.layers.linears._linear.RowParallelLinear": (lambda: ParallelLinear(False), (5, 32)),
    "bonsai.models.llada.modeling.ShardedLinear": (lambda: ShardedLinear(True), (5, 32)),
    "bonsai.models.qwen3_vl.modeling.ShardedLinear": (lambda: ShardedLinear(False), (5, 32)),
}  # fmt: skip


def named(module, name):
    """Returns a module whose class has the full name of a library's class."""
    home, _, kind = name.rpartition(" ")[2].rpartition(".")
    module.__class__ = type(kind, (type(module),), {"__module__": home, "__qualname__": kind})
    return module


def apply(module, x):
    return module(x, out_sharding=None) if "Sharded" in type(module).__name__ else module(x)


@pytest.mark.parametrize("evolving", some([False, True], False))
@pytest.mark.parametrize("name", MODULES)
def test_a_class_of_a_library_keeps_its_function(name, evolving):
    make, shape = MODULES[name]
    model = nnx.List([named(make(), name)])
    x = jax.random.normal(jax.random.key(0), shape)
    sparse = sd.sparsify(model, density=1.0, block=8, evolving=evolving)
    expected = apply(model[0], x)
    np.testing.assert_allclose(sparse[0](x, out_sharding=None), expected, atol=1e-5)
    dense = sd.densify(sparse)
    assert type(dense[0]) is type(model[0])
    np.testing.assert_allclose(apply(dense[0], x), expected, atol=1e-5)
    quarter = sd.sparsify(model, density=0.25, block=8, evolving=evolving)
    assert quarter[0].linear.layout.density == 0.25


def test_every_row_has_a_module_here():
    packages = {name.rpartition(" ")[2] for name in MODULES}
    assert all(packages & set(row.classes) for row in libraries.LIBRARIES)


def test_a_scaled_linear_is_refused_because_it_computes_more():
    module = named(ParallelLinear(True, 0.5), "easydel.layers.linears._linear.RowParallelLinear")
    with pytest.raises(sd.UserError, match="gives other numbers"):
        sd.sparsify(nnx.List([module]), density=1.0, block=8)


@pytest.mark.parametrize("version", ["0.2.4", "0.2.5", "1.0.0"])
def test_another_version_than_the_tested_one_is_named_once(version, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    libraries._say_untested.cache_clear()
    caplog.set_level(logging.INFO, "sparse_dataflow")
    monkeypatch.setattr(logging.getLogger("sparse_dataflow"), "propagate", True)
    name = "maxtext.layers.linears.DenseGeneral"
    model = nnx.List([named(MODULES[name][0](), name) for _ in range(2)])
    sd.sparsify(model, density=1.0, block=8)
    lines = [record.getMessage() for record in caplog.records if "maxtext" in record.getMessage()]
    assert len(lines) == (version != "0.2.5")
    assert all(version in line and "0.2.5" in line for line in lines)
    libraries._say_untested.cache_clear()
