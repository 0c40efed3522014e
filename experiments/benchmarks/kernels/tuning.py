"""Measured tile sizes of the block-sparse product, for `kernel_bench --tune`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.chips.hopper import api as pallas_hopper
from sparse_dataflow.chips.tpu.matmul import api as pallas_tpu
from sparse_dataflow.commands import measurement
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.ops import tuned
from sparse_dataflow.core.ops.block_sparse_matmul import xla
from sparse_dataflow.core.ops.block_sparse_matmul import xla_tuning as tuning_xla
from sparse_dataflow.files.errors import UserError, first_line

from .. import paired
from ..benchmark import ENOUGH_SECONDS, Program
from . import programs as kernel_programs
from .programs import Grid, Operands

TUNABLE = {
    "xla": (xla, tuning_xla),
    "pallas_hopper": (pallas_hopper, pallas_hopper),
    "pallas_tpu": (pallas_tpu, pallas_tpu),
}
"""Implementations with tile sizes: the modules of their product, and of what may be tried."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Tile sizes to be tuned.

    Attributes:
      spaces: case -> tile sizes that may be tried.
      program: (product, tile sizes) -> its program.
    """

    spaces: Mapping[tuned.Case, tuned.SearchSpace]
    program: Callable[[str, Any], Program]


def run(grid: Grid, rounds: int, folder: str) -> Path:
    """Tunes every case of a grid, prints each result and writes it.

    Args:
      grid: the cases.
      rounds: timed rounds of each measurement.
      folder: of the files; empty for the folder in the package, from which kernels read them.

    Returns:
      The folder.
    """
    print(f"{'case':<66} {'tuned ms':>9} {'heuristic ms':>12}  tiles")
    path = tuned.file_path(tuned.device_kind())
    path = Path(folder) / tuned.OP / path.name if folder else path
    done: set[tuned.Case] = set()
    for tuning in _tunings(grid):
        for case, space in tuning.spaces.items():
            if case in done:
                continue
            done.add(case)
            seconds_of = functools.partial(_seconds, tuning.program, case.product, rounds)
            tiles, seconds, heuristic = descend(space, seconds_of)
            _keep(path, case, tiles, 1e3 * seconds, 1e3 * heuristic)
    return path.parent


def _tunings(grid: Grid) -> Iterator[Tuning]:
    for shape, layouts in grid.layouts.items():
        for tokens in grid.tokens:
            operands = Operands.draw(*shape, tokens, grid.dtype)
            for _, _, layout in layouts:
                for name in TUNABLE.keys() & set(grid.implementations):
                    yield _product(layout, operands, name)


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

    return Tuning(spaces, program)


def _seconds(program, product, rounds, tried):
    """Median seconds of each, infinite where it does not run."""
    runs = {}
    for tiles in tried:
        try:
            runs[tiles] = program(product, tiles).run
        except (UserError, RuntimeError, NotImplementedError) as refusal:
            print(f"{tiles} is left out: {first_line(refusal)}")
    seconds = paired.paired_seconds(runs, rounds, ENOUGH_SECONDS)
    return [float(np.median(seconds[tiles])) if tiles in runs else math.inf for tiles in tried]


def _keep(path, case, tiles, ms, heuristic_ms):
    text = (
        f"{case.implementation} {case.product} {case.tokens} x {case.in_features} x "
        f"{case.out_features}, {case.stored} of {case.block}"
    )
    print(f"{text:<66} {ms:9.3f} {heuristic_ms:12.3f}  {tiles}")
    entry = case, tiles, {"ms": ms, "heuristic_ms": heuristic_ms}
    tuned.write(path, [entry], measurement.provenance(tuned.device_kind()))


MIN_GAIN = 0.03
"""Least fraction of the time that a search step must save; less is noise."""


def descend(
    space: tuned.SearchSpace, seconds_of: Callable[[list], Sequence[float]], rounds: int = 3
) -> tuple[Any, float, float]:
    """Search greedily: move to the fastest neighbour until none gains MIN_GAIN.

    Args:
      space: the tile sizes to try.
      seconds_of: maps a list of tile sizes to the seconds of each, measured together; infinite
        for tiles that do not run.
      rounds: maximum number of moves.

    Returns:
      (fastest tile sizes, their seconds, seconds of `space.start`), timed in the last round.
    """
    best, best_seconds, start_seconds = space.start, math.nan, math.nan
    for _ in range(rounds):
        tried = list(dict.fromkeys([space.start, best, *space.neighbours(best)]))
        seconds = dict(zip(tried, seconds_of(tried), strict=True))
        fastest = min(tried, key=seconds.__getitem__)
        stays = seconds[fastest] > (1 - MIN_GAIN) * seconds[best]
        best = best if stays else fastest
        best_seconds, start_seconds = seconds[best], seconds[space.start]
        if stays:
            break
    return best, best_seconds, start_seconds
