"""Report of a run as a self-contained HTML file."""

import os
import pathlib

import jinja2

from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.reporting.quantities import visible
from sparse_dataflow.reporting.report_data import ReportData


def write_report(data: ReportData, path: str | os.PathLike) -> None:
    """Atomically writes `data` as one HTML file that needs no network.

    Raises:
      UserError: the file cannot be written; an existing file is unchanged.
    """
    # Imports matplotlib, which is slow.
    from sparse_dataflow.reporting import page

    path = pathlib.Path(path)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sparse_dataflow.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Texts of a run can have any characters; Markup values are figures.
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    html = environment.get_template("template.html.jinja").render(page.contents(data))
    try:
        storage.replace(path, html.encode("utf-8"))
    except OSError as error:
        raise UserError(
            f"The report {path} cannot be written: {error.strerror or error}. "
            "Free disk space or choose a writable folder. The run is not affected."
        ) from error
