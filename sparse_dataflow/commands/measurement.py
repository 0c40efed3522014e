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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from sparse_dataflow.cluster.warm_up import warm_up
from sparse_dataflow.commands.command_line import command_of
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


def provenance(machine: str) -> dict:
    """Returns command, date, machine and versions of this process, for a result file."""
    module = Path(sys.argv[0]).stem
    return {
        "command": f"{command_of(module)} {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
            **({"torch": importlib.metadata.version("torch")} if "torch" in sys.modules else {}),
        },
    }


def keep(folder: str, name: str, machine: str, results: Iterable[dict]) -> Path | None:
    """Writes each result with its code and machine as FOLDER/NAME.json; prints the path at the end.

    Args:
      folder: created if missing; "" writes none.
      name: becomes lower-case words joined by "-" or "_".  A file of this name that another program
        wrote is not replaced: the result is then NAME_2.json, and so on.
      machine: name of the machine of the measurement.
      results: JSON-able; each replaces the one before, because a benchmark may be stopped.

    Returns:
      The path; None if nothing was written.
    """
    path = None
    for result in results:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = next(filter(_may_write, _paths(Path(folder), hardware.slug(name))))
            content = {**provenance(machine), **result}
            path.write_text(json.dumps(content, indent=1) + "\n")
    if path:
        print(f"kept in {path}", flush=True)
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
