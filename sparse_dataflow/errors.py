"""The one exception that speaks to the user."""


class UserError(ValueError):
    """A request that cannot be served, told in one or two plain sentences with the legal values.

    Experiments print it without a stack trace and exit with status 2.
    """
