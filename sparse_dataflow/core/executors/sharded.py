"""The `whole` executor over a mesh: every device runs the same program on its shards."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core import step_metrics
from sparse_dataflow.core.config.layer_groups import group_index_of_path, split_groups
from sparse_dataflow.core.config.projections import KEY_VALUE, MLP
from sparse_dataflow.core.executors import compatibility, cuts, sharding, whole
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors import (
    residual_stream as residual,
)
from sparse_dataflow.core.executors.block_gradients import block_gradient_norms
from sparse_dataflow.core.executors.context import Context
from sparse_dataflow.core.executors.executor import TracedExecutor, abstract
from sparse_dataflow.core.executors.mesh import BATCH_AXES, MODEL_AXES
from sparse_dataflow.core.executors.mesh_axes import MOST_SUB_BATCHES, key_value_copies
from sparse_dataflow.core.executors.mesh_axes import cut_run_length as run_length
from sparse_dataflow.core.executors.sharding import COLUMN_PARALLEL, TABLES
from sparse_dataflow.core.executors.state_roles import Role, parameter_shapes, roles
from sparse_dataflow.core.layouts.layout import FixedTables
from sparse_dataflow.core.model import partition, stacks
from sparse_dataflow.core.model.shard import Shard
from sparse_dataflow.core.optim.optimizers import gradient_arrays
from sparse_dataflow.core.weights.kind import BIAS
from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sharded(TracedExecutor):
    """All sections in one program, sharded over the axes of a mesh.

    Attributes:
      mesh: with all of `mesh.AXES`; its "stage" is 1.
      zero: which arrays are sharded over "fsdp" and "context"; see `sharding.ZERO`.
      exchange: whether tokens travel to the experts over "fsdp", whose weights stay sharded.
      sub_batches: see `whole.Rank`.
    """

    mesh: meshes.AnyMesh
    zero: int = 3
    exchange: bool = False
    sub_batches: int = 1

    @property
    def devices(self):
        return self.mesh.size

    def describe(self):
        flags = f"--mesh={meshes.describe(self.mesh)} --set parallel.zero={self.zero}"
        if self.sub_batches > 1:
            flags += f" --set parallel.sub_batches={self.sub_batches}"
        return flags + (" --set parallel.experts=exchange" if self.exchange else "")

    @property
    def parallelisms(self):
        longer = {axis for axis, size in self.mesh.shape.items() if size > 1}
        rows = (compatibility.ROWS.words,) if longer & set(BATCH_AXES) else ()
        axes = [axis.words for axis in compatibility.PARALLELISMS]
        return (*rows, *(axis for axis in axes if axis in longer))

    def check(self, model, training):
        super().check(model, training)
        if self.exchange:
            sharding.refuse_exchange(self.mesh, model)
        row = model.row(training.sequence)
        sharding.refuse_indivisible(self.mesh, model, training.batch, training.micro_batches, row)
        rows = training.batch // training.micro_batches // meshes.batch_shards(self.mesh)
        if rows % self.sub_batches:
            most = min(rows, MOST_SUB_BATCHES)
            legal = ", ".join(str(n) for n in range(1, most + 1) if rows % n == 0)
            raise UserError(
                f"parallel.sub_batches={self.sub_batches} does not divide the {rows} sequences of "
                f"a micro-batch on a device; legal: {legal}."
            )
        residual.refuse(self.mesh, model)
        for place, layout in stacks.layouts_by_place(stacks.stored_layouts(model)).items():
            cut = self._cut(model, place, layout, changing=False)
            if model.experts and place.projection in MLP and cut.layout.groups is None:
                raise UserError(
                    f"tensor:{self.tensor_shards} divides the groups of stored blocks of "
                    f"{place.projection} unequally; legal with block-sparse experts: the pattern "
                    "monarch and a size that divides, or is a multiple of, the number of groups."
                )

    def evaluation(self, model, params, rest, batch):
        rank, specs, _ = self._rank(model, params, rest)

        def local(params, rest, batch):
            share = whole.evaluation(model, _local_weights(model, params, rest), batch, rank)
            return step_metrics.over_devices(share, self.mesh.axis_names)

        return self._mapped(local, (*specs, P(BATCH_AXES)), P())(params, rest, batch)

    def token_scores(self, model, params, rest, batch, places, targets):
        """Returns `whole.token_scores` as [batch shards, S] each.

        `places` and `targets` are int32 [batch shards, S]: row i is of the i-th shard of the batch.
        """
        rank, specs, _ = self._rank(model, params, rest)

        def local(params, rest, batch, places, targets):
            ours = batch, places[0], targets[0]
            weights = _local_weights(model, params, rest)
            scores = whole.token_scores(model, weights, *ours, rank)
            return tuple(score[None] for score in scores)

        rows = P(BATCH_AXES)
        mapped = self._mapped(local, (*specs, rows, rows, rows), (rows, rows))
        return mapped(params, rest, batch, places, targets)

    def loss_and_gradients(self, model, params, rest, batch, how):
        rank, specs, gradient_specs = self._rank(model, params, rest)

        def local(params, rest, batch):
            metrics, gradients = whole.loss_and_gradients(
                model, params, local_layouts(rest), batch, how, rank
            )
            all_reduce = functools.partial(sharding.all_reduce, mesh=self.mesh)
            # Once, after all micro-batches, which each rank sums by itself.
            gradients = jax.tree.map(all_reduce, gradients, gradient_specs)
            return step_metrics.over_devices(metrics, self.mesh.axis_names), gradients

        in_specs = *specs, batch_specs(batch)
        return self._mapped(local, in_specs, (P(), gradient_specs))(params, rest, batch)

    def over_rows(self, function):
        rows = P(BATCH_AXES)
        return self._mapped(function, (P(), rows), rows)

    def block_gradient_norms(self, model, params, rest, batch):
        rank, specs, _ = self._rank(model, params, rest)
        # A norm of the whole rows is not the sum of norms of their parts.
        rank = dataclasses.replace(rank, sub_batches=1)
        axes = self._measured_axes(batch)

        def local(params, rest, batch):
            weights = _local_weights(model, params, rest)
            norms = block_gradient_norms(model, weights, batch, rank, axes)
            return self._summed_strips(norms)

        out_specs = norm_specs(split_groups(stacks.layouts_by_name(rest))[0])
        measure = self._mapped(local, (*specs, P(axes or None)), out_specs)
        return self._one_copy(measure(params, rest, batch), model)

    def _summed_strips(self, norms):
        """Returns norms of blocks from those of the strips of each that "feature" cuts."""
        if self.mesh.shape["feature"] == 1:
            return norms
        # A block's strips lie on the devices of "feature": squares of norms add, norms do not.
        squares = jax.tree.map(jnp.square, norms)
        return jax.tree.map(jnp.sqrt, lax.psum(squares, "feature"))

    def _measured_axes(self, batch):
        """Returns the axes that shard measured rows; none if they are too few for all devices."""
        return () if len(batch.tokens) % meshes.batch_shards(self.mesh) else BATCH_AXES

    def _one_copy(self, norms, model):
        """Returns norms [layers, in_blocks, out_blocks] with one copy of each key/value head."""

        def without_copies(norms):
            # [layers, in_blocks, kv heads, copies, out_blocks of a head]; the copies are equal.
            by_copy = norms.reshape(*norms.shape[:2], model.kv_heads, self._kv_copies(model), -1)
            return by_copy[:, :, :, 0].reshape(*norms.shape[:2], -1)

        if self._kv_copies(model) == 1:
            return norms
        return {
            name: without_copies(projection_norms) if name in KEY_VALUE else projection_norms
            for name, projection_norms in norms.items()
        }

    def _kv_copies(self, model):
        return int(key_value_copies(model, self.tensor_shards))

    def _rank(self, model, params, rest):
        """Returns (rank, (specs of params, of the rest), specs of the gradients)."""
        fsdp = self.zero >= sharding.ZERO["params"]
        specs, rest_specs = (sharding.specs(p, model, self.mesh, fsdp) for p in (params, rest))
        fsdp = self.zero >= sharding.ZERO["gradients"]
        gradient_specs = sharding.specs(params, model, self.mesh, fsdp)
        # Frozen parameters are gathered as trained ones are; layouts are not.
        all_specs = partition.merged(specs, stacks.split_layouts(rest_specs)[0])
        all_specs = sharding.gathered_specs(model, all_specs, self.exchange)
        by_group = {name: split_groups(section) for name, section in all_specs.items()}
        by_group["blocks"] = tuple(map(sharding.layer_specs, by_group["blocks"]))
        # An axis of one device has no name here, so that the model's sections call no collective
        # over it.
        longer = lambda axis: axis if self.mesh.shape[axis] > 1 else None  # noqa: E731
        rank = whole.Rank(
            Shard(
                longer("tensor"),
                # Rows that the model axes do not divide are whole on each device.
                bool(sharding.axes_of(all_specs["embed"]["tokens"]) & set(MODEL_AXES)),
                self._kv_copies(model),
                (*BATCH_AXES, *(("context",) if longer("context") else ())),
                longer("fsdp") if self.exchange else None,
                longer("feature"),
                run_length(model),
            ),
            meshes.batch_shards(self.mesh),
            lambda name, params, group: sharding.gather(
                params, by_group[name][group], model.compute_dtype
            ),
            lambda gradients: jax.tree.map(
                sharding.reduce_scatter, gradients, specs, gradient_specs
            ),
            self.sub_batches,
            Context("context", self.mesh.shape["context"]) if longer("context") else None,
        )
        return rank, (specs, rest_specs), gradient_specs

    def _mapped(self, local, in_specs, out_specs):
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    @property
    def tensor_shards(self):
        return self.mesh.shape["tensor"]

    def shardings(self, state, model):
        return sharding.state_shardings(state, model, self.mesh, self.zero)

    def replicated(self):
        return NamedSharding(self.mesh, P())

    def place(self, state, model):
        return self._with_rows(self._reordered(state, model, lambda order: order), model)

    def placed_shapes(self, state, model):
        shapes = self._row_shapes(state, model)
        if shapes is state:
            return state
        return jax.tree.map(abstract, shapes, self.shardings(shapes, model))

    def canonical(self, state, model):
        return self._reordered(self._with_rows(state, model, model.vocab_size), model, cuts.inverse)

    def _row_shapes(self, state, model, vocabulary=None):
        """Returns the state with new shapes for embedding, output layer and their moments.

        They get `vocabulary` rows, or those of `sharding.padded_rows`. Returns the state itself if
        it has these rows.
        """

        parameters = parameter_shapes(state)

        def resized(leaf, role):
            if not role.parameter.endswith(sharding.VOCABULARY_ROWS):
                return leaf
            before = parameters.get(role.parameter, leaf.shape)[0]
            rows = vocabulary or sharding.padded_rows(before, self.mesh)
            if rows == before or (axis := role.axis(0)) is None:
                return leaf
            shape = (*leaf.shape[:axis], rows, *leaf.shape[axis + 1 :])
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        shapes = jax.tree.map(resized, state, roles(model, state))
        same = all(map(operator.is_, jax.tree.leaves(shapes), jax.tree.leaves(state)))
        return state if same else shapes

    def _with_rows(self, state, model, vocabulary=None):
        """Adds padding rows (zeros) to placed embedding and output layer, or removes them."""
        arrays = state.without_layouts()
        shapes = self._row_shapes(arrays, model, vocabulary)
        if shapes is arrays:
            return state

        def resize(leaf, shape, target):
            return leaf if leaf.shape == shape.shape else _resize(target, shape.shape)(leaf)

        placed = jax.tree.map(resize, arrays, shapes, self.shardings(shapes, model))
        return placed.with_layouts_of(state)

    def _reordered(self, state, model, permutation):
        """Places a state with blocks of row-parallel projections and residual features reordered.

        `permutation` maps the order of the shards to the indices to take.
        """
        orders: dict[stacks.Place, np.ndarray] = {}
        if self.tensor_shards > 1:
            for each, layout in stacks.layouts_by_place(state.rest).items():
                if (order := self._cut(model, each, layout, changing=False).order) is not None:
                    orders[each] = order
        arrays = state.without_layouts()
        features = self.residual_order(model)

        parameters = parameter_shapes(arrays)

        def place(path, leaf, target, role: Role):
            *_, module, name = ["", "", *role.parameter.split(".")]
            key = stacks.Place(group_index_of_path(path), module)
            if key in orders and model.linear(module).leaves.get(name, BIAS).is_blocks:
                # Values are sorted by output block, and a row-parallel shard has a range of input
                # blocks. So its blocks are scattered, and a `NamedSharding` only cuts an axis into
                # contiguous parts. Here the blocks of each shard are moved together. They are the
                # third axis from the end, in moments too.
                order = permutation(orders[key])[: len(leaf)]  # Shared layers have one layout.
                dims = len(parameters.get(role.parameter, leaf.shape))  # Frozen ones have no state.
                axis = role.axis(dims - 3)
                return _take(target, axis)(put_global(leaf, target), order)
            dim = sharding.residual_dim(model, role.parameter) if role.parameter else None
            if features is not None and dim is not None and (axis := role.axis(dim)) is not None:
                # `cuts.inverse` takes a permutation in each row.
                order = permutation(features[None])[0]
                return _take_features(target, axis)(put_global(leaf, target), order)
            return put_global(leaf, target)

        placed = jax.tree_util.tree_map_with_path(
            place, arrays, self.shardings(arrays, model), roles(model, arrays)
        )
        return placed.with_layouts_of(state)

    def residual_order(self, model):
        return residual.order(model, self.mesh)

    def place_layouts(self, rest, model, changing):
        target = NamedSharding(self.mesh, TABLES)
        cut = self._cut_layouts(rest, model, changing)
        cut = jax.tree.map(lambda table: put_global(table, target), cut)
        others, _ = stacks.split_layouts(rest)
        return partition.merged(others, cut)

    def _cut_layouts(self, rest, model, changing):
        """Returns the layouts of `place_layouts` as leaves, in numpy."""
        _, layouts = stacks.split_layouts(rest)
        if self.tensor_shards == 1 and not changing:
            return stacks.map_layouts(FixedTables, layouts)
        return stacks.map_placed_layouts(
            lambda place, layout: self._cut(model, place, layout, changing).layout, layouts
        )

    def _cut(self, model, place, layout, changing):
        """Returns the `cuts.Cut` of the layouts of a projection."""
        copies = self._kv_copies(model)
        return cuts.cut(place.projection, layout, self.tensor_shards, changing, copies)

    def arrays(self, state, model, changing, batch):

        def sharded(tree, spec):
            target = NamedSharding(self.mesh, spec)
            return jax.tree.map(lambda leaf: abstract(leaf, target), tree)

        layouts = self._cut_layouts(state.rest, model, changing)
        state = state.without_layouts()
        placed = jax.tree.map(abstract, state, self.shardings(state, model))
        placed = self.placed_shapes(placed, model)
        fsdp = self.zero >= sharding.ZERO["gradients"]
        specs = sharding.specs(placed.params, model, self.mesh, fsdp)
        return super().arrays(placed, model, changing, batch) | {
            "gradients": jax.tree.map(sharded, self._gradients_like(placed), specs),
            "layout tables": sharded(layouts, TABLES),
            "batch": sharded(batch, P(BATCH_AXES)),
        }

    def _gradients_like(self, state):
        """Returns the shapes and dtypes of the gradients."""
        return gradient_arrays(state.moments, state.params)

    def local_rows(self, batch):
        return meshes.local_rows(self.mesh, batch)

    def put(self, batch, rows):
        target = NamedSharding(self.mesh, P(BATCH_AXES))
        position = {row: i for i, row in enumerate(self.local_rows(rows))}

        def put_array(array):
            def shard(index):
                start, stop, _ = index[0].indices(rows)
                # A device's rows are consecutive in the batch, and local rows ascend, so they are
                # here as well.
                return array[position[start] : position[stop - 1] + 1]

            return jax.make_array_from_callback((rows, *array.shape[1:]), target, shard)

        return jax.tree.map(put_array, batch)


def batch_specs(batch):
    """Returns the partition specs of a `Batch`."""
    return jax.tree.map(lambda _: P(), batch).map_rows(lambda _: P(BATCH_AXES))


def norm_specs(projections):
    """Returns the partition specs of block norms [layers, in_blocks, out_blocks]."""
    column, row = P("stage", None, "tensor"), P("stage", "tensor")
    return {name: column if name in COLUMN_PARALLEL else row for name in projections}


def _local_weights(model, params, rest):
    """Returns the weights of a device."""
    return stacks.weights_of(model, params, local_layouts(rest))


def local_layouts(rest):
    """Returns a device's layouts as [layers, lines, fan], without the axis of shards."""
    drop = lambda table: table if table.ndim == 3 else table[:, 0]  # noqa: E731
    return stacks.map_layouts(lambda layout: jax.tree.map(drop, layout), rest)


