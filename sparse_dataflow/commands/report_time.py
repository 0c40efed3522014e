"""The time left of a run of the main job, whose report times sections and writes continuations."""

from collections.abc import Mapping, Sequence

from sparse_dataflow.cluster.clock import Clock
from sparse_dataflow.core.training.monitoring.progress import Progress
from sparse_dataflow.core.training.monitoring.time_left import TimeLeft
from sparse_dataflow.core.training.programs import Compiled
from sparse_dataflow.core.training.variants import Variant

COMPILE_SHARE = 1.4
"""Seconds in which the report compiles sections and generation, over those of the training step."""

STEPS = 6
"""Executions of each section, which make about one step together."""


def progress(
    clock: Clock, models: Sequence[Variant], programs: Mapping[str, Sequence[Compiled]]
) -> Progress:
    """Returns the progress of a run whose models train in turns."""
    compiled = {v.name: programs[v.name][-1].seconds for v in models}

    def report(name: str, step: float) -> float:
        return COMPILE_SHARE * compiled[name] + STEPS * step

    return Progress(TimeLeft(clock.seconds_by_activity, report))
