"""Prints as JSON the errors of block-sparse layers over eight devices against one device."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sparse_dataflow as sd

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))


def model():
    return nnx.Sequential(
        sd.BlockSparseLinear(64, 128, density=0.5, block=8, rngs=nnx.Rngs(0)),
        nnx.relu,
        sd.BlockSparseLinear(128, 64, density=0.5, block=8, evolving=True, rngs=nnx.Rngs(1)),
        nnx.relu,
        nnx.Linear(64, 3, rngs=nnx.Rngs(2)),
    )


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def largest_difference(first, second):
    differences = jax.tree.map(
        lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), first, second
    )
    return float(max(jax.tree.leaves(differences)))


def shard_map_difference(x):
    graph, params, others = nnx.split(model(), nnx.Param, ...)

    def gradients(params, others, x):
        return jax.grad(lambda params: loss(nnx.merge(graph, params, others), x))(params)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=MESH, in_specs=(P(), P(), P(("data", "fsdp"))), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    def sharded(params, others, x):
        return jax.lax.pmean(gradients(params, others, x), ("data", "fsdp"))

    return largest_difference(sharded(params, others, x), gradients(params, others, x))


def trained(place, x):
    layers = model()
    nnx.update(layers, place(layers, nnx.state(layers)))
    optimizer = nnx.Optimizer(layers, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(layers, optimizer, x):
        optimizer.update(layers, nnx.grad(loss)(layers, x))

    for _ in range(3):
        step(layers, optimizer, x)
    return layers, optimizer


def sharded_training(x):
    def place(layers, state):
        specs = sd.partition_specs(layers, MESH, "fsdp")
        put = lambda spec, leaf: jax.device_put(leaf, NamedSharding(MESH, spec))  # noqa: E731
        return jax.tree.map(put, specs, state)

    alone, _ = trained(lambda layers, state: state, x)
    rows = jax.device_put(x, NamedSharding(MESH, P("data")))
    layers, optimizer = trained(place, rows)
    moments = optimizer.opt_state[0].mu["layers"][0]["values"][...]
    return {
        "training": largest_difference(nnx.state(layers), nnx.state(alone)),
        "sharded": [
            "fsdp" in tuple(array.sharding.spec)
            for array in (
                layers.layers[0].values[...],
                moments,
                layers.layers[2].in_index[...],
                layers.layers[4].kernel[...],
                layers.layers[4].bias[...],
            )
        ],
    }


if __name__ == "__main__":
    x = jax.random.normal(jax.random.key(0), (16, 64))
    print(json.dumps({"shard_map": shard_map_difference(x), **sharded_training(x)}))
