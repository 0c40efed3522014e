"""Linear classes of users' own: how each is a product of its input with a kernel."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.general import BlockSparseGeneral, Contraction, _terms
from sparse_dataflow.layers.libraries import Reader, library_reader

Writer = Callable[[Any, nnx.Variable, nnx.Variable | None], None]
"""(module, kernel, bias): puts variables of the kernel and the bias into a module."""

FLAX_LINEARS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
"""Modules that need no registration."""


@dataclasses.dataclass(frozen=True)
class _Registered:
    """How a class is read, and written if that is more than setting its two attributes."""

    read: Reader
    write: Writer | None


_registered: dict[type, _Registered] = {}


def register_linear(cls: type, *, read: Reader, write: Writer | None = None) -> None:
    """Makes `sd.sparsify` replace the modules of a class, which is a product with a kernel.

    The layer in its place has the public attributes of the module, and the call
    `layer(inputs, out_sharding=None)`.  `sd.densify` gives back a module of the class.

    Args:
      cls: a class of nnx modules.  Its call is an einsum of the input with one kernel, plus a bias
        along the new axes of the result.  It has no other variables.
      read: (module) -> (equation, kernel, bias).  The equation is that of `jnp.einsum` of the input
        and the kernel, such as "btd,dhk->bthk" or "...i,ij->...j"; an axis of the kernel is either
        summed with the input or new in the result.  The kernel and the bias are attributes of the
        module; the bias may be None.
      write: (module, kernel, bias) puts the variables of `sd.densify` into a module; by default
        they become the attributes that `read` returned.

    Raises:
      UserError: `cls` is no class of nnx modules, or is one that needs no registration.

    Examples:
        >>> class Projection(nnx.Module):
        ...     def __init__(self, shape, rngs):
        ...         self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), shape))
        ...     def __call__(self, x):
        ...         return jnp.einsum("btd,dhk->bthk", x, self.w[...])
        >>> sd.register_linear(Projection, read=lambda m: ("btd,dhk->bthk", m.w, None))
        >>> model = nnx.Sequential(Projection((64, 4, 16), nnx.Rngs(0)))
        >>> sd.sparsify(model, density=0.25, block=16).layers[0].linear.layout.density
        0.25
    """
    if not (isinstance(cls, type) and issubclass(cls, nnx.Module)):
        raise UserError(f"{cls!r} is no class of nnx modules; legal: a subclass of nnx.Module.")
    if cls in FLAX_LINEARS:
        raise UserError(f"nnx.{cls.__name__} needs no registration; legal: a class of your own.")
    _registered[cls] = _Registered(read, write)


def is_linear(module: object) -> bool:
    """Returns whether a module is a linear of flax, or of a registered class."""
    return isinstance(module, FLAX_LINEARS) or is_registered(module)


def is_registered(module: object) -> bool:
    """Returns whether a module is of a registered class."""
    return _registration(type(module)) is not None


def _registration(cls):
    if cls in _registered:
        return _registered[cls]
    reader = library_reader(cls)
    return reader and _Registered(reader, None)


def registration(cls: type) -> str:
    """Returns the line that registers a class."""
    return (
        f"sd.register_linear({cls.__name__}, "
        "read=lambda module: (equation, module.kernel, module.bias))"
    )


class BlockSparseRegistered(BlockSparseGeneral):
    """Drop-in for a module of a registered class.

    Attributes:
      shell: the module without its variables.
    """

    def __init__(
        self, linear: nnx.Module, contraction: Contraction, like: nnx.Module, names: tuple[str, str]
    ):
        super().__init__(linear, contraction, like, names)
        self.shell = nnx.static(_Shell(like, names))

    def dense(self) -> nnx.Module:
        """Returns the module of the class, with the kernel that `linear` has as an nnx.Linear."""
        module = self.shell.module()
        kernel, bias = self.contraction.kernel_and_bias(self.linear)
        write = _registration(type(module)).write
        if write is not None:
            write(module, kernel, bias)
            return module
        setattr(module, self.names[0], kernel)
        if bias is not None:
            setattr(module, self.names[1], bias)
        return module


class _Shell:
    """Makes a module without its variables; equal to those of equal modules."""

    def __init__(self, module, names):
        empty = nnx.clone(module)
        for name in names:
            if name:
                setattr(empty, name, nnx.data(None))
        self.graph, self.state = nnx.split(empty)

    def module(self):
        return nnx.merge(self.graph, self.state)

    def __eq__(self, other):
        return isinstance(other, _Shell) and self.graph == other.graph

    def __hash__(self):
        return hash(self.graph)


def read_linear(module: object) -> tuple[Contraction, nnx.Linear, tuple[str, str]]:
    """Returns the contraction, the nnx.Linear and the attributes of a registered module.

    Raises:
      UserError: what the reader returns is not how the module computes.
    """
    equation, kernel, bias = _read(module)
    names = _attribute(module, kernel, "kernel"), _attribute(module, bias, "bias")
    variables = [v for _, v in nnx.iter_graph(module) if isinstance(v, nnx.Variable)]
    if others := [v for v in variables if v is not kernel and v is not bias]:
        shapes = ", ".join(str(each.shape) for each in others)
        raise UserError(
            f"It has variables besides its kernel and its bias, of shapes {shapes}; legal: none."
        )
    rank = len(_terms(equation)[1]) if equation.count(",") == 1 == equation.count("->") else 0
    if kernel.ndim < rank:
        raise UserError(
            f"Its registered equation {equation} has a kernel of {rank} axes and its kernel has "
            f"shape {kernel.shape}; legal: an index for each axis."
        )
    contraction = Contraction.from_equation(equation, tuple(kernel.shape[kernel.ndim - rank :]))
    stack = kernel.shape[: kernel.ndim - rank]
    new = contraction.shape[contraction.count :]
    if bias is not None and tuple(bias.shape) != (*stack, *new):
        raise UserError(
            f"Its bias has shape {bias.shape} and its registered equation {equation} has new axes "
            f"{new} with a kernel of {kernel.shape}; legal: a bias of the new axes."
        )
    linear = contraction.linear(None, kernel, bias)
    linear.dtype = _checked_dtype(module, contraction, linear, len(stack))
    return contraction, linear, names


def _read(module):
    """Returns what the reader of a module returns, checked by type."""
    result = _registration(type(module)).read(module)
    if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], str)):
        raise UserError(
            f"Its registered reader returns {type(result).__name__}; legal: a tuple of the "
            "equation, the variable of the kernel, and the variable of the bias or None."
        )
    return result


def _attribute(module, variable, role):
    """Returns the attribute of a module that is a variable."""
    if variable is None:
        return ""
    names = [name for name, value in vars(module).items() if value is variable]
    if not names:
        raise UserError(f"Its registered reader returns a {role} that is none of its attributes.")
    return names[0]


def _checked_dtype(module, contraction, linear, stack_axes):
    """Returns the dtype of a linear that computes what a module computes.

    Raises:
      UserError: the two compute different results.
    """
    letters, kernel, _ = _terms(contraction.equation)
    sizes = dict(zip(kernel, contraction.kernel_shape))
    shape = [sizes.get(letter, 2) for letter in letters if letter != "."]
    module, linear = (_first(each, stack_axes) for each in (module, linear))
    x = jax.random.normal(jax.random.key(0), shape)
    leaves = jax.tree.leaves(nnx.state(module))
    abstract = any(isinstance(a, jax.core.Tracer | jax.ShapeDtypeStruct) for a in leaves)
    run = nnx.eval_shape if abstract else lambda function: function()
    words = f"Its registered equation {contraction.equation} of a kernel {contraction.kernel_shape}"
    try:
        expected = run(lambda: _call(module, x))
    except Exception as error:
        raise UserError(
            f"{words} takes inputs {x.shape}, and the module does not: {str(error)[:200]}"
        ) from error
    result = run(lambda: contraction.apply(linear, x))
    if result.dtype != expected.dtype:
        linear.dtype = expected.dtype
        result = run(lambda: contraction.apply(linear, x))
    if result.shape != expected.shape:
        raise UserError(
            f"{words} gives {result.shape} of inputs {x.shape}, and the module gives "
            f"{expected.shape}; legal: the equation of its call."
        )
    if abstract:
        return linear.dtype
    first, second = (np.asarray(each, np.float32) for each in (result, expected))
    # Loose: sums in another order differ by their rounding, a wrong equation by whole numbers.
    wide = jnp.finfo(jnp.result_type(expected.dtype, jnp.bfloat16)).eps
    tolerance = 4 * max(float(jnp.finfo(expected.dtype).eps), float(wide)) ** 0.5
    if np.abs(first - second).max() > tolerance * np.abs(second).max():
        raise UserError(
            f"{words} gives other numbers than the module, of inputs {x.shape}; legal: the "
            "equation of its call, and no more in it than a product and a bias."
        )
    return linear.dtype


def _call(module, x):
    """Returns what a module computes; some ask for the sharding of the result at each call."""
    options = inspect.signature(type(module).__call__).parameters
    return module(x, out_sharding=None) if "out_sharding" in options else module(x)


def _first(module, stack_axes):
    """Returns the first of a stack of modules, as a copy."""
    graph, state = nnx.split(module)
    first = (0,) * stack_axes
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[first] if first else leaf, state))
