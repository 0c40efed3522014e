"""The one self-contained HTML file that shows a run's results."""

import os
import pathlib

import jinja2

from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.reporting.quantities import visible
from sparse_dataflow.reporting.report_data import ReportData


def write_report(data: ReportData, path: str | os.PathLike) -> None:
    """Writes `data` as one HTML file that needs no network; a reader never sees half of it.

    Raises:
      UserError: where the file cannot be written; what stood there before is untouched.
    """
    # It imports matplotlib, which takes a second that only a report is worth.
    from sparse_dataflow.reporting import page

    path = pathlib.Path(path)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sparse_dataflow.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Texts of the run may hold anything; Markup (our own figures) is left as it is.
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    html = environment.get_template("template.html.jinja").render(page.contents(data))
    try:
        storage.replace(path, html.encode("utf-8"))
    except OSError as error:
        raise UserError(
            f"The report could not be written to {path}: {error.strerror or error}. "
            "Free some space or name a folder that can be written; the run itself is kept."
        ) from error
