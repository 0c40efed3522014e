"""Counts the names whose words hide what they mean (the vague words of the project's style).

python tests/names.py                     share of vague names, and the commonest of them
python tests/names.py sparse_dataflow/data --list     each of them, with its file and line
"""

import ast
import collections
import pathlib
import re
import sys
from collections.abc import Iterator

from places import ROOT

PLACES = ("sparse_dataflow", "experiments", "launch", "tests")
VAGUE = frozenset(
    "found made kept told asked own owns part parts one ones known wanted begun laid gone here "
    "there things thing what whose taken given held said says heard come came goes went "
    "begin".split()
)


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields (name, line) of everything that a module defines: functions, classes, arguments,
    variables and attributes that it assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno


def hides_its_noun(name: str) -> bool:
    """Whether a name begins with "of_": `of_layer` may be its model, its metrics or its index."""
    return name.lstrip("_").startswith("of_")


def vague(name: str) -> bool:
    """Whether a name, leading underscores apart, has a vague word or hides its noun."""
    if hides_its_noun(name):
        return True
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name.replace("held_out", ""))
    # A test's name is a sentence about a property; its words are read together.
    return not name.startswith("test_") and any(word.lower() in VAGUE for word in words)


def survey(*places: str | pathlib.Path) -> tuple[int, list[tuple[str, pathlib.Path, int]]]:
    """Returns (number of distinct names a file, summed; the vague ones as (name, file, line))."""
    total, matches = 0, []
    for place in places:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            first_lines: dict[str, int] = {}
            for name, line in names(ast.parse(file.read_text())):
                first_lines.setdefault(name, line)
            total += len(first_lines)
            matches += [(n, file.relative_to(ROOT), k) for n, k in first_lines.items() if vague(n)]
    return total, matches


def main() -> None:
    """Prints what the module docstring says."""
    arguments = [a for a in sys.argv[1:] if a != "--list"]
    total, matches = survey(*(arguments or PLACES))
    print(f"{len(matches)} of {total} names are vague: {len(matches) / max(total, 1):.2%}")
    if "--list" in sys.argv:
        for name, file, line in matches:
            print(f"{file}:{line}: {name}")
    else:
        for name, count in collections.Counter(n for n, *_ in matches).most_common(20):
            print(f"{count:5} {name}")


if __name__ == "__main__":
    main()
