"""Prints as JSON how the sharded op on eight virtual devices compares with the op on one.

Run by test_sharded.py, as a process decides at its start how many CPU devices it has.
"""

import contextlib
import json
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_dataflow.kernels import dispatch
from sparse_dataflow.kernels.block_sparse_matmul import api, sharded
from sparse_dataflow.kernels.sparse_mlp.api import sparse_mlp
from sparse_dataflow.kernels.sparse_mlp.sharded import parallel_sparse_mlp
from sparse_dataflow.sparsity.patterns import make_layout

TOKENS, SHARDS = (6, 5), 4


@contextlib.contextmanager
def tpu():
    """The kernels run interpreted, chosen as if the devices of the mesh were TPUs."""
    interpreted = pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())
    with mock.patch.object(dispatch, "platform", lambda: "tpu"), interpreted:
        yield


def compare(implementation, side, kind):
    """Errors of y, dx, dvalues relative to the largest; the collectives; programs compiled."""
    mesh = jax.make_mesh((2, SHARDS), ("data", "model"), axis_types=(kind, kind))
    block = 32
    columns = side == "columns"
    cut = sharded.cut_columns if columns else sharded.cut_rows
    product = sharded.column_parallel if columns else sharded.row_parallel
    split, whole = P("data", None, "model"), P("data", None, None)
    held = P("model", None, None)
    specs = (whole if columns else split, held, split if columns else whole)
    on_mesh = lambda spec: NamedSharding(mesh, spec)  # noqa: E731

    def gradients(x, values, dy, tables):
        y, pullback = jax.vjp(
            lambda x, v: product(
                x, v, tables, mesh, "model", data_axes=("data",), implementation=implementation
            ),
            x,
            values,
        )
        return y, *pullback(dy)

    def one_device(x, values, dy, tables):
        y, pullback = jax.vjp(
            lambda x, v: api.block_sparse_matmul(x, v, tables, "reference"), x, values
        )
        return y, *pullback(dy)

    program = jax.jit(gradients, out_shardings=(on_mesh(specs[2]), *map(on_mesh, specs[:2])))
    errors = []
    for offset in range(2):
        layout = make_layout("random", 8 * block, 16 * block, block, 0.5, offset)
        pieces = cut(layout, SHARDS, fan=4 if columns else 2)
        rng = np.random.default_rng(offset)
        x = rng.normal(size=(*TOKENS, layout.in_features)).astype(np.float32)
        values = rng.normal(size=(layout.nnz, block, block)).astype(np.float32)
        dy = rng.normal(size=(*TOKENS, layout.out_features)).astype(np.float32)
        placed = [
            jax.device_put(array, on_mesh(spec))
            for array, spec in zip((x, values[pieces.order], dy), specs)
        ]
        tables = jax.tree.map(lambda table: jax.device_put(table, on_mesh(held)), pieces.tables)
        with interpreter(implementation):
            actual = program(*placed, tables)
            jax.block_until_ready(actual)
        right = list(one_device(*map(jnp.asarray, (x, values, dy)), layout.tables()))
        right[2] = right[2][pieces.order]
        for mine, other in zip(actual, right):
            errors.append(float(np.abs(mine - other).max() / np.abs(other).max()))
    with interpreter(implementation):
        return report(program, (*placed, tables), errors)


def report(program, operands, errors):
    text = program.lower(*operands).compile().as_text()
    names = ("all-gather", "all-to-all", "collective-permute", "all-reduce")
    return {
        "error": max(errors),
        "collectives": {name: text.count(f" {name}(") for name in names},
        "programs": program._cache_size(),
    }


def compare_mlp(implementation, kind):
    """The same of the sparse MLP, its hidden layer cut over the tensor axis."""
    mesh = jax.make_mesh((2, SHARDS), ("data", "model"), axis_types=(kind, kind))
    first = make_layout("random", 128, 512, 32, 0.5, 0)
    second = make_layout("random", 512, 128, 32, 0.5, 1)
    cuts = sharded.cut_columns(first, SHARDS), sharded.cut_rows(second, SHARDS)
    rng = np.random.default_rng(0)
    shapes = ((*TOKENS, 128), (first.nnz, 32, 32), (512,), (second.nnz, 32, 32), (*TOKENS, 128))
    scales = (1, 1 / 8, 1, 1 / 16, 1)
    operands = [(s * rng.normal(size=n)).astype(np.float32) for s, n in zip(scales, shapes)]
    specs = (P("data"), P("model"), P("model"), P("model"), P("data"))

    def gradients(*operands):
        *operands, dy, tables = operands
        run = lambda *o: parallel_sparse_mlp(  # noqa: E731
            *o, *tables, mesh, "model", data_axes=("data",), implementation=implementation
        )
        y, pullback = jax.vjp(run, *operands)
        return y, *pullback(dy)

    def one_device(*operands):
        *operands, dy = operands
        tables = first.tables(), second.tables()
        run = lambda *o: sparse_mlp(*o, *tables, implementation="products")  # noqa: E731
        y, pullback = jax.vjp(run, *operands)
        return y, *pullback(dy)

    order = [slice(None), cuts[0].order, slice(None), cuts[1].order, slice(None)]
    placed = [
        jax.device_put(array[at], NamedSharding(mesh, spec))
        for array, at, spec in zip(operands, order, specs)
    ]
    tables = jax.device_put(tuple(c.tables for c in cuts), NamedSharding(mesh, P("model")))
    outputs = [NamedSharding(mesh, spec) for spec in (specs[0], *specs[:4])]
    program = jax.jit(gradients, out_shardings=tuple(outputs))
    right = one_device(*operands)
    with interpreter(implementation):
        actual = jax.block_until_ready(program(*placed, tables))
        errors = [
            float(np.abs(mine - other[at]).max() / np.abs(other).max())
            for mine, other, at in zip(actual, right, (order[0], *order[:4]))
        ]
        return report(program, (*placed, tables), errors)


def interpreter(implementation):
    return tpu() if implementation == "pallas_tpu" else contextlib.nullcontext()


if __name__ == "__main__":
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    implementation, side, kind = sys.argv[1:]
    assert jax.device_count() == 8
    kind = getattr(AxisType, kind)
    if side == "mlp":
        found = compare_mlp(implementation, kind)
    else:
        found = compare(implementation, side, kind)
    print(json.dumps(found))
