"""Measured tile sizes of the block-sparse product and MLP, for `kernel_bench --tune`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.kernels import tuned
from sparse_dataflow.kernels.block_sparse_matmul import pallas_hopper, pallas_tpu, tuning_xla, xla
from sparse_dataflow.kernels.sparse_mlp import pallas_tpu as mlp_tpu
from sparse_dataflow.runs import measurement
from sparse_dataflow.runs.benchmarks import kernel_programs
from sparse_dataflow.runs.benchmarks.benchmark import ENOUGH_SECONDS, Program
from sparse_dataflow.runs.benchmarks.kernel_programs import Grid, Operands
from sparse_dataflow.sparsity.layout import BlockLayout

TUNABLE = {
    "xla": (xla, tuning_xla),
    "pallas_hopper": (pallas_hopper, pallas_hopper),
    "pallas_tpu": (pallas_tpu, pallas_tpu),
}
"""Implementations with tile sizes: the modules of their product, and of what may be tried."""

OP, MLP = "block_sparse_matmul", "sparse_mlp"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Tile sizes to be tuned.

    Attributes:
      op: OP or MLP.
      spaces: case -> tile sizes that may be tried.
      program: (product, tile sizes) -> its program; with None the program of the heuristic.
    """

    op: str
    spaces: Mapping[tuned.Case, tuned.SearchSpace]
    program: Callable[[str, Any], Program]


def run(grid: Grid, rounds: int, folder: str) -> Path:
    """Tunes every case of a grid, prints each result and writes it.

    On a TPU also the fused MLP of two shapes that are each other's reverse.

    Args:
      grid: the cases.
      rounds: timed rounds of each measurement.
      folder: of the files; empty for the folder in the package, from which kernels read them.

    Returns:
      The folder.
    """
    print(f"{'case':<66} {'tuned ms':>9} {'heuristic ms':>12}  tiles")
    done: set[tuned.Case] = set()
    for tuning in _tunings(grid):
        for case, space in tuning.spaces.items():
            if case in done:
                continue
            done.add(case)
            seconds_of = functools.partial(_seconds, tuning.program, case.product, rounds)
            tiles, seconds, heuristic = tuned.descend(space, seconds_of)
            if tuning.op == MLP:
                # The heuristic of an MLP may be two products instead.
                seconds, heuristic = seconds_of([tiles, None])
                if seconds >= (1 - tuned.MIN_GAIN) * heuristic:
                    continue
            _keep(_path(tuning.op, folder), case, tiles, 1e3 * seconds, 1e3 * heuristic)
    return _path(OP, folder).parent


def _tunings(grid: Grid) -> Iterator[Tuning]:
    for shape, layouts in grid.layouts.items():
        for tokens in grid.tokens:
            operands = Operands.draw(*shape, tokens, grid.dtype)
            for number, (_, _, layout) in enumerate(layouts):
                for name in TUNABLE.keys() & set(grid.implementations):
                    yield _product(layout, operands, name)
                back = grid.layouts.get(shape[::-1])
                if back and shape[0] < shape[1] and "pallas_tpu" in grid.implementations:
                    yield _mlp((layout, back[number][2]), tokens, grid.dtype)


def _product(layout: BlockLayout, operands: Operands, implementation: str) -> Tuning:
    """The single products of a layout; UserError if no tile fits this device."""
    kernels, sizes = TUNABLE[implementation]
    tables, values = layout.tables(), operands.stored(layout)
    data = jax.tree.map(jnp.asarray, tables)
    spaces = sizes.spaces(operands.x, values, tables)
    if spaces is None:
        raise UserError(f"No tile of {implementation} fits this device.")
    config = sizes.default_tuning(operands.x, values, tables)

    def program(product, tiles):
        tuning = dataclasses.replace(config, **{product: tiles})
        function = functools.partial(kernels.block_sparse_matmul, tuning=tuning)
        return kernel_programs.product_of(product, operands, function, values, data)

    return Tuning(OP, spaces, program)


def _mlp(layouts: tuple[BlockLayout, BlockLayout], tokens: int, dtype: str) -> Tuning:
    """The fused passes of an MLP on a TPU."""
    first = layouts[0]
    shapes = (
        (tokens, first.in_features),
        *((layout.nnz, layout.block, layout.block) for layout in layouts),
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x, values_in, values_out = (
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)
    )
    tables_in, tables_out = (layout.tables() for layout in layouts)
    data = jax.tree.map(jnp.asarray, (tables_in, tables_out))
    bias = jnp.zeros(first.out_features)
    config = mlp_tpu.default_tuning(x, values_in, values_out, tables_in, tables_out)
    operands = Operands(x, x, values_in)

    def program(product, tiles):
        tuning = config if tiles is None else dataclasses.replace(config, **{product: tiles})

        def mlp(x, values_in, values_out, *tables):
            return mlp_tpu.sparse_mlp(x, values_in, bias, values_out, *tables, tuning=tuning)

        product = "forward" if product == "forward" else "forward_backward"
        return kernel_programs.product_of(product, operands, mlp, values_in, values_out, *data)

    spaces = mlp_tpu.spaces(x, values_in, values_out, tables_in, tables_out)
    return Tuning(MLP, spaces, program)


def _seconds(program, product, rounds, tried):
    """Median seconds of each, infinite where it does not run."""
    runs = {}
    for tiles in tried:
        try:
            runs[tiles] = program(product, tiles).run
        except (UserError, RuntimeError, NotImplementedError) as refusal:
            print(f"{tiles} is left out: {first_line(refusal)}")
    seconds = measurement.paired_seconds(runs, rounds, ENOUGH_SECONDS)
    return [float(np.median(seconds[tiles])) if tiles in runs else math.inf for tiles in tried]


def _path(op, folder):
    path = tuned.file_path(op, tuned.device_kind())
    return Path(folder) / op / path.name if folder else path


def _keep(path, case, tiles, ms, heuristic_ms):
    text = (
        f"{case.implementation} {case.product} {case.tokens} x {case.in_features} x "
        f"{case.out_features}, {case.stored} of {case.block}"
    )
    print(f"{text:<66} {ms:9.3f} {heuristic_ms:12.3f}  {tiles}")
    entry = case, tiles, {"ms": ms, "heuristic_ms": heuristic_ms}
    tuned.write(path, [entry], measurement.provenance(tuned.device_kind()))
