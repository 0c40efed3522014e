"""How a number is printed: three significant digits, SI prefixes for counts, binary ones for bytes.

Every function takes the values of one table row and gives their texts in one common unit, chosen by
the largest, so that cells of a row compare at a glance.  A value that is missing (None) or not
finite prints as `MISSING`.  A number and its unit are joined by no-break spaces.
"""

import math
import unicodedata
from collections.abc import Callable, Sequence

MISSING = "–"
_NBSP = "\N{NO-BREAK SPACE}"
_SI = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

Number = float | int | None
Row = Callable[[Sequence[Number]], list[str]]


def finite(value: Number) -> float | None:
    """`value` as a float; None where it is missing, NaN or infinite."""
    return None if value is None or not math.isfinite(value) else float(value)


def significant(value: float, digits: int = 3) -> str:
    """`value` at `digits` significant digits, thousands grouped, never with an exponent."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(decimals, 0)}f}".replace("-", "−")


def fixed(decimals: int) -> Row:
    """Printer of a row at a fixed number of decimals."""

    def row(values: Sequence[Number]) -> list[str]:
        return _each(values, lambda v: f"{v:,.{decimals}f}".replace("-", "−"))

    return row


def count(values: Sequence[Number], unit: str = "") -> list[str]:
    """Counts with one SI prefix for the row, as in "25.3 M"; below 1000 they stay whole."""
    power = _power(values, 1000, len(_SI))
    suffix = f"{_SI[power]}{unit}"

    def one(value: float) -> str:
        scaled = value / 1000**power
        text = str(int(value)) if power == 0 and value == int(value) else significant(scaled)
        return f"{text}{_NBSP}{suffix}".rstrip()

    return _each(values, one)


def flops(values: Sequence[Number]) -> list[str]:
    """Floating-point operations, as in "151 MFLOP"."""
    return count(values, "FLOP")


def size(values: Sequence[Number]) -> list[str]:
    """Bytes in one binary unit for the row, as in "1.37 GiB"."""
    power = _power(values, 1024, len(_BINARY))
    return _each(values, lambda v: f"{significant(v / 1024**power)}{_NBSP}{_BINARY[power]}")


def seconds(values: Sequence[Number]) -> list[str]:
    """A step's time in one unit for the row: "µs", "ms" or "s"."""
    largest = _largest(values)
    scale, unit = next(
        ((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if largest >= s * 0.9995), (1e-6, "µs")
    )
    return _each(values, lambda v: f"{significant(v / scale)}{_NBSP}{unit}")


def percent(values: Sequence[Number]) -> list[str]:
    """Fractions of one as percentages, as in "41.2%"."""
    return _each(values, lambda v: f"{significant(100 * v)}%")


def durations(values: Sequence[Number]) -> list[str]:
    """Wall-clock for people: "95.3 s", "12 min 5 s" or "3 h 12 min"."""
    return [text.replace(" ", _NBSP) for text in _each(values, _duration)]


def _duration(value: float) -> str:
    if value < 119.95:
        return f"{significant(value)} s"
    if round(value) < 7200:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def visible(text: str) -> str:
    """Any text as text that a page can hold: what cannot be seen or encoded is made visible.

    Control characters other than newline and tab become their Unicode control pictures (U+2400 on),
    bidirectional overrides are named so that they cannot reorder the page, and lone surrogates and
    non-characters, which UTF-8 or HTML refuse, become U+FFFD.
    """
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    code, category = ord(character), unicodedata.category(character)
    if character in "\n\t":
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return f"⟨U+{code:04X}⟩"
    if category in ("Cc", "Cs") or code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF:
        return "\ufffd"
    return character


def _each(values: Sequence[Number], one: Callable[[float], str]) -> list[str]:
    return [MISSING if (v := finite(value)) is None else one(v) for value in values]


def _largest(values: Sequence[Number]) -> float:
    return max((abs(v) for value in values if (v := finite(value)) is not None), default=0.0)


def _power(values: Sequence[Number], base: int, limit: int) -> int:
    """The prefix under which the row's largest value, once rounded, is below `base`."""
    largest = _largest(values)
    if largest < base - 0.5:
        return 0
    return next((p for p in range(1, limit) if largest / base**p < base - 0.5), limit - 1)
