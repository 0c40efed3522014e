"""Settings: fields of a config that carry their help and their legal values.

Everything that is generated from the configs (flags, help pages, JSON, checks) reads the fields
through this module and knows nothing else about them.  A setting is explained once, in its help;
"Attributes" of a config adds what a help page has no room for.
"""

import dataclasses
import difflib
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

import numpy as np

from sparse_dataflow.core.config import arguments
from sparse_dataflow.core.config.arguments import MOST_INTEGER, WHOLE_RANGE
from sparse_dataflow.files.errors import UserError

Config = TypeVar("Config")
BLOCK = int | str
"""Type of a block of weights: the side of a square, or inputs x outputs such as "1x16"."""
Legal = tuple[str, Callable[[float], bool]]
"""The words for the legal numbers, and their test."""

AT_LEAST_ZERO: Legal = ("0 or more", lambda n: n >= 0)
AT_LEAST_ONE: Legal = ("1 or more", lambda n: n >= 1)
AT_LEAST_TWO: Legal = ("2 or more", lambda n: n >= 2)
ABOVE_ZERO: Legal = ("above 0", lambda n: n > 0)
A_FRACTION: Legal = ("in (0, 1]", lambda n: 0 < n <= 1)
A_SHARE: Legal = ("in [0, 1)", lambda n: 0 <= n < 1)


def between(least: float, most: float) -> Legal:
    """Numbers from `least` to `most`; a bound keeps a typo from running or allocating for ever."""
    return f"from {least:,} to {most:,}", lambda n: least <= n <= most


def positive(most: float) -> Legal:
    """Numbers above 0 and up to `most`."""
    bound = f"{most:,}" if most < 10**9 else f"{most:g}"
    return f"above 0, up to {bound}", lambda n: 0 < n <= most


MOST_STEPS = 10**9
MOST_SEQUENCES = 2**22
MOST_SIZE = 2**22
"""Upper bound of widths, vocabulary and positions: far above any model; it stops an untrusted
config file from exhausting memory."""
MOST_EXPERTS = 2**12
"""Upper bound of the experts of a layer."""
MOST_SECONDS = 7 * 24 * 3600

FIXED, ADOPTED, FRESH, ASKED = "fixed", "adopted", "fresh", "asked"
"""How a resumed run treats a setting.

FIXED: it must keep the saved value. ADOPTED: it takes the saved value unless another is given.
FRESH: it ignores the saved value. ASKED: it takes the value from its command line alone, and is
refused if the saved one is not empty and none is given. A run folder may come from anybody, so a
place that is written or sent to is FRESH or ASKED.
"""

AUTO = "auto"
"""The text of None, which a setting may have whose default is None."""

_NUMBER_LISTS: dict[object, type] = {tuple[int, ...]: int, tuple[float, ...]: float}
_BOOLEANS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
_SHOWN = 60
_LONGEST_NAME, _LONGEST_PATH = 255, 3900
"""Bytes that common file systems allow, with room for the files of a folder."""


