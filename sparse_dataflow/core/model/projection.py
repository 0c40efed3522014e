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
from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.layouts.model_layouts import projection_layout
from sparse_dataflow.core.model.shard import WHOLE, Shard
from sparse_dataflow.core.weights.kind import TERMS, Weight, stored_form
from sparse_dataflow.core.weights.low_rank import PlusLowRank
from sparse_dataflow.core.weights.weight import Hadamard, Linear, Probed, Thresholded


def linear(
    config: ModelConfig, projection: str, arrays: Mapping[str, Any], layout: Any = None
) -> Linear:
    """Returns a projection from its arrays, as parameter trees and checkpoints name them.

    The spec says how a weight is computed; which arrays there are says how it is stored, and
    whether it has an added term and a bias.

    Args:
      arrays: the arrays, also stacked over layers or experts; of any dtype.
      layout: of a weight that stores blocks; or a `Probe` or `InputThreshold`.
    """
    if isinstance(layout, InputThreshold):
        return with_threshold(linear(config, projection, arrays, layout.tables), layout.level)
    if isinstance(layout, Probe):
        plain = linear(config, projection, arrays, layout.tables)
        return _with_stored(plain, lambda stored: _probed(stored, layout))
    form = stored_form(arrays)
    assert form is not None, f"no weight has the arrays {', '.join(arrays)}"
    weight = form.from_arrays(arrays, layout, config.precision)
    if width := config.linear(projection).hadamard:
        weight = Hadamard(weight, width)
    if TERMS <= arrays.keys():
        weight = PlusLowRank(weight, **{name: arrays[name] for name in TERMS})
    return Linear(weight, arrays.get("bias"))


def arrays(linear: Linear) -> dict[str, Any]:
    """Returns the arrays of a projection by name; inverse of the function `linear`."""
    leaves = jax.tree_util.tree_leaves_with_path(linear)
    names = [(path[-1].name, leaf) for path, leaf in leaves if not _of_layout(path)]
    return dict(names)


def _of_layout(path):
    return any(getattr(key, "name", "") == "layout" for key in path)


def layer_weights(config: ModelConfig, params: Mapping[str, Any], tables: Mapping) -> dict:
    """Returns the parameters of one layer with each projection as a `Linear`.

    Args:
      params: parameters of the layer, see `gpt`.
      tables: block-sparse projection -> its tables, a `Probe` or an `InputThreshold`; those of
        experts belong to the shared expert too.
    """

    def weights(name, module):
        if name in PROJECTIONS:
            return linear(config, name, module, tables.get(name))
        if name in ("experts", "shared"):
            return layer_weights(config, module, tables)
        return module

    return {name: weights(name, module) for name, module in params.items()}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("tables", "norms"), meta_fields=("axes", "shard")
)
@dataclasses.dataclass(frozen=True)
class Probe:
    """Layout tables of a projection, and the rest of its `Probed` weight.

    Attributes:
      norms: see `Probed`, also for `axes`.
      axes: `shard_map` axes over which the rows of x are sharded.
      shard: shard of a projection in KEY_VALUE, whose gradient is summed over its copies.
    """

    tables: LayoutTables
    norms: jax.Array
    axes: tuple[str, ...] = ()
    shard: Shard = WHOLE

    @classmethod
    def of(
        cls,
        tables: Mapping[str, LayoutTables],
        norms: Mapping[str, jax.Array],
        axes: tuple[str, ...],
        shard: Shard,
    ) -> "dict[str, Probe]":
        """Returns the probes of a block's projections, by name."""
        return {
            name: cls(table, norms[name], axes, shard if name in KEY_VALUE else WHOLE)
            for name, table in tables.items()
        }


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("tables", "level"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class InputThreshold:
    """Layout tables of a projection, and the level of its `Thresholded` weight.

    Inputs are measured after a Hadamard transform, as the weight reads them.  The low-rank term
    reads all.

    Attributes:
      tables: tables of the layout; None for a dense weight.
      level: float32 [], jax or numpy, the largest magnitude that counts as zero.
    """

    tables: LayoutTables | None
    level: Any

    def with_groups(self) -> "InputThreshold":
        """See `LayoutTables.with_groups`."""
        if self.tables is None:
            return self
        return dataclasses.replace(self, tables=self.tables.with_groups())


def without_layout(linear: Linear) -> Linear:
    """Returns a projection whose block-sparse weight has no layout, and multiplies nothing."""

    no_layout: Any = None

    def without(stored: Weight) -> Weight:
        return dataclasses.replace(stored, layout=no_layout) if stored.stores_blocks else stored  # type: ignore[type-var]

    return _with_stored(linear, without)


def with_threshold(linear: Linear, level: Any) -> Linear:
    """Returns a projection whose weight is `Thresholded`."""
    return _with_stored(linear, lambda stored: Thresholded(stored, level))


def _probed(stored, probe):
    """Returns a block-sparse weight with a probe; quantised products are measured without."""
    copies = probe.shard.sum_copies if probe.shard.kv_copies > 1 else None
    stored = dataclasses.replace(stored, precision=PRECISIONS[0])
    return Probed(stored, probe.norms, probe.axes, copies)


def _with_stored(linear, wrap):
    return dataclasses.replace(linear, weight=linear.weight.map_stored(wrap))


def draw(config: ModelConfig, projection: str, *, gain: float, rngs: nnx.Rngs) -> Linear:
    """Draws the parameters of a projection, float32, at the layout of layer 0.

    Weights are drawn normal with variance gain² / (stored inputs of one output); see `Weight.draw`
    of each kind.
    """
    spec = config.linear(projection)
    sides = config.projection_shape(projection)
    layout = projection_layout(config, projection, layer=0) if spec.weight.stores_blocks else None
    draw_normal = functools.partial(normal, rngs)
    parameters = spec.weight.draw(spec, sides, gain, draw_normal, layout)
    if projection in config.biases:
        parameters["bias"] = jnp.zeros(sides[1])
    if spec.rank:
        parameters |= PlusLowRank.draw_term(spec.rank, sides, draw_normal)
    return linear(config, projection, parameters, layout)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Draws float32 normal numbers of standard deviation `scale`."""
    # Drawn as rows, which gives the same numbers: short inner loops over a small block compile to
    # slow code on a CPU.
    rows = (shape[0], math.prod(shape[1:]))
    return (jax.random.normal(rngs.params(), rows, jnp.float32) * scale).reshape(shape)
