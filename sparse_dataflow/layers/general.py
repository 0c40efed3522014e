"""Linears whose kernel has any rank as products with a matrix, which can be block-sparse."""

import dataclasses
import math
import string
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.axis_names import constrained, folded, over_auto_axes, unfolded
from sparse_dataflow.layers.dense_kernel import DerivedArray


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The product of an input with a kernel of any rank, as a product with a matrix.

    Attributes:
      order: axes of the kernel: those of the matrix's inputs, then those of its outputs.
      count: number of axes of the matrix's inputs.
      axis: axes of the input that an nnx.LinearGeneral sums over.
      equation: of inputs and kernel, as of an nnx.Einsum; empty for an nnx.LinearGeneral.
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
        return cls.from_equation(module.einsum_str, tuple(module.kernel_shape))

    @classmethod
    def from_equation(cls, equation: str, kernel_shape: tuple[int, ...]) -> "Contraction":
        """Returns the contraction of an equation of inputs and a kernel.

        Raises:
          UserError: it is no product with one matrix.
        """
        if equation.count(",") != 1 or equation.count("->") != 1:
            raise UserError(f"{equation!r} is no equation; legal: such as 'btd,dhk->bthk'.")
        inputs, kernel, outputs = _terms(equation)
        # Indices by what becomes of them: summed with the kernel, new from it, and passed on.
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
                f"Its equation {equation} is no product with one matrix; legal: an index "
                "of the kernel is either summed with the input or new in the output."
            )
        if len(kernel) != len(kernel_shape):
            raise UserError(
                f"Its equation {equation} has a kernel of {len(kernel)} axes and the kernel has "
                f"shape {kernel_shape}; legal: an index for each axis."
            )
        order = tuple(kernel.index(letter) for letter in summed + new)
        return cls(kernel_shape, order, len(summed), equation=equation)

    def with_equation(self, equation: str | None) -> "Contraction":
        """Returns the contraction by the equation of a call, which has the same matrix.

        Raises:
          UserError: it sums over other axes of the kernel.
        """
        if equation is None or equation == self.equation:
            return self
        other = Contraction.from_equation(equation, self.kernel_shape)
        if set(other.order[: other.count]) != set(self.order[: self.count]):
            raise UserError(
                f"The equation {equation} sums over other axes of the kernel than {self.equation}; "
                "legal: the same axes, as the stored blocks are of that matrix."
            )
        return dataclasses.replace(self, equation=equation)

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape in the order of the matrix."""
        return tuple(self.kernel_shape[axis] for axis in self.order)

    @property
    def new(self) -> tuple[int, ...]:
        """The shape of a bias: axes of the kernel that are new in the result."""
        return self.shape[self.count :]

    @property
    def sides(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return math.prod(self.shape[: self.count]), math.prod(self.new)

    def to_matrix(self, kernel: Any) -> Any:
        """Returns a kernel, or a mask of one, as a matrix [..., in, out]; leading axes stay."""
        # Axes of a stack of layers come first, and stay there.
        lead = kernel.ndim - len(self.order)
        axes = [*range(lead), *(lead + axis for axis in self.order)]
        return kernel.transpose(axes).reshape(*kernel.shape[:lead], *self.sides)

    def to_kernel(self, matrix: Any) -> Any:
        """Returns a matrix as a kernel: inverse of `to_matrix`."""
        lead = matrix.ndim - 2
        # The inverse of the permutation `order`.
        axes = [*range(lead), *(lead + self.order.index(axis) for axis in range(len(self.order)))]
        return matrix.reshape(*matrix.shape[:lead], *self.shape).transpose(axes)

    def linear(self, module: Any, kernel: Any = None, bias: Any = None) -> nnx.Linear:
        """Returns the nnx.Linear of a module with this contraction; leading axes stay.

        Args:
          module: an nnx.LinearGeneral or nnx.Einsum, whose settings the linear has; or None.
          kernel: variable of the kernel; None for the module's.
          bias: variable of the bias; None for the module's.
        """
        if module is not None:
            kernel, bias = module.kernel, module.bias
        array, rank = over_auto_axes(kernel[...]), len(self.shape)
        stack = array.shape[: array.ndim - rank]
        lead = [(axis,) for axis in range(len(stack))]
        axes = [len(stack) + axis for axis in self.order]
        linear = module_like(nnx.Linear, *self.sides, like=module)
        matrix = self.to_matrix(array)
        linear.kernel = folded(kernel, matrix, [*lead, axes[: self.count], axes[self.count :]])
        if bias is not None:
            new = range(len(stack), bias.ndim)
            flat = over_auto_axes(bias[...]).reshape(*stack, -1)
            linear.bias = folded(bias, flat, [*lead, new])
            linear.use_bias = True
        return linear

    def kernel_and_bias(self, linear: nnx.Linear) -> tuple[nnx.Variable, nnx.Variable | None]:
        """Returns the variables of the module that has a linear as its matrix."""
        kernel = self.to_kernel(over_auto_axes(linear.kernel[...]))
        if linear.bias is None:
            return unfolded(linear.kernel, kernel), None
        bias = over_auto_axes(linear.bias[...])
        bias = bias.reshape(*bias.shape[:-1], *self.new)
        return unfolded(linear.kernel, kernel), unfolded(linear.bias, bias)

    def module(self, linear: nnx.Linear) -> nnx.LinearGeneral | nnx.Einsum:
        """Returns the module of a matrix: inverse of `linear`."""
        new = self.new
        if self.equation:
            general = module_like(nnx.Einsum, self.equation, self.kernel_shape, None, like=linear)
            general.bias_shape = None if linear.bias is None else new
        else:
            features = self.shape[: self.count], new
            general = module_like(nnx.LinearGeneral, *features, axis=self.axis, like=linear)
            general.use_bias = linear.use_bias
        general.kernel, bias = self.kernel_and_bias(linear)
        if bias is not None:
            general.bias = bias
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
            # In the order of the input's axes, as flax has it, however `axis` lists them.
            summed = sorted(axis % rank for axis in self.axis)
        sizes = tuple(inputs.shape[axis] for axis in summed if axis < rank)
        if sizes != self.shape[: self.count] or len(letters) not in (0, rank):
            raise UserError(
                f"The input has shape {inputs.shape}; legal: {self.shape[: self.count]} along the "
                f"axes of {self.equation or self.axis}."
            )
        rest = [axis for axis in range(rank) if axis not in summed]
        kept = [inputs.shape[axis] for axis in rest]
        # The summed axes come last, as the inputs of the matrix.
        rows = inputs.transpose(*rest, *summed).reshape(*kept, math.prod(sizes))
        y = linear(rows).reshape(*kept, *self.shape[self.count :])
        if not self.equation:
            return y
        # The product has the other axes of the input, then those of the kernel; the equation may
        # order them in any way.
        have = [letters[axis] for axis in rest] + [
            kernel[axis] for axis in self.order[self.count :]
        ]
        return y.transpose([have.index(letter) for letter in outputs])


class BlockSparseGeneral(nnx.Module):
    """Drop-in for a module that is a product with a kernel, which is block-sparse as a matrix.

    It has the module's public attributes.  Its kernel and bias can be read and written like those
    of the module; the kernel is dense then.

    Attributes:
      linear: `sd.BlockSparseLinear` of the matrix.
      contraction: how the kernel is a matrix.
      names: attributes of the module that are its kernel and its bias.

    Args:
      linear: `sd.BlockSparseLinear` of the matrix.
      contraction: how the kernel is a matrix.
      like: the module that it replaces.
      names: attributes of the module that are its kernel and its bias.
    """

    linear: Any

    def __init__(
        self,
        linear: nnx.Module,
        contraction: Contraction,
        like: nnx.Module,
        names: tuple[str, str] = ("kernel", "bias"),
    ):
        for name, value in vars(like).items():
            if not (name.startswith("_") or isinstance(value, nnx.Variable) or name in names):
                setattr(self, name, value)
        self.linear, self.contraction, self.names = linear, contraction, names

    def __getattr__(self, name):
        names = vars(self).get("names", ())
        if name not in names:
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)
        linear, contraction = self.linear, self.contraction
        if name == names[0]:
            kernel = linear.kernel
            shape = *kernel.shape[:-2], *contraction.kernel_shape
            return kernel.seen_through(shape, contraction.to_kernel, contraction.to_matrix)
        if linear.bias is None:
            return None
        bias = linear.bias
        flat, shape = bias.shape, (*bias.shape[:-1], *contraction.new)
        derived = DerivedArray(flat, bias.dtype, bias.get_value, bias.set_value)
        return derived.seen_through(shape, lambda b: b.reshape(shape), lambda b: b.reshape(flat))

    def __call__(self, inputs: jax.Array, out_sharding: object = None) -> jax.Array:
        """Applies the layer.

        Raises:
          UserError: the input has another shape.
        """
        return constrained(self.contraction.apply(self.linear, inputs), out_sharding)


class BlockSparseEinsum(BlockSparseGeneral):
    """Drop-in for an nnx.Einsum, whose call takes an equation too."""

    def __call__(  # type: ignore[override]
        self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: object = None
    ) -> jax.Array:
        """Applies the layer.

        Raises:
          UserError: the input has another shape, or the equation has another matrix.
        """
        contraction = self.contraction.with_equation(einsum_str)
        return constrained(contraction.apply(self.linear, inputs), out_sharding)


def _terms(equation, rank=None):
    """Returns the letters of an equation's inputs, kernel and outputs.

    "." is the ellipsis, or for inputs of a known rank there are letters in its place.
    """
    operands, outputs = equation.replace(" ", "").replace("...", ".").split("->")
    terms = [*operands.split(","), outputs]
    if rank is not None:
        # One unused letter for each axis of the ellipsis.
        free = [letter for letter in string.ascii_letters if letter not in equation]
        rest = "".join(free[: max(0, rank - len(terms[0]) + 1)])
        terms = [term.replace(".", rest) for term in terms]
    return terms


def shapes_of(
    module: nnx.Linear | nnx.LinearGeneral | nnx.Einsum,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the kernel and the bias of one layer, of a linear of flax."""
    if isinstance(module, nnx.Einsum):
        return tuple(module.kernel_shape), tuple(module.bias_shape or ())
    if isinstance(module, nnx.Linear):
        return (module.in_features, module.out_features), (module.out_features,)
    lead = tuple(module.batch_axis.values())
    inputs, outputs = tuple(module.in_features), tuple(module.out_features)
    return (*lead, *inputs, *outputs), (*lead, *outputs)


def module_like(kind: type, *sizes: object, like: object, **options: object) -> Any:
    """Returns an nnx module of zeros, without a bias, with the settings of the module `like`."""
    if kind is not nnx.Einsum:
        options["use_bias"] = False
        dot_general = getattr(like, "dot_general", None)
        options["dot_general"] = lax.dot_general if dot_general is None else dot_general
    elif getattr(like, "dot_general", lax.dot_general) is not lax.dot_general:
        raise UserError("An nnx.Einsum takes no dot_general; legal: lax.dot_general.")
    names = ("dtype", "param_dtype", "precision", "promote_dtype", "preferred_element_type")
    settings = {} if like is None else {name: getattr(like, name) for name in names}
    zeros = nnx.initializers.zeros_init()
    module = kind(*sizes, kernel_init=zeros, rngs=nnx.Rngs(0), **settings, **options)
    for name in ("kernel_init", "bias_init"):
        if hasattr(like, name) and hasattr(module, name):
            setattr(module, name, getattr(like, name))
    return module
