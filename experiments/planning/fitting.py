"""Fits the constants of chip families to published step times, and reports prediction errors."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from scipy import optimize

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner import bands
from sparse_dataflow.planner.bands import Band
from sparse_dataflow.planner.efficiency import PRIOR, Efficiency
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.step_time import step_time
from sparse_dataflow.runs.run_config import SIZES

from . import published, run_memory
from .published import Row, Scaling

# Name -> (minimum, maximum, standard deviation of the prior in logits).
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
    "traffic": (0.3, 12.0, 0.7),
    "by_owner": (0.0, 1.0, 3.0),
    "data_overlap": (0.0, 1.0, 3.0),
}
_STACKS_ONLY = ("traffic", "by_owner", "data_overlap")
HARDWARE = tuple(name for name in RANGES if name not in _STACKS_ONLY)
"""Constants that are fitted for a chip family; its rows are of the stack that is tuned best."""
SOFTWARE = tuple(
    name for name in (*HARDWARE, "traffic") if name not in ("half_width", "bandwidth", "fast_link")
)
"""Constants that are fitted again for another stack on the same chips.  Every stack on NVIDIA chips
multiplies with cuBLAS, so products lose the same at narrow widths."""
BY_OWNER = (*SOFTWARE, "by_owner")
"""Constants of a stack whose ZeRO 1 sends the parts of the state one after the other."""
DATA_SUMS = (*SOFTWARE, "data_overlap")
"""Constants of XLA on GPUs."""
FEW_ROWS = 4
"""Fewer rows than this determine one factor, of `matmul` and `attention`."""
_ONE = ["matmul"]
FOLDS = 5
"""Folds of the cross-validation of `fit_bands`."""
ENOUGH = 9
"""Fewest residuals whose 90% conformal quantile is finite."""
LEAST = 0.03
"""Smallest band: the assumed noise of published figures."""
NOISE = 0.03
"""Assumed relative standard deviation of published step times."""
DIFFERENCE = 1.5e-8
"""Relative step of the forward differences, about the root of float64's precision."""


def fit(
    rows: Sequence[Row], prior: Efficiency = PRIOR, names: Sequence[str] = HARDWARE
) -> Efficiency:
    """Fits constants to rows by least squares in log seconds.

    Each constant has a prior around that of `prior`, so constants that the rows do not determine
    stay there.

    Args:
      rows: published runs.
      prior: starting point and centre of the priors.
      names: constants to fit, where there are at least FEW_ROWS rows.
    """
    names = list(names) if len(rows) >= FEW_ROWS else _ONE
    low, high, spread = np.array([RANGES[name] for name in names]).T
    centre = _logit(np.array([getattr(prior, name) for name in names]), low, high)
    measured = np.array([row.seconds for row in rows])
    lost = np.array([run_memory.retry_seconds(row) for row in rows])

    @functools.lru_cache(maxsize=1)
    def around(*values):
        """Returns the residuals at a point, and at a small step from it along each constant.

        [1 + names, residuals]. All in one call: a step time costs about the same for one set of
        constants as for a few.
        """
        point = np.array(values)
        points = np.vstack([point, point + np.diag(_steps(point))])
        constants = _at(prior, names, points, low, high)
        computed = np.empty((len(rows), len(points)))
        for number, row in enumerate(rows):
            computed[number] = _step_time(row, constants).total
        errors = np.log((computed.T + lost) / measured) / NOISE
        return np.concatenate([errors, (points - centre) / spread], axis=1)

    def jacobian(point):
        at_point, *others = around(*point)
        return ((np.array(others) - at_point) / _steps(point)[:, None]).T

    solution = optimize.least_squares(
        lambda point: around(*point)[0].copy(), centre, jacobian, loss="soft_l1"
    ).x
    return _at(prior, names, solution, low, high)


def predict_seconds(row: Row, efficiency: Efficiency) -> float:
    """Predicts the seconds per step of a published run."""
    return float(_step_time(row, efficiency).total) + run_memory.retry_seconds(row)


def _step_time(row, efficiency):
    """Returns the step time of a run, with arrays if the constants are arrays."""
    efficiency = published.with_kernel(row, efficiency)
    return step_time(row.config, row.sequence, row.plan, row.chip, efficiency)


