"""Measured tile sizes of the block-sparse product and MLP, for `kernel_bench --tune`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from sparse_dataflow.runs.benchmarks.kernel_programs import Case, Operands
from sparse_dataflow.sparsity.layout import BlockLayout

TUNABLE = {
    "xla": (xla, tuning_xla),
    "pallas_hopper": (pallas_hopper, pallas_hopper),
    "pallas_tpu": (pallas_tpu, pallas_tpu),
}
"""Implementations with tile sizes: the modules of their product, and of what may be tried."""

OP, MLP = "block_sparse_matmul", "sparse_mlp"

ENOUGH_SECONDS = 0.01
"""Seconds of one timing, at least."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The cases of `kernel_bench`: every layout of a shape with every number of tokens.

    Attributes:
      layouts: (in_features, out_features) -> (pattern, density, layout) triples.
      tokens: rows of x.
      dtype: of x and the weights.
      implementations: of the block-sparse product.
    """

    layouts: Mapping[tuple[int, int], Sequence[tuple[str, float, BlockLayout]]]
    tokens: Sequence[int]
    dtype: str
    implementations: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Found:
    """The fastest tile sizes of one case.

    Attributes:
      case: what was measured.
      tiles: tile sizes.
      seconds: of the product with them.
      heuristic_seconds: of the product with the heuristic's, in the same rounds.
    """

    case: tuned.Case
    tiles: Any
    seconds: float
    heuristic_seconds: float


def tune(
    case: Case,
    operands: Operands,
    implementation: str,
    timer: Callable[[dict], dict],
    done: Collection[tuned.Case] = (),
) -> Iterator[Found]:
    """The fastest tile sizes of each single product of a layout.

    Args:
      case: layout, tokens and dtype; its product is not read.
      operands: of the layout's shape.
      implementation: one of TUNABLE.
      timer: name -> function that starts work, to name -> seconds, as
        `measurement.paired_seconds` gives them.
      done: what is left out, as it was measured before.

    Raises:
      UserError: if nothing of the implementation's fits this device.
    """
    kernels, sizes = TUNABLE[implementation]
    tables, values = case.layout.tables(), operands.stored(case.layout)
    data = jax.tree.map(jnp.asarray, tables)
    spaces = sizes.spaces(operands.x, values, tables)
    if spaces is None:
        raise UserError(f"No tile of {implementation} fits this device.")
    config = sizes.default_tuning(operands.x, values, tables)

    def program(product, tiles):
        tuning = dataclasses.replace(config, **{product: tiles})
        function = functools.partial(kernels.block_sparse_matmul, tuning=tuning)
        return kernel_programs.product_of(product, operands, function, values, data)

    for key, space in spaces.items():
        if key not in done:
            yield Found(
                key, *tuned.descend(space, functools.partial(_seconds, program, key, timer))
            )


def tune_mlp(
    layouts: tuple[BlockLayout, BlockLayout],
    tokens: int,
    dtype: str,
    timer: Callable[[dict], dict],
    done: Collection[tuned.Case] = (),
) -> Iterator[Found]:
    """The fastest tile sizes of each fused pass of an MLP on a TPU, where that beats what the
    heuristic does, fused or not.

    Args:
      layouts: of mlp_in and mlp_out.
      tokens: rows of x.
      dtype: of x and the stored blocks.
      timer: as in `tune`.
      done: what is left out, as it was measured before.
    """
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

    def program(part, tiles):
        tuning = config if tiles is None else dataclasses.replace(config, **{part: tiles})

        def mlp(x, values_in, values_out, *tables):
            return mlp_tpu.sparse_mlp(x, values_in, bias, values_out, *tables, tuning=tuning)

        product = "forward" if part == "forward" else "forward_backward"
        return kernel_programs.product_of(product, operands, mlp, values_in, values_out, *data)

    for key, space in mlp_tpu.spaces(x, values_in, values_out, tables_in, tables_out).items():
        if key in done:
            continue
        seconds_of = functools.partial(_seconds, program, key, timer)
        tiles, *_ = tuned.descend(space, seconds_of)
        seconds, heuristic = seconds_of([tiles, None])
        if seconds < (1 - tuned.MIN_GAIN) * heuristic:
            yield Found(key, tiles, seconds, heuristic)


def _seconds(program, key, timer, tried):
    """Median seconds of each, infinite where it does not run."""
    runs = {}
    for tiles in tried:
        try:
            runs[tiles] = program(key.product, tiles).run
        except (UserError, RuntimeError, NotImplementedError) as refusal:
            print(f"{tiles} is left out: {first_line(refusal)}")
    seconds = timer(runs)
    return [float(np.median(seconds[tiles])) if tiles in runs else math.inf for tiles in tried]


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
    timer = functools.partial(measurement.paired_seconds, rounds=rounds, enough=ENOUGH_SECONDS)
    print(f"{'case':<66} {'tuned ms':>9} {'heuristic ms':>12}  tiles")
    done: set[tuned.Case] = set()
    for shape, layouts in grid.layouts.items():
        for tokens in grid.tokens:
            operands = Operands.draw(shape[0], shape[1], tokens, grid.dtype)
            for number, (_, _, layout) in enumerate(layouts):
                case = Case(layout, tokens, grid.dtype, "forward")
                for name in TUNABLE.keys() & set(grid.implementations):
                    found = list(tune(case, operands, name, timer, done))
                    done |= {one.case for one in found}
                    _keep(OP, folder, found)
                back = grid.layouts.get((shape[1], shape[0]))
                if back and shape[0] < shape[1] and "pallas_tpu" in grid.implementations:
                    pair = layout, back[number][2]
                    found = list(tune_mlp(pair, tokens, grid.dtype, timer, done))
                    done |= {one.case for one in found}
                    _keep(MLP, folder, found)
    return _path(OP, folder).parent


def _path(op, folder):
    path = tuned.file_path(op, tuned.device_kind())
    return Path(folder) / op / path.name if folder else path


def _keep(op, folder, found):
    for one in found:
        case = one.case
        text = (
            f"{case.implementation} {case.product} {case.tokens} x {case.in_features} x "
            f"{case.out_features}, {case.stored} of {case.block}"
        )
        print(f"{text:<66} {_ms(one.seconds)} {_ms(one.heuristic_seconds):>12}  {one.tiles}")
    entries = [
        (
            one.case,
            one.tiles,
            {"ms": 1e3 * one.seconds, "heuristic_ms": 1e3 * one.heuristic_seconds},
        )
        for one in found
    ]
    if entries:
        source = measurement.provenance(tuned.device_kind())
        tuned.write(_path(op, folder), entries, source)


def _ms(seconds):
    return f"{1e3 * seconds:9.3f}"
