"""Prunes a language model projection after projection, each on what the pruned ones before it give.

The outputs that a projection shall give are those of the dense model.  A projection that adds to
the residual stream shall give the stream of the dense model, so it makes up for earlier errors too.
One layer is on the device at a time, and the moments of one projection on the host.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.layer_groups import layer_model
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, PRECISIONS, ROW_PARALLEL
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.inputs import observed_block
from sparse_dataflow.core.model.projection import arrays
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.core.weights.dense import Dense
from sparse_dataflow.core.weights.weight import Linear
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pruning.moments import HELD_OUT, Moments, batch_sums


class Site(NamedTuple):
    """A projection that is pruned, with what it reads and shall give.

    Attributes:
      name: projection.
      layer: index of the layer.
      kernel: float32 [in, out], the dense weights.
      fit: moments of the tokens that weights are fitted to; of deviations from the means if the
        projection has a bias.
      held_out: those of the tokens that the damping is chosen by.
    """

    name: str
    layer: int
    kernel: np.ndarray
    fit: Moments
    held_out: Moments

    @property
    def path(self) -> str:
        """Name for messages."""
        return f"layer {self.layer + 1}, {self.name}"


Prune = Callable[[Site], np.ndarray]
"""(site) -> the kernel [in, out] that takes the place of the dense one."""


def pruned_layers(
    model: ModelConfig,
    weights: ModelWeights,
    batches: Sequence[np.ndarray],
    names: Sequence[str],
    prune: Prune,
) -> Iterator[dict[str, Any]]:
    """Yields each layer with pruned kernels, as `layer_weights` of dense weights on the host.

    Args:
      model: of the weights.
      weights: on the host; block-sparse ones are read as dense ones with zeros.
      batches: int32 [B, T] token ids.
      names: projections to prune; others keep their weights.
      prune: called once for each of them, in the order of the forward pass.

    Raises:
      UserError: activations are not finite.
    """
    dense = dataclasses.replace(
        model, linears={}, density_by_depth=(), compute_dtype="float32", precision=PRECISIONS[0]
    )
    embed = jax.tree.map(jnp.asarray, weights.merged["embed"])
    enter = jax.jit(gpt.embed, static_argnums=0)
    streams = [np.asarray(enter(dense, embed, jnp.asarray(tokens))) for tokens in batches]
    _refuse_not_finite(dense, weights, model, streams)
    pairs = [(stream, stream) for stream in streams]
    for number, sparse in enumerate(stacks.weights(model, weights)):
        config = layer_model(dense, number)
        before = {name: _dense(value) for name, value in sparse.items()}
        after = dict(before)
        for stage in stages(config.projections):
            chosen = [name for name in stage if name in names]
            if chosen:
                after |= _pruned_stage(config, number, before, after, pairs, chosen, prune)
        yield after
        pairs = [_advanced(config, before, after, *pair) for pair in pairs]


def _refuse_not_finite(dense, weights, model, streams):
    """Raises UserError if the model gives values that are not finite, before anything is pruned."""

    def check(name):
        if not all(np.isfinite(stream).all() for stream in streams):
            raise UserError(
                f"{name} gives activations that are not finite; legal: weights and calibration "
                "tokens with finite activations."
            )

    check("embed")
    for number, layer in enumerate(stacks.weights(model, weights)):
        config = layer_model(dense, number)
        device = jax.tree.map(jnp.asarray, {name: _dense(value) for name, value in layer.items()})
        streams = [np.asarray(_layer(config, device, jnp.asarray(x))) for x in streams]
        check(f"layer {number + 1}")


@functools.partial(jax.jit, static_argnames="config")
def _layer(config, layer, x):
    return gpt.bind_block(config, layer)(x)


def stages(projections: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the projections in the order of the forward pass; those of a stage read the same."""
    attention = tuple(name for name in projections if name not in (*MLP, *ROW_PARALLEL))
    mlp = tuple(name for name in projections if name in MLP and name not in ROW_PARALLEL)
    return [attention, ("attn_out",), mlp, ("mlp_out",)]


def _dense(value):
    """Returns a projection with a dense weight, and any other value as it is."""
    if not isinstance(value, Linear):
        return value
    bias = None if value.bias is None else np.asarray(value.bias)
    return Linear(Dense(np.asarray(value.weight.dense(), np.float32)), bias)


