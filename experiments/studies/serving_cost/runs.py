"""The runs of the study: trials of the learning rate, then seeds; each finished one is a line."""

import dataclasses
import datetime
import json
import math
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_dataflow.commands.measurement import provenance
from sparse_dataflow.core.config.settings import validate
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

from .. import rate_search
from . import arms
from .options import SHARED, NarrowOptions

LINES, LAST_SETTINGS = "runs.jsonl", "settings.json"

POSITIVE = (
    "length", "multiplier", "held_out", "tuning", "tokens", "flops", "mean_weights",
    "served_flops", "stored_weights",
)  # fmt: skip
"""Fields of a run that are numbers above 0."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What has one learning rate: an arm, an optimizer with its schedule, and a length.

    Attributes:
      arm: name in `arms.ARMS`.
      optimizer: "muon" or "adamw".
      schedule: "linear", "cosine" or "wsd".
      length: training tokens of the narrow model, for each weight of its projections.
    """

    arm: str
    optimizer: str
    schedule: str
    length: int

    @property
    def base(self) -> str:
        """The arm of the same shape whose rate a variant begins with."""
        base = "_".join(self.arm.split("_")[:2])
        return base if base in arms.ARMS else self.arm


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of a cell."""

    cell: Cell
    multiplier: float
    seed: int


Lines = list[dict[str, Any]]


def read_lines(folder: Path, settings: Mapping[str, object]) -> Lines:
    """Returns the finished runs of a folder, and writes its settings if it is new.

    Raises:
      UserError: the runs are of other settings, or damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / LAST_SETTINGS
    if saved.exists() and json_files.load(saved) != settings:
        raise UserError(
            f"{folder} has runs of other settings: {json_files.load(saved)}; legal: the same ones, "
            "or another --out."
        )
    saved.write_text(json.dumps(settings, indent=1) + "\n")
    return _parsed(folder / LINES)


def _parsed(path):
    try:
        return [json_files.parse(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove its last line.") from None


def load(folder: Path) -> tuple[NarrowOptions, Lines]:
    """Returns the settings and runs of a finished `experiments.serving_cost`; writes nothing.

    Runs of arms that only earlier versions had are left out.

    Raises:
      UserError: the folder is missing or of another program, or a value is damaged.
    """
    foreign = f"{folder} is no folder of experiments.serving_cost"
    try:
        saved = json_files.load(folder / LAST_SETTINGS)
    except json_files.MALFORMED as error:
        raise UserError(f"{foreign}: {LAST_SETTINGS}: {error}.") from None
    if not isinstance(saved, dict) or set(saved) != set(SHARED):
        raise UserError(f"{foreign}: {LAST_SETTINGS} has other settings.")
    options = NarrowOptions(**saved)
    validate(options, str(folder / LAST_SETTINGS))
    lines = _parsed(folder / LINES)
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict) or not _is_run(line):
            raise UserError(f"{foreign}: line {number} of {LINES} is no run of an arm.")
    return options, current_lines(lines)


def current_lines(lines: Lines) -> Lines:
    """Returns the lines without arms that only earlier versions had."""
    return [line for line in lines if line["arm"] in arms.ARMS]


def _is_run(line):
    numbers = [line.get(name) for name in POSITIVE]
    texts = [line.get(name) for name in ("arm", "optimizer", "schedule")]
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(line.get("seed"), int)
        and all(type(n) in (int, float) and 0 < n < math.inf for n in numbers)
    )


def append(folder: Path, run: Run, result: Mapping[str, object], machine: str) -> dict:
    """Writes a finished run as a line, with what made it; returns the line."""
    line = {
        **dataclasses.asdict(run.cell),
        "multiplier": run.multiplier,
        "seed": run.seed,
        **result,
        **provenance(machine),
        "commit": _commit(),
    }
    with (folder / LINES).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def cell_lines(lines: Lines, cell: Cell) -> Lines:
    """Returns the runs of a cell."""
    wanted = dataclasses.asdict(cell)
    return [line for line in lines if all(line[name] == wanted[name] for name in wanted)]


def best_multiplier(lines: Lines, cell: Cell) -> float | None:
    """Returns the multiplier of the cell's best trial on the tuning split; None without one."""
    trials = _trials(lines, cell)
    return rate_search.best_multiplier(trials) if trials else None


def measured(lines: Lines, cell: Cell) -> dict[int, dict]:
    """Returns seed -> run at the cell's best rate."""
    best = best_multiplier(lines, cell)
    return {line["seed"]: line for line in cell_lines(lines, cell) if line["multiplier"] == best}


def pending(
    lines: Lines, cells: Sequence[Cell], trials: int, seeds: Callable[[Cell], int]
) -> Iterator[Run]:
    """Yields the runs that are left, one at a time; `lines` has grown before the next one.

    Trials are runs of seed 0; other seeds have the best trial's rate.
    """
    for cell in cells:
        while len(losses := _trials(lines, cell)) < trials:
            if losses:
                yield Run(cell, rate_search.next_multiplier(losses), 0)
            else:
                yield Run(cell, _first(lines, cell), 0)
        best = rate_search.best_multiplier(_trials(lines, cell))
        for seed in range(seeds(cell)):
            if seed not in measured(lines, cell):
                yield Run(cell, best, seed)


def _trials(lines, cell):
    """Returns multiplier -> tuning loss of seed 0."""
    chosen = (line for line in cell_lines(lines, cell) if line["seed"] == 0)
    return {line["multiplier"]: line["tuning"] for line in chosen}


def _first(lines, cell):
    """Returns the multiplier of a cell's first trial: the best one of the nearest cell."""
    change = dataclasses.replace
    shorter = sorted({line["length"] for line in lines if line["length"] < cell.length})
    like = [
        change(cell, arm=cell.base),
        *(change(cell, length=length) for length in reversed(shorter)),
        *(change(cell, arm=cell.base, length=length) for length in reversed(shorter)),
        change(cell, schedule="linear"),
        change(cell, arm=cell.base, schedule="linear"),
    ]
    found = (best_multiplier(lines, each) for each in like)
    return next((best for best in found if best is not None), 1.0)


def _commit():
    """Returns the commit of the source, "" outside of a repository."""
    where = Path(__file__).parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=where, capture_output=True, text=True
    )
    return done.stdout.strip()


def now() -> str:
    """Returns the time for progress lines."""
    return datetime.datetime.now().strftime("%H:%M:%S")
