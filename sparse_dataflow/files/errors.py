"""The exception for errors that the user can fix, words for other errors, and no secrets in either.

A secret is a password in an address, or the value of an environment variable that is not known to
hold none. A user may put either into a command by mistake; errors, logs, config.json, the report,
trackers and model cards then show `***`.
"""

import contextlib
import errno
import functools
import html
import importlib
import json
import os
import re
import traceback
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "***"

_HARMLESS = re.compile(
    r"PATH|PWD|OLDPWD|HOME|USER|USERNAME|LOGNAME|HOSTNAME|SHELL|SHLVL|TERM|LANG|LANGUAGE|TZ|EDITOR|"
    r"PAGER|DISPLAY|OSTYPE|HOSTTYPE|MACHTYPE|_|(LC|XDG|JAX|XLA|LIBTPU|CUDA|NVIDIA|ROCM|PYTEST)_\w+|"
    r"PYTHON\w*|\w*_(PATH|DIR|FILE|HOME|SOCK)",
    re.I,
)
"""Variables whose values are no secrets, unless `_SECRET_NAME` or `_LOOKS_SECRET` says so."""

_NEVER = {"PWD", "OLDPWD"}
"""Variables that only look as if they held a secret."""

_SECRET_NAME = re.compile(
    # Words that say so wherever they are in a name, and words that do so alone.
    r"TOKEN(?!I[ZS])|PASSW|PASSPHRASE|PASSCODE|SECRET|CREDENTIAL|COOKIE|CONNECTION_?STR|WEBHOOK|"
    r"BEARER|PRIVATE_?KEY|ACCESS_?KEY|API_?KEY|SIGNATURE|PWD$|(^|_)\w{0,12}(?<!BY)(?<!COM)PASS$|"
    r"(^|_|\d)(KEY|PASS|PAT|PW|PWD|CRED|AUTH|OAUTH|JWT|SAS|SIG|DSN|OTP|TOTP|HMAC|SALT)"
    r"(S?\d*)(_|$)",
    re.I,
)
_LOOKS_SECRET = re.compile(
    # No word, name of a host or path: a mixture without a separator, or many hexadecimal digits.
    r"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=\D*\d)[\w+=~-]{20,}|[0-9a-fA-F]{32,}"
)
_SHORTEST = 8  # Shorter values are no secrets; replacing them would remove ordinary words.

_ADDRESS = re.compile(r"://[^/@\s:\[\]]*:(?!\d{1,5}(?:[/?#\s,;.)'\"]|$))")
"""What comes before a password; a number up to a slash is a port."""
_BREAK, _AT = re.compile(r"[\s\"]"), re.compile("@")
_BLANKS = 80
"""Characters of a password up to which it may have blanks."""

_TOKEN_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s:]{8,}(?=@)")
_FIELD, _VALUE = re.compile(r"[?&;][\w.-]+="), re.compile(r"[^&;#\s'\"]+")
_SECRET_FIELD = re.compile("token|key|secret|passw|pwd|signature|sig|credential|auth|jwt", re.I)
_IN_HEADER = re.compile(r"(?i)\b((?:bearer|basic) +)[\w.~+/-]{8,}=*")


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replaces the secrets in a text by `***`, in time linear in its length.

    All text that leaves the process passes here; what a program reads again does not, see
    `refuse_secrets`.
    """
    # Values before addresses: a variable's value may itself be an address.
    for value in _values(tuple(sorted(environment.items()))):
        text = text.replace(value, HIDDEN)
    if "://" in text:
        text = _TOKEN_IN_ADDRESS.sub(HIDDEN, _without_passwords(text))
    return _IN_HEADER.sub(rf"\1{HIDDEN}", _without_fields(text))


def _without_passwords(text: str) -> str:
    """Hides names and passwords up to the last @ of each address."""
    # Each of these looks at a character once, as positions only grow.
    end, next_end, next_at = _forward(_BREAK, text), _forward(_BREAK, text), _forward(_AT, text)
    pieces: list[str] = []
    done, position, run_end, last = 0, 0, -1, -1
    while address := _ADDRESS.search(text, position):
        start, password = address.start() + 3, address.end()
        position = start
        if end(password) != run_end:
            run_end, last = end(password), text.rfind("@", password, end(password))
        at = last
        if at < password:  # A password may have blanks.
            at = next_at(password)
            blanks = min(password + _BLANKS, at)
            if at == len(text) or "\n" in text[password:blanks] or next_end(blanks) < at:
                continue
        pieces += text[done:start], f"{HIDDEN}@"
        done = position = at + 1
    return "".join(pieces) + text[done:]


def _without_fields(text: str) -> str:
    """Hides values of a query whose names say that they are secret."""
    pieces: list[str] = []
    done, position = 0, 0
    while field := _FIELD.search(text, position):
        position = field.end()
        if _SECRET_FIELD.search(field[0]) and (value := _VALUE.match(text, position)):
            pieces += text[done:position], HIDDEN
            done = position = value.end()
    return "".join(pieces) + text[done:]


def _forward(pattern: re.Pattern, text: str) -> Callable[[int], int]:
    """Returns a function of growing positions: the next place of a pattern, or the end."""
    place = -1

    def at_or_after(position: int) -> int:
        nonlocal place
        if place < position:
            match = pattern.search(text, position)
            place = match.start() if match else len(text)
        return place

    return at_or_after


def shortened(text: str, most: int, tail: int = 0) -> str:
    """Returns a text without secrets, cut to its first `most` and its last `tail` characters.

    What is hidden is looked for in little more than what is shown.
    """
    if len(text) <= most + tail + 2 * _MARGIN:
        text = redact(text)
        if len(text) <= most + tail:
            return text
        return text[:most] + (f" ... {text[-tail:]}" if tail else "")
    end = f" ... {redact(text[-tail - _MARGIN :])[-tail:]}" if tail else ""
    return redact(text[: most + _MARGIN])[:most] + end


_MARGIN = 2**16
"""Characters beyond a cut, with the end of a secret that the cut would divide."""


def redact_json(value: object) -> Any:
    """Applies `redact` to every string in a JSON value; field names stay."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: redact_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact_json(each) for each in value]
    return value


