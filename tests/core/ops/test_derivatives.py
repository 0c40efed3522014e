"""Derivatives of both modes, orders and batchings are those of JAX for the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core.ops import derivatives


def native(x, weight):
    return jnp.sin(x @ weight)


def value(_, x, weight, table):
    return native(x, weight)


def backward(_, saved, dy):
    x, weight, _ = saved
    dz = dy * jnp.cos(x @ weight)
    return dz @ weight.T, x.T @ dz, None


TABLE = {"index": np.arange(3, dtype=np.int32)}
OPS = {
    "with a tangent": derivatives.tangent_of(value),
    "by transposition": None,
}


@pytest.fixture(params=OPS)
def op(request):
    op = derivatives.differentiable(value, backward, tangent=OPS[request.param])
    return lambda x, weight: op(None, x, weight, TABLE)


def loss(function):
    return lambda x, weight: jnp.sum(jnp.cos(function(x, weight)))


def scanned(function, wrap=lambda function: function):
    step = wrap(lambda x, weight: (jnp.tanh(function(x, weight)), None))
    return lambda x, weight: jnp.sum(jax.lax.scan(step, x, jnp.stack([weight] * 3))[0])


def mapped(function, axes):
    several = lambda a, axis: a if axis is None else jnp.stack([a, 2 * a, -a], axis)  # noqa: E731
    return lambda x, weight: jnp.sum(
        jax.vmap(function, axes)(*map(several, (x, weight), axes)) ** 2
    )


def sharded(function, varying):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def local(x, weight):
        weight = jax.lax.pcast(weight, "d", to="varying") if varying else weight
        return jax.lax.psum(jnp.sum(function(x, weight) ** 2), "d")

    specs = {"in_specs": (P("d"), P()), "out_specs": P()}
    return jax.shard_map(local, mesh=mesh, check_vma=varying, **specs)


both = (0, 1)
TRANSFORMS = {
    "grad": lambda f: jax.grad(loss(f), both),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (x + 1, 2 * w)),
    "jvp of one": lambda f: lambda x, w: jax.jvp(lambda w: f(x, w), (w,), (w,)),
    "jacobians": lambda f: lambda x, w: (jax.jacfwd(f, both)(x, w), jax.jacrev(f, both)(x, w)),
    "hessian": lambda f: jax.hessian(loss(f), both),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(loss(f), both), both),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(loss(f), both), both),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(loss(f), 1), 0),
    "vmap of grad": lambda f: (
        lambda x, w: jax.vmap(jax.grad(loss(f), both), (0, None))(x[:, None], w)
    ),
    "grad of vmap": lambda f: jax.grad(mapped(f, (0, None)), both),
    "hessian of vmap": lambda f: jax.hessian(mapped(f, (1, 2)), both),
    "scan": lambda f: jax.hessian(scanned(f), both),
    "remat": lambda f: jax.hessian(scanned(f, jax.checkpoint), both),
    "shard_map": lambda f: jax.grad(sharded(f, False), both),
    "shard_map with varying axes": lambda f: jax.grad(sharded(f, True), both),
    "jvp in shard_map": lambda f: lambda x, w: jax.jvp(sharded(f, True), (x, w), (x + 1, w)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_are_those_of_jax(op, transform):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, weight = jnp.asarray(rng.normal(size=(2, 3))), jnp.asarray(rng.normal(size=(3, 3)))
        actual, expected = (
            jax.jit(TRANSFORMS[transform](function))(x, weight) for function in (op, native)
        )
    for mine, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-9, atol=1e-9)


def test_an_elementwise_gradient_saves_the_input_alone():
    op = derivatives.elementwise(jnp.sin, lambda x, dy: dy * jnp.cos(x))
    _, pull = jax.vjp(op, jnp.ones(5))
    assert [leaf.shape for leaf in jax.tree.leaves(pull)] == [(5,)]
