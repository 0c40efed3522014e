"""Paired timing, and the bytes of a compiled program."""

import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import numpy as np

from .warm_up import warm_up

K = TypeVar("K")


def paired_seconds(
    runs: Mapping[K, Callable[[], object]], rounds: int, enough: float = 0.0
) -> dict[K, np.ndarray]:
    """Times each function once per round, in turn, so that all see the same load.

    Args:
      runs: name -> function that starts work and returns its arrays.
      rounds: number of timed rounds.  Untimed rounds come first: two, and more while the memory of
        the process grows.
      enough: least seconds of one timing.  Shorter functions are called several times in a row,
        which hides the launch cost on devices with a queue, such as a GPU.

    Returns:
      name -> float [rounds] seconds of one call; element i of every name is from the same round.
    """
    times: dict[K, list[float]] = {name: [] for name in runs}
    untimed = warm_up(lambda: {name: _seconds_a_call(run, 1) for name, run in runs.items()}, 2)
    calls = {name: max(1, math.ceil(enough / seconds)) for name, seconds in untimed.items()}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds_a_call(run, calls[name]))
    return {name: np.asarray(seconds) for name, seconds in times.items()}


def _seconds_a_call(run, calls):
    start = time.perf_counter()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def program_bytes(program: jax.stages.Compiled) -> int | None:
    """Returns the bytes of a program's arguments, results and temporaries; None where the compiler
    does not report them.  Donated arguments count once."""
    sizes = program.memory_analysis()
    if sizes is None:
        return None
    inputs = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    return inputs + sizes.output_size_in_bytes - sizes.alias_size_in_bytes


def paired_ratio(
    numerator: np.ndarray, denominator: np.ndarray, name: str = "ratio"
) -> dict[str, float]:
    """Returns {NAME: median, NAME_low, NAME_high: quartiles} of the ratio over rounds."""
    low, middle, high = np.percentile(numerator / denominator, [25, 50, 75])
    return {name: float(middle), f"{name}_low": float(low), f"{name}_high": float(high)}


def ratio_text(ratio: Mapping[str, float]) -> str:
    """Returns a `paired_ratio` as text."""
    low, high = ratio["ratio_low"], ratio["ratio_high"]
    return f"{ratio['ratio']:.2f}x (quartiles {low:.2f}-{high:.2f})"