@dataclasses.dataclass(frozen=True)
class Error:
    """A published row with its prediction.

    Attributes:
      row: published row.
      seconds: predicted seconds per step.
      figure: predicted figure, in the unit of the row.
      limit: group of terms that limits the plan.
    """

    row: Row
    seconds: float
    figure: float
    limit: str

    @property
    def relative(self) -> float:
        """Relative error: predicted / published figure - 1."""
        return self.figure / self.row.value - 1


def errors(source: str, efficiencies: Mapping[str, Efficiency]) -> list[Error]:
    """Returns every row of a source with its prediction.

    A row whose software has no constants on its chip is predicted by those of the chip's family.
    """
    result = []
    for row in published.rows(source):
        constants = efficiencies.get(row.key, efficiencies[row.chip.family])
        seconds = predict_seconds(row, constants)
        ratio = seconds / row.seconds
        figure = row.value * (ratio if row.unit == "seconds" else 1 / ratio)
        result.append(Error(row, seconds, figure, _step_time(row, constants).limit))
    return result


def summary(errors: Sequence[Error]) -> tuple[float, float]:
    """Returns the median and maximum absolute relative error."""
    sizes = np.abs([error.relative for error in errors])
    return float(np.median(sizes)), float(sizes.max())


def scaling_efficiency(study: Scaling, efficiency: Efficiency) -> float:
    """Predicts the throughput per chip on many chips, relative to that on few chips."""
    config = dataclasses.replace(SIZES[study.scale], compute_dtype="bfloat16")
    speeds = []
    for plan in (study.before, study.after):
        time = step_time(config, config.max_len, plan, study.chip, efficiency)
        speeds.append(float(plan.batch / (time.total * plan.chips)))
    return speeds[1] / speeds[0]


def block_seconds(config: ModelConfig, chip: Chip, efficiency: Efficiency, fused: bool) -> float:
    """Predicts the seconds of a step of 8 sequences on one chip, without the optimizer.

    Args:
      config: the model, sparse or dense.
      chip: kind of chip; its memory is not checked.
      efficiency: constants of the chip family.
      fused: whether element-wise operations and attention are fused.
    """
    plan = ParallelPlan(micro_batch=8, fused=fused, fused_attention=fused)
    terms = step_time(config, config.max_len, plan, chip, efficiency).terms
    return float(sum(seconds for name, seconds in terms.items() if name != "optimizer"))


def fit_all(rows: Sequence[Row]) -> dict[str, Efficiency]:
    """Fits the constants of every chip family, then those of other stacks on it.

    Args:
      rows: published runs, of which those marked "fit" count.

    Returns:
      Key of `efficiency.EFFICIENCIES` -> constants with three digits.
    """
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        if row.split == "fit":
            by_key.setdefault(row.key, []).append(row)
    result: dict[str, Efficiency] = {}
    for key, (prior, names) in _ORDER.items():
        if key in by_key:
            fitted = fit(by_key[key], result.get(prior, PRIOR), names)
            digits = {name: float(f"{getattr(fitted, name):.3g}") for name in RANGES}
            result[key] = dataclasses.replace(fitted, **digits)
    return result


def fit_bands(
    rows: Sequence[Row], constants: Mapping[str, Efficiency]
) -> dict[tuple[str, str], Band]:
    """Returns the error band of every domain, by cross-validation over the rows marked "fit".

    Each model is predicted by constants that are fitted without it: models are dealt to FOLDS
    folds.  A domain of ENOUGH residuals or more has their conformal quantile (Lei et al. 2018).
    Fewer do not show a tail, so they get at least that of all domains together.
    """
    residuals: dict[tuple[str, str], list[float]] = {}
    runs: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for row, error in _cross_validated(rows, constants, _model_folds):
        domain = (row.key, bands.regime(row.config, row.sequence))
        residuals.setdefault(domain, []).append(error)
        runs[domain][row.chip.name] += 1
    pooled = _quantile([error for errors in residuals.values() for error in errors])
    return {
        domain: Band(_band_error(errors, pooled), dict(runs[domain]))
        for domain, errors in residuals.items()
    }