class Readable:
    """A config whose repr has the settings that differ from their defaults.

    Its dataclass has `repr=False`.
    """

    def __repr__(self):
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        defaults = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        changed = [f"{n}={v!r}" for n, v in shown.items() if v != defaults[n]]
        text = f"{type(self).__name__}({', '.join(changed)})"
        if len(text) <= 88 and not any("\n" in each for each in changed):
            return text
        inner = "".join(f"    {each},\n".replace("\n", "\n    ").rstrip(" ") for each in changed)
        return f"{type(self).__name__}(\n{inner})"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field that a user may set.

    Attributes:
      name: the field's name; in a `RunConfig` its path, such as "training.batch".
      type: int, float, bool, str, or a tuple of names or numbers, such as tuple[str, ...].
      default: its default; `dataclasses.MISSING` where the preset decides, None where the code
        that reads it decides.
      help: one or two sentences, with units.
      legal: the legal numbers, as a description and a test.
      choices: the legal names of a str or tuple; empty where any text is legal.
      resumed: FIXED, ADOPTED, FRESH or ASKED.
      path: whether a text may name a file or folder, so that `~` is the user's home.
      address: whether a path may be an address of an object store too.
      auto: the number that the text "auto" names; None where there is none.
    """

    name: str
    type: Any
    default: Any
    help: str
    legal: Legal | None = None
    choices: Sequence[str] = ()
    resumed: str = FIXED
    path: bool = False
    address: bool = False
    auto: int | None = None

    def parse(self, text: str) -> Any:
        """The value that a text names.

        Raises:
          ValueError: it names none; the message completes "NAME=TEXT ".
        """
        if self.default is None and text.lower() == AUTO:
            return None
        if self.auto is not None and text.lower() == AUTO:
            return self.auto
        if self.type is int or (self.type == BLOCK and text.isdecimal()):
            value: Any = _integer(text)
        elif self.type is float:
            value = _number(text)
        elif self.type is bool:
            value = _BOOLEANS.get(text.lower())
            if value is None:
                raise ValueError("is not legal: it must be yes or no.")
        elif self.type == tuple[str, ...]:
            value = _names(text, self.choices)
        elif self.type in _NUMBER_LISTS:
            value = self._numbers(text)
        elif self.choices:
            value = nearest_choice(self._spelled(text), self.choices)
        else:
            if reason := _not_utf8(text):
                raise ValueError(reason)
            value = expanded(_addresses().normal(text)) if self.path else text
        if reason := self.value_refusal(value) or self._missing_library(value):
            raise ValueError(reason)
        return value

    @property
    def is_switch(self) -> bool:
        """Whether --NAME and --noNAME are legal, as yes and no."""
        return self.type is bool or {"yes", "no"} <= set(self.choices)

    def _spelled(self, text: str) -> str:
        """The text, with yes or no for another spelling of them in a switch with more choices."""
        switched = _BOOLEANS.get(text.lower()) if self.is_switch else None
        return text if switched is None else "yes" if switched else "no"

    def _numbers(self, text: str) -> tuple[int | float, ...]:
        """The numbers of a comma list, in order."""
        kind = _NUMBER_LISTS[self.type]
        if self.default == () and text.lower() == "none":
            return ()
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise ValueError(self._no_numbers()) from None

    def _no_numbers(self) -> str:
        whole = "whole " if _NUMBER_LISTS[self.type] is int else ""
        each = f", each {self.legal[0]}" if self.legal else ""
        none = " or none" if self.default == () else ""
        return f"is not legal: it must be a comma list of {whole}numbers{each}{none}."

    def value_refusal(self, value: Any) -> str:
        """Why a value is not legal, completing "NAME=VALUE "; empty where it is."""
        if value is None and self.default is None:
            return ""
        if self.type == tuple[str, ...]:
            if not isinstance(value, tuple) or not all(isinstance(v, str) for v in value):
                return "is not legal: it must be a tuple of names."
            unknown = [name for name in value if self.choices and name not in self.choices]
            return f"is unknown. Legal: {', '.join(self.choices)}." if unknown else ""
        if self.type in _NUMBER_LISTS:
            element = dataclasses.replace(self, type=_NUMBER_LISTS[self.type])
            legal = isinstance(value, tuple) and not any(map(element.value_refusal, value))
            return "" if legal and (value or self.default == ()) else self._no_numbers()
        if self.type == BLOCK and block_sides(value) is None:
            sides = f"from 1 to {MOST_SIZE:,}"
            return f"is not legal: it must be the side of a square, {sides}, or INPUTSxOUTPUTS."
        if self.type in (int, float):
            if arguments.is_whole(value) and abs(int(value)) > MOST_INTEGER:
                limits = self.legal
                words = limits[0] if limits and not limits[1](value) else WHOLE_RANGE
                return f"is not legal: it must be {words}."
            is_number = arguments.is_whole if self.type is int else arguments.is_finite
            if not is_number(value):
                return f"is not legal: it must be {arguments.words(self.type)}."
            if self.legal and not self.legal[1](value):
                return f"is not legal: it must be {self.legal[0]}."
            # Programs compute with float32, in which a legal number may be zero or infinite.
            narrow = _in_float32(value) if self.type is float else value
            if self.legal and not self.legal[1](narrow):
                return f"is not legal: in float32 it is {narrow:g}, and must be {self.legal[0]}."
            return ""
        if not isinstance(value, self.type):
            return f"is not legal: it must be {arguments.words(self.type)}."
        if self.type is str and (reason := _not_utf8(value)):
            return reason
        if self.choices and value not in (*self.choices, self.default):
            return f"is unknown. Legal: {', '.join(self.choices)}."
        if self.path:
            refusals = (_addresses().address_refusal(p, self.address) for p in _parts(value))
            return next(filter(None, refusals), "")
        return ""

    def _missing_library(self, value: Any) -> str:
        if not (self.path and self.address):
            return ""
        return next(filter(None, map(_addresses().missing_library, _parts(value))), "")


def _addresses():
    from sparse_dataflow.files import addresses  # Which most settings do not need.

    return addresses


def _in_float32(value: float) -> float:
    """Returns what programs compute with; they take numbers below float32's normal ones for 0."""
    narrow = np.float32(value)
    return float(narrow) if abs(narrow) >= np.finfo(np.float32).tiny else 0.0


def block_sides(block: int | str) -> tuple[int, int] | None:
    """Returns the inputs and outputs of a value of the type BLOCK; None if it is not legal."""
    match = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", str(block), re.ASCII)
    sides = match and (int(match[1]), int(match[2] or match[1]))
    return sides if sides and 1 <= min(sides) <= max(sides) <= MOST_SIZE else None


