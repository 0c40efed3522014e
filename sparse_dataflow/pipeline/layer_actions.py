"""Splits a layer into forward, recomputation, input gradient and weight gradients.

The layer and its gradient are traced as one jaxpr, which is split in four: equations that the
output needs; those that the gradients need before the output's gradient is known (for a
rematerialised layer); those that the input's gradient needs; the rest. Only the layer's own remat,
equations of weights alone, and views run more than once.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

# Newer releases of jax rename calls; a call that is missing here stays one equation, and its whole
# gradient then counts as BACKWARD.
_CALLS = ("pjit", "jit", "remat2", "checkpoint", "closed_call", "core_call")
_VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "convert_element_type")
_ANY, _FORWARD, _RECOMPUTE, _BACKWARD, _WEIGHTS = range(-1, 4)


class LayerActions(NamedTuple):
    """The four programs; `saved`, `recomputed` and `pending` are tuples of arrays to store.

    Attributes:
      forward: (params, constants, x) -> (y, metrics, saved).
      recompute: (params, constants, saved) -> recomputed; () if nothing is recomputed.
      backward: (params, constants, saved, recomputed, dy) -> (dx, pending).
      weights: (params, constants, saved, recomputed, pending) -> gradient in params.
    """

    forward: Callable
    recompute: Callable
    backward: Callable
    weights: Callable


def layer_actions(
    layer: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]],
    params,
    constants,
    x,
    recompute: bool,
) -> LayerActions:
    """Splits a layer and its gradient into programs.

    Args:
      layer: (params, constants, x) -> (y like x, metrics); y is differentiable in params and x.
      params: a pytree of float arrays or their shapes.
      constants: a pytree of arrays or their shapes, such as the layouts.
      x: an array or its shape.
      recompute: whether `recompute` runs all equations that do not need dy; otherwise the two
        gradients run them.
    """

    def joint(params, constants, x, dy):
        y, pullback, metrics = jax.vjp(lambda p, x: layer(p, constants, x), params, x, has_aux=True)
        dparams, dx = pullback(dy)
        return y, metrics, dx, dparams

    # The last one stands for dy, which has the shape of x.
    operands, structure = jax.tree.flatten((params, constants, x, x))
    closed, (_, like_metrics, *_) = jax.make_jaxpr(
        lambda *flat: joint(*jax.tree.unflatten(structure, flat)), return_shape=True
    )(*operands)
    # The gradient of a rematerialised layer is a single equation, a call with recomputation, input
    # gradient and weight gradients inside. The second trace inlines calls, so that they can be
    # split.
    closed = jax.make_jaxpr(lambda *flat: _evaluate(closed, flat))(*operands)
    jaxpr, consts = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts))
    *weight_vars, x_var, dy_var = jaxpr.invars
    count = 1 + len(jax.tree.leaves(like_metrics))
    forward_vars, (dx_var, *gradients) = jaxpr.outvars[:count], jaxpr.outvars[count:]
    home = _homes(jaxpr, recompute, count)
    results = {_FORWARD: forward_vars, _RECOMPUTE: [], _BACKWARD: [dx_var], _WEIGHTS: gradients}
    weight_vars, equations, stored = [*weight_vars, *consts], {}, {}
    read: set[core.Var] = set()
    # From the last action to the first: what an action must store is what later ones read, which is
    # known once their equations are chosen.
    for action in reversed(results):
        stored[action] = [v for v, at in home.items() if at == action and v in read]
        equations[action], reads = _slice(jaxpr, home, action, [*results[action], *stored[action]])
        read |= reads

    def program(action, *operands):
        """Returns the program of an action; `operands` are lists of its other variables."""
        invars = [*weight_vars, *(v for group in operands for v in group)]
        outvars = [*results[action], *stored[action]]
        function = _program(jaxpr, invars, outvars, equations[action])

        def run(params, constants, *values):
            out = function(*jax.tree.leaves((params, constants)), *consts.values(), *values)
            count = len(results[action])
            return out[:count], tuple(out[count:])

        return run

    saved, recomputed, pending = (stored[a] for a in (_FORWARD, _RECOMPUTE, _BACKWARD))
    forward = program(_FORWARD, [x_var])
    recomputation = program(_RECOMPUTE, saved)
    backward = program(_BACKWARD, saved, recomputed, [dy_var])
    weights = program(_WEIGHTS, saved, recomputed, pending)
    like_params = jax.tree.structure(params)

    def run_forward(params, constants, x):
        (y, *metrics), saved = forward(params, constants, x)
        return y, jax.tree.unflatten(jax.tree.structure(like_metrics), metrics), saved

    def run_backward(params, constants, saved, recomputed, dy):
        (dx,), pending = backward(params, constants, *saved, *recomputed, dy)
        return dx, pending

    def run_weights(params, constants, saved, recomputed, pending):
        leaves, _ = weights(params, constants, *saved, *recomputed, *pending)
        return jax.tree.unflatten(like_params, leaves)

    return LayerActions(
        run_forward,
        lambda params, constants, saved: recomputation(params, constants, *saved)[1],
        run_backward,
        run_weights,
    )


def _evaluate(closed, values):
    """Evaluates a jaxpr equation by equation, inlining inner calls."""
    jaxpr = closed.jaxpr
    at = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *values)))
    read = lambda v: v.val if isinstance(v, core.Literal) else at[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if not isinstance(inner, core.ClosedJaxpr):
                inner = core.ClosedJaxpr(inner, ())
            out = _evaluate(inner, [read(v) for v in eqn.invars])
        else:
            operands = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, core.Var)))
            out = _program(jaxpr, operands, eqn.outvars, [eqn])(*map(read, operands))
        at.update(zip(eqn.outvars, out))
    return [read(v) for v in jaxpr.outvars]


def _program(jaxpr, invars, outvars, equations):
    """Returns some equations of a jaxpr as a function."""
    unnamed = jaxpr.debug_info.with_unknown_names()
    subset = jaxpr.replace(
        constvars=[], invars=invars, outvars=outvars, eqns=equations, debug_info=unnamed
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(subset, ()))


def _homes(jaxpr, recompute, count):
    """Returns {variable: action that computes it}; _ANY if it depends on weights alone.

    The first `count` results are those of the forward pass.
    """
    outputs, (dx_var, *gradients) = jaxpr.outvars[:count], jaxpr.outvars[count:]
    needed = {
        action: _ancestors(jaxpr, outputs)
        for action, outputs in ((_FORWARD, outputs), (_BACKWARD, [dx_var]), (_WEIGHTS, gradients))
    }
    *weight_vars, x_var, dy_var = jaxpr.invars
    home = dict.fromkeys((*weight_vars, *jaxpr.constvars), _ANY) | {
        x_var: _FORWARD,
        dy_var: _BACKWARD,
    }
    after_dy = {dy_var}
    for eqn in jaxpr.eqns:
        reads = [v for v in eqn.invars if isinstance(v, core.Var)]
        if not after_dy.isdisjoint(reads):
            after_dy.update(eqn.outvars)
        # Stored, what depends on weights alone would be stored for every micro-batch in flight; so
        # every action that reads it computes it.
        if all(home[v] == _ANY for v in reads):
            action = _ANY
        elif not needed[_FORWARD].isdisjoint(eqn.outvars):
            action = _FORWARD
        # Not of the forward pass, and possible before dy is known: remat's own recomputation.
        elif recompute and after_dy.isdisjoint(eqn.outvars):
            action = _RECOMPUTE
        else:
            action = _WEIGHTS if needed[_BACKWARD].isdisjoint(eqn.outvars) else _BACKWARD
        home.update(dict.fromkeys(eqn.outvars, action))
    return home


def _ancestors(jaxpr, outputs):
    """Returns the variables that the outputs are computed from, and the outputs."""
    needed = {v for v in outputs if isinstance(v, core.Var)}
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, core.Var))
    return needed


def _slice(jaxpr, home, action, outputs):
    """Returns (equations of an action for these outputs, variables read from other actions)."""
    needed = {v for v in outputs if isinstance(v, core.Var)}
    equations = []
    for eqn in reversed(jaxpr.eqns):
        # A view of another action runs again here: its input is stored instead, which is no larger.
        # For a broadcast bias that saves an array of the size of x.
        computed = home[eqn.outvars[0]] in (action, _ANY) or _is_view(eqn)
        if computed and not needed.isdisjoint(eqn.outvars):
            equations.append(eqn)
            needed.difference_update(eqn.outvars)
            needed.update(v for v in eqn.invars if isinstance(v, core.Var))
    return equations[::-1], {v for v in needed if home[v] not in (action, _ANY)}


def _is_view(eqn):
    """Returns whether an equation is nearly free and its output is no smaller than its input."""
    if eqn.primitive.name not in _VIEWS:
        return False
    size = lambda v: math.prod(v.aval.shape) * v.aval.dtype.itemsize  # noqa: E731
    return sum(map(size, eqn.invars)) <= sum(map(size, eqn.outvars))
