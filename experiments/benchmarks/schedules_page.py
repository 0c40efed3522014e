"""A page with a picture of each pipeline schedule."""

from collections.abc import Sequence

from sparse_dataflow.pipeline.schedules import Schedule
from sparse_dataflow.reporting import templates

from .schedule_pictures import describe, schedule_picture


def schedules_page(schedules: Sequence[Schedule]) -> str:
    """Returns a self-contained HTML page with a picture of each schedule."""
    figures = [
        {"description": describe(schedule), "svg": schedule_picture(schedule, f"schedule{index}")}
        for index, schedule in enumerate(schedules)
    ]
    return templates.html("schedules.html.jinja", {"figures": figures})
