"""Fits a chip family's constants to published step times, and says how far predictions are off."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.models.sizes import SIZES, ModelConfig
from sparse_dataflow.planning import published
from sparse_dataflow.planning.efficiency import PRIOR, Efficiency
from sparse_dataflow.planning.published import Row, Scaling
from sparse_dataflow.planning.run_layout import RunLayout
from sparse_dataflow.planning.step_time import step_time

# name -> (lowest, highest, spread of the prior in units of the logarithm or logit).
RANGES = {
    "matmul": (0.3, 0.98, 0.5),
    "half_width": (1.0, 2000.0, 1.0),
    "attention": (0.1, 0.9, 0.3),
    "bandwidth": (0.3, 0.95, 0.3),
    "fast_link": (0.1, 0.95, 0.7),
    "slow_link": (0.05, 0.95, 0.7),
    "overlap": (0.02, 0.98, 0.7),
    "tensor_overlap": (0.01, 0.95, 0.7),
    "waits": (0.0, 0.05, 1.0),
    "pass_seconds": (0.0, 1e-3, 1.0),
}
NOISE = 0.03
"""Standard deviation that a published step time is taken to have."""


def fit(rows: Sequence[Row], start: Efficiency = PRIOR) -> Efficiency:
    """The constants under which `rows` are likeliest: least squares of the logarithm of seconds.

    Each constant has a prior around `start`, so that what the rows say nothing of stays there.
    """
    names = list(RANGES)
    low, high, spread = np.array([RANGES[name] for name in names]).T
    centre = _logit(np.array([getattr(start, name) for name in names]), low, high)

    def residuals(point):
        found = _at(start, names, point, low, high)
        errors = [np.log(predicted(row, found) / row.seconds) / NOISE for row in rows]
        return np.concatenate([errors, (point - centre) / spread])

    solution = optimize.least_squares(residuals, centre).x
    return _at(start, names, solution, low, high)


def predicted(row: Row, efficiency: Efficiency) -> float:
    """Seconds of a step of the row's run."""
    time = step_time(row.config, row.sequence, row.layout, row.chip, efficiency)
    return float(time.total)


@dataclasses.dataclass(frozen=True)
class Error:
    """A row and what the planner predicts for it.

    Attributes:
      row: as published.
      figure: predicted, in the row's own unit.
      limit: the group of terms that limits the layout.
    """

    row: Row
    figure: float
    limit: str

    @property
    def relative(self) -> float:
        """Predicted / published - 1, of the figure as it was published, a time or a rate."""
        return self.figure / self.row.value - 1


def errors(source: str, efficiencies: Mapping[str, Efficiency]) -> list[Error]:
    """Every row of a source with its prediction."""
    found = []
    for row in published.rows(source):
        time = step_time(
            row.config, row.sequence, row.layout, row.chip, efficiencies[row.chip.family]
        )
        ratio = float(time.total) / row.seconds
        figure = row.value * (ratio if row.unit == "seconds" else 1 / ratio)
        found.append(Error(row, figure, time.limit))
    return found


def summary(errors: Sequence[Error]) -> tuple[float, float]:
    """Median and largest absolute error."""
    sizes = np.abs([error.relative for error in errors])
    return float(np.median(sizes)), float(sizes.max())


def scaling_efficiency(study: Scaling, efficiency: Efficiency) -> float:
    """Throughput a chip on many chips over that on few, predicted."""
    config = dataclasses.replace(SIZES[study.scale], compute_dtype="bfloat16")
    speeds = []
    for layout in (study.before, study.after):
        time = step_time(config, config.max_len, layout, study.chip, efficiency)
        speeds.append(float(layout.batch / (time.total * layout.chips)))
    return speeds[1] / speeds[0]


def block_seconds(config: ModelConfig, chip: Chip, efficiency: Efficiency, fused: bool) -> float:
    """Seconds of a step of 8 sequences on one chip of unlimited memory, without the optimizer.

    Args:
      config: the model, sparse or dense.
      chip: what it runs on.
      efficiency: the family's constants.
      fused: element-wise operations and attention.
    """
    layout = RunLayout(micro_batch=8, fused=fused, fused_attention=fused)
    terms = step_time(config, config.max_len, layout, chip, efficiency).terms
    return float(sum(seconds for name, seconds in terms.items() if name != "optimizer"))


def fitted() -> dict[str, Efficiency]:
    """Chip family -> constants fitted to its rows marked "fit", to three digits."""
    found = {}
    for source in published.SOURCES:
        rows = [row for row in published.rows(source) if row.split == "fit"]
        constants = dataclasses.asdict(fit(rows))
        rounded = {name: float(f"{value:.3g}") for name, value in constants.items()}
        found[rows[0].chip.family] = Efficiency(**rounded)
    return found


def _logit(value, low, high):
    share = (value - low) / (high - low)
    return np.log(share / (1 - share))


def _at(start, names, point, low, high):
    values = low + (high - low) / (1 + np.exp(-point))
    return dataclasses.replace(start, **dict(zip(names, map(float, values))))
