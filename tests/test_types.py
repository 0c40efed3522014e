"""Types say what a value is: `Any` becomes rarer, and `object` is what no code looks into."""

import ast
from pathlib import Path

import sparse_dataflow

MOST_ANY = 4.4
"""Uses of `Any` in 1,000 lines of code.  This limit only falls."""


def test_any_does_not_become_more_frequent():
    files = Path(sparse_dataflow.__file__).parent.rglob("*.py")
    sources = [path.read_text(encoding="utf-8") for path in files]
    lines = [line.strip() for source in sources for line in source.splitlines()]
    code = sum(bool(line) and not line.startswith("#") for line in lines)
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    uses = sum(getattr(node, "id", getattr(node, "attr", "")) == "Any" for node in nodes)
    assert 1000 * uses / code <= MOST_ANY
