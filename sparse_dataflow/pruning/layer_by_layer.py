"""Prunes a language model projection after projection, each on what the pruned ones before it give.

The outputs that a projection shall give are those of the dense model.  A projection that adds to
the residual stream shall give the stream of the dense model, so it makes up for earlier errors too.
One layer is on the device at a time.  The host holds this layer, the moments of the projections
that read the same inputs, and the residual streams of both models with what attention made of them.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.layer_groups import layer_model
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, PRECISIONS, ROW_PARALLEL
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.projection import arrays, layer_weights
from sparse_dataflow.core.weights.dense import Dense
from sparse_dataflow.core.weights.weight import Linear
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pruning.inputs import observed_block
from sparse_dataflow.pruning.moments import Moments, SplitMoments


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

Rounded = Callable[[object], np.ndarray]
"""(float32 array) -> its values as they are saved."""

Restored = Callable[[int], tuple[ModelConfig, dict] | None]
"""(layer) -> the pruned model and its parameters of a layer that was pruned before; or None."""


class Layers(Protocol):
    """Parameters of a model, which are read in parts."""

    def ends(self) -> dict:
        """Returns the parameters that are of no layer, "embed" and "head", on the host."""

    def layer(self, number: int) -> dict:
        """Returns the parameters of a layer with its layouts, on the host."""

    def digest(self) -> str:
        """Returns the sha256 (hex) of all parameters."""


class HeldLayers:
    """Parameters that are in memory."""

    def __init__(self, params: dict):
        """Takes the parameters with their layouts, on the host."""
        self._params = params
        self._layers = list(stacks.layers(params["blocks"]))

    def ends(self) -> dict:
        """See `Layers`."""
        return {name: tree for name, tree in self._params.items() if name != "blocks"}

    def layer(self, number: int) -> dict:
        """See `Layers`."""
        return self._layers[number]

    def digest(self) -> str:
        """See `Layers`."""
        combined = hashlib.sha256()
        for leaf in jax.tree.leaves(self._params):
            combined.update(np.ascontiguousarray(leaf).tobytes())
        return combined.hexdigest()


def pruned_layers(
    model: ModelConfig,
    weights: Layers,
    batches: Sequence[np.ndarray],
    names: Sequence[str],
    prune: Prune,
    rounded: Rounded = np.asarray,
    restored: Restored = lambda number: None,
) -> Iterator[tuple[int, dict[str, object]]]:
    """Yields (number, layer with pruned kernels as `layer_weights` of dense weights on the host).

    Args:
      model: of the weights.
      weights: block-sparse ones are read as dense ones with zeros.
      batches: int32 [B, T] token ids.
      names: projections to prune; others keep their weights.
      prune: called once for each of them, in the order of the forward pass.
      rounded: how results are saved, which later layers are fitted to.
      restored: layers that were pruned before, which are not yielded.

    Raises:
      UserError: activations are not finite.
    """
    dense = _exact(model)
    embed = jax.tree.map(jnp.asarray, weights.ends()["embed"])
    enter = jax.jit(gpt.embed, static_argnums=0)
    streams = [np.asarray(enter(dense, embed, jnp.asarray(tokens))) for tokens in batches]
    del embed
    _refuse_not_finite(dense, weights, model, streams)
    # Each layer is fitted to what it will read: the stream through the layers that are pruned
    # already. The other stream has the outputs that it should give.
    pruned_streams = list(streams)
    for number in range(model.num_layers):
        config, before = layer_model(dense, number), _dense_layer(model, weights.layer(number))
        both = _Tokens(config, streams), _Tokens(config, pruned_streams)
        # A stopped pruning goes on here: finished layers are read, and both streams pass through
        # them.
        if (earlier := restored(number)) is not None:
            after = _dense_layer(*earlier)
            both[1].config = layer_model(_exact(earlier[0]), number)
        else:
            # Rounded as it is saved: later layers are fitted to the weights that they will meet.
            after = jax.tree.map(rounded, before)
            for stage in stages(config.projections):
                if chosen := [name for name in stage if name in names]:
                    results = _pruned_stage(config, number, before, after, both, chosen, prune)
                    after |= jax.tree.map(rounded, results)
            yield number, after
        if number + 1 < model.num_layers:
            for tokens, layer in zip(both, (before, after)):
                if not tokens.advanced:
                    tokens.advance(layer)


class _Tokens:
    """The tokens of all batches in a layer of one model, on the host, from the residual stream
    [B, T, D] of each batch before the layer; after it once they are `advanced`."""

    def __init__(self, config: ModelConfig, streams: list):
        self.config, self.streams, self.advanced = config, streams, False
        self._attended: list = []

    def attended(self, layer: dict) -> list:
        """Returns the inputs [B, T, in] of attn_out, which are computed once: the projections
        before it have their weights."""
        if not self._attended:
            device = jax.tree.map(jnp.asarray, layer)
            streams = map(jnp.asarray, self.streams)
            self._attended = [np.asarray(_attended(self.config, device, x)) for x in streams]
        return self._attended

    def advance(self, layer: dict) -> None:
        """Replaces the streams before the layer by those after it, one by one."""
        device = jax.tree.map(jnp.asarray, layer)
        attended = self._attended or [None] * len(self.streams)
        for number, pair in enumerate(zip(self.streams, attended)):
            x, y = jax.tree.map(jnp.asarray, pair)
            self.streams[number] = np.asarray(_layer(self.config, device, x, y))


def _exact(model):
    """Returns a model with dense weights, which computes in float32."""
    return dataclasses.replace(
        model, linears={}, density_by_depth=(), compute_dtype="float32", precision=PRECISIONS[0]
    )


def _dense_layer(model, params):
    """Returns the parameters of a layer as `layer_weights` of dense weights on the host."""
    return {name: _dense(value) for name, value in layer_weights(model, params).items()}


def _refuse_not_finite(dense, weights, model, streams):
    """Raises UserError if the model gives values that are not finite, before anything is pruned;
    layers read the first batch alone, as moments show those of other batches."""

    def check(name, streams):
        if not all(np.isfinite(stream).all() for stream in streams):
            raise UserError(
                f"{name} gives activations that are not finite; legal: weights and calibration "
                "tokens with finite activations."
            )

    check("embed", streams)
    first = list(streams[:1])
    for number in range(model.num_layers):
        layer = _dense_layer(model, weights.layer(number))
        _Tokens(layer_model(dense, number), first).advance(layer)
        check(f"layer {number + 1}", first)


@functools.partial(jax.jit, static_argnames="config")
def _layer(config, layer, x, attended):
    return gpt.bind_block(config, layer)(x, **_attend(attended))


@functools.partial(jax.jit, static_argnames="config")
def _attended(config, layer, x):
    _, observations = observed_block(config, layer, x, lambda _, read, linear: (read, linear))
    return observations["attn_out"]


def _attend(attended):
    """Returns the arguments of a block whose attention gives [B, T, in] again; none for None."""
    if attended is None:
        return {}
    # [B, T, heads, K], whatever the queries are.
    return {"attend": lambda q, *_, **__: attended.reshape(*q.shape[:3], -1)}


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


def _pruned_stage(config, number, before, after, both, names, prune):
    """Returns name -> pruned projection of some projections that read the same inputs."""
    totals = SplitMoments()
    device = jax.tree.map(jnp.asarray, (before, after))
    arrays = [tokens.streams for tokens in both]
    # All of these read what attention gave, which is computed once for them.
    if names[0] in ("attn_out", *MLP):
        arrays += [tokens.attended(layer) for tokens, layer in zip(both, (before, after))]
    for index, batch in enumerate(zip(*arrays)):
        *rows, out_dense = _read(config, tuple(names), *device, *map(jnp.asarray, batch))
        totals.add(*rows)
        if out_dense is not None:  # Nothing else of this layer reads the dense stream.
            both[0].streams[index] = np.asarray(out_dense)
            both[0].advanced = True
    del device
    mean_x, mean_outputs = totals.means
    kinds = {before[name].bias is not None for name in names}
    read = {has_bias: totals.read(has_bias) for has_bias in kinds}
    del totals
    results, start = {}, 0
    for name in names:
        linear = before[name]
        kernel = linear.weight.kernel
        # The outputs of all names lie side by side.
        columns = slice(start, start + kernel.shape[1])
        start = columns.stop
        moments = [each.outputs(columns) for each in read[linear.bias is not None]]
        if not all(each.finite for each in moments):
            raise UserError(
                f"layer {number + 1}, {name} reads or gives activations that are not finite; "
                "legal: weights and calibration tokens with finite activations."
            )
        kernel = prune(Site(name, number, kernel, *moments)).astype(np.float32)
        bias = linear.bias
        if bias is not None:
            # The mean of what the pruned inputs no longer give goes to the bias.
            bias = (bias + mean_outputs[columns] - mean_x @ kernel).astype(np.float32)
        results[name] = Linear(Dense(kernel), bias)
    return results


@functools.partial(jax.jit, static_argnames=("config", "names"))
def _read(config, names, before, after, x_dense, x_pruned, *attended):
    """Returns inputs [tokens, in] of some projections, their wanted outputs [tokens, out], and the
    dense stream [B, T, D] after the layer."""
    observe = lambda _, x, linear: (x, linear)  # noqa: E731
    dense, pruned = map(_attend, attended or (None, None))
    adds = not config.post_norms
    # Without what mlp_out adds to the stream, whose wanted outputs are all that is missing then.
    without = lambda name, x, linear: (  # noqa: E731
        x,
        _Nothing(x_dense.shape[-1]) if adds and name == "mlp_out" else linear,
    )
    # Both models on their own streams: what the dense one gives, and what the pruned one reads.
    out_dense, read_dense = observed_block(config, before, x_dense, observe, **dense)
    missing, read_pruned = observed_block(config, after, x_pruned, without, **pruned)

    def wanted(name):
        if adds and name == "mlp_out":
            return (out_dense - missing) / config.residual_scale
        outputs = read_dense[name] @ before[name].weight
        if adds and name == "attn_out":
            outputs += (x_dense - x_pruned) / config.residual_scale
        return outputs

    x = read_pruned[names[0]].reshape(-1, read_pruned[names[0]].shape[-1])
    y = jnp.concatenate([wanted(name) for name in names], axis=-1).reshape(len(x), -1)
    return x, y, out_dense if names[0] == "mlp_out" else None


class _Nothing(NamedTuple):
    """A projection that gives 0."""

    outputs: int

    def product(self, x, *_):
        return jnp.zeros((*x.shape[:-1], self.outputs), x.dtype)


def as_params(layers: Iterator[Mapping[str, object]], num_layers: int) -> object:
    """Returns layers of dense weights as the "blocks" of a dense model's parameters.

    Each layer is copied into the stack when it comes, so that no layer is in memory twice.
    """
    stacked: object = None
    for number, layer in enumerate(layers):
        tree = layer_arrays(layer)
        if stacked is None:
            stacked = jax.tree.map(lambda x: np.empty((num_layers, *x.shape), x.dtype), tree)
        for stack, leaf in zip(jax.tree.leaves(stacked), jax.tree.leaves(tree), strict=True):
            stack[number] = leaf
    return stacked


def layer_arrays(layer: Mapping[str, object]) -> dict[str, object]:
    """Returns the `layer_weights` of dense weights as named arrays in numpy."""
    is_linear = lambda node: isinstance(node, Linear)  # noqa: E731
    by_name = lambda node: arrays(node) if is_linear(node) else node  # noqa: E731
    return jax.tree.map(np.asarray, jax.tree.map(by_name, dict(layer), is_leaf=is_linear))
