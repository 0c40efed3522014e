"""Code says why: long functions, scans, permutations and index maps have comments."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparse_dataflow

FILES = sorted(Path(sparse_dataflow.__file__).parent.rglob("*.py"))
LONG = 45
"""Lines of a function above which one asks why it does what it does."""

LEAST_COMMENTS = 35.0
"""Comment lines in 1,000 lines of code.  This limit only rises; its goal is 50."""

ORDERINGS = {
    "scan", "fori_loop", "while_loop", "associative_scan", "argsort", "lexsort", "take_along_axis",
    "searchsorted", "cumsum", "permutation", "moveaxis", "BlockSpec", "ppermute", "all_to_all",
    "psum_scatter",
}  # fmt: skip
"""Functions whose call is a scan, a permutation or an index map."""

DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma)")


def comment_lines(source: str) -> set[int]:
    """Lines with a comment for people."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = (token for token in tokens if token.type == tokenize.COMMENT)
    return {each.start[0] for each in comments if not DIRECTIVE.match(each.string)}


def calls_of(function: ast.FunctionDef) -> Iterator[str]:
    """Names that a function itself calls, without the functions in it."""
    nodes: list[ast.AST] = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", ""))
        nodes += ast.iter_child_nodes(node)


def unexplained(source: str) -> list[str]:
    """Functions that need a why and have none: no comment, or for an ordering no docstring of
    several lines either."""
    comments, names = comment_lines(source), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if comments & set(lines):
            continue
        described = len((ast.get_docstring(node) or "").splitlines()) > 1
        if len(lines) > LONG or (not described and ORDERINGS & {*calls_of(node)}):
            names.append(node.name)
    return names


def test_long_functions_and_orderings_say_why():
    named = {str(path): unexplained(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: names for path, names in named.items() if names} == {}


def test_comments_do_not_become_fewer():
    sources = [path.read_text(encoding="utf-8") for path in FILES]
    lines = [line.strip() for source in sources for line in source.splitlines()]
    code = sum(bool(line) and not line.startswith("#") for line in lines)
    comments = sum(len(comment_lines(source)) for source in sources)
    assert 1000 * comments / code >= LEAST_COMMENTS


LOOP = "def f(x):\n    {}\n    return lax.scan(step, 0, x)\n"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (LOOP.format("pass"), ["f"]),
        (LOOP.format("# Carried, so that one sum exists."), []),
        (LOOP.format('"""Returns sums.\n\n    One exists.\n    """'), []),
        (LOOP.format('"""Returns sums."""'), ["f"]),
        (LOOP.format("pass  # noqa: E501"), ["f"]),
        ("def f(x):\n" + "    x += 1\n" * LONG, ["f"]),
        ("def f(x):\n    # Why.\n" + "    x += 1\n" * LONG, []),
        ("def f(x):\n    x += 1\n", []),
        ("def f(x):\n    def g(y): return y.argsort()\n    return g\n", ["g"]),
    ],
)
def test_unexplained_functions_are_found(source, names):
    assert unexplained(source) == names
