"""The one exception that speaks to the user, and the first line of what others say."""

from sparse_dataflow.files.redaction import redacted

TEMPORARY = 75
"""Exit status of a run that is to be started again, as when its machine is taken away: EX_TEMPFAIL
of sysexits.h, which schedulers may be told to requeue on."""


class UserError(ValueError):
    """A request that cannot be served, told in one or two plain sentences with the legal values.

    Experiments print it without a stack trace and exit with status 2. Secrets do not come out.
    """

    def __str__(self) -> str:
        return redacted(super().__str__())


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 300 characters; its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
