"""Measured tile sizes of the block-sparse product, for `kernel_bench --tune`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import kernel_programs, measurement
from experiments.kernel_programs import Case, Operands
from sparse_dataflow.errors import UserError
from sparse_dataflow.kernels import tuned
from sparse_dataflow.kernels.block_sparse_matmul import pallas_hopper, pallas_tpu, tuning_xla, xla

TUNABLE = {
    "xla": (xla, tuning_xla),
    "pallas_hopper": (pallas_hopper, pallas_hopper),
    "pallas_tpu": (pallas_tpu, pallas_tpu),
}
"""Implementations with tile sizes: the modules of their product, and of what may be tried."""

OP = "block_sparse_matmul"

ENOUGH_SECONDS = 0.01
"""What is timed at once."""


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


def _seconds(program, key, timer, tried):
    """Median seconds of each, infinite where it does not run."""
    runs = {}
    for tiles in tried:
        try:
            runs[tiles] = program(key.product, tiles).run
        except (UserError, RuntimeError, NotImplementedError) as refusal:
            first = (str(refusal).strip() or type(refusal).__name__).splitlines()[0]
            print(f"{tiles} is left out: {first}")
    seconds = timer(runs)
    return [float(np.median(seconds[tiles])) if tiles in runs else math.inf for tiles in tried]


def run(settings: dict, layouts: dict, rounds: int, folder: str) -> Path:
    """Tunes every layout of every shape, prints each result and keeps it.

    Args:
      settings: as `kernel_bench` has them.
      layouts: (in, out) -> [(pattern, density, layout)].
      rounds: timed rounds of each measurement.
      folder: where the file goes; empty for the package's own, from which it is read.

    Returns:
      The file.
    """
    kind = tuned.device_kind()
    path = tuned.path_of(OP, kind)
    if folder:
        path = Path(folder) / path.name
    timer = functools.partial(measurement.paired_seconds, rounds=rounds, enough=ENOUGH_SECONDS)
    print(f"{'case':<66} {'tuned ms':>9} {'heuristic ms':>12}  tiles")
    done = set()
    for shape in settings["shapes"]:
        for tokens in settings["tokens"]:
            operands = Operands.draw(*shape, tokens, settings["dtype"])
            for _, _, layout in layouts[shape]:
                case = Case(layout, tokens, settings["dtype"], "forward")
                for name in TUNABLE.keys() & set(settings["implementations"]):
                    found = list(tune(case, operands, name, timer, done))
                    done |= {one.case for one in found}
                    _keep(path, found, kind)
    return path


def _keep(path, found, kind):
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
    tuned.write(path, entries, measurement.provenance(kind))


def _ms(seconds):
    return f"{1e3 * seconds:9.3f}"
