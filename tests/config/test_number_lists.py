"""Settings that are lists of numbers."""

import pytest

from sparse_dataflow.config.settings import AT_LEAST_ONE, Setting, text

WIDTHS = Setting("widths", tuple[int, ...], (1, 2), "Widths.", legal=AT_LEAST_ONE)
SHARES = Setting("shares", tuple[float, ...], (0.5,), "Shares.")


def test_numbers_keep_their_order_and_come_once():
    assert WIDTHS.parse("4,1,4") == (4, 1)
    assert SHARES.parse("1,0.5") == (1.0, 0.5)


def test_the_text_of_numbers_is_parsed_to_the_same():
    assert WIDTHS.parse(text((1, 2))) == (1, 2)
    assert SHARES.parse(text((0.25, 1.0))) == (0.25, 1.0)


@pytest.mark.parametrize("words", ["", "1,x", "0,1", "1.5", "1,,2", "nan"])
def test_what_is_no_list_of_legal_numbers_is_named(words):
    with pytest.raises(ValueError, match="is not legal: it must be"):
        WIDTHS.parse(words)


def test_infinite_numbers_are_refused():
    with pytest.raises(ValueError, match="is not legal: it must be"):
        SHARES.parse("1,inf")


@pytest.mark.parametrize("value", [(), [1], 1, (1, "2"), (True,)])
def test_values_from_python_are_checked(value):
    assert "is not legal" in WIDTHS.refusal(value)
