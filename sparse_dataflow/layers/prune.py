"""Prunes the linears of any nnx model, one after the other, with weights fitted to its outputs."""

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.block_sparse_linear import filled_up
from sparse_dataflow.layers.paths import dotted
from sparse_dataflow.layers.registered import is_linear
from sparse_dataflow.layers.replace import (
    Where,
    balanced_degree,
    block_sparse,
    kernel_of,
    with_dense_matrix,
    with_matrix,
)
from sparse_dataflow.layers.replaceable import (
    check_replaceable,
    mapped,
    none_selected,
    readers_of,
)
from sparse_dataflow.pruning import second_order
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.moments import SplitMoments
from sparse_dataflow.pruning.projection import Pruned, Target, prune
from sparse_dataflow.pruning.rebuild import report
from sparse_dataflow.pruning.result import PrunedModel

Call = Callable[[Any, Any], object]
"""(model, batch) -> anything; applies the model to a batch."""


def prune_linears(
    model: nnx.Module,
    batches: Sequence[object],
    groups: Groups,
    density: float | None,
    rounds: int,
    where: Where | None,
    call: Call,
) -> PrunedModel:
    """See `sd.prune`; the model itself does not change.

    The linears are pruned in the order in which the model calls them.  The model runs op by op, in
    evaluation mode, so only the inputs of one linear are in memory.

    Raises:
      UserError: see `sd.prune`.
    """
    targets = _targets(model, groups, density, rounds, where)
    # Two models see each batch.  The inputs of the pruned one are what a layer will read; its
    # outputs should be those of the model before.
    before, after = (_observed(model, targets) for _ in range(2))
    order = _calls(before, batches, call)
    if missing := sorted(set(targets) - set(order)):
        raise UserError(
            f"The model does not call {missing[0]} on the first batch; legal: leave it out with "
            "`where`."
        )
    results: dict[str, Pruned] = {}
    biases: dict[str, np.ndarray | None] = {}
    # In the order of calls: a linear reads what the ones pruned before it give.
    for path, count in order.items():
        target, full = targets[path]
        moments = _moments(before, after, path, count, batches, call, full)
        results[path], biases[path] = _pruned(path, after[1][path].linear, moments, target)

    def replace(path, node):
        if dotted(path) not in results:
            return node
        result, bias = results[dotted(path)], biases[dotted(path)]
        mask = second_order.expanded(result.mask, groups)
        rows, columns = result.kernel.shape
        masks[dotted(path)] = kernel_of(node, mask[:rows, :columns])
        changed = with_matrix(node, lambda linear: _with_weights(linear, result, bias, groups))
        return changed if groups.is_square else with_dense_matrix(changed)

    masks: dict[str, np.ndarray] = {}
    pruned = mapped(replace, model)
    errors = {path: result.error for path, result in results.items()}
    return PrunedModel(pruned, {path: masks[path] for path in results}, errors)


class _ReachedError(Exception):
    """All inputs of a linear were read."""


_reads: contextvars.ContextVar[Callable[[str, jax.Array], None]] = contextvars.ContextVar("reads")


class _Observed(nnx.Module):
    """A linear whose inputs are read."""

    def __init__(self, linear: nnx.Linear, path: str):
        self.linear, self.path = linear, path
        self.bias = None

    def __call__(self, inputs, **options):
        if isinstance(inputs, jax.core.Tracer):
            raise UserError(
                f"{self.path} is called inside a transform such as nnx.scan or nnx.jit; legal: a "
                "model that calls it directly, or leave it out with `where`."
            )
        _reads.get()(self.path, inputs)
        return self.linear(inputs, **options)


def _targets(model, groups, density, rounds, where) -> dict[str, tuple[Target, tuple[int, int]]]:
    """Returns path -> what is left of each selected linear, and its sides with filling."""
    names: list[str] = []
    targets: dict[str, tuple[Target, tuple[int, int]]] = {}
    readers = readers_of(model)

    def target(linear):
        shape = linear.in_features, linear.out_features
        if linear.kernel.ndim > 2:
            raise UserError("Its kernel is a stack over layers; legal: one kernel.")
        if not groups.is_square:
            targets[names[-1]] = Target(groups, groups.count(shape, density), rounds), shape
            return linear
        share = 0.5 if density is None else density
        full = filled_up(shape, groups.rows, share)
        balanced_degree(full, groups.rows, share)
        targets[names[-1]] = Target.balanced(full, groups.rows, share, rounds), full
        return linear

    def check(path, node):
        if is_linear(node):
            names.append(dotted(path))
            if where is None or where(names[-1], node):
                try:
                    check_replaceable(node, readers)
                    with_matrix(node, target)
                except UserError as error:
                    raise UserError(f"{names[-1]}: {error} Or leave it out with `where`.") from None
        return node

    nnx.recursive_map(check, model)
    if not targets:
        raise none_selected(model, names)
    return targets


