"""The products of one weight, compiled for a described TPU; their schedules as a line of JSON.

`estimates` starts this module in a process of its own, because libtpu reads the flags that make it
write schedules once, when jax starts it:

    python -m experiments.benchmarks.schedules.case '{"chip": "v5e", ...}' FOLDER
"""

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from . import schedule

PRODUCTS = ("forward", "dx", "dW")

DENSE = "dense"
"""The implementation that is XLA's dense product."""

SLICES = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}
"""Chip -> a slice that libtpu describes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One weight on one chip.

    Attributes:
      chip: kind of a described TPU, as in `--topology`: v5e, v5p, v6e.
      implementation: DENSE, or a module of `ops.block_sparse_matmul`.
      pattern: of the layout; "" for DENSE.
      in_features: rows of the weight.
      out_features: columns of the weight.
      block: side of a block; 0 for DENSE.
      density: stored fraction; 1 for DENSE.
      tokens: rows of x.
    """

    chip: str
    implementation: str
    pattern: str
    in_features: int
    out_features: int
    block: int
    density: float
    tokens: int


def measure(case: Case, folder: Path) -> dict[str, dict[str, int]]:
    """Return each product's counts, in cycles and bytes of the whole device.

    Args:
      case: the weight and the chip.
      folder: that libtpu writes schedules to; its content is deleted.

    Returns:
      product -> {"cycles", "xla_cycles" (the compiler's own estimate of all other instructions),
      "hbm_bytes", "spills", "products" (executed vmatmul)}.
    """
    import jax
    import jax.numpy as jnp

    function, weight, tables = _BUILDERS[case.implementation](case)
    shapes = (case.tokens, case.in_features), weight, (case.tokens, case.out_features)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    functions = {product: functools.partial(function, product) for product in PRODUCTS}
    dense = case.implementation == DENSE
    return count_products(case, functions, [*operands, tables], folder, dense=dense)


def count_products(
    case: Case, functions: Mapping[str, Callable], operands: list, folder: Path, *, dense: bool
) -> dict[str, dict[str, int]]:
    """Return the counts of compiled functions, as `measure` has them.

    Args:
      case: the weight and the chip.
      functions: product -> function of the operands.
      operands: shapes and dtypes; index tables are concrete.
      folder: that libtpu writes schedules to; its content is deleted.
      dense: whether the functions are XLA's alone, whose HBM traffic is then the operands'.
    """
    import jax
    import numpy as np

    from sparse_dataflow.compile import topologies

    (device, *_) = topologies.devices(topologies.parse(f"{case.chip}:{SLICES[case.chip]}"))
    where = jax.sharding.SingleDeviceSharding(device)
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), operands
    )
    known = [a if isinstance(a, np.ndarray) else None for a in jax.tree.leaves(operands)]
    counts = {}
    for product, function in functions.items():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with topologies.tracing_for(device):
            trace = jax.jit(function).trace(*structs)
            text = trace.lower(lowering_platforms=("tpu",)).compile().as_text()
        prefetched = list(_kernel_tables(trace.jaxpr.jaxpr, known, trace.jaxpr.consts))
        cores = getattr(device, "num_cores", 1) or 1
        counts[product] = _counts(text, folder, prefetched, cores, case.chip)
        if dense:
            counts[product]["hbm_bytes"] = sum(map(_bytes, jax.tree.leaves(operands)))
    return counts


def dense_product(case: Case) -> tuple[Callable, tuple, tuple]:
    """Return (function of (product, x, weight, dy, tables), shape of the weight, tables)."""

    def product_of(product, x, weight, dy, _):
        if product == "forward":
            return x @ weight
        return dy @ weight.T if product == "dx" else x.T @ dy

    return product_of, (case.in_features, case.out_features), ()


def layout_of(case: Case):
    """Return the layout of a case."""
    from sparse_dataflow.core.layouts.patterns import make_layout

    return make_layout(case.pattern, case.in_features, case.out_features, case.block, case.density)