def put_global(leaf, target):
    """Returns the array with sharding `target`; a whole one is equal on every process."""
    # All but an array that is whole here for a target that has devices of other processes.
    if isinstance(leaf, jax.Array) and target.is_fully_addressable >= leaf.is_fully_addressable:
        return jax.device_put(leaf, target)
    return jax.make_array_from_callback(leaf.shape, target, lambda index: leaf[index])


@functools.cache
def _resize(target, shape):
    """Returns a jitted function that truncates an array to a shape, or pads it with zeros."""

    def resize(array):
        array = array[tuple(map(slice, shape))]
        return jnp.pad(array, [(0, size - has) for size, has in zip(shape, array.shape)])

    return jax.jit(resize, out_shardings=target)


@functools.cache
def _take_features(target, dim):
    """Returns a jitted function (array, order of the features along `dim`) -> reordered array."""
    return jax.jit(lambda array, order: jnp.take(array, order, dim), out_shardings=target)


@functools.cache
def _take(target, axis):
    """Returns a jitted function (array [layers, ..., nnz, ...], order of each layer) -> reordered
    array; the blocks are at `axis`."""

    def take(array, order):
        # The order is of one axis, and is broadcast to all others.
        inner = (1,) * (array.ndim - axis - 1)
        order = order.reshape(len(order), *(1,) * (axis - 1), -1, *inner)
        return jnp.take_along_axis(array, order, axis)

    return jax.jit(take, out_shardings=target)
