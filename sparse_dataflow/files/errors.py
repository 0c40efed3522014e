"""The exception for errors that the user can fix, and the first line of other errors."""

from sparse_dataflow.files.redaction import redact

TEMPORARY = 75
"""Exit status of a run that should be started again, such as after a preemption: EX_TEMPFAIL of
sysexits.h. Schedulers can requeue on it."""


class UserError(ValueError):
    """A request that cannot be served, in one or two plain sentences that name the legal values.

    Experiments print it without a stack trace and exit with status 2. Its text is redacted.
    """

    def __str__(self) -> str:
        return redact(super().__str__())


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, at most 300 characters; its type if empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
