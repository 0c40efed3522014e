"""nnx.LinearGeneral and nnx.Einsum as products with a matrix, which can be block-sparse."""

import dataclasses
import math
import string
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The product of an input with a kernel of any rank, as a product with a matrix.

    Attributes:
      order: axes of the kernel: those of the matrix's inputs, then those of its outputs.
      count: number of axes of the matrix's inputs.
      axis: axes of the input that an nnx.LinearGeneral sums over.
      equation: of an nnx.Einsum; empty for an nnx.LinearGeneral.
    """

    kernel_shape: tuple[int, ...]
    order: tuple[int, ...]
    count: int
    axis: tuple[int, ...] = ()
    equation: str = ""

    @classmethod
    def of(cls, module: Any) -> "Contraction":
        """Returns the contraction of an nnx.LinearGeneral or nnx.Einsum.

        Raises:
          UserError: it is no product with one matrix.
        """
        if isinstance(module, nnx.LinearGeneral):
            if module.batch_axis:
                raise UserError(
                    f"It has batch_axis={dict(module.batch_axis)}, so a matrix for each index; "
                    "legal: no batch_axis."
                )
            if module.dot_general_cls is not None:
                raise UserError("It has a dot_general_cls; legal: None, and a dot_general.")
            shape = (*module.in_features, *module.out_features)
            order, count = tuple(range(len(shape))), len(module.in_features)
            return cls(shape, order, count, axis=tuple(module.axis))
        if module.einsum_op is not jnp.einsum:
            raise UserError("It has an einsum_op of its own; legal: jnp.einsum.")
        inputs, kernel, outputs = _terms(module.einsum_str)
        summed = [letter for letter in kernel if letter in inputs]
        new = [letter for letter in outputs if letter in kernel]
        others = [letter for letter in inputs if letter not in kernel]
        if (
            sorted(summed + new) != sorted(kernel)
            or sorted(others + new) != sorted(outputs)
            or any(len(set(term)) < len(term) for term in (inputs, kernel, outputs))
            or "." in kernel
            or not (summed and new)
        ):
            raise UserError(
                f"Its equation {module.einsum_str} is no product with one matrix; legal: an index "
                "of the kernel is either summed with the input or new in the output."
            )
        order = tuple(kernel.index(letter) for letter in summed + new)
        return cls(tuple(module.kernel_shape), order, len(summed), equation=module.einsum_str)

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape in the order of the matrix."""
        return tuple(self.kernel_shape[axis] for axis in self.order)

    def linear(self, module: Any) -> nnx.Linear:
        """Returns the nnx.Linear of a module with this contraction; leading axes stay."""
        kernel, rank = module.kernel[...], len(self.shape)
        stack = kernel.shape[: kernel.ndim - rank]
        axes = [*range(len(stack)), *(len(stack) + axis for axis in self.order)]
        sides = math.prod(self.shape[: self.count]), math.prod(self.shape[self.count :])
        linear = module_like(nnx.Linear, *sides, like=module)
        linear.kernel = variable_like(module.kernel, kernel.transpose(axes).reshape(*stack, *sides))
        if module.bias is not None:
            linear.bias = variable_like(module.bias, module.bias[...].reshape(*stack, -1))
            linear.use_bias = True
        return linear

    def module(self, linear: nnx.Linear) -> nnx.LinearGeneral | nnx.Einsum:
        """Returns the module of a matrix: inverse of `linear`."""
        new = self.shape[self.count :]
        if self.equation:
            general = module_like(nnx.Einsum, self.equation, self.kernel_shape, None, like=linear)
            general.bias_shape = None if linear.bias is None else new
        else:
            features = self.shape[: self.count], new
            general = module_like(nnx.LinearGeneral, *features, axis=self.axis, like=linear)
            general.use_bias = linear.use_bias
        kernel = linear.kernel[...]
        stack = kernel.shape[:-2]
        back = [len(stack) + self.order.index(axis) for axis in range(len(self.order))]
        kernel = kernel.reshape(*stack, *self.shape).transpose(*range(len(stack)), *back)
        general.kernel = variable_like(linear.kernel, kernel)
        if linear.bias is not None:
            general.bias = variable_like(linear.bias, linear.bias[...].reshape(*stack, *new))
        return general

    def apply(self, linear: nnx.Module, inputs: jax.Array) -> jax.Array:
        """Applies a linear of the matrix as the module applies its kernel.

        Raises:
          UserError: the input has another shape.
        """
        inputs, rank = jnp.asarray(inputs), jnp.ndim(inputs)
        if self.equation:
            letters, kernel, outputs = _terms(self.equation, rank)
            summed = [letters.index(kernel[axis]) for axis in self.order[: self.count]]
        else:
            letters, kernel, outputs = "", "", ""
            summed = sorted(axis % rank for axis in self.axis)
        sizes = tuple(inputs.shape[axis] for axis in summed if axis < rank)
        if sizes != self.shape[: self.count] or len(letters) not in (0, rank):
            raise UserError(
                f"The input has shape {inputs.shape}; legal: {self.shape[: self.count]} along the "
                f"axes of {self.equation or self.axis}."
            )
        rest = [axis for axis in range(rank) if axis not in summed]
        kept = [inputs.shape[axis] for axis in rest]
        rows = inputs.transpose(*rest, *summed).reshape(*kept, math.prod(sizes))
        y = linear(rows).reshape(*kept, *self.shape[self.count :])
        if not self.equation:
            return y
        have = [letters[axis] for axis in rest] + [
            kernel[axis] for axis in self.order[self.count :]
        ]
        return y.transpose([have.index(letter) for letter in outputs])


