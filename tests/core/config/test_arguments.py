"""Which Python values an annotated argument takes, and the sentence for the others."""

import collections
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.config.arguments import argument, checked, surrogate
from sparse_dataflow.files.errors import UserError

Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, np.uint8(9), 9),
        (int, jnp.int32(-4), -4),
        (int, np.array(12), 12),
        (float, 3, 3),
        (float, np.float16(0.25), 0.25),
        (bool, np.bool_(True), True),
        (int | None, None, None),
        (str | pathlib.Path, pathlib.Path("a"), pathlib.Path("a")),
        (Sequence[str], ("one", "two"), ("one", "two")),
        (Sequence[str], {"one": 1}.keys() and ["one"], ["one"]),
        (Sequence[int], np.arange(3), [0, 1, 2]),
        (int | Sequence[int], range(2, 4), range(2, 4)),
        (Sequence[str | Sequence[int]], ["text", np.array([7])], ["text", [7]]),
        (Mapping[str, float], {"mlp_in": np.float32(0.5)}, {"mlp_in": 0.5}),
        (Callable[[str], int], len, len),
        (Pair, Pair(1, "b"), Pair(1, "b")),
    ],
)
def test_a_legal_value_is_the_same_value_of_python(kind, value, expected):
    converted = argument("name", kind, value)
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (int, "12", "name='12' is not legal: it must be a whole number."),
        (int, True, "must be a whole number"),
        (int, 2.0, "must be a whole number"),
        (int, 2**70, r"must be a whole number from -2\^63 to 2\^63\."),
        (int | None, -(2**64), r"must be a whole number from -2\^63 to 2\^63\."),
        (int | Sequence[int] | None, 2**70, r"must be a whole number from -2\^63 to"),
        (Sequence[int], [1, 2**99], r"name\[1\]=.* must be a whole number from -2\^63 to"),
        (int, np.ones(2), "must be a whole number"),
        (float, float("inf"), "must be a finite number"),
        (bool, 1, "must be yes or no"),
        (str, b"text", "must be a text"),
        (Sequence[str], "text", "must be a list of texts"),
        (Sequence[str], b"text", "must be a list of texts"),
        (Sequence[str], {"text"}, "must be a list of texts"),
        (Sequence[str], [None], r"name\[0\]=None is not legal: it must be a text"),
        (Sequence[str] | None, "text", "must be a list of texts or None"),
        (int | Sequence[int] | None, "7", "a whole number, or a list of whole numbers, or None"),
        (Sequence[Sequence[int]], [[1], [2, 0.5]], r"name\[1\]\[1\]=0.5 .* a whole number"),
        (Mapping[str, float], {"qkv": "1"}, r"name\['qkv'\]='1' .* a finite number"),
        (Callable, 3, "must be a function"),
        (jax.Array, [1.0], "must be an array"),
        (Pair, (1, "b"), "must be a Pair"),
        (str, "\N{GRINNING FACE} \udead", "unpaired surrogate, .* at character 3"),
        (Sequence[str], ["a", "\ud800"], r"name\[1\] has an unpaired surrogate"),
    ],
)
def test_another_value_is_refused_with_the_name_and_the_legal_type(kind, value, words):
    with pytest.raises(UserError, match=words):
        argument("name", kind, value)


@given(st.text(st.characters(exclude_categories=())))
def test_a_surrogate_is_found_where_utf_8_cannot_encode(text):
    replaced = text.encode(errors="replace").decode()
    places = [n for n, (old, new) in enumerate(zip(text, replaced)) if old != new]
    assert surrogate(text) == (places[0] if places else None)


def test_a_checked_function_takes_its_defaults_and_gets_numbers_of_python():
    @checked
    def function(count: int, *, texts: Sequence[str] = (), other=None) -> tuple:
        """Documented."""
        return count, texts, other

    assert function(np.int8(3), other=[1]) == (3, (), [1])
    assert function.__doc__ == "Documented." and function.__name__ == "function"
    with pytest.raises(UserError, match="count=None"):
        function(None)
    with pytest.raises(TypeError, match="missing"):
        function()
