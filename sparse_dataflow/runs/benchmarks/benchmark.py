"""The skeleton of the benchmarks: models of a command line, measured, printed and written."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.presets import preset
from sparse_dataflow.config.run import RunConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.hardware.host_memory import keep_freed_memory
from sparse_dataflow.runs import measurement, train
from sparse_dataflow.runs.benchmarks.options import BenchOptions
from sparse_dataflow.runs.request import Request
from sparse_dataflow.training.variants import variant

UNREAD = ("evolution.", "parallel.", "run.", "training.steps")
"""Beginnings of the paths that no benchmark reads."""


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
      config: of the sparse one.
      by_name: "dense" and "sparse" -> model.
      training: how both are trained.
      chip: under this process.
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

    @property
    def facts(self) -> dict[str, Any]:
        """What a result file says of the models."""
        sparsity = self.config.sparsity
        return {
            "scale": self.scale,
            "batch": self.training.batch,
            "sequence": self.training.sequence,
            "dtype": self.config.model.compute_dtype,
            "density": sparsity.density,
            "pattern": sparsity.pattern,
            "block": sparsity.block,
        }

    @property
    def shape(self) -> str:
        """Batch and sequence in words."""
        return f"{self.training.batch} x {self.training.sequence} tokens"


def config_here(request: Request, sparse: bool = True) -> tuple[RunConfig, Chip]:
    """(config of a command line, chip under this process).

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
    return request.config(jax.default_backend(), chip.memory_bytes, sparse), chip


def models_of(request: Request) -> Models:
    """The models of a command line.

    Raises:
      UserError: as `config_here`, or a layout is not possible.
    """
    config, chip = config_here(request)
    dense, sparse = (variant(config, name).with_steps(1) for name in ("dense", "sparse"))
    return Models(config, {"dense": dense.model, "sparse": sparse.model}, dense.training, chip)


def named_model(
    scale: str, density: float = 1.0, block: int = 64, dtype: str = "float32"
) -> ModelConfig:
    """A named size, block-sparse in every projection where the density is below 1.

    Raises:
      UserError: block and density have no layout.
    """
    config = preset(scale, compute_dtype=dtype)
    if density == 1:
        return config.model
    config = config.change(sparsity__density=density, sparsity__block=block)
    return variant(config, "sparse").model


def run(name: str, chip: Chip, title: str, facts: dict, results: Iterable[dict], keep: str) -> None:
    """Prints the title, measures, and writes the result.

    Args:
      name: of the result file.
      chip: that is measured on.
      title: printed before anything is measured.
      facts: JSON-able, written with every result.
      results: measures and prints rows as it goes on, and yields what is to be written so far; each
        is written at once, as a benchmark may be stopped.
      keep: folder of the result file; "" writes none.
    """
    print(title, flush=True)
    path = None
    for result in results:
        if keep:
            path = measurement.write(keep, name, chip.name, {**facts, **result})
    if path:
        print(f"kept in {path}", flush=True)


def run_models(
    name: str,
    request: Request,
    options: BenchOptions,
    title: Callable[[Models], str],
    results: Callable[[Models], Iterable[dict]],
    case: str = "",
) -> None:
    """`run` with the models of a command line.

    Args:
      name: of the experiment.
      request: the command line.
      options: of the experiment.
      title: models -> what is measured, in words.
      results: see `run`.
      case: end of the result file's name.
    """
    models = models_of(request)
    sparsity = models.config.sparsity
    run(
        f"{name}_{models.chip.name}_{models.scale}{case}",
        models.chip,
        f"{models.chip.name}: {title(models)}, {models.config.model.compute_dtype}, "
        f"{sparsity.pattern} at density {sparsity.density:g}, block {sparsity.block}",
        models.facts,
        results(models),
        options.keep,
    )


def measured(
    models: Models,
    programs: Mapping[str, Program],
    row: Callable[[ModelConfig, float], dict],
    rounds: int,
    enough: float = 0.0,
) -> tuple[dict[str, dict], dict[str, np.ndarray]]:
    """(model -> row, model -> seconds of each round) of programs that run in turn.

    Args:
      models: of the programs.
      programs: "dense" and "sparse" -> program.
      row: (model, median seconds) -> its row.
      rounds: timed rounds.
      enough: seconds of one timing, at least.
    """
    runs = {name: program.run for name, program in programs.items()}
    seconds = measurement.paired_seconds(runs, rounds, enough)
    rows = {
        name: {
            **row(models.by_name[name], float(np.median(seconds[name]))),
            "compile_seconds": program.compile_seconds,
        }
        for name, program in programs.items()
    }
    return rows, seconds


def compared(
    rows: dict[str, dict],
    line: Callable[[dict], str],
    seconds: Mapping[str, np.ndarray],
    bound: str,
    ceiling: float,
) -> dict[str, Any]:
    """Prints a row a model and dense over sparse.

    Args:
      rows: model -> what was measured, with "compile_seconds".
      line: row -> its text.
      seconds: "dense" and "sparse" -> seconds of each round.
      bound: what sets the ceiling, in words.
      ceiling: the largest possible ratio of dense to sparse time.

    Returns:
      The rows and the ratio, for a result file.
    """
    width = max(map(len, rows))
    for name, row in rows.items():
        print(f"{name:>{width}}: {line(row)}  compile {row['compile_seconds']:.1f} s")
    return {**measurement.speedup(seconds, bound, ceiling), "rows": rows}


def mfu_text(mfu: float | None) -> str:
    """An MFU as a part of a line; "" where the chip's peak is not known."""
    return "" if mfu is None else f"  MFU {mfu:.1%}"