def _parts(text: str) -> list[str]:
    """The members of a comma list of paths, such as a mixture of corpora; their weights stay."""
    return [part.strip() for part in text.split(",")] if "://" in text else [text]


def setting(
    default: object = dataclasses.MISSING,
    help: str = "",
    *,
    legal: Legal | None = None,
    choices: Sequence[str] = (),
    resumed: str = FIXED,
    path: bool = False,
    address: bool = False,
    auto: int | None = None,
) -> Any:
    """A dataclass field that is a setting; see `Setting` for the arguments."""
    if path and resumed == ADOPTED:
        raise TypeError("a place is FIXED if it is read alone, else FRESH or ASKED")
    extra = {
        "help": help, "legal": legal, "choices": choices, "resumed": resumed, "path": path,
        "address": address, "auto": auto,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata={"setting": extra})


def settings(kind: object) -> tuple[Setting, ...]:
    """Returns the settings of a config class, without those of its members."""
    return _settings(kind)


@functools.cache
def _settings(kind: Any) -> tuple[Setting, ...]:
    fields = [field for field in dataclasses.fields(kind) if "setting" in field.metadata]
    # A setting that may be None is of the type `X | None`, and X is what its text names.
    types = [f.type if f.default is not None else get_args(f.type)[0] for f in fields]
    return tuple(
        Setting(f.name, t, f.default, **f.metadata["setting"]) for f, t in zip(fields, types)
    )


def by_path(config: Any) -> dict[str, Setting]:
    """Path -> setting, for a config class whose members are configs, such as `RunConfig`."""
    return {
        f"{member.name}.{s.name}": dataclasses.replace(s, name=f"{member.name}.{s.name}")
        for member in dataclasses.fields(config)
        for s in settings(member.type)
    }


def validate(config: object, member: str = "") -> None:
    """Checks every setting of a config by itself; numbers of numpy become Python's.

    Raises:
      UserError: naming the setting and its legal values.
    """
    for s in settings(type(config)):
        original = getattr(config, s.name)
        value = arguments.plain_number(original)
        if reason := s.value_refusal(value):
            name = f"{member}.{s.name}" if member else s.name
            raise UserError(f"{name}={shown(value)} {reason}")
        if value is not original:
            number = s.type if s.type in (int, float) and value is not None else None
            object.__setattr__(config, s.name, number(value) if number else value)


def changed(config: Config, changes: Mapping[str, object]) -> Config:
    """A config with other values of some settings, by path; all members are checked again together.

    Args:
      config: such as a `RunConfig`.
      changes: path -> value, or text that `Setting.parse` takes where the type is not str.

    Raises:
      UserError: no such path, with the nearest one, or a value that is not legal.
    """
    legal = by_path(type(config))
    members: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        if path not in legal:
            raise UserError(f"There is no setting {shown(path)}; {hint(path, legal)}")
        if isinstance(value, str) and legal[path].type is not str:
            value = parsed(legal[path], value)
        member, _, name = path.partition(".")
        members.setdefault(member, {})[name] = value
    replaced = {
        member: dataclasses.replace(getattr(config, member), **values)
        for member, values in members.items()
    }
    return dataclasses.replace(config, **replaced)  # type: ignore[type-var]


def parsed(s: Setting, text: str, spelled: str = "") -> Any:
    """`Setting.parse`; on failure a UserError that begins with `spelled`, or the setting's name."""
    try:
        return s.parse(text)
    except ValueError as error:
        raise UserError(f"{spelled or s.name}={shown(text)} {error}") from None


def to_json(config: Any) -> dict[str, dict[str, Any]]:
    """{member: {setting: value}} of a config such as a `RunConfig`; `from_json` is its inverse."""
    return {
        member.name: {
            s.name: _plain(getattr(getattr(config, member.name), s.name))
            for s in settings(member.type)
        }
        for member in dataclasses.fields(config)
    }


def from_json(kind: type[Config], fields: Any) -> Config:
    """The config that `to_json` wrote, in this version or an earlier one.

    A setting that is missing takes its default, so a new setting's default is what the code did
    before.

    Raises:
      UserError: a member, or a setting without a default, is missing; one is unknown or not legal.
    """
    members: dict[str, Any] = {
        member.name: member.type
        for member in dataclasses.fields(kind)  # type: ignore[arg-type]
    }
    _same_names(fields, members, "part", required=members)
    values = {}
    for name, member in members.items():
        legal = {s.name: s for s in settings(member)}
        saved = without_removed(name, fields[name])
        required = [key for key, s in legal.items() if s.default is dataclasses.MISSING]
        _same_names(saved, legal, f"setting of {name}", required)
        arguments = {key: _tuple(legal[key], value) for key, value in saved.items()}
        # A part whose settings had other values in an earlier version reads them.
        values[name] = getattr(member, "from_file", member)(**arguments)
    return kind(**values)