def _pruned_stage(config, layer, before, after, pairs, names, prune):
    """Returns name -> pruned projection of some projections that read the same inputs."""
    fit, held_out = (
        functools.reduce(Moments.__add__, parts)
        for parts in zip(*(_moments(config, tuple(names), before, after, *pair) for pair in pairs))
    )
    results, start = {}, 0
    for name in names:
        linear = before[name]
        kernel = linear.weight.kernel
        columns = slice(start, start + kernel.shape[1])
        start = columns.stop
        moments = [each.outputs(columns) for each in (fit, held_out)]
        if not all(each.finite for each in moments):
            raise UserError(
                f"layer {layer + 1}, {name} reads or gives activations that are not finite; legal: "
                "weights and calibration tokens with finite activations."
            )
        mean_x, mean_y = (moments[0] + moments[1]).means
        if linear.bias is not None:
            moments = [each.centred() for each in moments]
        kernel = prune(Site(name, layer, kernel, *moments)).astype(np.float32)
        bias = linear.bias
        if bias is not None:
            bias = (bias + mean_y - mean_x @ kernel).astype(np.float32)
        results[name] = Linear(Dense(kernel), bias)
    return results


def _moments(config, names, before, after, x_dense, x_pruned):
    """Returns the `Moments` of some projections on one batch: to fit, and held out."""
    device = jax.tree.map(jnp.asarray, (before, after, x_dense, x_pruned))
    sums = jax.device_get(_sums(config, names, *device))
    tokens = x_dense.shape[0] * x_dense.shape[1]
    counts = tokens - tokens // HELD_OUT, tokens // HELD_OUT
    return [Moments.from_sums(part, count) for part, count in zip(sums, counts)]


@functools.partial(jax.jit, static_argnames=("config", "names"))
def _sums(config, names, before, after, x_dense, x_pruned):
    observe = lambda _, x, linear: (x, linear)  # noqa: E731
    out_dense, read_dense = observed_block(config, before, x_dense, observe)
    out_pruned, read_pruned = observed_block(config, after, x_pruned, observe)
    adds = not config.post_norms

    def wanted(name):
        weight = before[name].weight
        if adds and name == "mlp_out":  # The block's output, as `after` has its dense weights yet.
            return read_pruned[name] @ weight + (out_dense - out_pruned) / config.residual_scale
        outputs = read_dense[name] @ weight
        if adds and name == "attn_out":
            outputs += (x_dense - x_pruned) / config.residual_scale
        return outputs

    x = read_pruned[names[0]].reshape(-1, read_pruned[names[0]].shape[-1])
    y = jnp.concatenate([wanted(name) for name in names], axis=-1).reshape(len(x), -1)
    cut = len(x) - len(x) // HELD_OUT
    return batch_sums(x[:cut], y[:cut]), batch_sums(x[cut:], y[cut:])


def _advanced(config, before, after, x_dense, x_pruned):
    """Returns the streams after a layer."""
    device = jax.tree.map(jnp.asarray, (before, after, x_dense, x_pruned))
    return tuple(map(np.asarray, _applied(config, *device)))


@functools.partial(jax.jit, static_argnames="config")
def _applied(config, before, after, x_dense, x_pruned):
    """Returns the outputs of the dense layer and of the pruned one."""
    return tuple(
        gpt.bind_block(config, layer)(x) for layer, x in ((before, x_dense), (after, x_pruned))
    )


def as_params(layers: Iterator[Mapping[str, Any]], num_layers: int) -> Any:
    """Returns layers of dense weights as the "blocks" of a dense model's parameters.

    Each layer is copied into the stack when it comes, so that no layer is in memory twice.
    """
    is_linear = lambda node: isinstance(node, Linear)  # noqa: E731
    by_name = lambda node: arrays(node) if is_linear(node) else node  # noqa: E731
    stacked: Any = None
    for number, layer in enumerate(layers):
        tree = jax.tree.map(np.asarray, jax.tree.map(by_name, dict(layer), is_leaf=is_linear))
        if stacked is None:
            stacked = jax.tree.map(lambda x: np.empty((num_layers, *x.shape), x.dtype), tree)
        for stack, leaf in zip(jax.tree.leaves(stacked), jax.tree.leaves(tree), strict=True):
            stack[number] = leaf
    return stacked
