"""Tasks on Python source: the body of a docstring, the name of a called function."""

import ast
import textwrap
import warnings
from collections.abc import Iterator

import numpy as np

from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.tasks.cutting import (
    CHOICES,
    shuffled,
    shuffled_choices,
    words_before,
)
from sparse_dataflow.evaluation.tasks.items import Builder, Item


def docstring_body(tokenizer: Tokenizer, tokens: int) -> Builder:
    """Builds items that ask for the function body of a docstring's first paragraph.

    The other choices are bodies of the same file, truncated to the same number of tokens.
    """
    length = tokens // 2

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        bodies = []
        for function in ast.walk(_parse(document.text)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            summary = ast.get_docstring(function)
            if summary and len(function.body) > 1:
                ids = tokenizer.encode(_body(document.text, function))
                summary = summary.split("\n\n")[0].strip()
                if len(ids) >= length:
                    bodies.append((summary, tokenizer.decode(ids[:length])))
        for summary, body in shuffled(bodies, rng):
            context = f'"""{summary}"""'
            others = list(dict.fromkeys(b for s, b in shuffled(bodies, rng) if body != b))
            if len(others) >= CHOICES - 1 and len(tokenizer.encode(context)) <= tokens - length:
                texts = [f"\n{text}" for text in (body, *others[: CHOICES - 1])]
                yield shuffled_choices(context, texts, document, rng)

    return build


def call_name(tokenizer: Tokenizer, tokens: int) -> Builder:
    """Builds items that ask for the name of a called function or method.

    The other choices are names called in the same file, of the same kind (function or attribute).
    """

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        calls = [
            node.func
            for node in ast.walk(_parse(document.text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
        ]
        lines = document.text.split("\n")
        starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
        for function in shuffled(calls, rng):
            name = _name(function)
            column = len(
                lines[function.end_lineno - 1].encode()[: function.end_col_offset].decode()
            )
            end = int(starts[function.end_lineno - 1]) + column
            if document.text[end - len(name) : end + 1] != f"{name}(":
                continue
            others = {_name(f) for f in calls if type(f) is type(function)} - {name}
            if len(others) >= CHOICES - 1:
                texts = [name, *rng.choice(sorted(others), CHOICES - 1, replace=False).tolist()]
                context = words_before(document.text, end - len(name), tokenizer, tokens)
                if context.strip():
                    yield shuffled_choices(context, [f"{t}(" for t in texts], document, rng)

    return build


def _name(function):
    return function.id if isinstance(function, ast.Name) else function.attr


def _parse(text) -> ast.AST:
    """Returns an empty module where the text is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in the source
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _body(text, function):
    """Returns the dedented source of a function's body without its docstring."""
    lines = text.split("\n")[function.body[0].end_lineno : function.body[-1].end_lineno]
    return textwrap.dedent("\n".join(lines))
