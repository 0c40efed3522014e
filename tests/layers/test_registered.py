"""Linear classes of users' own become block-sparse, or an error names what is wrong."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import some

import sparse_dataflow as sd


class Projection(nnx.Module):
    """A product by an equation, as in most code of language models."""

    def __init__(self, equation, shape, bias=None, dtype=jnp.float32, scale=1.0):
        rngs, init = nnx.Rngs(0), nnx.initializers.normal(0.1)
        self.equation, self.scale, self.heads = equation, scale, 4
        self.w = nnx.Param(init(rngs.params(), shape, dtype))
        self.b = nnx.Param(init(rngs.params(), bias, dtype)) if bias else None

    def __call__(self, x):
        y = jnp.einsum(self.equation, x, self.w[...]) * self.scale
        return y if self.b is None else y + self.b[...]


class Transposed(nnx.Module):
    """A kernel of [out, in], whose dtype is that of the computation."""

    def __init__(self, inputs, outputs):
        self.weight = nnx.Param(nnx.initializers.normal(0.1)(jax.random.key(1), (outputs, inputs)))

    def __call__(self, x):
        return x.astype(jnp.bfloat16) @ self.weight[...].T.astype(jnp.bfloat16)


class Subclass(nnx.Linear):
    pass


class Unknown(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.ones((16, 16)))


@pytest.fixture(autouse=True)
def registered():
    sd.register_linear(Projection, read=lambda m: (m.equation, m.w, m.b))
    sd.register_linear(Transposed, read=lambda m: ("...i,oi->...o", m.weight, None))


MODULES = {
    "heads": (lambda: Projection("btd,dhk->bthk", (32, 4, 16)), (2, 3, 32)),
    "heads summed": (lambda: Projection("bthk,hkd->btd", (4, 16, 48), bias=(48,)), (2, 3, 4, 16)),
    "with bias": (lambda: Projection("...i,ij->...j", (32, 48), bias=(48,)), (5, 32)),
    "half precision": (lambda: Projection("bi,ij->bj", (32, 48), dtype=jnp.float16), (5, 32)),
    "transposed": (lambda: Transposed(32, 48), (5, 32)),
}


@pytest.mark.parametrize("evolving", some([False, True], False))
@pytest.mark.parametrize("name", MODULES)
def test_it_keeps_its_function_and_densify_gives_the_class_back(name, evolving):
    make, shape = MODULES[name]
    model, x = nnx.List([make()]), jax.random.normal(jax.random.key(0), shape)
    sparse = sd.sparsify(model, density=1.0, block=16, evolving=evolving)
    half = sd.sparsify(model, "magnitude", density=0.5, block=8, evolving=evolving)
    tolerance = 3e-2 if name in ("half precision", "transposed") else 1e-5
    as_float = lambda y: np.asarray(y, np.float32)  # noqa: E731
    np.testing.assert_allclose(as_float(sparse[0](x)), as_float(model[0](x)), atol=tolerance)
    assert sparse[0](x).dtype == model[0](x).dtype
    dense = sd.densify(sparse)
    assert type(dense[0]) is type(model[0])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(dense), nnx.state(model))
    pruned = sd.densify(half)[0]
    np.testing.assert_allclose(as_float(pruned(x)), as_float(half[0](x)), atol=tolerance)


def test_public_attributes_are_those_of_the_module():
    module = Projection("btd,dhk->bthk", (32, 4, 16))
    layer = sd.sparsify(nnx.List([module]), density=1.0, block=16)[0]
    assert (layer.equation, layer.heads, layer.b) == (module.equation, 4, None)
    assert layer.w.shape == module.w.shape and layer.w.dtype == module.w.dtype
    assert not hasattr(layer, "nothing")


WRONG = {
    "another axis": (
        lambda m: ("btd,hdk->bthk", m.w, None),
        r"kernel \(32, 32, 32\) gives other numbers than the module, of inputs \(2, 2, 32\)",
    ),
    "another shape": (
        lambda m: ("bhtd,dxk->bhtxk", m.w, None),
        r"takes inputs \(2, 2, 2, 32\), and the module does not",
    ),
    "another order": (lambda m: ("btd,dhk->btkh", m.w, None), "gives other numbers"),
    "more axes": (
        lambda m: ("b,bcdef->cdef", m.w, None),
        r"a kernel of 5 axes and its kernel has shape \(32, 32, 32\)",
    ),
    "no attribute": (lambda m: (m.equation, nnx.Param(jnp.ones((2, 2))), None), "none of its attr"),
    "no tuple": (lambda m: m.w, "returns Param; legal: a tuple"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_reader_that_is_wrong_is_refused_with_the_shapes(name):
    read, words = WRONG[name]
    sd.register_linear(Projection, read=read)
    model = nnx.List([Projection("btd,dhk->bthk", (32, 32, 32))])
    with pytest.raises(sd.UserError, match=words):
        sd.sparsify(model, density=1.0, block=16)


def test_what_a_module_computes_besides_is_refused():
    more = Projection("bi,ij->bj", (32, 32))
    more.gain = nnx.Param(jnp.ones((32,)))
    for module, words in (
        (Projection("bi,ij->bj", (32, 32), scale=2.0), "gives other numbers"),
        (Projection("bi,ij->bj", (32, 32), bias=(5, 32)), r"bias has shape \(5, 32\) and its"),
        (more, r"variables besides its kernel and its bias, of shapes \(32,\)"),
    ):
        with pytest.raises(sd.UserError, match=words):
            sd.sparsify(nnx.List([module]), density=1.0, block=16)


@pytest.mark.parametrize("make", [Unknown, lambda: Subclass(16, 16, rngs=nnx.Rngs(0))])
def test_a_class_that_nobody_registered_is_named_with_the_line(make):
    model = nnx.List([make()])
    name = type(model[0]).__name__
    with pytest.raises(sd.UserError, match=rf"{name}.*sd.register_linear\({name}, read="):
        sd.sparsify(model, density=1.0, block=16)


def test_what_cannot_be_registered_is_refused():
    for cls, words in ((nnx.Linear, "needs no registration"), (int, "no class of nnx modules")):
        with pytest.raises(sd.UserError, match=words):
            sd.register_linear(cls, read=lambda m: ("", m, None))


def test_a_writer_puts_the_kernel_back():
    class Doubled(Projection):
        pass

    def write(module, kernel, bias):
        module.w, module.written = kernel, True

    sd.register_linear(Doubled, read=lambda m: (m.equation, m.w, None), write=write)
    model = nnx.List([Doubled("bi,ij->bj", (32, 32))])
    dense = sd.densify(sd.sparsify(model, density=1.0, block=16))[0]
    assert dense.written
    np.testing.assert_array_equal(dense.w[...], model[0].w[...])


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "sparse_dataflow")
    logging.getLogger("sparse_dataflow").propagate = True
    return caplog


def test_one_line_says_what_is_sparse_and_what_is_dense(log):
    model = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(n)) for n in range(3)])
    model.append(nnx.Embed(8, 16, rngs=nnx.Rngs(0)))
    model.append(Unknown())
    sd.sparsify(model, density=1.0, block=16, where=lambda path, _: path != "0")
    (line,) = [r.getMessage() for r in log.records if "sd.sparsify" in r.getMessage()]
    assert "2 linears are block-sparse (2 x *)" in line
    for words in ("0.kernel of Linear", "3.embedding of Embed", "4.table of Unknown"):
        assert words in line
