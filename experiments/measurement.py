"""Paired timing, and results kept as JSON with what made them."""

import datetime
import importlib.metadata
import json
import math
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
from sparse_dataflow.hardware import detect as hardware

K = TypeVar("K")


def paired_seconds(
    runs: Mapping[K, Callable[[], object]], rounds: int, enough: float = 0.0
) -> dict[K, np.ndarray]:
    """Times each run once a round, in turn, so that all meet the same machine.

    Args:
      runs: name -> function that starts work and returns its arrays.
      rounds: how often; untimed rounds come first: two, and more while the process still grows.
      enough: seconds that one timing takes at least: a shorter run is started several times in a
        row, which hides the cost of starting it where work is queued, as on a GPU.

    Returns:
      name -> float [rounds] seconds of one call; element i of every name belongs to the same round.
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
    """Bytes of a program's arguments, results and temporaries; None where its compiler does not
    say. What a result takes over from an argument counts once."""
    found = program.memory_analysis()
    if found is None:
        return None
    held = found.argument_size_in_bytes + found.temp_size_in_bytes
    return held + found.output_size_in_bytes - found.alias_size_in_bytes


def paired_ratio(numerator: np.ndarray, denominator: np.ndarray) -> tuple[float, float, float]:
    """Median, lower and upper quartile of the ratio, round by round."""
    ratio = numerator / denominator
    low, middle, high = np.percentile(ratio, [25, 50, 75])
    return float(middle), float(low), float(high)


def speedup(seconds: Mapping[str, np.ndarray], bound: str, ceiling: float) -> dict[str, float]:
    """Dense time over sparse time, printed beside the most that it could be.

    Args:
      seconds: of "dense" and "sparse", as `paired_seconds` gives them.
      bound: what sets the ceiling, in words.
      ceiling: the ratio that it would allow.

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
    """Command, date, machine and versions of this process, for a result file."""
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
    """As `write`, and says where; does nothing where `folder` is ""."""
    if folder:
        print(f"kept in {write(folder, name, machine, result)}", flush=True)


def write(folder: str, name: str, machine: str, result: dict) -> Path:
    """Writes a result with its `provenance` as FOLDER/NAME.json, and returns its path.

    Args:
      folder: made where it is missing.
      name: written in lower-case words joined by "-" or "_".
      machine: that it was measured on.
      result: JSON-able.
    """
    result = {**provenance(machine), **result}
    path = Path(folder) / f"{hardware.slug(name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
