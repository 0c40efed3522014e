"""How much each choice decides: Shapley effects of the throughput over the whole grid of layouts.

With v(S) = Var(E[f | x_S]) / Var(f), every level of every choice equally likely and what cannot run
counted as throughput 0 (as the search of arXiv 2312.12705 penalises running out of memory), the
Shapley value of each choice is exact here, since the whole grid is known; the values add up to 1
(Owen 2014, "Sobol' indices and Shapley value").  That paper's figure shows mean |SHAP| of a fitted
surrogate instead; both rank the choices.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from sparse_dataflow.planning.search import Priced


def decisions(priced: Priced) -> tuple[np.ndarray, dict[str, tuple]]:
    """The throughput over choices that can all be made freely, and their levels.

    "chunks" and "schedule" are one choice, since only interleaved stages have several chunks; a
    layout of one stage has no schedule and counts with each.
    """
    levels = dict(priced.space.levels)
    names = list(levels)
    chunks, schedules = levels.pop("chunks"), levels.pop("schedule")
    pairs = [(c, s) for s in schedules for c in chunks if (c > 1) == (s == "interleaved")]
    at = ([chunks.index(c) for c, _ in pairs], [schedules.index(s) for _, s in pairs])
    moved = np.moveaxis(priced.throughput, [names.index("chunks"), names.index("schedule")], [0, 1])
    merged = np.moveaxis(moved[at], 0, -1)
    alone = levels["stage"].index(1) if 1 in levels["stage"] else None
    if alone is not None:
        axis = list(levels).index("stage")
        first = (slice(None),) * axis + (alone,)
        merged[first] = merged[first].max(axis=-1, keepdims=True)
    labels = tuple(s if c == 1 else f"{s}/{c}" for c, s in pairs)
    return merged, {**levels, "schedule": labels}


def shapley_effects(values: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Name of each axis -> its share of the variance of `values`, largest first.

    Args:
      values: float [levels of the first choice, ...], one axis a choice.
      names: of the axes.
    """
    count = values.ndim
    variance = values.var()
    if not variance > 0:
        return dict.fromkeys(names, 0.0)
    explained = {}
    for size in range(count + 1):
        for kept in itertools.combinations(range(count), size):
            others = tuple(axis for axis in range(count) if axis not in kept)
            explained[kept] = values.mean(axis=others).var() / variance
    effects = {}
    for axis, name in enumerate(names):
        rest = [other for other in range(count) if other != axis]
        effect = 0.0
        for size in range(count):
            weight = 1 / (count * math.comb(count - 1, size))
            for kept in itertools.combinations(rest, size):
                with_axis = tuple(sorted((*kept, axis)))
                effect += weight * (explained[with_axis] - explained[kept])
        effects[name] = float(effect)
    return dict(sorted(effects.items(), key=lambda item: -item[1]))


def best_by_level(values: np.ndarray, levels: Mapping[str, Sequence]) -> dict[str, dict]:
    """Name -> level -> the highest of `values` that it can still be part of."""
    found = {}
    for axis, (name, choices) in enumerate(levels.items()):
        others = tuple(other for other in range(values.ndim) if other != axis)
        found[name] = dict(zip(choices, map(float, values.max(axis=others))))
    return found
