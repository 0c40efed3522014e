"""Formatting of numbers: three significant digits, SI prefixes for counts, binary ones for bytes.

Every formatter takes the values of one table row and returns their texts in a common unit, chosen
by the largest value. Missing (None) and non-finite values print as `MISSING`. No-break spaces join
a number and its unit.
"""

import math
import unicodedata
from collections.abc import Callable, Sequence

MISSING = "–"
_NBSP = "\N{NO-BREAK SPACE}"
_SI = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

Number = float | int | None
Formatter = Callable[[Sequence[Number]], list[str]]


LARGEST = 1e30
"""Largest number on a page: its squares and sums are finite, so that it can be drawn."""


def finite(value: Number) -> float | None:
    """Returns `value` as a float, cut to ±LARGEST; None where it is None, NaN or infinite.

    All numbers of files that a page shows or draws pass here.
    """
    if value is None or value != value or value in (math.inf, -math.inf):
        return None
    return float(max(-LARGEST, min(LARGEST, value)))


def significant(value: float) -> str:
    """Formats `value` with three significant digits, grouped thousands and no exponent."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")
    decimals = 2 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(decimals, 0)}f}".replace("-", "−")


def fixed(decimals: int) -> Formatter:
    """Returns a formatter with a fixed number of decimals."""

    def formatter(values: Sequence[Number]) -> list[str]:
        return _format_each(values, lambda v: f"{v:,.{decimals}f}".replace("-", "−"))

    return formatter


def count(values: Sequence[Number], unit: str = "") -> list[str]:
    """Formats counts with one SI prefix, e.g. "25.3 M"; counts below 1000 stay integers."""
    power = _power(values, 1000, len(_SI))
    suffix = f"{_SI[power]}{unit}"

    def format_count(value: float) -> str:
        scaled = value / 1000**power
        text = str(int(value)) if power == 0 and value == int(value) else significant(scaled)
        return f"{text}{_NBSP}{suffix}".rstrip()

    return _format_each(values, format_count)


def flops(values: Sequence[Number]) -> list[str]:
    """Formats floating-point operations, e.g. "151 MFLOP"."""
    return count(values, "FLOP")


def size(values: Sequence[Number]) -> list[str]:
    """Formats bytes in one binary unit, e.g. "1.37 GiB"."""
    power = _power(values, 1024, len(_BINARY))
    return _format_each(values, lambda v: f"{significant(v / 1024**power)}{_NBSP}{_BINARY[power]}")


def seconds(values: Sequence[Number]) -> list[str]:
    """Formats seconds in one unit: "µs", "ms" or "s"."""
    largest = _largest(values)
    scale, unit = next(
        ((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if largest >= s * 0.9995), (1e-6, "µs")
    )
    return _format_each(values, lambda v: f"{significant(v / scale)}{_NBSP}{unit}")


def percent(values: Sequence[Number]) -> list[str]:
    """Formats fractions of one as percentages, e.g. "41.2%"."""
    return _format_each(values, lambda v: f"{significant(100 * v)}%")


def durations(values: Sequence[Number]) -> list[str]:
    """Formats wall-clock seconds, e.g. "95.3 s", "12 min 5 s" or "3 h 12 min"."""
    return [text.replace(" ", _NBSP) for text in _format_each(values, _duration)]


def _duration(value: float) -> str:
    if value < 119.95:
        return f"{significant(value)} s"
    if round(value) < 7200:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def visible(text: str) -> str:
    """Returns `text` with invisible and unencodable characters made visible.

    Control characters other than newline and tab become Unicode control pictures (U+2400 on).
    Bidirectional overrides become their code points, so they cannot reorder the page. Lone
    surrogates and non-characters, which UTF-8 or HTML refuse, become U+FFFD.
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


def _format_each(values: Sequence[Number], format_value: Callable[[float], str]) -> list[str]:
    return [MISSING if (v := finite(value)) is None else format_value(v) for value in values]


def _largest(values: Sequence[Number]) -> float:
    return max((abs(v) for value in values if (v := finite(value)) is not None), default=0.0)


def _power(values: Sequence[Number], base: int, limit: int) -> int:
    """Returns the smallest power of `base` at which the largest value rounds to below `base`."""
    largest = _largest(values)
    if largest < base - 0.5:
        return 0
    return next((p for p in range(1, limit) if largest / base**p < base - 0.5), limit - 1)
