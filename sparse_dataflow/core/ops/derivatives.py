"""Derivatives of an op, in reverse and in forward mode, from its forward and backward pass.

`jax.custom_vjp` refuses forward mode.  Here the derivative of an op is one linear primitive.
Forward mode evaluates it, reverse mode transposes it: that is the op's backward pass.  So a
gradient's program is that of `jax.custom_vjp`, and `jax.jvp`, `jax.linearize`, `jax.jacfwd` and
`jax.hessian` work too.

Gradients of parameters that many tokens share are summed in float32 or wider.  Autodiff sums in the
dtype of the cotangents.  In bfloat16, 24,576 tokens of gradient 1 give a bias 29,952 on a CPU, and
a token that occurs 1,000 times gives its embedding 256.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.files.errors import UserError


def differentiable(
    value: Callable,
    backward: Callable,
    *,
    forward: Callable | None = None,
    tangent: Callable | None = None,
) -> Callable:
    """Returns the differentiable op (options, *operands) -> y.

    Operands are pytrees of arrays.  Options are static and hashable.  The second derivative is that
    of these functions.

    Args:
      value: (options, *operands) -> y, a pytree of arrays.
      backward: (options, saved, dy) -> a gradient for each operand, or None for one of integers;
        dy has the structure of y.
      forward: (options, *operands) -> (y, saved), in a differentiation; None to save the operands.
      tangent: (options, saved, tangents) -> dy, linear in the tangents of the operands, which are
        None where an operand is constant.  None to transpose `backward`, which Pallas kernels do
        not allow.
    """
    forward = forward or (lambda options, *operands: (value(options, *operands), operands))
    op = jax.custom_jvp(value, nondiff_argnums=(0,))

    def jvp(options, operands, tangents):
        tree: jax.tree_util.PyTreeDef
        saved_tree: jax.tree_util.PyTreeDef
        y_tree: jax.tree_util.PyTreeDef
        y, saved = forward(options, *operands)
        leaves, tree = jax.tree.flatten(tangents)
        # Only what is differentiated is an operand of the linear primitive, so no gradient of a
        # constant is computed.
        moving = [place for place, leaf in enumerate(leaves) if not _is_constant(leaf)]
        # All operands are constants. Binding the primitive with no moved array would give it
        # nothing to transpose.
        if not moving:
            return y, jax.tree.map(zero_from_primal, y)
        saved, saved_tree = jax.tree.flatten(saved)
        y_leaves, y_tree = jax.tree.flatten(y)
        types = tuple(jax.typeof(leaf) for leaf in y_leaves)

        def pull(saved, dy):
            # One gradient for each operand, a tree or None, becomes one entry for each leaf.
            gradients = backward(options, saved_tree.unflatten(saved), y_tree.unflatten(dy))
            by_operand = zip(tree.children(), gradients, strict=True)
            every = [leaf for each in by_operand for leaf in _leaves_up_to(*each)]
            return [every[place] for place in moving]

        def push(saved, moved):
            if tangent is None:
                zeros = [jnp.zeros(each.shape, each.dtype) for each in types]
                zeros, *_ = dispatch.equally_varying(zeros, saved, moved)

                def pulled(dy):
                    every = zip(pull(saved, dy), moved, strict=True)
                    return [jnp.zeros_like(d) if g is None else g for g, d in every]

                # The pull-back is linear in dy, so its transpose is the forward derivative.  The
                # vjp of a linear function is that transpose at every point: zero is as good as any.
                return jax.vjp(pulled, zeros)[1](list(moved))[0]
            moved = dict(zip(moving, moved, strict=True))
            every = tree.unflatten([moved.get(place) for place in range(len(leaves))])
            return jax.tree.leaves(tangent(options, saved_tree.unflatten(saved), every))

        linear = _Linear(push, pull, len(saved), types)
        moved = _linear_p.bind(*saved, *(leaves[place] for place in moving), linear=linear)
        return y, y_tree.unflatten(moved)

    # Symbolic zeros tell constants from operands whose tangent is a numeric zero.
    op.defjvp(jvp, symbolic_zeros=True)
    return op


def bilinear(value: Callable, backward: Callable) -> Callable:
    """Returns the differentiable product (options, x, weight, *tables) -> y.

    Args:
      value: linear in x, and in the weight.
      backward: as in `differentiable`, which saves the operands.
    """

    def tangent(options, saved, tangents):
        x, weight, *tables = saved
        dx, dweight, *_ = tangents
        # Through the op instead of `value`, so that a tangent can be differentiated again.
        terms = [] if dx is None else [op(options, dx, weight, *tables)]
        return sum(terms if dweight is None else [*terms, op(options, x, dweight, *tables)])

    op = differentiable(value, backward, tangent=tangent)
    return op


def kernel_product(value: Callable, gradients: Callable) -> Callable:
    """Returns the differentiable product (options, x, weight, *tables) -> y of Pallas kernels.

    Args:
      value: see `bilinear`.
      gradients: (options, x, weight, *tables, dy) -> (dx, dweight).
    """
    gradients = batchable(gradients)

    def backward(options, saved, dy):
        return *gradients(options, *saved, dy), *[None] * (len(saved) - 2)

    return bilinear(batchable(value), backward)


def tangent_of(form: Callable) -> Callable:
    """Returns the `tangent` of an op by another form of it, which has a forward mode.

    Args:
      form: (options, *operands) -> y; the op saves its operands first.
    """

    def tangent(options, saved, tangents):
        operands, tree = jax.tree.flatten(tuple(saved[: len(tangents)]))

        def function(*operands):
            return form(options, *jax.tree.unflatten(tree, operands))

        return _jvp(function, operands, _leaves_up_to(tree, tangents))[1]

    return tangent


def _jvp(function, primals, tangents):
    """Returns `jax.jvp`, where tangents that are None are zero, also of integers."""
    moving = [place for place, tangent in enumerate(tangents) if tangent is not None]

    def moving_function(*moved):
        by_place = dict(zip(moving, moved, strict=True))
        return function(*(by_place.get(place, each) for place, each in enumerate(primals)))

    starts, directions = ([each[place] for place in moving] for each in (primals, tangents))
    return jax.jvp(moving_function, starts, directions)


def elementwise(value: Callable, times_slope: Callable) -> Callable:
    """Returns a differentiable elementwise function of x, whose gradient saves x alone.

    Args:
      value: x -> y.
      times_slope: (x, dy) -> dy times the derivative at x.
    """
    op = differentiable(
        lambda _, x: value(x),
        lambda _, saved, dy: (times_slope(*saved, dy),),
        tangent=lambda _, saved, tangents: times_slope(*saved, *tangents),
    )
    return functools.partial(op, None)


def batchable(kernels: Callable) -> Callable:
    """Returns Pallas `kernels` for use in `differentiable`, where `jax.vmap` loops over them.

    Args:
      kernels: (options, *arrays, **static) -> arrays; `static` is not traced.

    The result raises a UserError where it is differentiated again.
    """

    def run(options, *arrays, **static):
        call = functools.partial(kernels, options, **static)
        # A kernel has no batching rule that keeps its tiles; the loop runs it as it was tuned.
        once = jax.custom_jvp(jax.custom_batching.sequential_vmap(call))
        once.defjvp(_refuse_second_derivative)
        return once(*arrays)

    return run


def _refuse_second_derivative(primals, tangents):
    raise UserError(
        "Pallas kernels of block-sparse weights have first derivatives alone; legal for higher "
        "ones: implementation='xla' ('products' for the MLP)."
    )


def _leaves_up_to(tree: jax.tree_util.PyTreeDef, gradient: object) -> list:
    return [None] * tree.num_leaves if gradient is None else tree.flatten_up_to(gradient)


def _is_constant(tangent):
    # Tangents of integers have dtype float0.
    return isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0


class _Linear(NamedTuple):
    """A linear function of arrays, given saved ones.

    Attributes:
      push: (saved, moved) -> list of the arrays of y.
      pull: (saved, list of the arrays of dy) -> the gradient of each moved array.
      saved: number of saved arrays.
      results: types of the arrays of y.
    """

    push: Callable
    pull: Callable
    saved: int
    results: tuple


def _apply(*arrays, linear):
    return linear.push(arrays[: linear.saved], arrays[linear.saved :])


def _differentiate(arrays, tangents, linear):
    """Differentiates the function that `push` computes, with its saved arrays."""
    tangents = [None if isinstance(tangent, ad.Zero) else tangent for tangent in tangents]
    return _jvp(functools.partial(_apply, linear=linear), arrays, tangents)


def _transpose(dy, *arrays, linear):
    if all(isinstance(each, ad.Zero) for each in dy):
        return [None] * len(arrays)
    # Linear in the moved arrays alone, so those that were saved have no gradient here.
    saved, moved = arrays[: linear.saved], arrays[linear.saved :]
    dy = [ad.instantiate_zeros(each) for each in dy]
    gradients = zip(moved, linear.pull(saved, dy), strict=True)
    # jax marks the operands that are transposed; the others are known numbers.
    moved_gradients = [each if ad.is_undefined_primal(array) else None for array, each in gradients]
    return [None] * len(saved) + moved_gradients


def _batch(arrays, axes, linear):
    size = next(a.shape[axis] for a, axis in zip(arrays, axes) if axis is not None)
    saved, saved_axes = arrays[: linear.saved], tuple(axes[: linear.saved])
    # `pull` returns one gradient per element for every moved array, so all have the batch axis.
    # Transposing the broadcast of an array without it sums these gradients.
    moved = tuple(
        jnp.broadcast_to(a, (size, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(arrays[linear.saved :], axes[linear.saved :])
    )
    push, pull = (jax.vmap(each, (saved_axes, 0)) for each in (linear.push, linear.pull))
    results = tuple(jax.make_jaxpr(push)(saved, moved).out_avals)
    batched = _linear_p.bind(*saved, *moved, linear=_Linear(push, pull, len(saved), results))
    return batched, [0] * len(results)


_linear_p = Primitive("linear_op")
_linear_p.multiple_results = True
_linear_p.def_impl(_apply)
_linear_p.def_abstract_eval(lambda *arrays, linear: linear.results)
mlir.register_lowering(_linear_p, mlir.lower_fun(_apply, multiple_results=True))
ad.primitive_jvps[_linear_p] = _differentiate
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch


def again(saved: object, dy: object) -> tuple[Any, Any]:
    """Return both, for a backward pass that computes again what the forward pass did not save.

    Else XLA keeps what both passes compute, in float32, or computes it in the forward pass already.
    A GPU needs no barrier, which would end a fusion.
    """
    merged = dispatch.on(platforms.MERGED_PASSES)
    return lax.optimization_barrier((saved, dy)) if merged else (saved, dy)


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of logits, losses and sums: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def broadcast_like(parameter: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast a parameter, for instance a bias, to the shape and dtype of `like`."""
    return jnp.broadcast_to(parameter.astype(wide(like.dtype)), like.shape).astype(like.dtype)


