"""Paired timing, and JSON results with their provenance."""

import datetime
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from sparse_dataflow.distributed.warm_up import warm_up
from sparse_dataflow.files import json_files
from sparse_dataflow.hardware import detect as hardware

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


def paired_ratio(numerator: np.ndarray, denominator: np.ndarray) -> tuple[float, float, float]:
    """Returns the median, lower and upper quartile of the ratio over rounds."""
    ratio = numerator / denominator
    low, middle, high = np.percentile(ratio, [25, 50, 75])
    return float(middle), float(low), float(high)


def speedup(seconds: Mapping[str, np.ndarray], bound: str, ceiling: float) -> dict[str, float]:
    """Prints and returns the ratio of dense to sparse time, and its bound.

    Args:
      seconds: of "dense" and "sparse", as `paired_seconds` gives them.
      bound: name of the bound.
      ceiling: the largest possible ratio.

    Returns:
      {"ratio" (median), "ratio_low", "ratio_high" (quartiles)}, for a result file.
    """
    ratio, low, high = paired_ratio(seconds["dense"], seconds["sparse"])
    print(
        f"dense / sparse: {ratio:.2f}x (quartiles {low:.2f}-{high:.2f}); {bound} {ceiling:.2f}x, "
        f"reached {ratio / ceiling:.0%}"
    )
    return {"ratio": ratio, "ratio_low": low, "ratio_high": high}


def provenance(machine: str) -> dict:
    """Returns command, date, machine and versions of this process, for a result file."""
    module = Path(sys.argv[0]).stem
    return {
        "command": f"python -m experiments.{module} {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
            **({"torch": importlib.metadata.version("torch")} if "torch" in sys.modules else {}),
        },
    }


def keep(folder: str, name: str, machine: str, result: dict) -> None:
    """Calls `write` and prints the path; does nothing if `folder` is ""."""
    if folder:
        print(f"kept in {write(folder, name, machine, result)}", flush=True)


def write(folder: str, name: str, machine: str, result: dict) -> Path:
    """Writes a result with its `provenance` as FOLDER/NAME.json, and returns its path.

    Args:
      folder: created if missing.
      name: becomes lower-case words joined by "-" or "_".  A file of this name that another program
        wrote is not replaced: the result is then NAME_2.json, and so on.
      machine: name of the machine of the measurement.
      result: JSON-able.
    """
    result = {**provenance(machine), **result}
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = next(filter(_may_write, _paths(Path(folder), hardware.slug(name))))
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def _paths(folder, name):
    yield folder / f"{name}.json"
    for number in itertools.count(2):
        yield folder / f"{name}_{number}.json"


def _may_write(path):
    """Returns whether the path is free, or holds a result of this experiment."""
    if not os.path.lexists(path):
        return True
    try:
        saved, current = json_files.load(path), provenance("")
        programs = [result["command"].split()[:3] for result in (saved, current)]
        return current.keys() <= saved.keys() and programs[0] == programs[1]
    except json_files.MALFORMED:
        return False
