"""Counts the inputs that tests draw, boundary by boundary, for docs/evidence/surviving.md.

The rule is the same everywhere: an input is used, or refused with a UserError.
"""

import contextlib
import json
import os
import random
import re
import signal
from pathlib import Path

from sparse_dataflow.files.errors import UserError

FILE = Path(__file__).parent / "borders" / "drawn_inputs.json"
KINDS = (
    "command lines and flagfiles",
    "variables of launchers and jax",
    "JSON files of a run",
    "tensors",
    "tokenizers",
    "templates",
    "corpora",
    "tasks",
    "tasks of lm-eval",
    "connections",
    "HTTP requests",
    "damaged run folders",
    "folders of text",
    "environments of a process",
)
HEAD = (
    "| input | drawn | used | refused with a message | traceback or hang |\n|---|---|---|---|---|\n"
)
PLACE = re.compile(re.escape(HEAD) + r"(\|.*\n)*")
SECONDS = 120
"""An input that takes longer hangs, even on a busy machine."""


class DrawnInputs:
    """The inputs of a kind, counted where FAULTS names a file; fails at the first that is wrong.

    Attributes:
      draw: the source of the inputs; the same ones in each run.
    """

    def __init__(self, kind: str, few: int = 100, many: int = 2000):
        assert kind in KINDS
        self.draw = random.Random(kind)
        self._kind, self._used, self._refused = kind, 0, 0
        self._number = many if "FAULTS" in os.environ else few

    def __iter__(self):
        yield from range(self._number)
        if self._number >= 100:
            assert self._used and self._refused, "the inputs are all alike"
        if "FAULTS" in os.environ:
            rows = json.loads(FILE.read_text()) if FILE.exists() else {}
            rows[self._kind] = [self._number, self._used, self._refused]
            rows = {kind: rows[kind] for kind in KINDS if kind in rows}
            FILE.write_text(json.dumps(rows, indent=1) + "\n")

    @contextlib.contextmanager
    def one(self, what: object):
        """The use of one input; a UserError counts as refused, any other exception fails."""
        try:
            with no_hang():
                yield
            self._used += 1
        except UserError as error:
            text = str(error)
            assert 0 < len(text) < 3000 and "Traceback" not in text and text.isprintable(), text
            self._refused += 1
        except BaseException as error:
            error.add_note(f"the input: {what!r}"[:3000])
            raise


@contextlib.contextmanager
def no_hang():
    """Fails a block that takes longer than SECONDS."""

    def fail(number, frame):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def text(rows):
    """The counts as a table, in Markdown."""
    lines = []
    for kind in KINDS:
        drawn, used, refused = rows.get(kind, ["-"] * 3)
        lines.append(f"| {kind} | {drawn} | {used} | {refused} | {0 if kind in rows else '-'} |\n")
    return HEAD + "".join(lines)
