"""The relations: functions of a `World` that raise `Wrong` where they do not hold.

To add one, write a function with `@relation(COST)` in a file of this folder; its name is the
relation's.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

RELATIONS: dict[str, Callable] = {}
"""Name -> function."""

COSTS: dict[str, float] = {}
"""Name -> seconds of the processor that it takes at most, beside the run of the case."""


def relation(cost: float) -> Callable[[Callable], Callable]:
    """Registers a relation, as a decorator."""

    def register(function):
        name = function.__name__
        assert name not in RELATIONS, name
        RELATIONS[name], COSTS[name] = function, cost
        return function

    return register


def load() -> dict[str, Callable]:
    """Returns all relations."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem != "__init__":
            importlib.import_module(f"storm.relations.{path.stem}")
    return RELATIONS
