"""Tables, result file and figure of the study."""

from pathlib import Path

from experiments.serving_cost_study import runs
from experiments.serving_cost_study.runs import Cell


def write(options, narrow, corpus, lines, folder: Path) -> None:
    """Prints the losses of every cell."""
    cells = dict.fromkeys(
        Cell(line["arm"], line["optimizer"], line["schedule"], line["length"]) for line in lines
    )
    for cell in cells:
        losses = {seed: line["held_out"] for seed, line in runs.measured(lines, cell).items()}
        print(cell, runs.best_multiplier(lines, cell), losses)