def fit_other_software(rows: Sequence[Row], constants: Mapping[str, Efficiency]) -> float:
    """Returns the error that nine of ten runs of a source without a fitted run stay within.

    Each source is predicted by constants that are fitted without it, by those of the prior where
    its key has no other source.  The result is the hierarchical conformal quantile (Lee, Barber and
    Willett 2023): sources have equal weight, because errors within one are alike.
    """
    by_source: dict[tuple[str, str], list[float]] = {}
    for row, error in _cross_validated(rows, constants, lambda rows: [r.source for r in rows]):
        by_source.setdefault((row.key, row.source), []).append(error)
    sizes = np.concatenate(list(by_source.values()))
    weights = np.concatenate([np.full(len(e), 1 / len(e)) for e in by_source.values()])
    order = np.argsort(sizes)
    share = np.cumsum(weights[order]) / (len(by_source) + 1)
    return float(sizes[order][min(int(np.searchsorted(share, 0.9)), len(sizes) - 1)])


def _cross_validated(
    rows: Sequence[Row],
    constants: Mapping[str, Efficiency],
    folds: Callable[[Sequence[Row]], Sequence],
) -> Iterator[tuple[Row, float]]:
    """Yields each "fit" row with its absolute log error without its fold, key by key."""
    for key, (prior, names) in _ORDER.items():
        fitted = [row for row in rows if row.key == key and row.split == "fit"]
        fold = folds(fitted)
        for held_out in dict.fromkeys(fold):
            rest = [r for r, n in zip(fitted, fold) if n != held_out]
            start = constants.get(prior, PRIOR)
            fold_constants = fit(rest, start, names) if rest else start
            for row in (r for r, n in zip(fitted, fold) if n == held_out):
                yield row, float(abs(np.log(predict_seconds(row, fold_constants) / row.seconds)))


def _model_folds(rows):
    models = list(dict.fromkeys((r.config.num_layers, r.config.d_model) for r in rows))
    fold = {model: number % FOLDS for number, model in enumerate(models)}
    return [fold[r.config.num_layers, r.config.d_model] for r in rows]


def _band_error(residuals, pooled):
    few = len(residuals) < ENOUGH
    size = max(1.5 * max(residuals), pooled) if few else _quantile(residuals)
    return float(np.ceil(100 * max(size, LEAST)) / 100)


def _quantile(residuals):
    """Returns the 90% conformal quantile of at least ENOUGH residuals."""
    rank = int(np.ceil(0.9 * (len(residuals) + 1)))
    return float(np.sort(residuals)[min(rank, len(residuals)) - 1])


_ORDER = {
    "ampere": ("", HARDWARE),
    "hopper": ("", HARDWARE),
    "blackwell": ("hopper", HARDWARE),
    "cdna2": ("", HARDWARE),
    **{f"tpu-{name}": ("", HARDWARE) for name in ("v4", "v5e", "v5p", "v6e")},
    "hopper-500w": ("hopper", SOFTWARE),
    **{f"{f}/{s}": (f, SOFTWARE) for f in ("ampere", "hopper") for s in ("eager", "pytorch")},
    **{f"{f}/xla": (f, DATA_SUMS) for f in ("ampere", "hopper")},
    "hopper/pipelining": ("hopper/eager", SOFTWARE),
    "ampere/sail": ("ampere", SOFTWARE),
    "hopper-500w/eager": ("hopper-500w", SOFTWARE),
    **{
        f"ampere/{s}": ("ampere", BY_OWNER)
        for s in ("deepspeed", "internevo", "aleph", "aleph-norm", "paddle")
    },
}
"""Key of EFFICIENCIES -> (key of its prior, constants that are fitted), in the order of fits."""


def _logit(value, low, high):
    share = np.clip((value - low) / (high - low), 0.01, 0.99)
    return np.log(share / (1 - share))


def _steps(point):
    """Returns the steps of forward differences."""
    return DIFFERENCE * np.maximum(np.abs(point), 1)


def _at(prior, names, points, low, high):
    """Returns the constants at a point [names]; arrays [points] for points [points, names]."""
    values = low + (high - low) / (1 + np.exp(-points))
    constants = dict(zip(names, values.T if values.ndim > 1 else map(float, values)))
    if names == _ONE:
        constants["attention"] = prior.attention * constants["matmul"] / prior.matmul
    return dataclasses.replace(prior, **constants)
