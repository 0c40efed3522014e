"""What `make test` leaves out of a test: most cases of a table, and two of three examples."""

import math

import hypothesis
import pytest


def some(cases, *chosen):
    """Returns the cases for `parametrize`; those that are not chosen are marked slow.

    Args:
      cases: values, tuples of values, or a dictionary of them by id.
      *chosen: a value, the first value of a tuple, or an id.
    """
    ids = list(cases) if isinstance(cases, dict) else [None] * len(cases)
    params, keys = [], []
    for name, case in zip(ids, cases.values() if isinstance(cases, dict) else cases, strict=True):
        values = case if isinstance(case, tuple) else (case,)
        keys.append(values[0] if name is None else name)
        marks = () if keys[-1] in chosen else pytest.mark.slow
        params.append(pytest.param(*values, marks=marks, id=None if name is None else str(name)))
    assert all(name in keys for name in chosen), f"{chosen} are not all in the table: {keys}"
    return params


def examples(number):
    """Returns max_examples of a costly property: a third of the number in `make test`."""
    fewer = hypothesis.settings.get_current_profile_name() == "fewer-draws"
    return math.ceil(number / 3) if fewer else number
