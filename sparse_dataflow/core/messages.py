"""Lines on standard error."""

import contextlib

from sparse_dataflow.core import collectives
from sparse_dataflow.files import output
from sparse_dataflow.files.errors import (
    printable,
    redact,
)


def say(text: str) -> None:
    """Prints information above the progress line on process 0, with secrets redacted.

    Nothing is printed where the logger "sparse_dataflow" leaves out information.  A standard error
    that cannot be written is ignored: training does not depend on its log.
    """
    if not output.is_quiet():
        say_result(text)


def say_result(text: str) -> None:
    """Prints as `say`, also with --quiet."""
    if not collectives.is_first():
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        output.write_line(printable(redact(text)))
