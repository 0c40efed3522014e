"""How sure a prediction is: error bands of step times, and sensitivity to each choice.

A domain is a key of `efficiency.EFFICIENCIES` (chip family and software stack) and a regime.  Its
band is the 90% quantile of the relative errors of runs whose model had no part in the fit;
`fitting.fit_bands` computes BANDS, and a test compares them with the runs that no fit has seen.

A band holds for chips and software whose runs are in the fit, and counts the runs of each chip.
The runs of other software share errors that are larger: OTHER_SOFTWARE, by leaving out one source
at a time.

The sensitivity of the throughput to each choice is its Shapley effect over the whole grid of plans.
The value of a set of choices S is v(S) = Var(E[f | x_S]) / Var(f).  All levels are equally likely,
and illegal plans have throughput 0, as the search of arXiv 2312.12705 penalises running out of
memory.  The whole grid is priced, so the Shapley values are exact, and they sum to 1 (Owen 2014,
"Sobol' indices and Shapley value").  Figures of arXiv 2312.12705 show mean |SHAP| of a surrogate
model instead; both rank the choices.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner import efficiency
from sparse_dataflow.planner.search import Priced

REGIMES = {
    "small": "below 7B, to 8,192 tokens",
    "large": "7B and more, to 8,192 tokens",
    "long": "more than 8,192 tokens",
}
_LARGE, _LONG = 6.5e9, 8192


OTHER_SOFTWARE = 0.39
"""Relative error, in log seconds, that nine of ten runs of software without a fitted run stay
within; `fitting.fit_other_software` computes it."""
UNKNOWN = 0.2
"""Width of a tie without published runs, about the 90% quantile of all residuals."""


@dataclasses.dataclass(frozen=True)
class Band:
    """Relative error that nine of ten runs of a kind stay within.

    Attributes:
      error: in log seconds; 0.06 is about 6%.
      runs: chip -> published runs behind it.
    """

    error: float
    runs: Mapping[str, int]


_BANDS = {
    ("ampere", "small"): (0.18, {"a100-80gb": 1}),
    ("ampere", "large"): (0.08, {"a100-80gb": 10}),
    ("hopper", "small"): (0.39, {"h100": 1}),
    ("hopper", "large"): (0.17, {"h100": 35}),
    ("blackwell", "large"): (0.18, {"gb200": 5}),
    ("cdna2", "large"): (0.67, {"mi250x-gcd": 1}),
    ("tpu-v4", "large"): (0.26, {"tpu-v4": 3}),
    ("tpu-v5e", "large"): (0.23, {"tpu-v5e": 12}),
    ("tpu-v5p", "large"): (0.28, {"tpu-v5p": 8}),
    ("tpu-v6e", "large"): (0.18, {"tpu-v6e": 7}),
    ("hopper-500w", "large"): (0.28, {"h100-96gb": 4}),
    ("ampere/eager", "large"): (0.16, {"a100-80gb": 16, "a100-40gb": 12}),
    ("ampere/eager", "long"): (0.12, {"a100-80gb": 8, "a100-40gb": 5}),
    ("ampere/eager", "small"): (0.07, {"a100-80gb": 16, "a100-40gb": 22}),
    ("ampere/pytorch", "large"): (0.18, {"a100-80gb": 2}),
    ("hopper/eager", "large"): (0.11, {"h100": 15, "h200": 1}),
    ("hopper/eager", "small"): (0.13, {"h100": 15}),
    ("hopper/eager", "long"): (0.18, {"h100": 5}),
    ("hopper/pytorch", "large"): (0.47, {"h100": 1, "h200": 7}),
    ("ampere/xla", "small"): (0.23, {"a100-80gb": 2}),
    ("ampere/xla", "large"): (0.18, {"a100-80gb": 1}),
    ("hopper/xla", "large"): (0.24, {"h100": 10}),
    ("hopper/xla", "small"): (0.18, {"h100": 2}),
    ("hopper/pipelining", "large"): (0.3, {"h200": 2}),
    ("ampere/sail", "small"): (0.12, {"a100-80gb": 11}),
    ("ampere/sail", "large"): (0.18, {"a100-80gb": 7}),
    ("hopper-500w/eager", "large"): (0.18, {"h100-96gb": 1}),
    ("ampere/deepspeed", "large"): (0.16, {"a100-80gb": 30}),
    ("ampere/internevo", "large"): (0.32, {"a100-80gb": 23}),
    ("ampere/aleph", "large"): (0.13, {"a100-80gb": 69}),
    ("ampere/aleph-norm", "large"): (0.17, {"a100-80gb": 120}),
    ("ampere/paddle", "large"): (0.08, {"a100-80gb": 9, "a100-40gb": 1}),
}
BANDS = {domain: Band(error, runs) for domain, (error, runs) in _BANDS.items()}
"""(key of EFFICIENCIES, regime) -> band."""


def regime(config: ModelConfig, sequence: int) -> str:
    """Returns the regime of a run."""
    if sequence > _LONG:
        return "long"
    return "large" if cost.parameter_count(config) >= _LARGE else "small"


def band(models: Sequence[ModelConfig], sequence: int, chip: Chip) -> Band | None:
    """Returns the band of a prediction, or None where no fitted run of its kind is on its chip.

    Args:
      models: the model in each of its phases; no fitted run with block-sparse weights names its
        plan, and the fits have no run with low-rank weights, experts or quantised products.
      sequence: tokens per sequence.
    """
    match = BANDS.get(_domain(models, sequence, chip))
    has_runs = match is not None and chip.name in match.runs
    return match if has_runs and not _unfitted(models) else None


# The largest phase takes most of the time, so its regime is that of the run.
def _domain(models, sequence, chip):
    largest = max(models, key=cost.parameter_count)
    return efficiency.own_key(chip.family), regime(largest, sequence)


def _unfitted(models):
    """Returns what the models have and no fitted run has."""
    kinds = sorted({words for model in models for words in model.weight_words})
    kinds += ["experts"] * any(model.experts for model in models)
    return kinds + [f"{p} products" for p in sorted({m.precision for m in models if m.quantized})]


def _has_runs(chip):
    """Returns whether any published run of the fits is on a chip."""
    return any(chip.name in each.runs for each in BANDS.values())


def log_error(models: Sequence[ModelConfig], sequence: int, chip: Chip) -> float:
    """Returns the relative error of a predicted step time, in log seconds.

    It is that of software without a fitted run, which this project is, wider by UNKNOWN where no
    fitted run has such weights, and again where none is on such chips.
    """
    # Independent errors in log seconds add as squares.
    unknown = bool(_unfitted(models)) + (not _has_runs(chip))
    return math.hypot(_other_software(models, sequence, chip), *[UNKNOWN] * unknown)


def _other_software(models, sequence, chip):
    """Returns the error of software without a fitted run: never less than that of one with runs."""
    match = BANDS.get(_domain(models, sequence, chip))
    return max(OTHER_SOFTWARE, match.error if match and chip.name in match.runs else 0.0)


def tie_width(models: Sequence[ModelConfig], sequence: int, chip: Chip) -> float:
    """Returns the relative difference below which two predictions are a tie.

    It is the band of a dense model of this kind, or UNKNOWN where no fitted run of its kind is
    on its chip.  Plans that the same software runs share its errors, so OTHER_SOFTWARE is no part
    of it.
    """
    match = BANDS.get(_domain(models, sequence, chip))
    return match.error if match and chip.name in match.runs else UNKNOWN


def words(models: Sequence[ModelConfig], sequence: int, chip: Chip) -> str:
    """Returns the band of a prediction as a sentence; arguments as in `band`."""
    key, kind = _domain(models, sequence, chip)
    # From the least that is known to the most: no constants, no run on the chip, none of such
    # weights, none of this size.
    if key not in efficiency.EFFICIENCIES:
        return f"extrapolated: prior constants, because no fitted run is on {chip.name}"
    if not _has_runs(chip):
        others = {name for (k, _), each in BANDS.items() if k == key for name in each.runs}
        names = " and ".join(sorted(others))
        return f"extrapolated: the constants of {names}, because no fitted run is on {chip.name}"
    if kinds := _unfitted(models):
        return f"extrapolated: no fitted run of this kind ({', '.join(kinds)})"
    match = band(models, sequence, chip)
    if match is None:
        return (
            f"extrapolated: no fitted run of this kind ({key}, {REGIMES[kind]}) is on {chip.name}"
        )
    count = match.runs[chip.name]
    runs = f"{count} published run{'s' if count > 1 else ''}"
    factor = math.exp(_other_software(models, sequence, chip))
    # Of a wide band, the log is no percentage: 0.67 is 49% less, or 95% more.
    error = f"±{match.error:.0%}" if match.error < OTHER_SOFTWARE else _factor(match.error)
    return (
        f"{error}, like {runs} of this kind on {chip.name} ({key}), in their software; "
        f"within a factor of {factor:.2f} in other software"
    )


def _factor(error):
    return f"within a factor of {math.exp(error):.2f}"


def decisions(priced: Priced) -> tuple[np.ndarray, dict[str, tuple]]:
    """Returns the throughput over independent choices, and the levels of these choices.

    "chunks" and "schedule" become one choice, because only the interleaved schedule has several
    chunks.  A plan of one stage has no schedule, so its throughput is repeated for each.
    """
    levels = dict(priced.levels)
    names = list(levels)
    chunks, schedules = levels.pop("chunks"), levels.pop("schedule")
    pairs = [(c, s) for s in schedules for c in chunks if (c > 1) == (s == "interleaved")]
    # Both axes come first; one array of indices for each takes the pairs alone and leaves one axis,
    # which goes to the end.
    at = ([chunks.index(c) for c, _ in pairs], [schedules.index(s) for _, s in pairs])
    moved = np.moveaxis(priced.throughput, [names.index("chunks"), names.index("schedule")], [0, 1])
    merged = np.moveaxis(moved[at], 0, -1)
    if 1 in levels["stage"]:
        axis = list(levels).index("stage")
        # One stage has its throughput under the first schedule alone (`search.violations`).
        no_pipeline = (slice(None),) * axis + (levels["stage"].index(1),)
        merged[no_pipeline] = merged[no_pipeline].max(axis=-1, keepdims=True)
    for name in ("experts", "feature", "context"):
        if len(levels[name]) == 1:  # No choice, as for a model without experts.
            merged = merged.squeeze(list(levels).index(name))
            del levels[name]
    labels = tuple(s if c == 1 else f"{s}/{c}" for c, s in pairs)
    return merged, {**levels, "schedule": labels}


def shapley_effects(values: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Returns axis name -> share of the variance of `values`, largest first.

    Args:
      values: float [levels of the first choice, ...], one axis for each choice.
      names: names of the axes.
    """
    count = values.ndim
    variance = values.var()
    if not variance > 0:
        return dict.fromkeys(names, 0.0)
    explained = {}
    for size in range(count + 1):
        for subset in itertools.combinations(range(count), size):
            others = tuple(axis for axis in range(count) if axis not in subset)
            # v(S): what is left of the variance where all other choices are averaged over.
            explained[subset] = values.mean(axis=others).var() / variance
    effects = {}
    for axis, name in enumerate(names):
        rest = [other for other in range(count) if other != axis]
        effect = 0.0
        for size in range(count):
            # The share of the orders of all choices in which exactly a given subset of this size is
            # before this one: a Shapley effect is the mean over orders.
            weight = 1 / (count * math.comb(count - 1, size))
            for subset in itertools.combinations(rest, size):
                with_axis = tuple(sorted((*subset, axis)))
                effect += weight * (explained[with_axis] - explained[subset])
        effects[name] = float(effect)
    return dict(sorted(effects.items(), key=lambda item: -item[1]))


def best_by_level(values: np.ndarray, levels: Mapping[str, Sequence]) -> dict[str, dict]:
    """Returns name -> level -> maximum of `values` at this level."""
    return _by_level(np.max, values, levels)


def mean_by_level(values: np.ndarray, levels: Mapping[str, Sequence]) -> dict[str, dict]:
    """Returns name -> level -> mean of `values` at this level, minus the mean of all.

    This is the first-order effect E[f | level] - E[f], which a mean SHAP value estimates.
    """
    return _by_level(lambda v, axis: v.mean(axis) - v.mean(), values, levels)


def _by_level(reduce, values, levels):
    """Returns name -> level -> `values` at this level, reduced over all other choices."""
    reduced = {}
    for axis, (name, choices) in enumerate(levels.items()):
        others = tuple(other for other in range(values.ndim) if other != axis)
        reduced[name] = dict(zip(choices, map(float, reduce(values, axis=others))))
    return reduced
