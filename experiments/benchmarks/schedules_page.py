"""A page with a picture of each pipeline schedule."""

from collections.abc import Sequence

from sparse_dataflow.pipeline.action_tables import Table
from sparse_dataflow.reporting import templates

from .schedule_pictures import describe, schedule_picture


def schedules_page(tables: Sequence[Table]) -> str:
    """Returns a self-contained HTML page with a picture of each schedule."""
    figures = [
        {"description": describe(table), "svg": schedule_picture(table, f"schedule{index}")}
        for index, table in enumerate(tables)
    ]
    return templates.html("schedules.html.jinja", {"figures": figures})
