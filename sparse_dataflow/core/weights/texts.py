"""Weights in words: `BlockSparse(values=f32[24,16,16], ...)`."""

import dataclasses
from typing import Any

import numpy as np

from sparse_dataflow.core.layouts.layout import LayoutTables


def text_of(node: Any) -> str:
    """Returns the repr of a dataclass with arrays as `f32[3,4]`, and without its defaults."""
    fields: Any = dataclasses.fields(node)
    values = {field.name: getattr(node, field.name) for field in fields}
    shown = [f.name for f in fields if values[f.name] is not f.default]
    return f"{type(node).__name__}({', '.join(f'{n}={array_text(values[n])}' for n in shown)})"


_KINDS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "bool"}


def array_text(value: Any) -> str:
    """Returns `f32[3,4]` for an array or its shape and dtype, else the repr."""
    if isinstance(value, LayoutTables):
        return f"tables {array_text(value.in_index)}"
    if not hasattr(value, "dtype"):
        return repr(value)
    name = np.dtype(value.dtype).name
    letters = name.rstrip("0123456789")
    kind = _KINDS.get(letters, letters) + name[len(letters) :]
    return f"{kind}[{','.join(map(str, value.shape))}]"
