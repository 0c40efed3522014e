"""Metrics that a user adds to a training: functions of a step, by name."""

import math
import re
from collections.abc import Callable, Mapping

from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.loop import StepDone
from sparse_dataflow.files.errors import UserError, first_line

ROW = (
    "kind", "step", "tokens", "seconds", "loss", "gradient_norm", "learning_rate",
    "tokens_per_second", "mfu",
)  # fmt: skip
"""Names that each row "train" has without a user's metrics."""

_LEGAL_NAME = re.compile(r"[A-Za-z_][\w./-]{0,59}", re.ASCII)


class UserMetrics:
    """Numbers that a user's functions make of each step, for its row.

    A function that fails at its first step ends the training; one that fails later is called no
    more, and the training goes on.
    """

    def __init__(self, functions: Mapping[str, Callable[[StepDone], float]]):
        """Checks names and functions; calls none.

        Args:
          functions: name -> function (step) -> its number.

        Raises:
          UserError: a name is illegal or in use, or its function cannot be called.
        """
        for name, function in functions.items():
            if not isinstance(name, str) or not _LEGAL_NAME.fullmatch(name):
                raise UserError(
                    f"metrics has the name {name!r:.80}; legal: up to 60 letters, digits and _./- "
                    "that begin with a letter or _."
                )
            if name in ROW:
                raise UserError(
                    f"metrics has {name!r}, which is in use; legal: another name than "
                    f"{', '.join(ROW)}."
                )
            if not callable(function):
                raise UserError(
                    f"metrics[{name!r}] is {type(function).__name__}; legal: a function of a step "
                    "that returns a number."
                )
        self._functions, self._checked = dict(functions), False

    def numbers(self, step: StepDone) -> dict[str, float]:
        """Returns the number of each function.

        Raises:
          UserError: at the first step, a function fails, returns no finite number, or has the name
            of a metric of the step.
        """
        numbers = {}
        for name, function in list(self._functions.items()):
            try:
                numbers[name] = self._number(name, function, step)
            except UserError as error:
                if not self._checked:
                    raise
                del self._functions[name]
                say(f"{error} It is left out from step {step.number} on.")
        self._checked = True
        return numbers

    def _number(self, name, function, step):
        if name in step.numbers:
            raise UserError(
                f"metrics has {name!r}, which a step of this model reports; legal: another name "
                f"than {', '.join(step.numbers)}."
            )
        try:
            value = function(step)
        except KeyError as error:
            raise UserError(
                f"metrics[{name!r}] reads {error}, which a step of this model does not report; "
                f"legal: {', '.join(step.numbers)}."
            ) from error
        except Exception as error:  # The code of others raises any error.
            raise UserError(f"metrics[{name!r}] fails ({first_line(error)}).") from error
        return self._checked_number(name, value)

    def _checked_number(self, name, value):
        shape = getattr(value, "shape", ())
        try:
            if shape != () or isinstance(value, str | bytes):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            words = f"an array of shape {shape}" if shape else f"{value!r:.60}"
            raise UserError(f"metrics[{name!r}] returns {words}; legal: one number.") from None
        if not self._checked and not math.isfinite(number):
            raise UserError(f"metrics[{name!r}] returns {number}; legal: a finite number.")
        return number
