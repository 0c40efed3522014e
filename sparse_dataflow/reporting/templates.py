"""HTML of the report templates in this folder."""

from collections.abc import Mapping

import jinja2

from sparse_dataflow.files import console
from sparse_dataflow.files.errors import redact
from sparse_dataflow.reporting.quantities import visible


def html(template: str, contents: Mapping[str, object]) -> str:
    """Returns a page that needs no network, with secrets redacted.

    Args:
      template: file name of a template in this folder.
      contents: its variables; strings are escaped, `Markup` values are not.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sparse_dataflow.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Texts of a run or process can have any characters; Markup values are figures.
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    # A page may be read where the package is installed in another way than where it was made.
    environment.filters["command"] = console.with_commands
    return redact(environment.get_template(template).render(contents))
