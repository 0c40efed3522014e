"""Metrics that a user adds to a training: functions of a step, by name."""

import math
from collections.abc import Callable, Mapping

from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.loop import StepDone
from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.monitoring.presentation import COUNTERS, KNOWN, LEGAL_NAME

IN_USE = (*COUNTERS, *KNOWN)
"""Names that a user's metric cannot have, whatever the model."""


class UserMetrics:
    """Numbers that a user's functions make of each step.

    A function that fails at its first step ends the training.  One that fails later is not called
    again, and the training goes on; numbers that are not finite are then unknown ones.
    """

    def __init__(self, functions: Mapping[str, Callable[[StepDone], float]]):
        """Checks names and functions; calls none.

        Args:
          functions: name -> function (step) -> number.

        Raises:
          UserError: a name is illegal or in use, or its function cannot be called.
        """
        for name, function in functions.items():
            if not isinstance(name, str) or not LEGAL_NAME.fullmatch(name):
                raise UserError(
                    f"metrics has the name {name!r:.80}; legal: up to 60 letters, digits and _./- "
                    "that begin with a letter or _."
                )
            if name in IN_USE:
                raise UserError(
                    f"metrics has {name!r}, a name in use; legal: other names than "
                    f"{', '.join(IN_USE)}."
                )
            if not callable(function):
                raise UserError(
                    f"metrics[{name!r}] is {type(function).__name__}; legal: a function of a step "
                    "that returns a number."
                )
        self._functions, self._begun = dict(functions), False

    def __call__(self, step: StepDone) -> dict[str, float]:
        """Returns the number of each function.

        Raises:
          UserError: at the first step, a function fails, does not return a finite number, or has
            the name of a metric of the step.
        """
        numbers = {}
        # A copy of the items, as a function that fails is removed.
        for name, function in list(self._functions.items()):
            try:
                numbers[name] = self._number(name, function, step)
            except UserError as error:
                if not self._begun:
                    raise
                del self._functions[name]
                say(f"{error} The rows from step {step.number} on do not have it.")
        self._begun = True
        return numbers

    def _number(self, name, function, step):
        names = ", ".join(step.numbers)
        if name in step.numbers:
            raise UserError(
                f"metrics has {name!r}, which this model reports itself; legal: other names than "
                f"{names}."
            )
        try:
            value = function(step)
        # A function most often fails by the name of a number that this model does not report, so
        # the legal names are listed.
        except KeyError as error:
            raise UserError(
                f"metrics[{name!r}] reads {error}, which the steps of this model do not have; "
                f"legal: {names}."
            ) from error
        except Exception as error:  # The code of others raises any error.
            raise UserError(f"metrics[{name!r}] fails: {first_line(error)}.") from error
        shape = getattr(value, "shape", ())
        try:
            if shape or isinstance(value, str | bytes):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            words = f"an array of shape {shape}" if shape else f"{value!r:.60}"
            raise UserError(f"metrics[{name!r}] returns {words}; legal: one number.") from None
        if not self._begun and not math.isfinite(number):
            raise UserError(f"metrics[{name!r}] returns {number}; legal: a finite number.")
        return number