def _observed(model, paths) -> tuple[nnx.Module, dict[str, _Observed]]:
    """Returns a copy of the model whose linears are observed, and these by path."""

    def wrap(path, node):
        name = dotted(path)
        return with_matrix(node, lambda linear: _Observed(linear, name)) if name in paths else node

    observed = mapped(wrap, model)
    observed.eval()
    modules = (module for _, module in nnx.iter_modules(observed))
    return observed, {each.path: each for each in modules if isinstance(each, _Observed)}


def _run(model, batch, call, read):
    token = _reads.set(read)
    try:
        with contextlib.suppress(_ReachedError):
            call(model, batch)
    finally:
        _reads.reset(token)


def _calls(observed, batches, call) -> dict[str, int]:
    """Returns path -> number of calls in one pass of the model, in the order of the first calls."""
    counts: dict[str, int] = {}

    def read(path, _):
        counts[path] = counts.get(path, 0) + 1

    _run(observed[0], batches[0], call, read)
    return counts


def _moments(before, after, path, count, batches, call, full) -> SplitMoments:
    """Returns the moments of a linear over all batches.

    Features that fill up its sides to those of `full` are 0.
    """

    def rows_of(model, batch):
        rows: list[jax.Array] = []

        def read(other, x):
            if other == path:
                rows.append(x.reshape(-1, x.shape[-1]))
                if len(rows) == count:
                    raise _ReachedError

        _run(model, batch, call, read)
        return jnp.concatenate(rows)

    kernel = before[1][path].linear.kernel[...]
    kernel = kernel.astype(jnp.float32)
    totals = SplitMoments()
    for batch in batches:
        rows = rows_of(before[0], batch).astype(jnp.float32)
        # A TPU would round the operands to bfloat16, and the weights would be fitted to that.
        outputs = jnp.matmul(rows, kernel, precision=jax.lax.Precision.HIGHEST)
        # Inputs of the pruned model, and the outputs that the model before gives.
        pairs = zip((rows_of(after[0], batch), outputs), full)
        totals.add(*(jnp.pad(a, [(0, 0), (0, side - a.shape[1])]) for a, side in pairs))
    return totals


def _pruned(path, linear, moments, target) -> tuple[Pruned, np.ndarray | None]:
    """Prunes a linear in place; returns the result, and the bias that goes with it."""
    fit, held_out = moments.read(linear.bias is not None)
    if not (fit.finite and held_out.finite):
        raise UserError(
            f"{path} reads or gives activations that are not finite; legal: weights and batches "
            "with finite activations."
        )
    kernel = np.asarray(linear.kernel[...], np.float32)
    rows, columns = kernel.shape
    kernel = np.pad(kernel, [(0, n) for n in np.subtract(fit.products.shape, kernel.shape)])
    result = prune(fit, held_out, kernel, target)
    report(path, fit.tokens, result)
    result = result._replace(kernel=result.kernel[:rows, :columns])
    mean_x, mean_y = moments.means[0][:rows], moments.means[1][:columns]
    linear.kernel[...] = jnp.asarray(result.kernel, linear.kernel.dtype)
    if linear.bias is None:
        return result, None
    # The weights were fitted around the means, so the bias restores the mean of the outputs.
    bias = np.asarray(linear.bias[...], np.float64) + mean_y - mean_x @ result.kernel
    linear.bias[...] = jnp.asarray(bias, linear.bias.dtype)
    return result, bias


def _with_weights(linear, result, bias, groups):
    """Returns a linear with the weights that stay, and its bias."""
    new = nnx.clone(linear)
    new.kernel[...] = jnp.asarray(result.kernel, linear.kernel.dtype)
    if bias is not None:
        new.bias[...] = jnp.asarray(bias, linear.bias.dtype)
    if not groups.is_square:
        return new
    layout = BlockLayout.from_mask(result.mask, groups.rows)
    return block_sparse(new, [layout], new.kernel[...][None])
