"""The block-sparse product beside the dense one, over a grid of cases, for `kernel_bench`."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops import platforms
from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.detect import keep_freed_memory
from sparse_dataflow.runs.run_config import SIZES

from .. import paired
from ..benchmark import ENOUGH_SECONDS, Program
from ..options import IMPLEMENTATIONS
from . import peers as kernel_peers
from . import programs as kernel_programs
from .programs import Grid

CPU: dict[str, Any] = {
    "shapes": "512x2048,1024x4096,4096x1024,2048x8192",
    "tokens": (2048,),
    "densities": (0.125,),
    "blocks": (64,),
    "patterns": ("monarch", "pixelfly", "random"),
    "dtype": "float32",
}
"""Options of a CPU where they are auto."""

ACCELERATOR: dict[str, Any] = {
    "shapes": "13b",
    "tokens": (2048, 4096, 8192, 16384),
    "densities": (0.5, 0.25, 0.125, 0.0625),
    "blocks": (64, 128),
    "patterns": ("monarch",),
    "dtype": "bfloat16",
}
"""Options of an accelerator where they are auto."""


def measure_kernels(options) -> None:
    """Measures, prints and writes; see `experiments.kernel_bench`.

    Raises:
      UserError: a shape or a layout is not possible, before anything is timed.
    """
    keep_freed_memory()
    grid = _grid(options)
    chip = hardware.detect([grid.dtype])
    print(
        f"{chip.name}; {grid.dtype}, normal inputs, medians of {options.rounds} rounds\n\n{_HEAD}",
        flush=True,
    )
    name = f"kernel_bench_{chip.name}_{grid.dtype}"
    measurement.keep(options.keep, name, chip.name, _results(grid, options))


def _grid(options) -> Grid:
    platform = jax.default_backend()
    chosen = {
        name: value if getattr(options, name) is None else getattr(options, name)
        for name, value in (CPU if platform in platforms.HOST else ACCELERATOR).items()
    }
    shapes = _shapes(chosen["shapes"])
    runnable = IMPLEMENTATIONS.get(platform, ("xla",))
    return Grid(
        {
            (fan_in, fan_out): [
                (pattern, density, make_layout(pattern, fan_in, fan_out, block, density))
                for block in chosen["blocks"]
                for density in chosen["densities"]
                for pattern in chosen["patterns"]
            ]
            for fan_in, fan_out in shapes
        },
        chosen["tokens"],
        chosen["dtype"],
        [name for name in options.implementations if name in runnable],
    )


def _shapes(text: str) -> list[tuple[int, int]]:
    if text in SIZES:
        return [SIZES[text].projection_shape(projection) for projection in SIZES[text].projections]
    try:
        shapes = []
        for shape in text.split(","):
            fan_in, fan_out = map(int, shape.split("x"))
            if min(fan_in, fan_out) < 1:
                raise ValueError
            shapes.append((fan_in, fan_out))
    except ValueError:
        raise UserError(
            f"--shapes={text} is not a list such as 512x2048,1024x4096, nor one of "
            f"{', '.join(SIZES)}."
        ) from None
    return shapes


def _results(grid: Grid, options) -> Iterator[dict]:
    """Yields what was measured so far, after each shape and number of tokens."""
    rows = []
    for shape, layouts in grid.layouts.items():
        for tokens in grid.tokens:
            operands = kernel_programs.Operands.draw(*shape, tokens, grid.dtype)
            for product in options.products:
                dense = kernel_programs.dense(product, operands)
                for pattern, density, layout in layouts:
                    case = kernel_programs.Case(layout, tokens, grid.dtype, product)
                    sparse = _programs(case, operands, grid.implementations, options.peers)
                    for row in _measured(case, dense, sparse, options.rounds):
                        rows.append({"pattern": pattern, "density": density, **row})
                        print(_line(rows[-1]), flush=True)
            yield {"inputs": "normal, unit variance", "dtype": grid.dtype, "rows": rows}


def _programs(case, operands, implementations: Sequence[str], peers) -> dict[str, Program]:
    """Implementation -> program, of those that run here; says which do not."""
    makers: dict[str, Callable[[], Program]] = {
        name: functools.partial(kernel_programs.block_sparse, case, operands, name)
        for name in implementations
    }
    if peers and case.product == "forward":
        makers |= dict(kernel_peers.available(case, operands))
    programs = {}
    for name, make in makers.items():
        try:
            programs[name] = make()
        except (UserError, RuntimeError, NotImplementedError) as refusal:
            shape = f"{case.layout.in_features}x{case.layout.out_features}"
            print(f"{shape} {case.product} {name} is left out: {first_line(refusal)}")
    return programs


def _measured(case, dense: Program, sparse: dict[str, Program], rounds) -> Iterator[dict]:
    """A row an implementation; the dense product is timed in turn with every layout."""
    runs = {"dense": dense.run, **{name: program.run for name, program in sparse.items()}}
    seconds = paired.paired_seconds(runs, rounds, ENOUGH_SECONDS)
    layout, dense_median = case.layout, float(np.median(seconds["dense"]))
    for name, program in sparse.items():
        median = float(np.median(seconds[name]))
        ratio = paired.paired_ratio(seconds["dense"], seconds[name])
        yield {
            "shape": f"{layout.in_features}x{layout.out_features}",
            "tokens": case.tokens,
            "block": layout.block,
            "product": case.product,
            "implementation": name,
            "dense_ms": 1e3 * dense_median,
            "sparse_ms": 1e3 * median,
            **ratio,
            "of_ideal": ratio["ratio"] * case.stored_flops / case.dense_flops,
            "dense_tflops": case.dense_flops / dense_median / 1e12,
            "stored_tflops": case.stored_flops / median / 1e12,
            "compile_seconds": program.compile_seconds,
        }


_HEAD = (
    f"{'shape':>11} {'tokens':>6} {'density':>7} {'block':>5} {'pattern':>9} {'product':>16} "
    f"{'implementation':>14} {'dense ms':>9} {'sparse ms':>9} {'ratio':>6} {'quartiles':>11} "
    f"{'of ideal':>8} {'TFLOP/s':>8} {'compile s':>9}"
)


def _line(row):
    return (
        f"{row['shape']:>11} {row['tokens']:>6} {row['density']:>7g} {row['block']:>5} "
        f"{row['pattern']:>9} {row['product']:>16} {row['implementation']:>14} "
        f"{row['dense_ms']:9.3f} {row['sparse_ms']:9.3f} {row['ratio']:6.2f} "
        f"{row['ratio_low']:5.2f}-{row['ratio_high']:5.2f} {row['of_ideal']:8.0%} "
        f"{row['stored_tflops']:8.3f} {row['compile_seconds']:9.2f}"
    )
