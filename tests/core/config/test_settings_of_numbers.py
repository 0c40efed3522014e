"""Settings that are comma lists of numbers, and settings that may be auto."""

import dataclasses

import pytest

from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting


@dataclasses.dataclass(frozen=True)
class Options:
    counts: tuple[int, ...] = setting((1, 2), "Counts.", legal=AT_LEAST_ONE)
    shares: tuple[float, ...] | None = setting(None, "Shares.")
    name: str | None = setting(None, "Name.", choices=("one", "two"))


BY_NAME = {s.name: s for s in settings.settings(Options)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("counts", "4,2,4", (4, 2, 4)),
        ("counts", settings.text((1, 2)), (1, 2)),
        ("shares", settings.text((0.25, 1.0)), (0.25, 1.0)),
        ("shares", "0.5,1", (0.5, 1.0)),
        ("shares", "auto", None),
        ("name", "auto", None),
        ("name", "two", "two"),
    ],
)
def test_a_text_is_parsed(name, text, value):
    assert BY_NAME[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("counts", "4,x", "a comma list of whole numbers"),
        ("counts", "4,0", "each 1 or more"),
        ("counts", "", "a comma list of whole numbers"),
        ("counts", "1.5", "a comma list of whole numbers"),
        ("counts", "1,,2", "a comma list of whole numbers"),
        ("counts", "nan", "a comma list of whole numbers"),
        ("counts", "auto", "a comma list of whole numbers"),
        ("shares", "1,nan", "a comma list of numbers"),
        ("shares", "1,inf", "a comma list of numbers"),
        ("name", "three", "Legal: one, two"),
    ],
)
def test_an_illegal_text_is_refused(name, text, words):
    with pytest.raises(ValueError, match=words):
        BY_NAME[name].parse(text)


@pytest.mark.parametrize("value", [(), [1], 1, (1, "2"), (True,)])
def test_values_from_python_are_checked(value):
    assert "is not legal" in BY_NAME["counts"].value_refusal(value)


def test_a_default_is_written_as_on_a_command_line():
    shown = {s.name: settings.text(s.default) for s in BY_NAME.values()}
    assert shown == {"counts": "1,2", "shares": "auto", "name": "auto"}