def refuse_secrets(value: object, name: str = "") -> None:
    """Refuses a JSON value with a secret in it, which is to be stored and read again.

    A path that exists, or could be made, is no secret.

    Args:
      name: of the value, such as "data.corpus", for the message.

    Raises:
      UserError: naming the field, and the variable with the secret.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            refuse_secrets(each, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for each in value:
            refuse_secrets(each, name)
    elif isinstance(value, str) and redact(value) != value and not _is_place(value):
        holders = [n for n, each in os.environ.items() if redact(value, {n: each}) != value]
        # What is hidden without any variable is a password in the text itself.
        alone = redact(value, {}) != value
        holds = "a password" if alone else f"the value of the variable {holders[0]}"
        raise UserError(
            f"{name} holds {holds}, which would be stored; give it in the environment or in a file "
            f"of its program{'' if alone else ', or unset that variable if it is no secret'}."
        )


def _is_place(value):
    try:
        path = os.path.expanduser(value)
        return os.path.exists(path) or ("/" in path and os.path.exists(os.path.dirname(path)))
    except ValueError:
        return False


@functools.lru_cache(4)
def _values(environment):
    """Returns the values of secret variables, longest first: one may contain another."""
    secrets = {
        form
        for name, value in environment
        if _is_secret(name, value.strip())
        for line in value.strip().splitlines()  # Of a private key, each line.
        for form in _forms(line.strip())
    }
    return sorted(secrets, key=len, reverse=True)


def _is_secret(name, value):
    if (
        # A path that exists is a place, whatever the variable is called.
        len(value) < _SHORTEST
        or name.upper() in _NEVER
        or (os.path.isabs(value) and os.path.exists(value))
    ):
        return False
    if _SECRET_NAME.search(name):
        return True
    return not _HARMLESS.fullmatch(name) and _LOOKS_SECRET.fullmatch(value) is not None


def _forms(value):
    """Returns how a value is written in a text, in JSON, by Python, in HTML and in an address."""
    # The first and the last line of a private key are the same for all keys.
    if len(value) < _SHORTEST or value.startswith("-----"):
        return ()
    quoted = (urllib.parse.quote(value, safe="", errors="replace"),
              urllib.parse.quote(value, errors="replace"),
              urllib.parse.quote_plus(value, errors="replace"))  # fmt: skip
    written = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    return {value, *written, repr(value)[1:-1], html.escape(value), *quoted}


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
        text = escaped(shortened(super().__str__(), LONGEST // 2, LONGEST // 2))
        half = LONGEST // 2
        return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"


class Mistakes:
    """Errors that are found one after another, and then raised together."""

    def __init__(self) -> None:
        self._errors: list[UserError] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Keeps a `UserError` of the block for `refuse`."""
        try:
            yield
        except UserError as error:
            self._errors.append(error)

    def refuse(self) -> None:
        """Raises what was collected.

        Raises:
          UserError: the only error, or a `UserErrors`.
        """
        if len(self._errors) > 1:
            raise UserErrors(self._errors)
        if self._errors:
            raise self._errors[0]


class UserErrors(UserError):
    """Several errors, of which each is shown in a line of its own.

    Attributes:
      errors: the errors, in the order of the input.
    """

    def __init__(self, errors: Iterable[UserError]):
        self.errors = tuple(errors)
        super().__init__(" ".join(map(str, self.errors)))


def lines(error: UserError) -> list[str]:
    """Returns the error as one line, or each of several as one."""
    return [str(each) for each in getattr(error, "errors", (error,))]


def escaped(text: str) -> str:
    """Returns one line in which unprintable characters are Python escapes, such as `\\x1b`.

    For text from outside in a message: it cannot move the cursor of a terminal, reorder a line or
    begin a new one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Returns text for a terminal: as `escaped`, but line breaks and tabs stay, and a space that
    does not break becomes one that does.

    For text that a model or somebody else made.
    """
    if text.isprintable():
        return text
    lines = re.split(r"([\n\t])", text.replace("\xa0", " "))
    return "".join(line if line in "\n\t" else escaped(line) for line in lines)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, at most 300 characters; its type if empty."""
    if isinstance(error, SystemExit):
        return f"it ends Python with {error.code!r}"[:300]
    text = str(error).strip()[: 2 * _MARGIN] or type(error).__name__
    return shortened(text.splitlines()[0], 300)


def needed_module(name: str, purpose: str) -> Any:
    """Imports a module of an extra.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        from sparse_dataflow.files import extras

        package = name.partition(".")[0]
        raise UserError(
            f"{purpose} needs the package {package}: {extras.installation(package)}."
        ) from error


def in_words(error: Exception) -> str:
    """Returns the words for an error of the machine rather than of the code; "" for others.

    A package that is not installed is one of the machine.
    """
    if isinstance(error, ImportError):
        from sparse_dataflow.files import extras

        if text := extras.missing(error, "This command"):
            return text
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
        # jax asserts that a platform has devices, without a text.
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
    return escaped(redact(f"{place}{reason}; {advice(error)}"))


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
