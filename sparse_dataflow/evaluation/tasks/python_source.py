"""Tasks that Python source gives: the body that belongs to a docstring, the name of a call."""

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
    """Items that ask which function body belongs to a docstring's first paragraph; the other
    choices are bodies of the same file, cut to as many tokens."""
    length = tokens // 2

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        bodies = []
        for function in ast.walk(_parsed(document.text)):
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
    """Items that ask for the name of a function or method that is called at some place; the other
    choices are names that the same file calls in the same way."""

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        called = [
            node.func for node in ast.walk(_parsed(document.text)) if isinstance(node, ast.Call)
        ]
        calls = [f for f in called if isinstance(f, ast.Name | ast.Attribute)]
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


def _parsed(text) -> ast.AST:
    """An empty module where the text is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the source's own escapes
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _body(text, function):
    """Source of a function's body without its docstring, moved to the left."""
    lines = text.split("\n")[function.body[0].end_lineno : function.body[-1].end_lineno]
    return textwrap.dedent("\n".join(lines))
