"""The products of one weight, compiled for a described GPU; what they take as a line of JSON.

`estimates` starts this module in a process of its own, because XLA reads the flags that make it
write PTX once:

    python -m experiments.benchmarks.schedules.gpu_case '{"chip": "a100", ...}' FOLDER
"""

import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparse_dataflow.compile import hlo

from . import case as schedule_case
from . import ptx
from .case import DENSE, PRODUCTS, Case

DTYPES = {"t4": "float32"}
"""Chip -> dtype; bfloat16 where it is missing.  XLA computes bfloat16 on a T4 as float32, with a
cast of every operand."""

_GRADIENTS = {"forward": "forward", "dx": "input_gradient", "dW": "weight_gradient"}


def measure(case: Case, folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each product takes.

    Args:
      case: the weight and the GPU.
      folder: that the compilers write PTX to; its content is deleted.

    Returns:
      product -> {"gemms": executed products (of XLA, of cuBLAS, or Pallas kernels), "others":
      other executed kernels, "source" of the products, their "registers", "spills" (bytes), "mma"
      and "stages" (None if a library has them), "temporary_bytes", and "product_bytes",
      "other_bytes" and "needed_bytes" of memory traffic}.
    """
    import jax

    from sparse_dataflow.compile import topologies

    (device,) = topologies.gpu_devices(case.chip)
    function, weight, tables = _BUILDERS[case.implementation](case)
    shapes = (case.tokens, case.in_features), weight, (case.tokens, case.out_features)
    dtype = DTYPES.get(case.chip, "bfloat16")
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    where = jax.sharding.SingleDeviceSharding(device)
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), (*operands, tables)
    )
    counts = {}
    for product in PRODUCTS:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with topologies.tracing_for(device):
            trace = jax.jit(functools.partial(function, product)).trace(*structs)
            program = trace.lower(lowering_platforms=("cuda",)).compile()
            counts[product] = _counts(program, folder)
            if case.implementation == "pallas_hopper":
                tiles = _hopper_tiles(operands, tables)
                counts[product]["stages"] = getattr(tiles, _GRADIENTS[product]).stages
        counts[product]["needed_bytes"] = sum(o.size * o.dtype.itemsize for o in operands)
    return counts


def _counts(program, folder):
    kernels = hlo.kernels(program.as_text())
    products = [kernel for kernel in kernels if kernel.multiplies]
    others = [kernel for kernel in kernels if not kernel.multiplies]
    targets = {kernel.target for kernel in products}
    compiled = [
        entry
        for path in sorted(folder.glob("*.ptx"))
        for entry in ptx.resources(path)
        if entry.name.startswith(("gemm_fusion", "block_sparse"))
    ]
    stages = re.findall(r"num_stages\W+(\d+)", program.as_text())
    return {
        "gemms": sum(kernel.times for kernel in products),
        "others": sum(kernel.times for kernel in others),
        "source": next(name for key, name in SOURCES.items() if key in str(sorted(targets))),
        "registers": max((entry.registers for entry in compiled), default=None),
        "spills": sum(entry.spills for entry in compiled) if compiled else None,
        "mma": sorted({shape for entry in compiled for shape in entry.products}),
        "stages": max(map(int, stages), default=None),
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        "product_bytes": sum(kernel.times * kernel.bytes for kernel in products),
        "other_bytes": sum(kernel.times * kernel.bytes for kernel in others),
    }


SOURCES = {
    "mosaic": "Mosaic GPU",
    "triton": "Triton",
    "gemm_fusion": "XLA, untuned",
    "__cublas": "cuBLAS",
}
"""Part of a product's target -> what compiles it."""


def _table_product(name, case):
    from sparse_dataflow.core.ops.block_sparse_matmul import matmul_op

    module = matmul_op.OP.load(name)
    layout = schedule_case.layout_of(case)
    weight = layout.nnz, case.block, case.block
    return schedule_case.three_products(module.block_sparse_matmul), weight, layout.tables()


def _hopper_tiles(operands, tables):
    from sparse_dataflow.chips.hopper import api as pallas_hopper

    x, values, _ = operands
    return pallas_hopper.default_tuning(x, values, tables)


def _grouped_product(case):
    from sparse_dataflow.core.ops.block_sparse_matmul import grouped

    groups = schedule_case.layout_of(case).groups
    forward = lambda x, weight, _: grouped.dense_products(  # noqa: E731
        x, weight, groups, block=case.block
    )
    sides = case.in_features // groups.count, case.out_features // groups.count
    return schedule_case.three_products(forward), (groups.count, *sides), ()


_BUILDERS: dict[str, Callable] = {
    DENSE: schedule_case.dense_product,
    "grouped": _grouped_product,
    "xla": functools.partial(_table_product, "xla"),
    "pallas_hopper": functools.partial(_table_product, "pallas_hopper"),
    "pallas_triton": functools.partial(_table_product, "pallas_triton"),
}


def main(arguments):
    """Prints the counts of a case."""
    case, folder = Case(**json.loads(arguments[0])), Path(arguments[1])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx"
    os.environ["MOSAIC_GPU_DUMP_TO"], os.environ["MOSAIC_GPU_DUMP_PTX"] = str(folder), "1"
    print(json.dumps(measure(case, folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