REMOVED: dict[str, dict[str, object]] = {"model": {"guided": False}, "evolution": {"plateau": 0}}
"""Settings of earlier versions, with the values by which they did nothing; another is refused."""


def without_removed(section: str, fields: object) -> Any:
    """Returns saved settings of a section without those that an earlier version had to no effect.

    Args:
      section: such as "model".
      fields: JSON values, which are not trusted.
    """
    none = REMOVED.get(section, {})
    if not isinstance(fields, Mapping) or not none.keys() & fields.keys():
        return fields
    return {n: v for n, v in fields.items() if n not in none or v != none[n]}


def _same_names(fields, legal, noun, required):
    if not isinstance(fields, Mapping):
        raise UserError(f"a {noun} is {shown(fields)}; legal: an object.")
    for name in fields:
        if name not in legal:
            raise UserError(f"there is no {noun} {shown(name)}; {hint(name, legal)}")
    missing = [name for name in required if name not in fields]
    if missing:
        raise UserError(f"the {noun} {missing[0]!r} is missing")


def _tuple(s, value):
    return tuple(value) if isinstance(value, list) and get_origin(s.type) is tuple else value


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def text(value: object) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return AUTO
    return ",".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def shown(value: object) -> str:
    """`text`, cut after 60 characters."""
    whole = text(value)
    return whole if len(whole) <= _SHOWN else f"{whole[: _SHOWN - 3]}..."


def _not_utf8(text: str) -> str:
    """Why UTF-8 cannot encode a text; empty where it can."""
    if arguments.surrogate(text) is None:
        return ""
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return "is not UTF-8."
    return (
        f"is UTF-8, which Python reads as {sys.getfilesystemencoding()} in this locale (LC_ALL, "
        "LANG); set PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8."
    )


def expanded(text: str) -> str:
    """A path in which a leading `~` or `~user` is a home folder.

    Raises:
      ValueError: there is no such home, or no file system allows such a name; the message completes
        "NAME=TEXT ".
    """
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(
            "is not legal: there is no such home folder; set HOME, or write ./~ for that name."
        )
    if "\0" in path:
        raise ValueError("is not legal: it has a NUL character, which no file name may have.")
    # A mixture of corpora is several names or paths.
    paths = path.encode().split(b",")
    longest = max(len(name) for each in paths for name in each.split(b"/"))
    if longest > _LONGEST_NAME or max(map(len, paths)) > _LONGEST_PATH:
        raise ValueError(
            f"is too long; a name may have {_LONGEST_NAME} bytes, and a path {_LONGEST_PATH:,}."
        )
    return path


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("is not a whole number.") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number.") from None
    if not math.isfinite(value):
        raise ValueError("is not a finite number.")
    return value


def nearest_choice(text: str, legal: Sequence[str]) -> str:
    """The legal name that a text is, whatever its case.

    Raises:
      ValueError: it is none; the message names the nearest and all of them.
    """
    by_lower = {name.lower(): name for name in legal}
    if text.lower() in by_lower:
        return by_lower[text.lower()]
    near = did_you_mean(text, legal)
    listed = f"Legal: {', '.join(legal)}."
    raise ValueError(f"is unknown; {near} {listed}" if near else f"is unknown. {listed}")


def _names(text: str, legal: Sequence[str]) -> tuple[str, ...]:
    if text.lower() in ("", "none"):
        return ()
    legal = legal or tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if text.lower() == "all":
        return tuple(legal)
    chosen = {nearest_choice(name.strip(), (*legal, "all", "none")) for name in text.split(",")}
    if chosen & {"all", "none"}:
        raise ValueError("mixes all or none with names; give one or the other.")
    # In the order of the legal names, so that equal choices are equal values.
    return tuple(name for name in legal if name in chosen)


def did_you_mean(text: str, legal: Iterable[str], prefix: str = "") -> str:
    """ "did you mean NAME?" with the nearest legal name, or "" where none is near."""
    by_lower = {name.lower(): name for name in legal}
    near = difflib.get_close_matches(text.lower(), by_lower, n=1, cutoff=0.55)
    return f"did you mean {prefix}{by_lower[near[0]]}?" if near else ""


def hint(name: str, legal: Iterable[str]) -> str:
    """`did_you_mean`, by a path or by its last word alone; else how to list the legal names.

    It ends a sentence."""
    legal = list(legal)
    last = {path.rpartition(".")[2]: path for path in legal}
    word = name.rpartition(".")[2].lower()
    if word in last:
        return f"did you mean {last[word]}?"
    near = did_you_mean(name, legal)
    if not near:
        close = difflib.get_close_matches(word, last, n=1, cutoff=0.6)
        near = f"did you mean {last[close[0]]}?" if close else ""
    return near or "--help=all lists them."