def _table_product(case):
    from sparse_dataflow.chips.tpu.matmul import api as pallas_tpu

    layout = layout_of(case)
    products = three_products(pallas_tpu.block_sparse_matmul)
    return products, (layout.nnz, case.block, case.block), layout.tables()


def _grouped_product(case):
    from sparse_dataflow.chips.tpu.grouped_matmul.api import products

    groups = layout_of(case).groups
    forward = lambda x, weight, _: products(x, weight, groups, block=case.block)  # noqa: E731
    sides = case.in_features // groups.count, case.out_features // groups.count
    return three_products(forward), (groups.count, *sides), ()


def three_products(forward: Callable) -> Callable:
    """Return a function of (product, x, weight, dy, tables) from y = forward(x, weight, tables)."""
    import jax

    def product_of(product, x, weight, dy, tables):
        if product == "forward":
            return forward(x, weight, tables)
        if product == "dx":
            return jax.vjp(lambda x: forward(x, weight, tables), x)[1](dy)
        return jax.vjp(lambda weight: forward(x, weight, tables), weight)[1](dy)

    return product_of


_BUILDERS = {
    DENSE: dense_product,
    "pallas_tpu": _table_product,
    "pallas_tpu_grouped": _grouped_product,
}


def _counts(text, folder, tables, cores, chip):
    """Return the counts of a compiled program, whose schedules are in the folder.

    Args:
      text: of the compiled program.
      folder: of the dumps.
      tables: (name, scalar-prefetch operands) of each traced kernel; the program has some of them.
      cores: of the device.
      chip: key of `schedule.PRODUCT_CYCLES`.
    """
    names = re.findall(r'^\s*(?:ROOT )?%(\S+) = .*custom_call_target="tpu_custom_call"', text, re.M)
    dumps = schedule.kernel_dumps(folder)
    total = {"cycles": 0, "xla_cycles": 0, "hbm_bytes": 0, "spills": 0, "products": 0}
    for name in names:
        operands = next((operands for kernel, operands in tables if kernel in name), ())
        cycles = schedule.PRODUCT_CYCLES[chip]
        read = schedule.read_schedule(dumps[name].read_text(), operands, cores, cycles)
        for field in ("cycles", "hbm_bytes", "spills", "products"):
            total[field] += getattr(read, field)
    total["xla_cycles"] = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))
    return total


def _kernel_tables(jaxpr, known, consts=()) -> Iterator[tuple[str, list]]:
    """Yield (name, scalar-prefetch operands) of each Pallas kernel, evaluated from the tables.

    Args:
      jaxpr: an open jaxpr.
      known: concrete value of each input, None where it is only a shape.
      consts: values of its constants.
    """
    values = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, known))

    def value(atom):
        return atom.val if hasattr(atom, "val") else values.get(atom)

    for equation in jaxpr.eqns:
        inputs = [value(atom) for atom in equation.invars]
        inner = next((equation.params[key] for key in _INNER if key in equation.params), None)
        if equation.primitive.name == "pallas_call":
            number = equation.params["grid_mapping"].num_index_operands
            yield _kernel_name(equation.params), inputs[:number]
        elif all(entry is not None for entry in inputs):
            results = equation.primitive.bind(*inputs, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
            values.update(zip(equation.outvars, results))
        elif inner is not None:
            yield from _kernel_tables(
                getattr(inner, "jaxpr", inner), inputs, getattr(inner, "consts", ())
            )


def _kernel_name(params):
    info = params.get("name_and_src_info") or params.get("name")
    return str(getattr(info, "name", info))


_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


def _bytes(struct):
    return math.prod(struct.shape) * struct.dtype.itemsize


def main(arguments, measure=measure):
    """Prints the counts of a case."""
    case, folder = Case(**json.loads(arguments[0])), Path(arguments[1])
    os.environ["LIBTPU_INIT_ARGS"] = schedule.DUMP_FLAGS.format(folder=folder)
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(measure(case, folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
