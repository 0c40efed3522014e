"""Sensitivity of the throughput to each choice: Shapley effects over the whole grid of plans.

The value of a set of choices S is v(S) = Var(E[f | x_S]) / Var(f).  All levels are equally likely,
and illegal plans have throughput 0, as the search of arXiv 2312.12705 penalises running out of
memory.  The whole grid is priced, so the Shapley values are exact, and they sum to 1 (Owen 2014,
"Sobol' indices and Shapley value").  Figures of arXiv 2312.12705 show mean |SHAP| of a surrogate
model instead; both rank the choices.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from sparse_dataflow.planner.search import Priced


def decisions(priced: Priced) -> tuple[np.ndarray, dict[str, tuple]]:
    """Returns the throughput over independent choices, and the levels of these choices.

    "chunks" and "schedule" become one choice, because only the interleaved schedule has several
    chunks.  A plan of one stage has no schedule, so its throughput is repeated for each.
    """
    levels = dict(priced.levels)
    names = list(levels)
    chunks, schedules = levels.pop("chunks"), levels.pop("schedule")
    pairs = [(c, s) for s in schedules for c in chunks if (c > 1) == (s == "interleaved")]
    at = ([chunks.index(c) for c, _ in pairs], [schedules.index(s) for _, s in pairs])
    moved = np.moveaxis(priced.throughput, [names.index("chunks"), names.index("schedule")], [0, 1])
    merged = np.moveaxis(moved[at], 0, -1)
    if 1 in levels["stage"]:
        axis = list(levels).index("stage")
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
            explained[subset] = values.mean(axis=others).var() / variance
    effects = {}
    for axis, name in enumerate(names):
        rest = [other for other in range(count) if other != axis]
        effect = 0.0
        for size in range(count):
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