class BlockSparseGeneral(nnx.Module):
    """Drop-in for an nnx.LinearGeneral or nnx.Einsum whose kernel is block-sparse as a matrix.

    Attributes:
      linear: `sd.BlockSparseLinear` of the matrix.
      contraction: how the kernel is a matrix.
    """

    def __init__(self, linear: nnx.Module, contraction: Contraction):
        self.linear, self.contraction = linear, contraction

    def __call__(self, inputs: jax.Array, out_sharding: None = None) -> jax.Array:
        """Applies the layer.

        Raises:
          UserError: the input has another shape, or `out_sharding` is not None.
        """
        if out_sharding is not None:
            raise UserError(
                "A block-sparse layer takes no out_sharding; legal: None, and "
                "jax.lax.with_sharding_constraint of its result."
            )
        return self.contraction.apply(self.linear, inputs)


def _terms(equation, rank=None):
    """Returns the letters of an equation's inputs, kernel and outputs.

    "." is the ellipsis, or for inputs of a known rank there are letters in its place.
    """
    operands, outputs = equation.replace(" ", "").replace("...", ".").split("->")
    terms = [*operands.split(","), outputs]
    if rank is not None:
        free = [letter for letter in string.ascii_letters if letter not in equation]
        rest = "".join(free[: max(0, rank - len(terms[0]) + 1)])
        terms = [term.replace(".", rest) for term in terms]
    return terms


def module_like(kind: type, *sizes: Any, like: Any, **options: Any) -> Any:
    """Returns an nnx module of zeros, without a bias, with the settings of the module `like`."""
    if kind is not nnx.Einsum:
        options["use_bias"] = False
        dot_general = getattr(like, "dot_general", None)
        options["dot_general"] = lax.dot_general if dot_general is None else dot_general
    elif getattr(like, "dot_general", lax.dot_general) is not lax.dot_general:
        raise UserError("An nnx.Einsum takes no dot_general; legal: lax.dot_general.")
    names = ("dtype", "param_dtype", "precision", "promote_dtype", "preferred_element_type")
    return kind(
        *sizes,
        kernel_init=nnx.initializers.zeros_init(),
        rngs=nnx.Rngs(0),
        **{name: getattr(like, name) for name in names},
        **options,
    )


def variable_like(variable: Any, value: jax.Array) -> nnx.Variable:
    """Returns a variable of the type and metadata of another.

    Raises:
      UserError: the metadata name axes and the value has others.
    """
    if not isinstance(variable, nnx.Variable):
        return nnx.Param(value)
    metadata = variable.get_metadata()
    axes = next((metadata[name] for name in _AXES if metadata.get(name) is not None), None)
    if axes is not None and value.ndim != variable.ndim and any(axis for axis in axes):
        raise UserError(
            f"A parameter of it is sharded over {tuple(axes)} by its metadata, and a block-sparse "
            "one has other axes; legal: no such metadata, and sd.partition_specs of the result."
        )
    named = {} if axes is None or value.ndim == variable.ndim else dict.fromkeys(_AXES)
    return type(variable)(value, **{k: v for k, v in metadata.items() if k not in named})


_AXES = ("out_sharding", "sharding_names", "sharding")
"""Metadata of a variable that name its axes, in this and earlier versions of flax."""
