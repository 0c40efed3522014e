"""The `pipeline` executor over a mesh: blocks split over "stage", stages as in `Sharded`."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core import step_metrics
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config import remat
from sparse_dataflow.core.config.layer_groups import (
    group_index,
    group_index_of_path,
    join_groups,
    layer_groups,
    layer_model,
    split_groups,
)
from sparse_dataflow.core.executors import compatibility, sharding, whole
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.executor import abstract
from sparse_dataflow.core.executors.mesh import BATCH_AXES
from sparse_dataflow.core.executors.sharded import (
    Sharded,
    batch_specs,
    local_layouts,
    norm_specs,
)
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights, with_probes
from sparse_dataflow.core.model.stacks import layouts_by_name, map_placed_layouts, split_layouts
from sparse_dataflow.pipeline import action_tables, pipeline
from sparse_dataflow.pipeline.stages import (
    Division,
    Kind,
    block_places,
    divide,
    from_stages,
    part,
    to_stages,
)

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
      schedule: name of the table's rule, in `action_tables.RULES`.
    """

    division: Division
    schedule: str = "1f1b"

    @property
    def parallelisms(self):
        return tuple(dict.fromkeys((*super().parallelisms, compatibility.STAGE.words)))

    def describe(self):
        schedule = action_tables.format_rule(self.schedule, self.division.chunks)
        return f"{super().describe()} --executor=pipeline --set parallel.schedule={schedule}"

    def check(self, model, training):
        super().check(model, training)
        self._plan(model, training.micro_batches)

    def evaluation(self, model, params, rest, batch):
        rows = len(batch.tokens) // meshes.batch_shards(self.mesh)
        # Evaluation batches have any size; this fills the stages if possible.
        micro_batches = math.gcd(rows, 4 * self.division.stages)
        # Nothing is stored for a backward pass, so evaluation takes the table with the fewest
        # ticks.
        stages, chunks = self.division.stages, self.division.chunks
        table = action_tables.forward_only(stages, micro_batches, chunks)
        rank, specs, _ = self._rank(model, params, rest)
        plan = pipeline.make_plan(self.division, table)

        def block(layer_config, params, rest, x, batch):
            layer = layer_weights(layer_config, merged(params, rest))
            return gpt.block(layer_config, layer, x, batch, rank.shard, rank.attend)[0], {}

        def local(table, params, rest, batch):
            split_batch = whole.micro_batches(model, batch, micro_batches, rank)
            trees = params, rest
            work = self._work(model, rank, trees, specs, block, split_batch, scored=True)
            # `shard_map` leaves the axis of stages, which has length 1 here.
            _, metrics, _ = pipeline.run_stage(plan, table[0], work)
            return step_metrics.over_devices(whole.evaluated(metrics), EVERY_AXIS)

        in_specs = STAGED, *specs, P(BATCH_AXES)
        return self._mapped(local, in_specs, P())(pipeline.rows(plan), params, rest, batch)

    def loss_and_gradients(self, model, params, rest, batch, how):
        """See `Executor`; a stage accumulates all gradients in float32, whatever the dtype."""
        micro_batches, plan = how.micro_batches, self._plan(model, how.micro_batches)
        rank, specs, gradient_specs = self._rank(model, params, rest)
        gathered = sharding.gathered_specs(model, specs[0], self.exchange)

        def block(layer_config, params, rest, x, batch):
            layer = layer_weights(layer_config, merged(params, rest))
            x, metrics = gpt.block(layer_config, layer, x, batch, rank.shard, rank.attend)
            x = gpt.with_auxiliary_losses(layer_config, x, metrics, batch, rank.shard)
            return x, metrics

        # Blocks are those of one stage, so their metrics are not summed over the stages.
        axes_of_a_stage = tuple(axis for axis in EVERY_AXIS if axis != "stage")

        def local(table, params, rest, batch):
            padded = batch.token_weights is not None
            batch = batch.weighted(rank.batch_shards)
            split_batch = whole.micro_batches(model, batch, micro_batches, rank, padded)
            work = self._work(model, rank, (params, rest), specs, block, split_batch)
            block_metrics, head_metrics, gradients = pipeline.run_stage(plan, table[0], work)
            block_metrics = step_metrics.over_devices(block_metrics, axes_of_a_stage)
            head_metrics = step_metrics.over_devices(head_metrics, EVERY_AXIS)
            on_all = {"embed", "head", *(("blocks",) if model.shared_layers else ())}
            # Every stage holds these, and one of them has computed their gradient: the others add
            # zeros.
            summed = lax.psum({name: gradients[name] for name in on_all}, "stage")
            gradients = {name: (gradients | summed)[name] for name in specs[0]}
            gradients = jax.tree.map(collect, gradients, specs[0], gathered, gradient_specs)
            return block_metrics, head_metrics, gradients

        def collect(gradient, param_spec, gathered, spec):
            # Parameters were gathered before the differentiation, so their gradients are whole;
            # experts to which tokens travel stayed sharded.
            whole_spec = P() if gathered == param_spec else param_spec
            shard = sharding.reduce_scatter(gradient, whole_spec, spec)
            return sharding.all_reduce(shard, spec, self.mesh)

        in_specs = STAGED, *specs, batch_specs(batch)
        out_specs = STAGED, P(), gradient_specs
        block_metrics, head_metrics, gradients = self._mapped(local, in_specs, out_specs)(
            pipeline.rows(plan), params, rest, batch
        )
        return {**head_metrics, **from_stages(self.division, block_metrics)}, gradients

    def block_gradient_norms(self, model, params, rest, batch):
        plan = self._plan(model, 1, "gpipe")
        rank, specs, _ = self._rank(model, params, rest)
        # A norm of the whole rows is not the sum of norms of their parts.
        rank = dataclasses.replace(rank, sub_batches=1)
        axes = self._measured_axes(batch)
        summed = axes if rank.context is None else (*axes, rank.context.axis)
        shards = math.prod(self.mesh.shape[axis] for axis in axes)

        def probed(layer_config, norms, rest, x, batch):
            # What is differentiated is the norms; all parameters are constants.
            layer = with_probes(layer_weights(layer_config, rest), norms, summed, rank.shard)
            return gpt.block(layer_config, layer, x, batch, rank.shard, rank.attend)[0], {}

        def local(table, params, rest, batch):
            split_batch = whole.micro_batches(model, batch.weighted(shards), 1, rank)
            work = self._work(model, rank, (params, rest), specs, probed, split_batch)
            norms = [
                {name: jnp.zeros(layout.grid) for name, layout in group.items()}
                for group in split_groups(layouts_by_name({"blocks": work.rest}))
            ]
            # The zeros of the norms are differentiated in place of the weights, which become
            # constants.
            measured = {**work.params, "blocks": join_groups(norms)}
            rest = merged(work.params["blocks"], work.rest)
            work = work._replace(rest=rest, params=measured)
            strips = split_groups(pipeline.run_stage(plan, table[0], work)[-1]["blocks"])
            return self._summed_strips(strips)

        in_specs = STAGED, *specs, P(axes or None)
        groups = split_groups(layouts_by_name(rest))
        norms = self._mapped(local, in_specs, tuple(map(norm_specs, groups)))(
            pipeline.rows(plan), params, rest, batch
        )
        by_group = map(from_stages, self._divisions(model), norms)
        joined = jax.tree.map(lambda *each: jnp.concatenate(each), *by_group)
        return self._one_copy(joined, model)

    def _gradients_like(self, state):
        return state.params

    def trip_counts(self, model, micro_batches):
        return pipeline.trip_counts(self._plan(model, micro_batches), self._kinds(model)[1])

    def _plan(self, model, micro_batches, name=None):
        stages, chunks = self.division.stages, self.division.chunks
        # One table serves all blocks. Blocks without remat=full have an empty recomputation.
        recompute = "full" in remat.kinds(model.remat, model.num_layers)
        table = action_tables.make(name or self.schedule, stages, micro_batches, chunks, recompute)
        return pipeline.make_plan(self.division, table)

    def _gathered(self, model, params, specs):
        specs = sharding.gathered_specs(model, specs, self.exchange)
        return {
            name: sharding.gather(section, specs[name], model.compute_dtype)
            for name, section in params.items()
        }

    def _kinds(self, model):
        """Returns the kinds of blocks as (remat, layer model, group), and `stages.block_places`,
        which is None for one kind in one group."""
        layer_kinds = [
            (kind, layer_model(model, layer), group_index(model, layer))
            for layer, kind in enumerate(remat.kinds(model.remat, model.num_layers))
        ]
        # In the order of first use, which every process computes alike: the programs of all
        # processes must agree on the numbers.
        kinds = tuple(dict.fromkeys(layer_kinds))
        if len(kinds) == 1:
            return kinds, None
        groups = [group.layers for group in layer_groups(model)]
        return kinds, block_places(self.division, list(map(kinds.index, layer_kinds)), groups)

    def _divisions(self, model):
        """Returns the division of each layer group."""
        return tuple(part(self.division, group.layers) for group in layer_groups(model))

    def _work(self, model, rank, trees, specs, block, batch, scored=False):
        """Returns the work of a stage.

        Args:
          trees: what is trained and what is not.
          block: (layer model, params, what is not trained, x, micro-batch) -> x.
          batch: `whole.micro_batches`.
          scored: see `gpt.head_loss`.
        """
        params, rest = trees[0], local_layouts(trees[1])
        # A section may have no parameter to train.
        nothing = {"embed": {}, "blocks": join_groups(({},) * len(layer_groups(model))), "head": {}}
        params, rest = (
            {**nothing, **self._gathered(model, tree or {}, tree_specs or {})}
            for tree, tree_specs in zip((params, rest), specs, strict=True)
        )

        # What is not trained (a frozen embedding, a base of adapters) enters by closure, so that
        # the gradient of the arguments has only trained leaves.
        def head_loss(embed, head, x, micro_batch):
            embed, head = merged(embed, rest["embed"]), merged(head, rest["head"])
            table = embed["tokens"]
            return gpt.head_loss(model, head, table, x, micro_batch, rank.shard, scored)

        def embed(params, tokens):
            params = merged(params, rest["embed"])
            return gpt.embed(model, params, tokens, positions, rank.shard)

        def layer(layer_config, params, rest, x, micro_batch):
            run = functools.partial(block, layer_config, params, rest)
            xs, metrics = whole.run_sub_batches(run, *whole.sub_batches(rank, x, micro_batch))
            return jnp.concatenate(xs), metrics

        def kind(remat_kind, layer_config, group):
            run = whole.rematerialised(remat_kind, functools.partial(layer, layer_config))
            return Kind(run, group, remat_kind == "full")

        kinds, places = self._kinds(model)
        positions = Batch(positions=batch.positions)
        return pipeline.Work(
            embed,
            head_loss,
            tuple(kind(*each) for each in kinds),
            params,
            batch,
            rest["blocks"],
            places,
            model.shared_layers,
        )

    def placed_shapes(self, state, model):
        state = super().placed_shapes(state, model)
        if self._in_order(model):
            return state
        shapes = jax.eval_shape(functools.partial(_moved, self._divisions(model), to_stages), state)
        return jax.tree.map(abstract, shapes, self.shardings(shapes, model))

    def place(self, state, model):
        return self._run(to_stages, super().place(state, model), model)

    def canonical(self, state, model):
        return super().canonical(self._run(from_stages, state, model), model)

    def _in_order(self, model):
        """Returns whether the arrays of blocks are in canonical order."""
        alike = all(division.in_order for division in self._divisions(model))
        return model.shared_layers or alike

    def _run(self, move, state, model):
        if self._in_order(model):
            return state
        arrays = state.without_layouts()
        leaves, structure = jax.tree.flatten(arrays)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return _mover(self, model, move, structure, shapes)(arrays).with_layouts_of(state)

    def _cut_layouts(self, rest, model, changing):
        """Stages share one program, so it can be specialised to common groups alone."""
        divisions = self._divisions(model)

        def staged(place, layout):
            cut = self._cut(model, place, layout, changing)
            return to_stages(divisions[place.group], cut.layout)

        return map_placed_layouts(staged, split_layouts(rest)[1])


def _moved(divisions, move, arrays):
    """Moves all arrays of a state that are stacked over blocks to the stages, or back."""

    def move_leaf(path, leaf):
        stacked = any(getattr(key, "key", None) == "blocks" for key in path)
        return move(divisions[group_index_of_path(path)], leaf) if stacked else leaf

    return jax.tree_util.tree_map_with_path(move_leaf, arrays)


@functools.cache
# Cached by shapes: a move at every checkpoint would else be traced and compiled each time.
def _mover(executor, model, move, structure, shapes):
    """Returns `_moved` as a jitted function."""
    function = functools.partial(_moved, executor._divisions(model), move)
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
      schedule: rule of the pipeline's table, as for `action_tables.parse`.
      exchange: see `Sharded`.
      sub_batches: see `Sharded`.

    Raises:
      UserError: an unknown schedule, or the layers cannot be divided over the stages.
    """
    if mesh.shape["stage"] == 1:
        return Sharded(mesh, zero, exchange, sub_batches)
    name, chunks = action_tables.parse(schedule)
    division = divide(num_layers, mesh.shape["stage"], chunks)
    return Pipelined(mesh, zero, exchange, sub_batches, division=division, schedule=name)
