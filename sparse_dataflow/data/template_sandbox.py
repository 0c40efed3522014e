"""Jinja's sandbox with bounds on time and memory, as a template is text of somebody else."""

import re
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox

from sparse_dataflow.files.errors import UserError

MOST_STEPS = 10**5
"""Rounds of all loops and calls of macros in one rendering: some seconds."""

MOST_CHARACTERS = 2**26
"""Characters of all strings that one rendering makes."""

LARGEST = 10**5
"""Largest number that is an argument, such as a width."""

_STEP, _JOINED = "_sparse_dataflow_step", "_sparse_dataflow_joined"
_WIDE_FORMAT = re.compile(r"\*|\d{4}|\{[^}]*\{")


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Raises UserError in a rendering that takes too many steps or makes too long strings.

    A step is a round of a loop or a call of a macro. One thread at a time renders.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any):
        super().__init__(**options, finalize=self._made)
        self._steps = self._characters = 0
        self.globals |= {_STEP: self._step, _JOINED: self._joined}
        del self.globals["lipsum"]
        self.filters = {name: self._checked(name, call) for name, call in self.filters.items()}
        self.concat = self._output  # type: ignore[method-assign]

    def add_filter(self, name: str, function: Callable) -> None:
        """Adds a filter, within the bounds of all others."""
        self.filters[name] = self._checked(name, function)

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        kinds: tuple[Any, ...] = (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)
        for kind in kinds:
            for node in tree.find_all(kind):
                node.body.insert(0, _statement(_STEP, 1, node.lineno))
        tree.body.insert(0, _statement(_STEP, 0, 1))
        _replace_joins(tree)
        return tree

    def _step(self, count):
        self._steps += count
        if not count:  # A rendering begins.
            self._steps = self._characters = 0
        if self._steps > MOST_STEPS:
            raise UserError(f"it makes more than {MOST_STEPS:,} rounds of loops")

    def _joined(self, *parts):
        return self._made("".join(self._made(str(part)) for part in parts))

    def _output(self, pieces):
        return "".join(self._made(piece) for piece in pieces)

    def _made(self, value):
        """Counts the characters of a value; returns it."""
        if isinstance(value, str | list | tuple):
            self._characters += len(value)
            if self._characters > MOST_CHARACTERS:
                raise UserError(f"it makes more than {MOST_CHARACTERS:,} characters")
        return value

    def _check(self, name, arguments):
        """Raises UserError if a call with these arguments may make too long a string."""
        for argument in arguments:
            if isinstance(argument, int) and abs(argument) > LARGEST:
                raise UserError(f"it calls {name} with a number over {LARGEST:,}")
        if name == "replace" and len(arguments) > 2:
            text, old, new = (str(argument) for argument in arguments[:3])
            if len(new) * (text.count(old) if old else len(text) + 1) > MOST_CHARACTERS:
                raise UserError(f"it makes more than {MOST_CHARACTERS:,} characters")
        if name in ("format", "format_map") and _WIDE_FORMAT.search(str(arguments[0])):
            raise UserError("it formats with a width of more than three digits")

    def _checked(self, name, function):
        passed = getattr(function, "jinja_pass_arg", None)
        first = 1 if passed else 0

        def call(*arguments, **keywords):
            self._check(name, [*arguments[first:], *keywords.values()])
            return self._made(function(*arguments, **keywords))

        if passed:
            call.jinja_pass_arg = passed  # type: ignore[attr-defined]
        return call

    def call(self, context: Any, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """Calls a function or method of a template."""
        # The sandbox wraps `format`.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            self._check(function.__name__, [owner, *arguments, *keywords.values()])
        elif owner is not self:
            self._check(getattr(function, "__name__", "it"), [*arguments, *keywords.values()])
        return self._made(super().call(context, function, *arguments, **keywords))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes `left operator right`."""
        for text, count in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(count, int):
                if operator == "*" and len(text) * count > MOST_CHARACTERS:
                    raise UserError(f"it makes more than {MOST_CHARACTERS:,} characters")
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(1, right if operator == "**" else 1) > 1000:
                raise UserError("it makes too large a number")
        if operator == "%" and isinstance(left, str):
            self._check("format", [left])
        return self._made(super().call_binop(context, operator, left, right))


def _statement(function, argument, line):
    name = jinja2.nodes.Name(function, "load", lineno=line)
    call = jinja2.nodes.Call(name, [jinja2.nodes.Const(argument)], [], None, None, lineno=line)
    return jinja2.nodes.ExprStmt(call, lineno=line)


def _replace_joins(node):
    """Puts calls of the bounded join in the place of `left ~ right`."""
    for field, value in node.iter_fields():
        values = value if isinstance(value, list) else [value]
        for number, child in enumerate(values):
            if not isinstance(child, jinja2.nodes.Node):
                continue
            _replace_joins(child)
            if isinstance(child, jinja2.nodes.Concat):
                name = jinja2.nodes.Name(_JOINED, "load", lineno=child.lineno)
                call = jinja2.nodes.Call(name, child.nodes, [], None, None, lineno=child.lineno)
                if isinstance(value, list):
                    value[number] = call
                else:
                    setattr(node, field, call)
