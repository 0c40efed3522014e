"""The `pipeline` executor over a mesh: blocks split over "stage", stages as in `Sharded`."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core import step_metrics
from sparse_dataflow.core.config.layer_groups import layer_model
from sparse_dataflow.core.executors import compatibility, cuts, sharding, whole
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.mesh import BATCH_AXES
from sparse_dataflow.core.executors.sharded import Sharded, local_weights, norm_specs
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.projection import Probe, layer_weights
from sparse_dataflow.pipeline import pipeline, schedules
from sparse_dataflow.pipeline.stages import Division, divide, from_stages, to_stages

EVERY_AXIS = tuple(meshes.AXES)
STAGED = P("stage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipelined(Sharded):
    """Blocks split over "stage", with every stage sharded as in `Sharded`.

    A stage all-gathers the params of its blocks over "fsdp" once per step, and reduces their
    gradients over the other axes once. All stages hold embedding and head; the first and the last
    stage use them.

    Attributes:
      division: assignment of the model's blocks to the mesh's stages.
      schedule: name in `schedules.SCHEDULES`.
    """

    division: Division
    schedule: str = "1f1b"

    @property
    def ways(self):
        return tuple(dict.fromkeys((*super().ways, compatibility.STAGE.words)))

    def describe(self):
        schedule = schedules.format_schedule(self.schedule, self.division.chunks)
        return f"{super().describe()} --executor=pipeline --set parallel.schedule={schedule}"

    def check(self, model, training):
        super().check(model, training)
        self._plan(model, training.micro_batches)

    def loss(self, model, weights, batch):
        rows = len(batch.tokens) // meshes.batch_shards(self.mesh)
        # Evaluation batches have any size; this fills the stages if possible.
        micro_batches = math.gcd(rows, 4 * self.division.stages)
        stages, chunks, of_layer = self.division.stages, self.division.chunks, layer_model(model, 0)
        schedule = schedules.forward_only(stages, micro_batches, chunks)
        member, specs, _ = self._member(model, weights)
        plan = pipeline.make_plan(self.division, schedule)

        def local(table, weights, batch):
            split = lambda a: a.reshape(micro_batches, -1, a.shape[1])  # noqa: E731
            full = self._gathered(model, weights.params, specs.params)
            layouts = local_weights(weights).tables
            tokens, of_targets = split(batch.tokens), split(batch.weights)

            def layer(params, layouts, x):
                weights = layer_weights(model, params, layouts)
                return gpt.block(of_layer, weights, x, member.shard), {}

            work = self._work(model, member, full, layouts, tokens, of_targets, layer)
            _, metrics, _ = pipeline.run_stage(plan, table[0], work)
            return lax.psum(metrics["loss"].total, EVERY_AXIS)

        in_specs = STAGED, specs, P(BATCH_AXES)
        return self._mapped(local, in_specs, P())(pipeline.rows(plan), weights, batch)

    def loss_and_gradients(self, model, weights, batch, how):
        """See `Executor`; a stage accumulates all gradients in float32, whatever the dtype.

        `check` and `commands.devices` refuse frozen parameters, weights of targets and a teacher.
        """
        assert not weights.frozen and batch.weights is None and batch.teacher is None
        micro_batches, of_layer = how.micro_batches, layer_model(model, 0)
        plan = self._plan(model, micro_batches)
        member, specs, gradient_specs = self._member(model, weights)

        def local(table, weights, tokens):
            full = self._gathered(model, weights.params, specs.params)
            targets = tokens[:, 1:].size * member.batch_shards
            tokens = whole.split_rows(model, tokens, micro_batches)
            of_targets = jnp.full(tokens[..., 1:].shape, 1 / targets, jnp.float32)

            def block(params, layouts, x):
                layer = layer_weights(model, params, layouts)
                return gpt.trained_block(of_layer, layer, x, targets, member.shard)

            layer = whole.rematerialised(model, block)
            layouts = local_weights(weights).tables
            work = self._work(model, member, full, layouts, tokens, of_targets, layer)
            of_blocks, of_head, gradients = pipeline.run_stage(plan, table[0], work)
            of_blocks = step_metrics.over_devices(of_blocks, axes_of_a_stage)
            of_head = step_metrics.over_devices(of_head, EVERY_AXIS)
            ends = {name: gradients[name] for name in ("embed", "head")}
            gradients = gradients | lax.psum(ends, "stage")
            gradients = jax.tree.map(collect, gradients, specs.params, gathered, gradient_specs)
            return of_blocks, of_head, gradients

        axes_of_a_stage = tuple(axis for axis in EVERY_AXIS if axis != "stage")
        gathered = sharding.gathered_specs(specs.params, self.exchange)

        def collect(gradient, param_spec, gathered, spec):
            whole_spec = P() if gathered == param_spec else param_spec
            shard = sharding.reduce_scatter(gradient, whole_spec, spec)
            return sharding.all_reduce(shard, spec, self.mesh)

        in_specs = STAGED, specs, P(BATCH_AXES)
        out_specs = STAGED, P(), gradient_specs
        of_blocks, of_head, gradients = self._mapped(local, in_specs, out_specs)(
            pipeline.rows(plan), weights, batch.tokens
        )
        return {**of_head, **from_stages(self.division, of_blocks)}, gradients

    def block_gradient_norms(self, model, weights, tokens):
        plan, of_layer = self._plan(model, 1, "gpipe"), layer_model(model, 0)
        member, specs, _ = self._member(model, weights)
        axes = self._measured_axes(tokens)
        shards = math.prod(self.mesh.shape[axis] for axis in axes)

        def local(table, weights, tokens):
            full = self._gathered(model, weights.params, specs.params)
            tables = local_weights(weights).tables
            mean = jnp.full((1, *tokens[:, 1:].shape), 1 / (shards * tokens[:, 1:].size))
            norms = {
                name: jnp.zeros((len(t.in_index), t.out_index.shape[1], t.in_index.shape[1]))
                for name, t in tables.items()
            }

            def probed(norms, constants, x):
                params, tables = constants
                probe = Probe.of(tables, norms, axes, member.shard)
                weights = layer_weights(model, params, probe)
                return gpt.block(of_layer, weights, x, member.shard), {}

            layer = whole.rematerialised(model, probed)
            constants, params = (full["blocks"], tables), full | {"blocks": norms}
            work = self._work(model, member, params, constants, tokens[None], mean, layer)
            return pipeline.run_stage(plan, table[0], work)[-1]["blocks"]

        in_specs = STAGED, specs, P(axes or None)
        norms = self._mapped(local, in_specs, norm_specs(weights.tables))(
            pipeline.rows(plan), weights, tokens
        )
        return self._one_copy(from_stages(self.division, norms), model)

    def _gradients_like(self, state):
        return state.params

    def trip_counts(self, model, micro_batches):
        return pipeline.trip_counts(self._plan(model, micro_batches))

    def _plan(self, model, micro_batches, name=None):
        stages, chunks = self.division.stages, self.division.chunks
        recompute = model.remat == "full"
        schedule = schedules.make(name or self.schedule, stages, micro_batches, chunks, recompute)
        return pipeline.make_plan(self.division, schedule)

    def _gathered(self, model, params, specs):
        specs = sharding.gathered_specs(specs, self.exchange)
        return {
            name: sharding.gather(section, specs[name], model.compute_dtype)
            for name, section in params.items()
        }

    def _work(self, model, member, params, constants, tokens, weights, layer):
        def head_loss(embed, head, x, targets, weights):
            return gpt.head_loss(model, head, embed["tokens"], x, targets, weights, member.shard)

        embed = lambda params, tokens: gpt.embed(model, params, tokens, member.shard)  # noqa: E731
        return pipeline.Work(embed, layer, head_loss, params, constants, tokens, weights)

    def placed_shapes(self, state, model):
        state = super().placed_shapes(state, model)
        if self.division.in_order:
            return state
        shapes = jax.eval_shape(functools.partial(_moved, self.division, to_stages), state)
        return jax.tree.map(sharding.abstract, shapes, self.shardings(shapes, model))

    def place(self, state, model):
        return self._run(to_stages, super().place(state, model), model)

    def canonical(self, state, model):
        return super().canonical(self._run(from_stages, state, model), model)

    def _run(self, move, state, model):
        if self.division.in_order:
            return state
        arrays = state._replace(tables=())
        leaves, structure = jax.tree.flatten(arrays)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return _mover(self, model, move, structure, shapes)(arrays)._replace(tables=state.tables)

    def _cut_layouts(self, weights, model, changing):
        """Stages share one program, so it can be specialised to common groups alone."""
        sharded = cuts.cut(weights.tables, self.tensor_shards, changing, self._kv_copies(model))
        return {name: to_stages(self.division, cut.tables) for name, cut in sharded.items()}


def _moved(division, move, arrays):
    """Moves all arrays of a state that are stacked over blocks to the stages, or back."""

    def move_leaf(path, leaf):
        stacked = any(getattr(key, "key", None) == "blocks" for key in path)
        return move(division, leaf) if stacked else leaf

    return jax.tree_util.tree_map_with_path(move_leaf, arrays)


@functools.cache
def _mover(executor, model, move, structure, shapes):
    """Returns `_moved` as a jitted function."""
    function = functools.partial(_moved, executor.division, move)
    moved = jax.eval_shape(function, jax.tree.unflatten(structure, shapes))
    return jax.jit(function, out_shardings=executor.shardings(moved, model))


def executor_over(
    mesh: meshes.AnyMesh,
    zero: int,
    num_layers: int,
    schedule: str,
    exchange: bool = False,
    sub_batches: int = 1,
) -> Sharded:
    """Returns `Pipelined` if the mesh has stages, else `Sharded`.

    Args:
      mesh: with all of `mesh.AXES`.
      zero: see `sharding.ZERO`.
      schedule: pipeline schedule, as for `schedules.parse`.
      exchange: see `Sharded`.
      sub_batches: see `Sharded`; 1 if the mesh has stages.

    Raises:
      UserError: an unknown schedule, or the layers cannot be divided over the stages.
    """
    if mesh.shape["stage"] == 1:
        return Sharded(mesh, zero, exchange, sub_batches)
    name, chunks = schedules.parse(schedule)
    division = divide(num_layers, mesh.shape["stage"], chunks)
    return Pipelined(mesh, zero, exchange, division=division, schedule=name)
