"""Linear classes of libraries, which `sd.sparsify` replaces without a registration.

A row names its classes by text, so nothing of a library is imported.
"""

import functools
import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

_LOG = logging.getLogger(__name__)

Reader = Callable[[Any], tuple[str, nnx.Variable, nnx.Variable | None]]
"""(module) -> (equation, variable of the kernel, variable of the bias or None)."""


class Library(NamedTuple):
    """The linear classes of a library.

    Attributes:
      package: the name that pip installs.
      tested: its version that these classes were run with; "" for a library without releases.
      classes: full names of the classes.
      read: as in `sd.register_linear`.
    """

    package: str
    tested: str
    classes: tuple[str, ...]
    read: Reader


def _general(module):
    """Reads a kernel [*inputs, *outputs] that is contracted with the last axes of the input."""
    letters = "abcdefghijklmnop"
    count = len(module.in_features_shape)
    kernel = letters[: count + len(module.out_features_shape)]
    return f"...{kernel[:count]},{kernel}->...{kernel[count:]}", module.kernel, module.bias


def _matrix(module):
    """Reads a kernel [inputs, outputs] and a bias, which may be an array of zeros."""
    bias = module.bias if isinstance(module.bias, nnx.Variable) else None
    return "...i,ij->...j", module.kernel, bias


LIBRARIES = (
    Library(
        "google-tunix",
        "0.1.7",
        tuple(
            f"tunix.models.{family}.model.Einsum"
            for family in ("gemma", "gemma3", "gemma4", "llama3", "qwen2", "qwen3")
        ),
        lambda module: (module.einsum_str, module.w, None),
    ),
    Library("maxtext", "0.2.5", ("maxtext.layers.linears.DenseGeneral",), _general),
    Library(
        "easydel",
        "0.3.0",
        tuple(
            f"easydel.layers.linears._linear.{kind}ParallelLinear" for kind in ("", "Row", "Column")
        ),
        _matrix,
    ),
    Library(
        "jax-bonsai",
        "",
        tuple(f"bonsai.models.{family}.modeling.ShardedLinear" for family in ("llada", "qwen3_vl")),
        _matrix,
    ),
)


def library_reader(cls: type) -> Reader | None:
    """Returns how a class of a library is read; None for any other class."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    row = next((row for row in LIBRARIES if name in row.classes), None)
    if row is None:
        return None
    _say_untested(row.package, row.tested)
    return row.read


@functools.cache
def _say_untested(package, tested):
    """Logs once that a library has another version than the tested one."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return
    if tested and version != tested:
        _LOG.warning(
            "%s has version %s; its linears were tested with %s and are compared with their own "
            "results.",
            package, version, tested,
        )  # fmt: skip
