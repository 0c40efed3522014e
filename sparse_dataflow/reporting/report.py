"""Report of a run as a self-contained HTML file."""

import os
import pathlib

from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.reporting.report_data import ReportData

PAGE = "report.html"
"""Name of the page in a run folder."""


def write_report(data: ReportData, path: str | os.PathLike) -> None:
    """Atomically writes `data` as one HTML file that needs no network.

    Raises:
      UserError: the file cannot be written; an existing file is unchanged.
    """
    # Imports matplotlib, which is slow.
    from sparse_dataflow.reporting import page, templates

    path = pathlib.Path(path)
    html = templates.html("template.html.jinja", page.contents(data))
    try:
        storage.replace(path, html.encode("utf-8"))
    except OSError as error:
        raise UserError(
            f"The report {path} cannot be written: {error.strerror or error}. "
            "Free disk space or choose a writable folder. The run is not affected."
        ) from error
