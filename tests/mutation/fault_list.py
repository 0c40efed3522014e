"""The faults of `faults.toml`, read and checked."""

import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("faults.toml")


class Fault(NamedTuple):
    """A small change to one file.

    Attributes:
      name: key in `faults.toml`.
      file: from ROOT on.
      old: text that stands in the file once.
      new: text that replaces it.
      why: what goes wrong without an error.
      tests: the nearest test files, nearest first.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: list[str]

    def source(self) -> str:
        """Returns the file's text with the fault.

        Raises:
          ValueError: the old text does not stand in the file exactly once.
          SyntaxError: the new text is no Python there.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its old text stands in {self.file} {count} times")
        changed = text.replace(self.old, self.new)
        compile(changed, self.file, "exec")
        return changed


def read() -> list[Fault]:
    """Returns all faults, in the order of the file."""
    with FILE.open("rb") as stream:
        return [Fault(name, **fields) for name, fields in tomllib.load(stream).items()]
