"""Prints as JSON the errors of block-sparse layers over eight devices against one device."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
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


def checked_shard_map_difference(x):
    """Inside and outside of `shard_map` with its check of varying axes, and by two axes."""
    graph, params, others = nnx.split(model(), nnx.Param, ...)

    def mean(params, others, x):
        return jax.lax.pmean(loss(nnx.merge(graph, params, others), x), ("data", "fsdp"))

    def over_devices(function):
        specs = {"in_specs": (P(), P(), P(("data", "fsdp"))), "out_specs": P()}
        return jax.shard_map(function, mesh=MESH, **specs)

    expected = jax.grad(lambda params: loss(nnx.merge(graph, params, others), x))(params)
    results = [
        jax.jit(jax.grad(over_devices(mean)))(params, others, x),
        jax.jit(over_devices(jax.grad(mean)))(params, others, x),
    ]
    return max(largest_difference(result, expected) for result in results)


def explicit_difference(x):
    """Over Explicit axes, weights replicated and sharded by their partition specs."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    layers = model()
    expected = nnx.grad(loss)(layers, x)
    rows = jax.device_put(x, NamedSharding(mesh, P("data")))
    differences = []
    for specs in (
        jax.tree.map(lambda _: P(), nnx.state(layers)),
        sd.partition_specs(layers, mesh, "fsdp"),
    ):
        put = lambda spec, leaf: jax.device_put(leaf, NamedSharding(mesh, spec))  # noqa: E731
        placed = nnx.clone(layers)
        # The axis of the features of a dense kernel is replicated: JAX asks for the rest.
        specs["layers"][4] = jax.tree.map(lambda _: P(), specs["layers"][4])
        nnx.update(placed, jax.tree.map(put, specs, nnx.state(layers)))
        with jax.set_mesh(mesh):
            gradients = nnx.jit(nnx.grad(loss))(placed, rows)
        differences.append(largest_difference(gradients, expected))
    return max(differences)


