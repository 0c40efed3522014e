"""The projections of a model as weights: their layouts, their drawing, their stored names."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import KEY_VALUE, PRECISIONS, PROJECTIONS
from sparse_dataflow.core.model.shard import UNSHARDED, Shard
from sparse_dataflow.core.weights.kind import BIAS_NAME, LAYOUT, THRESHOLD, Weight, with_term
from sparse_dataflow.core.weights.weight import Hadamard, Linear, Probed, Thresholded


def linear(config: ModelConfig, projection: str, arrays: dict, form: Any = None) -> Linear:
    """Returns a projection from its arrays, as parameter trees name them.

    The spec says of which kind a weight is, and whether it has an added term.

    Args:
      arrays: the arrays, also stacked over layers or experts, of any dtype; with the layout of a
        weight that stores blocks, and its threshold if it has one.
      form: class that stores the arrays; that of the spec if None.
    """
    spec = config.linear(projection)
    weight = (form or spec.weight.form(spec)).from_arrays(arrays, config.precision)
    if THRESHOLD in arrays:
        weight = Thresholded(weight, arrays[THRESHOLD])
    if spec.hadamard:
        weight = Hadamard(weight, spec.hadamard)
    return Linear(with_term(spec, weight, arrays), arrays.get(BIAS_NAME))


def arrays(linear: Linear) -> dict[str, jax.Array]:
    """Returns the arrays of a projection by name, without its layout."""
    leaves = jax.tree_util.tree_leaves_with_path(linear)
    names = [(path[-1].name, leaf) for path, leaf in leaves if not _is_layout(path)]
    return dict(names)


def _is_layout(path):
    return any(getattr(key, "name", "") == LAYOUT for key in path)


def layer_weights(
    config: ModelConfig, params: Mapping[str, dict], others: Mapping[str, dict] = {}
) -> dict:
    """Returns the parameters of a layer, or of a stack, with each projection as a `Linear`.

    Args:
      params: parameters of the layer, see `gpt`.
      others: section around it, whose layouts its weights have: the expert that all tokens have
        has those of the experts.
    """

    def weights(name, module):
        if name in PROJECTIONS:
            layout = {n: array for n, array in others.get(name, {}).items() if n == LAYOUT}
            return linear(config, name, {**layout, **module})
        if name in ("experts", "shared"):
            return layer_weights(config, module, params)
        return module

    return {name: weights(name, module) for name, module in params.items()}


def with_probes(
    weights: dict,
    norms: Mapping[str, jax.Array],
    axes: tuple[str, ...] = (),
    shard: Shard = UNSHARDED,
) -> dict:
    """Returns the weights of a layer, or of a stack, with `Probed` projections.

    Args:
      weights: see `layer_weights`.
      norms: projection -> its norms; see `Probed`, also for `axes`.
      shard: of the projections in KEY_VALUE, whose gradients are summed over their copies.
    """

    def probed(name, stored):
        copied = name in KEY_VALUE and shard.kv_copies > 1
        # Quantised products are measured without their rounding.
        exact = dataclasses.replace(stored, precision=PRECISIONS[0])
        return Probed(exact, norms[name], axes, shard.sum_copies if copied else None)

    probes = {n: _with_stored(weights[n], functools.partial(probed, n)) for n in norms}
    return {**weights, **probes}


def without_layout(linear: Linear) -> Linear:
    """Returns a projection whose block-sparse weight has no layout, and multiplies nothing."""

    no_layout: Any = None

    def without(stored: Weight) -> Weight:
        return dataclasses.replace(stored, layout=no_layout) if stored.stores_blocks else stored  # type: ignore[type-var]

    return _with_stored(linear, without)


def with_threshold(linear: Linear, level: object) -> Linear:
    """Returns a projection whose weight is `Thresholded`."""
    return _with_stored(linear, lambda stored: Thresholded(stored, level))


def _with_stored(linear, wrap):
    return dataclasses.replace(linear, weight=linear.weight.map_stored(wrap))


def draw(
    config: ModelConfig, projection: str, *, gain: float, rngs: nnx.Rngs, experts: bool = False
) -> dict:
    """Draws the arrays of a projection, float32, at the layout of layer 0.

    Weights are drawn normal with variance gain² / (stored inputs of one output); see `Weight.draw`
    of each kind.  A base under adapters is drawn before `adapters.frozen` stores it in another
    form.

    Args:
      experts: whether every expert has a projection: arrays [experts, ...], each drawn as that of
        an MLP is.
    """
    spec, sides = config.linear(projection), config.projection_shape(projection)
    stack = (config.experts,) if experts else ()
    layout = None
    if spec.weight.stores_blocks:
        from sparse_dataflow.core.layouts.model_layouts import expert_layout, projection_layout

        layout = (
            expert_layout(config, projection)
            if experts
            else projection_layout(config, projection, layer=0)
        )

    def draw_normal(shape, scale):
        return normal(rngs, (*stack, *shape), scale)

    parameters = spec.weight.draw(spec, sides, gain, draw_normal, layout)
    if projection in config.biases:
        parameters[BIAS_NAME] = jnp.zeros((*stack, sides[1]))
    if spec.term:
        parameters |= spec.term.draw(spec, sides, gain, draw_normal)
    return parameters


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Draws float32 normal numbers of standard deviation `scale`."""
    # Drawn as rows, which gives the same numbers: short inner loops over a small block compile to
    # slow code on a CPU.
    rows = (shape[0], math.prod(shape[1:]))
    return (jax.random.normal(rngs.params(), rows, jnp.float32) * scale).reshape(shape)