def lookup(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Take rows of a table.

    Args:
      table: float [length, features].
      rows: int32 of any shape, in [0, length).

    Returns:
      [*rows.shape, features], in the dtype of the table.
    """
    table, rows = dispatch.equally_varying(table, rows)
    return _lookup(len(table), table, rows)


def lookup_and_table(table: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `lookup`, and the table for another use, whose gradient gets that of the rows added.

    Else the gradients of both uses are tables, and a pass adds them.
    """
    table, rows = dispatch.equally_varying(table, rows)
    return _lookup_and_table(None, table, rows)


def _lookup_gradient(length, rows, dy):
    return _with_rows(jnp.zeros((length, dy.shape[-1]), dy.dtype), rows, dy), None


def _with_rows(table, rows, dy):
    """Returns the table with dy added to its rows, in float32 or wider."""
    dtype = wide(dy.dtype)
    table, dy = again(table, dy)
    table, rows, dy = dispatch.equally_varying(jnp.asarray(table, dtype), rows, dy)
    return table.at[rows].add(dy.astype(dtype)).astype(dy.dtype)


_lookup = differentiable(
    lambda length, table, rows: table[rows],
    _lookup_gradient,
    forward=lambda length, table, rows: (table[rows], rows),
    tangent=lambda length, rows, tangents: tangents[0][rows],
)

_lookup_and_table = differentiable(
    lambda _, table, rows: (table[rows], table),
    lambda _, rows, dy: (_with_rows(dy[1], rows, dy[0]), None),
    forward=lambda _, table, rows: ((table[rows], table), rows),
    tangent=lambda _, rows, tangents: (tangents[0][rows], tangents[0]),
)