def uncontextual_difference(x):
    """Of rows over Explicit axes where no context has the mesh, alone and compiled."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    layers, differences = model(), []
    for spec in (P(), P("data"), P(("data", "fsdp")), P(None, "fsdp")):
        rows = jax.device_put(x, NamedSharding(mesh, spec))
        for function in (lambda m, x: m(x), nnx.jit(nnx.grad(loss, argnums=1))):
            differences.append(largest_difference(function(layers, rows), function(layers, x)))
    return max(differences)


def linen_translations(x):
    """Shards of stored blocks after linen's translation of names, which flax's rules were for.

    By how many axes of the mesh the rules give to a kernel.
    """
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    report = {}
    for rules in (
        [("embed", None), ("mlp", None)],
        [("embed", None), ("mlp", "fsdp")],
        [("embed", "data"), ("mlp", None)],
        [("embed", ("data",)), ("mlp", ("fsdp",))],
        [("embed", ("data", "fsdp")), ("mlp", "data")],
    ):
        metadata = {"out_sharding": ("embed", "mlp"), "eager_sharding": False}
        dense = nnx.Linear(64, 128, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
            state = nnx.state(sd.sparsify(dense, density=1.0, block=16))
        specs = nnx.get_partition_spec(state)
        shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
        values = jax.device_put(state, shardings)["values"][...]
        report[str(rules)] = values.shape[0] // values.sharding.shard_shape(values.shape)[0]
    return list(report.values())


def translated_shardings(x):
    """Shards of stored blocks whose kernel is sharded by its metadata, by how that is written."""
    names, init = ("data", "fsdp"), nnx.initializers.lecun_normal()
    report = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)
        rules = [("embed", "data"), ("mlp", "fsdp"), ("head", None)]
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
            partitioned = nnx.with_partitioning(init, names)
            linear = nnx.Linear(64, 128, kernel_init=partitioned, rngs=nnx.Rngs(0))
            # The metadata's name depends on the version of flax.
            key = next(k for k, each in linear.kernel.get_metadata().items() if each == names)
            models = {
                "partitioned": linear,
                "logical": nnx.Einsum(
                    "bd,dhk->bhk",
                    (64, 8, 16),
                    kernel_metadata={key: ("embed", "mlp", "head")},
                    rngs=nnx.Rngs(0),
                ),
                "one axis": nnx.Linear(
                    64, 128, kernel_metadata={key: (None, "fsdp")}, rngs=nnx.Rngs(0)
                ),
            }
            for name, dense in models.items():
                sparse = sd.sparsify(dense, density=1.0, block=16)
                values = getattr(sparse, "linear", sparse).values
                spec = nnx.get_partition_spec(nnx.state(sparse))
                spec = spec.get("linear", spec)["values"].get_value()
                again = sd.densify(sparse).kernel
                same = again.get_metadata(key) == dense.kernel.get_metadata(key)
                same &= np.array_equal(again[...], dense.kernel[...])
                placed = jax.device_put(np.asarray(values[...]), NamedSharding(mesh, spec))
                shards = values[...].sharding.shard_shape(values.shape)[0]
                assert shards == placed.sharding.shard_shape(values.shape)[0]
                report[f"{name}, {kind.name}"] = [values.shape[0] // shards, bool(same)]
            few = nnx.Linear(48, 32, kernel_init=init, rngs=nnx.Rngs(0))
            few.kernel.set_metadata(**{key: names})
            values = sd.sparsify(few, density=1.0, block=16).values
            shards = values[...].sharding.shard_shape(values.shape)[0]
            report[f"6 blocks, {kind.name}"] = [values.shape[0] // shards, True]
            direct = sd.BlockSparseLinear(
                64, 64, density=0.5, block=8, kernel_init=partitioned, rngs=nnx.Rngs(0)
            )
            shards = direct.values[...].sharding.shard_shape(direct.values.shape)[0]
            report[f"direct, {kind.name}"] = [direct.values.shape[0] // shards, True]
    return report


def call_shardings(x):
    """Errors, and spec as asked for, of `out_sharding=` at the call, over both kinds of axes."""
    results = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)
        for dense, spec in (
            (nnx.Linear(64, 128, rngs=nnx.Rngs(0)), P("data", None)),
            (nnx.Linear(64, 128, rngs=nnx.Rngs(0)), P(None, "fsdp")),
            (nnx.LinearGeneral(64, (8, 16), rngs=nnx.Rngs(0)), P("data", "fsdp", None)),
        ):
            expected = dense(x)
            for evolving in (False, True):
                sparse = sd.sparsify(dense, density=1.0, block=16, evolving=evolving)
                everywhere = NamedSharding(mesh, P())
                nnx.update(sparse, jax.device_put(nnx.state(sparse), everywhere))
                rows = jax.device_put(x, everywhere)
                with jax.set_mesh(mesh):
                    y = nnx.jit(lambda m, x, spec=spec: m(x, out_sharding=spec))(sparse, rows)
                is_equal = y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim)
                results.append([largest_difference(y, expected), bool(is_equal)])
    return results


def evolved_shardings(x):
    """Sharding specs of values, a table and a moment before and after each method."""

    def place(layers, state):
        specs = sd.partition_specs(layers, MESH, "fsdp")
        put = lambda spec, leaf: jax.device_put(leaf, NamedSharding(MESH, spec))  # noqa: E731
        return jax.tree.map(put, specs, state)

    layers, optimizer = trained(place, x)

    def shards():
        first, second = layers.layers[0], layers.layers[2]
        arrays = first.values, second.values, optimizer.opt_state[0].mu["layers"][2]["values"]
        return [array[...].sharding.shard_shape(array.shape)[0] for array in arrays] + [
            len(second.in_index[...].sharding.device_set)
        ]

    before = shards()
    sd.evolve(layers, optimizer, "set", share=0.25, seed=1)
    after = shards()
    sd.evolve(layers, optimizer, "gradual", density=0.25)
    return [before, after, shards()]


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
    report = {
        "shard_map": shard_map_difference(x),
        "checked_shard_map": checked_shard_map_difference(x),
        "explicit": explicit_difference(x),
        "uncontextual": uncontextual_difference(x),
        "linen": linen_translations(x),
        "evolved": evolved_shardings(x),
        "translated": translated_shardings(x),
        "called": call_shardings(x),
    }
    print(json.dumps({**report, **sharded_training(x)}))
