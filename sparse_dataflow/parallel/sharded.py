"""The `whole` executor over a mesh: every device runs the same program on its part of all."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_dataflow.models import gpt
from sparse_dataflow.models.groups import group_of, parts, together
from sparse_dataflow.models.shard import Shard
from sparse_dataflow.optim.optimizers import adam_state
from sparse_dataflow.parallel import cuts, sharding, whole
from sparse_dataflow.parallel import mesh as meshes
from sparse_dataflow.parallel.block_gradients import block_gradient_norms
from sparse_dataflow.parallel.mesh import BATCH_AXES
from sparse_dataflow.parallel.sharding import COLUMN_PARALLEL

TABLES = P("stage", "tensor")
"""Of tables [layers, shards, lines, fan]."""


@dataclasses.dataclass(frozen=True)
class Sharded:
    """All sections in one program, cut over the axes of a mesh.

    Attributes:
      mesh: with all of `mesh.AXES`; its "stage" is 1.
      zero: what is dealt out over "fsdp"; see `sharding.ZERO`.
    """

    mesh: meshes.AnyMesh
    zero: int = 3

    @property
    def devices(self):
        """See `Executor`."""
        return self.mesh.size

    def describe(self):
        """See `Executor`."""
        return f"--mesh={meshes.describe(self.mesh)} --set parallel.zero={self.zero}"

    def check(self, model, training):
        """See `Executor`."""
        sharding.refuse_unfit(
            self.mesh, model, training.batch, training.micro_batches, training.sequence
        )
        for group in parts(gpt.layout_tables(gpt.layouts(model))):
            cuts.cut(group, self._tensor, changing=False)

    def loss(self, model, params, tables, tokens, weights):
        """See `Executor`."""
        member, kept, _ = self._member(model, params)

        def local(params, tables, tokens, weights):
            share = whole.loss(model, params, own_tables(tables), tokens, weights, member)
            return lax.psum(share, self.mesh.axis_names)

        rows = P(BATCH_AXES)
        return self._over_mesh(local, tables, (kept, rows, rows), P())(params, tokens, weights)

    def token_scores(self, model, params, tables, tokens, places):
        """As `whole.token_scores`, of places int32 [parts, S]: row i is of the i-th part of the
        batch's rows. Returns [parts, S] each."""
        member, kept, _ = self._member(model, params)

        def local(params, tables, tokens, places):
            found = whole.token_scores(model, params, own_tables(tables), tokens, places[0], member)
            return tuple(part[None] for part in found)

        rows = P(BATCH_AXES)
        return self._over_mesh(local, tables, (kept, rows, rows), (rows, rows))(
            params, tokens, places
        )

    def loss_and_gradients(self, model, params, tables, tokens, micro_batches, dtype="float32"):
        """See `Executor`."""
        member, kept, gradient_specs = self._member(model, params)

        def local(params, tables, tokens):
            share, gradients = whole.loss_and_gradients(
                model, params, own_tables(tables), tokens, micro_batches, member, dtype
            )
            summed = functools.partial(sharding.summed, mesh=self.mesh)
            gradients = jax.tree.map(summed, gradients, gradient_specs)
            return lax.psum(share, self.mesh.axis_names), gradients

        specs = (kept, P(BATCH_AXES))
        return self._over_mesh(local, tables, specs, (P(), gradient_specs))(params, tokens)

    def block_gradient_norms(self, model, params, tables, tokens):
        """See `Executor`."""
        member, kept, _ = self._member(model, params)
        # Rows too few for all devices are measured by each.
        axes = () if len(tokens) % meshes.batch_parts(self.mesh) else BATCH_AXES

        def local(params, tables, tokens):
            return block_gradient_norms(model, params, own_tables(tables), tokens, member, axes)

        column, row = P(None, None, "tensor"), P(None, "tensor")
        found = {name: column if name in COLUMN_PARALLEL else row for name in parts(tables)[0]}
        return self._over_mesh(local, tables, (kept, P(axes or None)), found)(params, tokens)

    def _member(self, model, params):
        """(member, specs of the params, specs of the gradients)."""
        kept = sharding.specs(params, self.mesh, self.zero >= sharding.ZERO["params"])
        wanted = sharding.specs(params, self.mesh, self.zero >= sharding.ZERO["gradients"])
        specs = {name: parts(section) for name, section in kept.items()}
        specs["blocks"] = tuple(map(sharding.of_layer, specs["blocks"]))
        cut = self._tensor > 1
        member = whole.Member(
            Shard(
                "tensor" if cut else None,
                cut and "tensor" in sharding.axes_of(kept["embed"]["tokens"]),
            ),
            meshes.batch_parts(self.mesh),
            lambda name, own, group: sharding.fetch(own, specs[name][group], model.compute_dtype),
            lambda gradients: jax.tree.map(sharding.scattered, gradients, kept, wanted),
        )
        return member, kept, wanted

    def _over_mesh(self, local, tables, specs, out_specs):
        """`local(params, tables, ...)` on every device; concrete tables stay so."""
        first, *others = specs
        if all(isinstance(table, np.ndarray) for table in jax.tree.leaves(tables)):
            run = lambda params, *rest: local(params, tables, *rest)  # noqa: E731
            in_specs = tuple(specs)
            given: tuple = ()
        else:
            run = lambda params, tables, *rest: local(params, tables, *rest)  # noqa: E731
            in_specs = (first, TABLES, *others)
            given = (tables,)
        # What is summed over which axis is written out.
        mapped = jax.shard_map(
            run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return lambda params, *rest: mapped(params, *given, *rest)

    @property
    def _tensor(self) -> int:
        return self.mesh.shape["tensor"]

    def shardings(self, state):
        """See `Executor`."""
        return sharding.state_shardings(state, self.mesh, self.zero)

    def replicated(self):
        """See `Executor`."""
        return NamedSharding(self.mesh, P())

    def place(self, state):
        """See `Executor`."""
        return self._with_rows(self._reordered(state, lambda order: order))

    def placed_shapes(self, state):
        """See `Executor`."""
        shapes = self._row_shapes(state)
        if shapes is state:
            return state
        return jax.tree.map(_abstract, shapes, self.shardings(shapes))

    def canonical(self, state, model):
        """See `Executor`."""
        return self._reordered(self._with_rows(state, model.vocab_size), cuts.inverse)

    def _row_shapes(self, state, vocabulary=None):
        """The state with shapes in place of its embedding and its moments: of so many rows, or of
        `sharding.filled`; the state itself where it has these rows."""

        def one(path, leaf):
            if not sharding.dotted(path).endswith("embed.tokens"):
                return leaf
            rows = vocabulary or sharding.filled(leaf.shape[0], self.mesh)
            if rows == leaf.shape[0]:
                return leaf
            return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

        shapes = jax.tree_util.tree_map_with_path(one, state)
        same = all(map(operator.is_, jax.tree.leaves(shapes), jax.tree.leaves(state)))
        return state if same else shapes

    def _with_rows(self, state, vocabulary=None):
        """The placed state with zeros for rows that stand for no token, or without such rows."""
        arrays = state._replace(tables=())
        shapes = self._row_shapes(arrays, vocabulary)
        if shapes is arrays:
            return state

        def one(leaf, shape, target):
            if leaf.shape == shape.shape:
                return leaf
            return _resized(target, shape.shape[0])(leaf)

        placed = jax.tree.map(one, arrays, shapes, self.shardings(shapes))
        return placed._replace(tables=state.tables)

    def _reordered(self, state, turned):
        """The state with the blocks of row-parallel projections in another order, laid out."""
        orders: dict[tuple[int, str], np.ndarray] = {}
        if self._tensor > 1:
            for group, tables in enumerate(parts(state.tables)):
                found = cuts.cut(tables, self._tensor, changing=False)
                orders |= {(group, n): c.order for n, c in found.items() if c.order is not None}
        arrays = state._replace(tables=())

        def one(path, leaf, target):
            *_, module, name = ["", "", *(getattr(key, "key", "") for key in path)]
            where = group_of(path), module
            if where in orders and name == "values":
                return _taken(target)(laid_out(leaf, target), turned(orders[where]))
            return laid_out(leaf, target)

        placed = jax.tree_util.tree_map_with_path(one, arrays, self.shardings(arrays))
        return placed._replace(tables=state.tables)

    def tables(self, tables, changing):
        """See `Executor`."""
        target = NamedSharding(self.mesh, TABLES)
        return jax.tree.map(
            lambda table: laid_out(table, target), self._cut_tables(tables, changing)
        )

    def _cut_tables(self, tables, changing):
        if self._tensor == 1 and not changing:
            return ()
        found = [cuts.cut(group, self._tensor, changing) for group in parts(tables)]
        return together([{name: cut.tables for name, cut in group.items()} for group in found])

    def arrays(self, state, tables, changing, batch):
        """See `Executor`."""
        abstract = lambda tree, spec: jax.tree.map(  # noqa: E731
            lambda leaf: _abstract(leaf, NamedSharding(self.mesh, spec)), tree
        )
        placed = self.placed_shapes(jax.tree.map(_abstract, state, self.shardings(state)))
        dealt = self.zero >= sharding.ZERO["gradients"]
        gradients = sharding.specs(placed.params, self.mesh, dealt)
        return {
            "parameters": placed.params,
            "gradients": jax.tree.map(
                lambda leaf, spec: _abstract(leaf, NamedSharding(self.mesh, spec)),
                self._gradients_like(placed),
                gradients,
            ),
            "moments": placed.moments,
            "layout tables": abstract(self._cut_tables(tables, changing), TABLES),
            "batch": abstract(batch, P(BATCH_AXES)),
        }

    def _gradients_like(self, state):
        """Shapes and dtypes of the gradients."""
        return adam_state(state.moments).mu

    def rounds(self, model, micro_batches):
        """See `Executor`."""
        return {}

    def rows(self, batch):
        """See `Executor`."""
        return meshes.rows_here(self.mesh, batch)

    def put(self, batch, rows):
        """See `Executor`."""
        target = NamedSharding(self.mesh, P(BATCH_AXES))
        place = {row: i for i, row in enumerate(self.rows(rows))}

        def one(mine):
            def part(index):
                start, stop, _ = index[0].indices(rows)
                return mine[place[start] : place[stop - 1] + 1]

            return jax.make_array_from_callback((rows, *mine.shape[1:]), target, part)

        return {name: one(mine) for name, mine in batch.items()}


def _abstract(leaf, target):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)


def own_tables(tables):
    """A device's own tables, [layers, lines, fan]; whole ones stay."""
    return jax.tree.map(lambda table: table if table.ndim == 3 else table[:, 0], tables)


def laid_out(leaf, target):
    """`leaf`, an array of all processes or one that every process has, laid out as `target`."""
    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf, target)
    return jax.make_array_from_callback(leaf.shape, target, lambda index: leaf[index])


@functools.cache
def _resized(target, rows):
    """Jitted table [V, D] -> its first rows, or with zeros behind them, laid out as `target`."""

    def resize(table):
        return jnp.pad(table[:rows], ((0, max(0, rows - len(table))), (0, 0)))

    return jax.jit(resize, out_shardings=target)


@functools.cache
def _taken(target):
    """Jitted (values [layers, nnz, ...], order) -> the values in that order, laid out likewise."""

    def take(values, order):
        return values[jnp.arange(len(values))[:, None], order]

    return jax.jit(take, out_shardings=target)
