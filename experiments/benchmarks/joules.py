"""Energy of one call, beside its seconds, for `step_bench` and `decode_bench`."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from . import energy

LEAST_SECONDS = 2.0
"""Seconds of a measurement.  The counter of a GPU moves only about ten times a second."""


def call_joules(run: Callable[[], object]) -> float | None:
    """Returns the joules of one call, None where they are unknown, by calls of `LEAST_SECONDS`.

    Args:
      run: starts work and returns its arrays; it was called before.
    """
    platform = jax.default_backend()
    before, start, calls = energy.read(platform), time.perf_counter(), 0
    if before is None:
        return None
    while not calls or time.perf_counter() - start < LEAST_SECONDS:
        jax.block_until_ready(run())
        calls += 1
    after = energy.read(platform)
    joules = after and after.joules_since(before)
    return joules / calls if joules else None


def measured(run: Callable[[], object], **units: int) -> dict[str, float | None]:
    """Returns {UNIT_joules: joules} of a call that makes so many of each unit."""
    joules = call_joules(run)
    return {f"{unit}_joules": joules and joules / number for unit, number in units.items()}


def text(row: Mapping[str, Any]) -> str:
    """Returns the energy in a row of `measured`, e.g. "3.1 J a step, 0.003 J a token"."""
    known = {name: row[name] for name in row if name.endswith("_joules") and row[name]}
    return ", ".join(f"{j:.3g} J a {name.removesuffix('_joules')}" for name, j in known.items())
