"""A layer's forward, recomputation, input gradient and weight gradients as separate programs.

The layer and its gradient are traced as one program, which is then cut in four: what the output
needs; what the gradients need beside, before the output's gradient is known (where the layer is
rematerialised); what the input's gradient needs; the rest.  Nothing runs twice but what the layer's
own remat asks for, what depends on weights alone, and views of what is at hand.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

_CALLS = ("pjit", "jit", "remat2", "checkpoint", "closed_call", "core_call")
_VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "convert_element_type")
_ANY, _FORWARD, _RECOMPUTE, _BACKWARD, _WEIGHTS = range(-1, 4)


class LayerActions(NamedTuple):
    """The four programs; `saved`, `recomputed` and `pending` are tuples of arrays to keep.

    Attributes:
      forward: (params, tables, x) -> (y, saved).
      recompute: (params, tables, saved) -> recomputed; () where nothing is recomputed.
      backward: (params, tables, saved, recomputed, dy) -> (dx, pending).
      weights: (params, tables, saved, recomputed, pending) -> gradient in params.
    """

    forward: Callable
    recompute: Callable
    backward: Callable
    weights: Callable


def layer_actions(
    layer: Callable[[Any, Any, jax.Array], jax.Array], params, tables, x, recompute: bool
) -> LayerActions:
    """Cuts a layer and its gradient.

    Args:
      layer: (params, tables, x) -> y like x; differentiable in params and x.
      params: a pytree of float arrays or their shapes.
      tables: a pytree of arrays or their shapes.
      x: an array or its shape.
      recompute: whether `recompute` does what can be done before dy is known; else the two
        gradients do it, where they need it.
    """

    def joint(params, tables, x, dy):
        y, pullback = jax.vjp(lambda p, x: layer(p, tables, x), params, x)
        dparams, dx = pullback(dy)
        return y, dx, dparams

    operands, structure = jax.tree.flatten((params, tables, x, x))
    closed = jax.make_jaxpr(lambda *flat: joint(*jax.tree.unflatten(structure, flat)))(*operands)
    closed = jax.make_jaxpr(lambda *flat: _evaluate(closed, flat))(*operands)
    jaxpr, consts = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts))
    *held, x_var, dy_var = jaxpr.invars
    y_var, dx_var, *gradients = jaxpr.outvars
    home = _homes(jaxpr, recompute)
    results = {_FORWARD: [y_var], _RECOMPUTE: [], _BACKWARD: [dx_var], _WEIGHTS: gradients}
    held, equations, crossing = [*held, *consts], {}, {}
    read: set[core.Var] = set()
    for part in reversed(results):
        crossing[part] = [v for v, at in home.items() if at == part and v in read]
        equations[part], reads = _slice(jaxpr, home, part, [*results[part], *crossing[part]])
        read |= reads

    def program(part, *given):
        """Runs a part; `given` are the lists of variables that it is called with."""
        names = [*held, *(v for group in given for v in group)]
        targets = [*results[part], *crossing[part]]
        function = _program(jaxpr, names, targets, equations[part])

        def run(params, tables, *values):
            out = function(*jax.tree.leaves((params, tables)), *consts.values(), *values)
            count = len(results[part])
            return out[:count], tuple(out[count:])

        return run

    saved, recomputed, pending = (crossing[p] for p in (_FORWARD, _RECOMPUTE, _BACKWARD))
    forward = program(_FORWARD, [x_var])
    again = program(_RECOMPUTE, saved)
    backward = program(_BACKWARD, saved, recomputed, [dy_var])
    weights = program(_WEIGHTS, saved, recomputed, pending)
    like_params = jax.tree.structure(params)

    def run_forward(params, tables, x):
        (y,), keep = forward(params, tables, x)
        return y, keep

    def run_backward(params, tables, saved, recomputed, dy):
        (dx,), keep = backward(params, tables, *saved, *recomputed, dy)
        return dx, keep

    def run_weights(params, tables, saved, recomputed, pending):
        leaves, _ = weights(params, tables, *saved, *recomputed, *pending)
        return jax.tree.unflatten(like_params, leaves)

    return LayerActions(
        run_forward,
        lambda params, tables, saved: again(params, tables, *saved)[1],
        run_backward,
        run_weights,
    )


def _evaluate(closed, values):
    """Runs a program equation by equation, those of inner calls too."""
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
    """Some equations of a program as a function."""
    unnamed = jaxpr.debug_info.with_unknown_names()
    some = jaxpr.replace(
        constvars=[], invars=invars, outvars=outvars, eqns=equations, debug_info=unnamed
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(some, ()))


def _homes(jaxpr, recompute):
    """Variable -> the part that makes it; _ANY where it depends on weights alone."""
    y_var, dx_var, *gradients = jaxpr.outvars
    needed = {
        part: _ancestors(jaxpr, outputs)
        for part, outputs in ((_FORWARD, [y_var]), (_BACKWARD, [dx_var]), (_WEIGHTS, gradients))
    }
    *held, x_var, dy_var = jaxpr.invars
    home = dict.fromkeys((*held, *jaxpr.constvars), _ANY) | {x_var: _FORWARD, dy_var: _BACKWARD}
    after_dy = {dy_var}
    for eqn in jaxpr.eqns:
        reads = [v for v in eqn.invars if isinstance(v, core.Var)]
        if not after_dy.isdisjoint(reads):
            after_dy.update(eqn.outvars)
        if all(home[v] == _ANY for v in reads):
            part = _ANY
        elif not needed[_FORWARD].isdisjoint(eqn.outvars):
            part = _FORWARD
        elif recompute and after_dy.isdisjoint(eqn.outvars):
            part = _RECOMPUTE
        else:
            part = _WEIGHTS if needed[_BACKWARD].isdisjoint(eqn.outvars) else _BACKWARD
        home.update(dict.fromkeys(eqn.outvars, part))
    return home


def _ancestors(jaxpr, outputs):
    """The variables that outputs are computed from, with themselves."""
    needed = {v for v in outputs if isinstance(v, core.Var)}
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, core.Var))
    return needed


def _slice(jaxpr, home, part, outputs):
    """(equations that make outputs in a part, variables that they read from other parts)."""
    needed = {v for v in outputs if isinstance(v, core.Var)}
    equations = []
    for eqn in reversed(jaxpr.eqns):
        here = home[eqn.outvars[0]] in (part, _ANY) or _is_view(eqn)
        if here and not needed.isdisjoint(eqn.outvars):
            equations.append(eqn)
            needed.difference_update(eqn.outvars)
            needed.update(v for v in eqn.invars if isinstance(v, core.Var))
    return equations[::-1], {v for v in needed if home[v] not in (part, _ANY)}


def _is_view(eqn):
    """Whether an equation makes no less data than it reads, for next to nothing."""
    if eqn.primitive.name not in _VIEWS:
        return False
    size = lambda v: math.prod(v.aval.shape) * v.aval.dtype.itemsize  # noqa: E731
    return sum(map(size, eqn.invars)) <= sum(map(size, eqn.outvars))
