"""The activations of an MLP: one table, which the model, the ops, their kernels and plans read.

Importing it loads no jax.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass(frozen=True)
class Activation:
    """An elementwise function of the hidden layer, or of its gate.

    Attributes:
      name: the value of `model.activation`.
      fused: whether kernels compute it between the products of an MLP.
      value_and_derivative: x -> (y, dy/dx), in x's dtype.  Kernels spend as long here as in the
        matrix unit, so use few operations that Pallas lowers on every chip: arithmetic, tanh and
        maximum.  None for a function that is not fused.
      exported: its names in the config.json of Hugging Face models, of which the first is written;
        none if they do not have it.
      function: x -> y outside of kernels, where it differs from `value_and_derivative`; its
        gradient is then autodiff's.  None to use `value_and_derivative`.
    """

    name: str = ""
    fused: bool | None = None
    value_and_derivative: Callable[[Any], tuple[Any, Any]] | None = None
    exported: tuple[str, ...] = ()
    function: Callable[[Any], Any] | None = None


ACTIVATIONS: dict[str, Activation] = {}
ACTIVATION_NAMES: list[str] = []
"""Legal values of `model.activation`."""


def register(row: Activation) -> None:
    """Adds an activation to the table.

    Raises:
      UserError: if it lacks a fact, which is named, or if its name is taken.
    """
    derived = row.value_and_derivative
    facts = {
        "name": isinstance(row.name, str) and row.name.isidentifier(),
        "fused": row.fused is not None,
        "value_and_derivative": callable(derived) or (derived is None and not row.fused),
        "function": callable(row.function) or (row.function is None and derived is not None),
    }
    if missing := next((name for name, present in facts.items() if not present), ""):
        raise UserError(
            f"The activation {row.name!r} lacks {missing}; legal: name, fused=True with "
            "value_and_derivative, or fused=False with function."
        )
    if row.name in ACTIVATIONS:
        raise UserError(
            f"The activation {row.name!r} exists; legal: a name that is not one of "
            f"{', '.join(ACTIVATIONS)}."
        )
    ACTIVATIONS[row.name] = row
    ACTIVATION_NAMES.append(row.name)


def fused_names() -> list[str]:
    """Returns the names of the activations that kernels compute."""
    return [name for name, activation in ACTIVATIONS.items() if activation.fused]


def _jax_function(name: str, **options: object) -> Callable[[Any], Any]:
    """Returns a function of `jax.nn`."""
    return lambda x: getattr(importlib.import_module("jax.nn"), name)(x, **options)


_SCALE, _CUBIC = 0.7978845608028654, 0.044715  # sqrt(2 / pi), and the paper's constant


def _gelu(x):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³)))."""
    jnp = x.__array_namespace__()
    square = x * x
    # tanh' = 1 - tanh², so the derivative of `half` is 2 half (1 - half) times that of tanh's
    # argument.
    half = 0.5 + 0.5 * jnp.tanh(x * (_SCALE + _SCALE * _CUBIC * square))
    value = x * half
    return value, half + value * (1 - half) * (2 * _SCALE + 6 * _SCALE * _CUBIC * square)


def _silu(x):
    """x sigmoid(x)."""
    jnp = x.__array_namespace__()
    # sigmoid(x) = (1 + tanh(x / 2)) / 2, with the operations that kernels have.
    half = 0.5 + 0.5 * jnp.tanh(0.5 * x)
    value = x * half
    return value, half + value * (1 - half)


def _relu(x):
    jnp = x.__array_namespace__()
    return jnp.maximum(x, 0), jnp.where(x > 0, 1.0, 0.0).astype(x.dtype)


def _squared_relu(x):
    jnp = x.__array_namespace__()
    positive = jnp.maximum(x, 0)
    return positive * positive, 2 * positive


for _row in (
    Activation("gelu", True, _gelu, ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")),
    Activation("gelu_exact", False, None, ("gelu",), _jax_function("gelu", approximate=False)),
    Activation("relu", True, _relu, ("relu",), _jax_function("relu")),
    Activation("relu2", True, _squared_relu, ("relu2",)),
    Activation("silu", True, _silu, ("silu", "swish"), _jax_function("silu")),
):
    register(_row)
