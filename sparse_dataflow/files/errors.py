"""The exception for errors that the user can fix, words for other errors, and no secrets in either.

A secret is a password or token inside a URL, or the value of an environment variable whose name
says so, such as HF_TOKEN. A user may put either into a command by mistake; its errors, config.json
and report then show `***`.
"""

import errno
import functools
import os
import re
import traceback
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|KEY|APIKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(_|$)", re.I
)
_SHORTEST = 8  # Shorter values are no secrets; replacing them would remove ordinary words.
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)|(?<=://)[^/@\s:]{8,}(?=@)")
_IN_QUERY = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|key|secret|password|passwd|signature|sig|credential)[\w.-]*)=)"
    r"[^&;#\s'\"]+"
)


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replaces the secrets in a text by `***`."""
    for value in _values(tuple(sorted(environment.items()))):
        text = text.replace(value, HIDDEN)
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(HIDDEN, text))


def redact_json(value: Any) -> Any:
    """Applies `redact` to every string in a JSON value; field names stay."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: redact_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact_json(each) for each in value]
    return value


@functools.lru_cache(4)
def _values(environment):
    """Returns the values of secret variables, longest first: one may contain another."""
    secrets = {
        value
        for name, value in environment
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and not os.path.exists(value)
    }
    return sorted(secrets, key=len, reverse=True)


TEMPORARY = 75
"""Exit status of a run that should be started again, such as after a preemption: EX_TEMPFAIL of
sysexits.h. Schedulers can requeue on it."""

_JAX = ("jax", "jaxlib")

LONGEST = 2000
"""Most characters of a `UserError`: one that quotes a huge argument loses its middle."""


class UserError(ValueError):
    """Wrong input, explained in one or two sentences that name the legal values.

    Experiments print it without a stack trace and exit with status 2. Its text is redacted and
    `escaped`.

    Examples:
        >>> try:
        ...     sd.make_layout("monarch", 64, 100, block=16, density=0.5)
        ... except sd.UserError as error:
        ...     print(error)
        Block 16 does not divide a 64 x 100 weight; legal blocks up to 512: none from 8 up.
    """

    def __str__(self) -> str:
        text = escaped(redact(super().__str__()))
        half = LONGEST // 2
        return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"


def escaped(text: str) -> str:
    """Returns one line in which unprintable characters are Python escapes, such as `\\x1b`.

    For text from outside in a message: it cannot move the cursor of a terminal, reorder a line or
    begin a new one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, at most 300 characters; its type if empty."""
    if isinstance(error, SystemExit):
        return f"it ends Python with {error.code!r}"[:300]
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def in_words(error: Exception) -> str:
    """Returns the words for an error of the machine rather than of the code; "" for others."""
    if is_exhausted(error) and isinstance(error, RuntimeError):
        return f"This process may have no more threads; {advice(error)}"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in first_line(error):
        return (
            f"There is too little memory ({first_line(error)}). Use a machine with more, or a "
            "smaller --scale or --batch."
        )
    if _in_start_of_jax(error):
        given = [f"{name}={os.environ[name]}" for name in OF_JAX if os.environ.get(name)]
        settings = f" {', '.join(given)[:400]}:" if given else ""
        reason = re.sub(r" \((set|you may need).*", "", first_line(error)).rstrip(".")
        reason = "it finds no device" if isinstance(error, AssertionError) else reason
        return (
            f"jax does not start here:{settings} {reason}. Correct or unset what names it; legal "
            "JAX_PLATFORMS: cpu, cuda or tpu if jax is installed for it and no other process "
            "holds the device."
        )
    if not isinstance(error, OSError) or error.errno is None:
        return ""
    place = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or errno.errorcode.get(error.errno, "")
    return redact(f"{place}{reason}; {advice(error)}")


OF_JAX = (
    "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables that jax reads at its start."""


def _in_start_of_jax(error: BaseException) -> bool:
    """Returns whether jax raised the error while it was imported or opened its devices."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        importing = frame.f_code.co_name == "<module>" and module.partition(".")[0] in _JAX
        if importing or module == "jax._src.xla_bridge":
            return True
    return False


def is_exhausted(error: BaseException) -> bool:
    """Returns whether the process has no memory or threads left, so that Python may not end."""
    threads = isinstance(error, RuntimeError) and "start new thread" in str(error)
    return isinstance(error, MemoryError) or threads


def advice(error: BaseException) -> str:
    """Returns what to do about a file operation that failed, such as "make room there."."""
    number = getattr(error, "errno", None)
    if is_exhausted(error) and isinstance(error, RuntimeError):
        return (
            "allow more threads (ulimit -u, ulimit -v or the limit of the container), or end other "
            "processes."
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return "allow more open files (ulimit -n)."
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room there."
    if number == errno.EROFS:
        return "mount it for writing."
    if number in (errno.EACCES, errno.EPERM):
        return "give this user the permission."
    return "check that place."
