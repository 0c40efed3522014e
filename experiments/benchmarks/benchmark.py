"""What benchmarks share: the models of a command line, and the comparison of dense with sparse."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from sparse_dataflow.commands import train
from sparse_dataflow.commands.planning import options
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.hardware.detect import keep_freed_memory
from sparse_dataflow.runs.run_config import RunConfig
from sparse_dataflow.runs.variants import variant

from . import energy, joules, paired

UNREAD = ("evolution.", "parallel.", "run.", "training.steps")
"""Beginnings of the paths that no benchmark reads."""

ENOUGH_SECONDS = 0.1
"""Least seconds of one timing of a product or a block.  A GPU's host waits about a millisecond for
the last result, which training does not: its steps are queued."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program on its own arrays.

    Attributes:
      run: starts it and returns its results.
      compile_seconds: wall-clock seconds of compiling it.
    """

    run: Callable[[], Any]
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Models:
    """The dense and the block-sparse model of a command line.

    Attributes:
      config: config of the sparse model.
      by_name: "dense" and "sparse" -> model.
      training: training settings of both.
      chip: chip under this process.
    """

    config: RunConfig
    by_name: dict[str, ModelConfig]
    training: TrainingConfig
    chip: Chip

    @property
    def scale(self) -> str:
        """Name of the scale."""
        return self.config.run.scale

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.training.batch * self.training.sequence

    def announce(self, words: str) -> None:
        """Prints what is measured of which models."""
        sparsity = self.config.sparsity
        print(
            f"{self.chip.name}: {words}, {self.config.model.compute_dtype}, {sparsity.pattern} at "
            f"density {sparsity.density:g}, block {sparsity.block}",
            flush=True,
        )

    def facts(self, **others: Any) -> dict[str, Any]:
        """Returns what a result file says of the models, and `others`."""
        sparsity = self.config.sparsity
        return {
            "scale": self.scale,
            "batch": self.training.batch,
            "sequence": self.training.sequence,
            "dtype": self.config.model.compute_dtype,
            "density": sparsity.density,
            "pattern": sparsity.pattern,
            "block": sparsity.block,
            **others,
        }


def config_here(request: Request, sparse: bool = True) -> tuple[RunConfig, Chip]:
    """Returns (config of a command line, chip under this process).

    Args:
      request: the command line.
      sparse: whether the model is block-sparse.

    Raises:
      UserError: it names a setting that no benchmark reads, or settings contradict each other.
    """
    keep_freed_memory()
    if unread := [path for path in request.changes if path.startswith(UNREAD)]:
        raise UserError(f"{', '.join(unread)} has no effect in a benchmark; leave it out.")
    chip = train.detect_chip(request)
    config = request.config(jax.default_backend(), chip.memory_bytes, sparse)
    return config.without_auto(), chip


def models_of(request: Request) -> Models:
    """Returns the models of a command line.

    Raises:
      UserError: as `config_here`, or a layout is not possible.
    """
    config, chip = config_here(request)
    dense, sparse = (variant(config, name).with_steps(1) for name in ("dense", "sparse"))
    return Models(config, {"dense": dense.model, "sparse": sparse.model}, dense.training, chip)


def named_model(
    scale: str, density: float = 1.0, block: int = 64, dtype: str = "float32"
) -> ModelConfig:
    """Returns a named size, block-sparse in every projection where the density is below 1.

    Raises:
      UserError: block and density have no layout.
    """
    model = options.named_model(scale, density, block, dtype)
    model_layouts.check_layouts(model)
    return model


def timed(
    programs: Mapping[str, Program], rounds: int, enough: float = 0.0
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Returns (name -> seconds of each round, name -> their median) of programs that take turns."""
    runs = {name: program.run for name, program in programs.items()}
    seconds = paired.paired_seconds(runs, rounds, enough)
    return seconds, {name: float(np.median(each)) for name, each in seconds.items()}


def compared(
    rows: dict[str, dict],
    line: Callable[[dict], str],
    seconds: Mapping[str, np.ndarray],
    bound: str,
    ceiling: float,
) -> dict[str, Any]:
    """Prints a row for each model, and the ratio of dense to sparse time beside its bound.

    Args:
      rows: name -> measurements, with "compile_seconds".
      line: maps a row to its text.
      seconds: "dense" and "sparse" -> seconds of each round.
      bound: name of the bound.
      ceiling: the largest possible ratio.

    Returns:
      The rows and the ratio, for a result file.
    """
    width = max(map(len, rows))
    for name, row in rows.items():
        text = "  ".join(filter(None, (line(row), joules.text(row))))
        print(f"{name:>{width}}: {text}  compile {row['compile_seconds']:.1f} s")
    if any(row.get("token_joules", 0) is None for row in rows.values()):
        print(f"energy: {energy.UNKNOWN}")
    ratio = paired.paired_ratio(seconds["dense"], seconds["sparse"])
    reached = f"{bound} {ceiling:.2f}x, reached {ratio['ratio'] / ceiling:.0%}"
    print(f"dense / sparse: {paired.ratio_text(ratio)}; {reached}")
    if ratio["ratio"] > ceiling:
        print("  above 100%: often the machine is busy; measure again on an idle one")
    return {**ratio, "rows": rows}


def mfu_text(mfu: float | None) -> str:
    """Returns an MFU as a part of a line; "" where the chip's peak is not known."""
    return "" if mfu is None else f"  MFU {mfu:.1%}"
