"""Types of arguments and settings: which Python values each type takes, and the words for it.

`checked` makes the annotations of a public function its border: a number of numpy or jax becomes
Python's, and a value of another type is a `UserError` that names the argument. Settings use the
same table, so a value is legal on a command line, in a config and in a call alike.
"""

import collections.abc
import functools
import inspect
import math
import numbers
import pathlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sparse_dataflow.files.errors import UserError

Function = TypeVar("Function", bound=Callable)

_SHOWN = 60
_TEXTS = (str, bytes, bytearray)
_ARRAYS = ("jax", "jaxlib", "numpy")
"""Libraries of arrays; a function checks the shape and the dtype of its arrays itself."""

MOST_INTEGER = 2**63
WHOLE_RANGE = "a whole number from -2^63 to 2^63"
"""Words for the integers up to MOST_INTEGER."""


_WORDS: dict[object, tuple[str, str]] = {
    bool: ("yes or no", "yes or no"),
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    str: ("a text", "texts"),
    pathlib.Path: ("a path", "paths"),
    type(None): ("None", "None"),
}
"""Words for one value and for several."""


class _OtherTypeError(ValueError):
    """A value of another type; its text completes "it must be "."""


class _TooLargeError(_OtherTypeError):
    """An integer beyond MOST_INTEGER."""


def checked(function: Function) -> Function:
    """Returns the function with a check of its arguments by their annotations.

    Arguments without an annotation, and those annotated with Any, are passed on.
    """
    signature = inspect.signature(function)
    kinds = functools.cache(lambda: typing.get_type_hints(function))

    @functools.wraps(function)
    def call(*positional, **named):
        try:
            bound = signature.bind(*positional, **named)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        for name, value in bound.arguments.items():
            if name in kinds():
                bound.arguments[name] = argument(name, kinds()[name], value)
        return function(*bound.args, **bound.kwargs)

    return typing.cast(Function, call)


def argument(name: str, kind: object, value: object) -> Any:
    """Returns the value of an argument as its type has it.

    Raises:
      UserError: it is of another type; names the argument and the legal values.
    """
    try:
        return _converted(name, kind, value)
    except _OtherTypeError as error:
        raise UserError(f"{name}={_shown(value)} is not legal: it must be {error}.") from None


def text(name: str, value: object) -> str:
    """Returns a text that enters the project.

    Raises:
      UserError: it is no string, or UTF-8 cannot encode it.
    """
    return argument(name, str, value)


def surrogate(text: str) -> int | None:
    """Returns the place of the first unpaired surrogate, which UTF-8 cannot encode; None where a
    text has none."""
    try:
        _ = text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def plain_number(value: object) -> Any:
    """Returns a number of numpy or jax, or an array of one without axes, as Python's; any other
    value as it is."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def is_whole(value: object) -> bool:
    """Returns whether a value is a whole number, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Returns whether a value is a finite real number, and no bool."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value)


def words(kind: object, several: bool = False) -> str:
    """Returns the words for the values of a type, such as "a whole number" or "whole numbers"."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if _is_union(kind):
        each = dict.fromkeys(words(member, several) for member in members)
        return ", or ".join(each) if len(each) > 2 else " or ".join(each)
    if kind in _WORDS:
        return _WORDS[kind][several]
    if _is_list(origin or kind):
        of = f" of {words(members[0], several=True)}" if members else ""
        return ("lists" if several else "a list") + of
    if origin is not None and issubclass(origin, Mapping):
        of = f" to {words(members[1], several=True)}" if members else ""
        return ("mappings" if several else "a mapping") + of
    if collections.abc.Callable in (origin, kind):
        return "functions" if several else "a function"
    if kind.__module__.partition(".")[0] in _ARRAYS:
        return "arrays" if several else "an array"
    name = getattr(kind, "__name__", str(kind))
    return f"{name}s" if several else f"a {name}"


def _converted(name, kind, value):
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, TypeVar):
        return value if kind.__bound__ is None else _converted(name, kind.__bound__, value)
    if _is_union(kind):
        return _member(name, kind, value)
    if not isinstance(origin or kind, type) or kind in (Any, object) or origin is type:
        return value  # A form of `typing`.
    if kind.__module__.partition(".")[0] in _ARRAYS:
        legal, plain = hasattr(value, "shape"), value
    elif kind is bool:
        legal = isinstance(plain := plain_number(value), bool)
    elif kind is int:
        if legal := is_whole(plain := plain_number(value)):
            plain = int(plain)
            if abs(plain) > MOST_INTEGER:
                raise _TooLargeError(WHOLE_RANGE)
    elif kind is float:
        legal = is_finite(plain := plain_number(value))
    elif kind is str:
        legal, plain = isinstance(value, str), value
        if legal and (place := surrogate(value)) is not None:
            raise UserError(
                f"{name} has an unpaired surrogate, {value[place]!r} at character {place + 1:,}, "
                "which is half of a character; legal: texts that UTF-8 encodes."
            )
    elif _is_list(origin or kind):
        return _list(name, arguments[0] if arguments else Any, kind, value)
    elif origin is not None and issubclass(origin, Mapping):
        legal, plain = isinstance(value, Mapping), value
        if legal and len(arguments) == 2:
            plain = {k: argument(f"{name}[{k!r}]", arguments[1], v) for k, v in value.items()}
    elif collections.abc.Callable in (origin, kind):
        legal, plain = callable(value), value
    else:
        legal, plain = isinstance(value, origin or kind), value
    if not legal:
        raise _OtherTypeError(words(kind))
    return plain


def _member(name, kind, value):
    """Returns a value as the first member of a union that takes it has it."""
    members = typing.get_args(kind)
    if value is None and type(None) in members:
        return None
    too_large = None
    for member in members:
        try:
            return _converted(name, member, value)
        except _OtherTypeError as error:
            # That a number is too large says more than that it is of no member.
            too_large = error if isinstance(error, _TooLargeError) else too_large
    raise too_large or _OtherTypeError(words(kind))


def _list(name, element, kind, value):
    """Returns a list, or the tuple that it was; a text is no list of its letters."""
    if isinstance(value, (*_TEXTS, Mapping, collections.abc.Set)) or not isinstance(
        value, Iterable
    ):
        raise _OtherTypeError(words(kind))
    if isinstance(value, range):
        return value
    rows = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(rows, Iterable):  # An array without axes.
        raise _OtherTypeError(words(kind))
    rows = [argument(f"{name}[{number}]", element, each) for number, each in enumerate(rows)]
    return tuple(rows) if isinstance(value, tuple) else rows


def _is_union(kind):
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_list(kind):
    return kind in (Sequence, list, tuple)


def _shown(value):
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
