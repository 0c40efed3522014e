import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsed import parse

from sparse_dataflow.reporting import quantities


def unit(text: str) -> str:
    return "".join(re.findall(r"[A-Za-zµ%]", text))


@pytest.mark.parametrize(
    "formatter", [quantities.count, quantities.flops, quantities.size, quantities.seconds]
)
@given(values=st.lists(st.floats(1e-3, 1e17), min_size=1, max_size=3))
def test_a_row_prints_its_values_in_one_unit_to_three_digits(formatter, values):
    texts = formatter(values)
    assert [parse(t) for t in texts] == pytest.approx(values, rel=5.01e-3)
    assert len(set(map(unit, texts))) == 1
    assert not any(" " in t for t in texts), "a line break can separate number and unit"


@given(st.floats(1e-3, 1e23))
def test_a_value_has_at_most_three_digits_before_the_point(value):
    (text,) = quantities.count([value])
    assert len(re.match(r"[\d,]+", text)[0].replace(",", "")) <= 3


@given(st.floats(0, 1e7))
def test_durations_print_the_time(value):
    tolerance = 30 if value > 7000 else 0.5
    assert parse(quantities.durations([value])[0]) == pytest.approx(value, abs=tolerance)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_missing_values_print_as_a_dash(value):
    formatters = (quantities.count, quantities.size, quantities.seconds, quantities.percent,
            quantities.durations, quantities.fixed(3))  # fmt: skip
    for formatter in formatters:
        assert formatter([value]) == [quantities.MISSING]
        assert formatter([value, 1.0])[0] == quantities.MISSING


def test_examples():
    assert quantities.count([7]) == ["7"]
    assert quantities.count([999_600]) == ["1.00\u00a0M"]
    assert quantities.count([999.7]) == ["1.00\u00a0k"]
    assert quantities.size([2**30 * 1.5, 2**28]) == ["1.50\u00a0GiB", "0.250\u00a0GiB"]
    assert quantities.percent([0.412]) == ["41.2%"]
    assert quantities.durations([150]) == ["2\u00a0min\u00a030\u00a0s"]
    assert quantities.significant(0.00012345) == "0.000123"
    assert quantities.significant(0.09999) == "0.100"


@given(st.text(st.characters(codec=None)))
def test_visible_text_is_encodable_without_invisible_characters(text):
    visible = quantities.visible(text)
    visible.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", visible)
    assert quantities.visible(visible) == visible
    assert visible == text or not text.isascii() or not text.isprintable()


def test_surrogates_and_control_characters_are_replaced():
    assert quantities.visible("a\ud800b\ufffe") == "a\ufffdb\ufffd"
    assert quantities.visible("\x00\x1b[31m\r\n\t") == "␀␛[31m␍\n\t"
