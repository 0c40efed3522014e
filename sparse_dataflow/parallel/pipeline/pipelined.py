"""The `pipeline` executor over a mesh: the stages of "stage", each cut over the other axes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models import gpt
from sparse_dataflow.models.linear import Probe
from sparse_dataflow.parallel import cuts, sharding, whole
from sparse_dataflow.parallel import mesh as meshes
from sparse_dataflow.parallel.mesh import BATCH_AXES
from sparse_dataflow.parallel.pipeline import pipeline, schedules
from sparse_dataflow.parallel.pipeline.stages import Division, divide, from_stages, to_stages
from sparse_dataflow.parallel.sharded import TABLES, Sharded, own_tables
from sparse_dataflow.parallel.sharding import COLUMN_PARALLEL

EVERY_AXIS = tuple(meshes.AXES)
STAGED = P("stage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipelined(Sharded):
    """Blocks cut over "stage", and every stage as `Sharded` cuts the whole.

    A stage gathers what "fsdp" dealt out of its own blocks once a step, and sums their gradients
    over the other axes once.  Embedding and head take part in the first and last stage alone, and
    are kept by all.

    Attributes:
      division: of the model's blocks; its stages are the mesh's.
      schedule: name in `schedules.SCHEDULES`.
    """

    division: Division
    schedule: str = "1f1b"

    def describe(self):
        """See `Executor`."""
        schedule = schedules.written(self.schedule, self.division.chunks)
        return f"{super().describe()} --executor=pipeline --schedule={schedule}"

    def check(self, model, training):
        """See `Executor`."""
        if model.density_by_depth:
            raise UserError(
                "--executor=pipeline needs layers that store equally much, and "
                "--density_budget=depth gives them other densities; legal: --executor=whole or "
                "relay, or another --density_budget."
            )
        super().check(model, training)
        self._plan(model, training.micro_batches)

    def loss(self, model, params, tables, tokens, weights):
        """See `Executor`."""
        rows = len(tokens) // meshes.batch_parts(self.mesh)
        # Evaluations come in batches of any size; this fills the stages where it can.
        micro_batches = math.gcd(rows, 4 * self.division.stages)
        stages, chunks = self.division.stages, self.division.chunks
        schedule = schedules.forward_only(stages, micro_batches, chunks)
        member, kept, _ = self._member(model, params)

        def work(params, tables, tokens, weights):
            full = self._fetched(model, params, kept)
            layer = functools.partial(_block, model, member.shard)
            return self._work(model, member, full, tables, tokens, weights, layer)

        def local(table, params, tables, tokens, weights):
            split = lambda a: a.reshape(micro_batches, -1, a.shape[1])  # noqa: E731
            done = work(params, own_tables(tables), split(tokens), split(weights))
            share, _ = pipeline.run_stage(plan, table[0], done)
            return lax.psum(share, EVERY_AXIS)

        plan = pipeline.make_plan(self.division, schedule)
        specs = STAGED, kept, TABLES, P(BATCH_AXES), P(BATCH_AXES)
        return self._mapped(local, specs, P())(pipeline.rows(plan), params, tables, tokens, weights)

    def loss_and_gradients(self, model, params, tables, tokens, micro_batches, dtype="float32"):
        """See `Executor`; a stage sums the gradients of all micro-batches, in float32."""
        plan = self._plan(model, micro_batches)
        member, kept, wanted = self._member(model, params)

        def local(table, params, tables, tokens):
            full = self._fetched(model, params, kept)
            weight = 1 / (tokens[:, 1:].size * member.batch_parts)
            tokens = tokens.reshape(micro_batches, -1, tokens.shape[1])
            weights = jnp.full(tokens[..., 1:].shape, weight, jnp.float32)
            layer = whole.rematerialised(model, functools.partial(_block, model, member.shard))
            work = self._work(model, member, full, own_tables(tables), tokens, weights, layer)
            share, gradients = pipeline.run_stage(plan, table[0], work)
            ends = {name: gradients[name] for name in ("embed", "head")}
            gradients = gradients | lax.psum(ends, "stage")
            return lax.psum(share, EVERY_AXIS), jax.tree.map(collect, gradients, wanted)

        def collect(gradient, spec):
            dealt = sharding.scattered(gradient, P(), spec)
            return sharding.summed(dealt, spec, self.mesh)

        specs = STAGED, kept, TABLES, P(BATCH_AXES)
        return self._mapped(local, specs, (P(), wanted))(
            pipeline.rows(plan), params, tables, tokens
        )

    def block_gradient_norms(self, model, params, tables, tokens):
        """See `Executor`."""
        stages, chunks = self.division.stages, self.division.chunks
        again = model.remat == "full"
        schedule = schedules.make("gpipe", stages, 1, chunks, again)
        plan = pipeline.make_plan(self.division, schedule)
        member, kept, _ = self._member(model, params)
        # Rows too few for all devices are measured by each.
        axes = () if len(tokens) % meshes.batch_parts(self.mesh) else BATCH_AXES
        parts = math.prod(self.mesh.shape[axis] for axis in axes)

        def local(table, params, tables, tokens):
            full, tables = self._fetched(model, params, kept), own_tables(tables)
            weights = jnp.full((1, *tokens[:, 1:].shape), 1 / (parts * tokens[:, 1:].size))
            norms = {
                name: jnp.zeros((len(t.in_index), t.out_index.shape[1], t.in_index.shape[1]))
                for name, t in tables.items()
            }
            probe = functools.partial(_probed_block, model, member.shard, axes)
            layer = whole.rematerialised(model, probe)
            work = self._work(
                model,
                member,
                full | {"blocks": norms},
                (full["blocks"], tables),
                tokens[None],
                weights,
                layer,
            )
            return pipeline.run_stage(plan, table[0], work)[1]["blocks"]

        column, row = P("stage", None, "tensor"), P("stage", "tensor")
        found = {name: column if name in COLUMN_PARALLEL else row for name in tables}
        specs = STAGED, kept, TABLES, P(axes or None)
        norms = self._mapped(local, specs, found)(pipeline.rows(plan), params, tables, tokens)
        return from_stages(self.division, norms)

    def _gradients_like(self, state):
        return state.params

    def rounds(self, model, micro_batches):
        """See `Executor`."""
        return pipeline.rounds(self._plan(model, micro_batches))

    def _plan(self, model, micro_batches):
        stages, chunks = self.division.stages, self.division.chunks
        again = model.remat == "full"
        schedule = schedules.make(self.schedule, stages, micro_batches, chunks, again)
        return pipeline.make_plan(self.division, schedule)

    def _fetched(self, model, params, kept):
        return {
            name: sharding.fetch(own, kept[name], model.compute_dtype)
            for name, own in params.items()
        }

    def _work(self, model, member, params, held, tokens, weights, layer):
        def head_loss(embed, head, x, targets, weights):
            return gpt.head_loss(model, head, embed["tokens"], x, targets, weights, member.shard)

        embed = lambda params, tokens: gpt.embed(model, params, tokens, member.shard)  # noqa: E731
        return pipeline.Work(embed, layer, head_loss, params, held, tokens, weights)

    def _mapped(self, local, specs, out_specs):
        # What is summed over which axis is written out.
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )

    def placed_shapes(self, state):
        """See `Executor`."""
        state = super().placed_shapes(state)
        if not self._moves:
            return state
        shapes = jax.eval_shape(functools.partial(_moved, self.division, to_stages), state)
        return jax.tree.map(
            lambda leaf, target: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target),
            shapes,
            self.shardings(shapes),
        )

    def place(self, state):
        """See `Executor`."""
        return self._run(to_stages, super().place(state))

    def canonical(self, state, model):
        """See `Executor`."""
        return super().canonical(self._run(from_stages, state), model)

    @property
    def _moves(self):
        """Whether blocks lie elsewhere than in their canonical order."""
        places = self.division.places
        return not np.array_equal(places, np.arange(len(places)))

    def _run(self, move, state):
        if not self._moves:
            return state
        arrays = state._replace(tables=())
        leaves, structure = jax.tree.flatten(arrays)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return _mover(self, move, structure, shapes)(arrays)._replace(tables=state.tables)

    def _cut_tables(self, tables, changing):
        """Stages share one program, so no layout is part of it."""
        found = cuts.cut(tables, self.mesh.shape["tensor"], changing)
        return {name: to_stages(self.division, cut.tables) for name, cut in found.items()}


def _moved(division, move, arrays):
    """The arrays of a state, with all that is stacked over blocks moved to the stages or back."""

    def one(path, leaf):
        stacked = any(getattr(key, "key", None) == "blocks" for key in path)
        return move(division, leaf) if stacked else leaf

    return jax.tree_util.tree_map_with_path(one, arrays)


@functools.cache
def _mover(executor, move, structure, shapes):
    """`_moved` as a program."""
    function = functools.partial(_moved, executor.division, move)
    moved = jax.eval_shape(function, jax.tree.unflatten(structure, shapes))
    return jax.jit(function, out_shardings=executor.shardings(moved))


def _block(model, shard, params, tables, x):
    return gpt.block(model, params, tables, x, shard)


def _probed_block(model, shard, axes, norms, held, x):
    params, tables = held
    probes = {name: Probe(tables[name], norms[name], axes) for name in tables}
    return gpt.block(model, params, probes, x, shard)


def executor_over(mesh: meshes.AnyMesh, zero: int, num_layers: int, schedule: str) -> Sharded:
    """`Pipelined` where the mesh has stages, else `Sharded`.

    Args:
      mesh: with all of `mesh.AXES`.
      zero: see `sharding.ZERO`.
      num_layers: of the model.
      schedule: of a pipeline, as `schedules.parse` takes it.

    Raises:
      UserError: no such schedule, or the layers cannot be divided over the stages.
    """
    if mesh.shape["stage"] == 1:
        return Sharded(mesh, zero)
    name, chunks = schedules.parse(schedule)
    division = divide(num_layers, mesh.shape["stage"], chunks)
    return Pipelined(mesh, zero, division=division, schedule=name)
