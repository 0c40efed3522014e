"""Pipeline execution: micro-batches stream through stages that hold some blocks each.

All stages run one program: a loop over the ticks of a table (`action_tables`). In a tick, a stage
receives from its neighbours and does one action: F, the forward pass of a virtual stage; R, its
recomputation under remat=full; B, the gradient of its input; W, that of its weights (see
`layer_actions`). Values that later ticks need lie in buffers with the table's number of slots,
so memory follows the table and not the number of micro-batches.

The F of the first virtual stage embeds tokens, and its B adds the embedding's gradient. The F of
the last one runs the head and writes the gradient of the loss to the buffer that its B reads.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from sparse_dataflow.core import step_metrics
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.layer_groups import join_groups, split_groups
from sparse_dataflow.core.model.partition import ArrayTree
from sparse_dataflow.pipeline.action_tables import BACKWARD, FORWARD, RECOMPUTE, WEIGHTS, Table
from sparse_dataflow.pipeline.layer_actions import LayerActions, layer_actions
from sparse_dataflow.pipeline.stages import Division, Kind
from sparse_dataflow.pipeline.table_slots import Slots, allocate


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Assignment of work to stages and ticks.

    Attributes:
      division: assignment of blocks to stages.
      table: action of each stage and tick.
      slots: buffer slots of the table.
    """

    division: Division
    table: Table
    slots: Slots


def make_plan(division: Division, table: Table) -> Plan:
    """Creates the plan of a division and a table with equal stages and chunks."""
    if (division.stages, division.chunks) != (table.stages, table.chunks):
        raise ValueError("The division and the table differ in stages or chunks.")
    return Plan(division, table, allocate(table))


BLOCKS = {
    FORWARD: "forward_blocks",
    RECOMPUTE: "recompute_blocks",
    BACKWARD: "backward_blocks",
    WEIGHTS: "weight_blocks",
}
"""Action -> named scope of its loop over blocks."""

TICKS, HEAD, EMBED, EMBEDDING = "pipeline_ticks", "head", "embed_input", "embedding_gradient"
"""Other named scopes: all ticks, head and its gradient, embedding, gradient of the embedding."""


def _scope(action, kind):
    """Returns the named scope of the loop that runs a block if it is of a kind."""
    return f"{BLOCKS[action]}_of_kind_{kind}"


def trip_counts(plan: Plan, places: np.ndarray | None = None) -> dict[str, float]:
    """Returns {named scope: trip count per step on the busiest stage}.

    Args:
      plan: assignment of work to stages and ticks.
      places: as in `Work`.
    """
    table, layers = plan.table, plan.division.chunk_layers
    counts = dict.fromkeys((EMBED, HEAD, EMBEDDING), float(table.micro_batches))
    stages = np.arange(table.stages)[:, None]
    for action, name in BLOCKS.items():
        blocks = np.where(table.action == action, layers[stages, table.chunk], 0)
        counts[name] = float(blocks.sum(axis=1).max())
        kinds: Any = () if places is None else places[..., 0]
        for kind in np.unique(kinds).tolist():
            # [stages, chunks, blocks of a chunk]; fewer blocks than the capacity fill a chunk up.
            # Padding has kind 0 in `places` as well, so it is masked before blocks are counted by
            # kind.
            is_block = np.arange(plan.division.capacity) < layers[..., None]
            kind_counts = (is_block & (kinds == kind)).sum(axis=-1)
            blocks = np.where(table.action == action, kind_counts[stages, table.chunk], 0)
            counts[_scope(action, kind)] = float(blocks.sum(axis=1).max())
    for name in ("activation", "gradient"):
        # A send is a collective of all stages: where one receives, all take part.
        arrives = (getattr(plan.slots, f"{name}_arrives") >= 0).any(axis=0)
        counts[f"send_{name}"] = float(arrives.sum())
    return counts


class Work(NamedTuple):
    """Model functions, params and batch of one stage.

    Attributes:
      embed: (params of `embed`, int32 [B, T] tokens) -> x.
      head_loss: (params of `embed`, params of `head`, x, micro-batch) -> (loss,
        metrics).
      kinds: what the blocks are.
      places: `stages.block_places`; None for blocks of one kind.
      params: {"embed", "blocks", "head"}, to differentiate; leaves of "blocks" are
        [chunks * capacity, ...], this stage's shard of `stages.to_stages`.  Where layers differ in
        density, "blocks" is a tuple of such trees, one for each group; as is `rest`.
      rest: what is not trained of the blocks, such as layouts.
      shared: whether all blocks share params of one block, [1, ...], and its rest.
      batch: of `whole.micro_batches`; its rows are [micro_batches, B, ...].
    """

    embed: Callable
    head_loss: Callable
    kinds: tuple[Kind, ...]
    params: dict
    batch: Batch
    rest: ArrayTree = ()
    places: np.ndarray | None = None
    shared: bool = False


class _State(NamedTuple):
    """Loop state of a stage; the first axis of a buffer is its slots."""

    block_metrics: step_metrics.Metrics
    head_metrics: step_metrics.Metrics
    gradients: dict
    saved: ArrayTree
    recomputed: ArrayTree
    pending: ArrayTree
    activation: jax.Array
    gradient: jax.Array
    sent_forward: jax.Array
    sent_backward: jax.Array


class Row(NamedTuple):
    """One stage's table entry of one tick, int32 [] each; see `Schedule` and `Slots`."""

    action: jax.Array
    micro_batch: jax.Array
    chunk: jax.Array
    saved: jax.Array
    recomputed: jax.Array
    pending: jax.Array
    activation: jax.Array
    gradient: jax.Array
    activation_arrives: jax.Array
    gradient_arrives: jax.Array
    any_activation_arrives: jax.Array
    any_gradient_arrives: jax.Array


def rows(plan: Plan) -> np.ndarray:
    """Returns the plan as int32 [stages, ticks, fields of `Row`]."""
    columns = []
    for name in Row._fields:
        source = plan.table if hasattr(plan.table, name) else plan.slots
        column = getattr(source, name.removeprefix("any_"))
        if name.startswith("any_"):
            # Equal on all stages, as the branch around a collective must be.
            column = np.broadcast_to((column >= 0).any(axis=0), column.shape)
        columns.append(column)
    return np.stack(columns, axis=2).astype(np.int32)


def run_stage(plan: Plan, table: jax.Array, work: Work):
    """Runs one stage, inside a `shard_map` over the axis "stage".

    Args:
      plan: assignment of work to stages and ticks.
      table: int32 [ticks, fields of `Row`], this stage's shard of `rows`.
      work: model functions, params and batch of this stage.

    Returns:
      (metrics of the blocks [chunks * capacity, ...], metrics of the head, gradients in
      work.params), float32, this stage's share of each. Gradients are zeros if the table has no
      backward actions.
    """
    stage = _Stage(plan, work)
    run = {
        FORWARD: stage.forward,
        RECOMPUTE: stage.recompute,
        BACKWARD: stage.backward,
        WEIGHTS: stage.weights,
    }

    # One program for all stages: the row says what this stage does in this tick, and an action that
    # it does not do has loops of zero iterations.
    def tick(state, row):
        row = Row(*row)
        state = stage.receive(state, row)
        for action in plan.table.actions:
            state = run[action](state, row)
        return state, None

    with jax.named_scope(TICKS):
        state = lax.scan(tick, stage.start(), table)[0]
    return state.block_metrics, state.head_metrics, state.gradients


class _Stage:
    """Actions of a stage: (state, row of the table) -> state.

    Each action is a loop with trip count zero unless it is the row's action. Unlike a branch, a
    loop never copies its buffers.
    """

    def __init__(self, plan, work):
        self.plan, self.work, self.stage = plan, work, lax.axis_index("stage")
        self.layers = jnp.asarray(plan.division.chunk_layers)[self.stage]
        self.places: Any = None if work.places is None else jnp.asarray(work.places)[self.stage]
        self.trains = BACKWARD in plan.table.actions
        groups = split_groups(work.params["blocks"])
        none: tuple[dict, ...] = ({},) * len(groups)
        self.groups = list(zip(groups, split_groups(work.rest or none), strict=True))
        # Activations and their gradients between stages all have this shape, so one buffer has
        # either.
        self.x = jax.eval_shape(lambda: self.embed(work.params["embed"], 0))
        self.kinds, self.contents, self.block_metrics = _actions(
            work.kinds, self.groups, self.x, self.block_batch
        )

    def block_batch(self, number):
        """Returns what the blocks read of a micro-batch."""
        return self.batch(number).for_blocks()

    def batch(self, number):
        """Returns a micro-batch."""
        return self.work.batch.map_rows(lambda rows: rows[number])

    def embed(self, params, micro_batch):
        return self.work.embed(params, self.work.batch.tokens[micro_batch])

    def head_loss(self, embed, head, x, micro_batch):
        return self.work.head_loss(embed, head, x, self.batch(micro_batch))

    def start(self):
        """Returns empty buffers and zero gradients."""
        capacity, peak = self.plan.division.capacity, self.plan.slots.peak
        ends = self.work.params["embed"], self.work.params["head"]
        _, head_metrics = jax.eval_shape(lambda x: self.head_loss(*ends, x, 0), self.x)

        def buffer(name, content, *inside):
            slots = int(peak[name].max())
            return jax.tree.map(lambda a: jnp.zeros((slots, *inside, *a.shape), a.dtype), content)

        return _State(
            step_metrics.empty(self.block_metrics, self.plan.division.chunks * capacity),
            step_metrics.empty(head_metrics),
            jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), self.work.params),
            buffer("saved", self.contents["saved"], capacity),
            buffer("recomputed", self.contents["recomputed"], capacity),
            buffer("pending", self.contents["pending"], capacity),
            buffer("activation", self.x),
            buffer("gradient", self.x),
            jnp.zeros(self.x.shape, self.x.dtype),
            jnp.zeros(self.x.shape, self.x.dtype),
        )

    def receive(self, state, row):
        """Receives from the neighbours; ticks without arrivals send nothing."""
        stages = self.plan.table.stages
        slots = self.plan.slots

        def exchange(name, sent, step):
            buffer, slot = getattr(state, name), getattr(row, name + "_arrives")
            if not (getattr(slots, name + "_arrives") >= 0).any():
                return buffer
            ring = [(stage, (stage + step) % stages) for stage in range(stages)]
            move = lambda: lax.ppermute(sent, "stage", ring)  # noqa: E731
            # The predicate says whether any stage receives in this tick, so it is equal on all
            # stages. A collective in a branch that only some stages take would wait forever. A
            # stage that has nothing to send then sends any numbers, which its neighbour does not
            # store.
            with jax.named_scope(f"send_{name}"):
                arrived = lax.cond(getattr(row, f"any_{name}_arrives") > 0, move, lambda: sent)
            # A stage without arrival writes slot 0 back to itself: a branch would copy the whole
            # buffer.
            return _write(buffer, jnp.where(slot < 0, _read(buffer, slot), arrived), slot)

        return state._replace(
            activation=exchange("activation", state.sent_forward, 1),
            gradient=exchange("gradient", state.sent_backward, -1),
        )

    def forward(self, state, row):
        """F of a virtual stage, with the embedding before the first and the head after the last."""
        params = self.work.params
        x = self.embed_or_read(state, row)

        def layer(kind, tie, number, carry):
            x, metrics, saved = carry
            operands = _tied(tie, (*self.layer(kind, row, number), x))
            y, more, values = kind.actions.forward(*operands)
            index = row.chunk * self.plan.division.capacity + number
            metrics = _write(metrics, step_metrics.combined(_read(metrics, index), more), index)
            if self.trains:
                saved = kind.saved.write(saved, values, row.saved, number)
            return y, metrics, saved

        carry = x, state.block_metrics, state.saved
        x, block_metrics, saved = self.each_block(FORWARD, row, layer, carry)

        def head(number, carry):
            metrics, embed, head, gradient = carry
            operands = _tied(number, (params["embed"], params["head"], x, row.micro_batch))
            if not self.trains:
                metrics = step_metrics.combined(metrics, self.head_loss(*operands)[1])
                return metrics, embed, head, gradient
            # Loss and gradient at once; the B of this micro-batch reads dx in a later tick.
            differentiated = jax.value_and_grad(self.head_loss, (0, 1, 2), has_aux=True)
            (_, more), (dembed, dhead, dx) = differentiated(*operands)
            embed, head = jax.tree.map(jnp.add, (embed, head), (dembed, dhead))
            metrics = step_metrics.combined(metrics, more)
            return metrics, embed, head, _write(gradient, dx, row.gradient)

        ends = state.head_metrics, state.gradients["embed"], state.gradients["head"], state.gradient
        head_metrics, embed, head, gradient = _loop(
            HEAD, self.trips(row, FORWARD, virtual_stage=-1), head, ends
        )
        return state._replace(
            block_metrics=block_metrics,
            head_metrics=head_metrics,
            gradients=state.gradients | {"embed": embed, "head": head},
            saved=saved,
            gradient=gradient,
            sent_forward=x,
        )

    def embed_or_read(self, state, row):
        """Returns the input of the row's forward."""
        embed = lambda: self.embed(self.work.params["embed"], row.micro_batch)  # noqa: E731
        if self.plan.table.virtual_stages == 1:
            return embed()
        read = lambda: _read(state.activation, row.activation)  # noqa: E731
        with jax.named_scope(EMBED):
            return lax.cond(self.trips(row, FORWARD, virtual_stage=0) > 0, embed, read)

    def recompute(self, state, row):
        """R of a virtual stage."""

        def layer(kind, tie, number, recomputed):
            saved = kind.saved.read(state.saved, row.saved, number)
            operands = _tied(tie, (*self.layer(kind, row, number), saved))
            values = kind.actions.recompute(*operands)
            return kind.recomputed.write(recomputed, values, row.recomputed, number)

        recomputed = self.each_block(RECOMPUTE, row, layer, state.recomputed)
        return state._replace(recomputed=recomputed)

    def backward(self, state, row):
        """B of a virtual stage, with the embedding's gradient after the first."""

        def layer(kind, tie, number, carry):
            dy, pending = carry
            saved = kind.saved.read(state.saved, row.saved, number)
            recomputed = kind.recomputed.read(state.recomputed, row.recomputed, number)
            operands = _tied(tie, (*self.layer(kind, row, number), saved, recomputed, dy))
            dx, values = kind.actions.backward(*operands)
            return dx, kind.pending.write(pending, values, row.pending, number)

        dy = _read(state.gradient, row.gradient)
        carry = dy, state.pending
        dx, pending = self.each_block(BACKWARD, row, layer, carry, reverse=True)

        def embedding(number, gradient):
            params, dy = _tied(number, (self.work.params["embed"], dx))
            _, pullback = jax.vjp(lambda params: self.embed(params, row.micro_batch), params)
            return jax.tree.map(jnp.add, gradient, pullback(dy)[0])

        first = self.trips(row, BACKWARD, virtual_stage=0)
        embed = _loop(EMBEDDING, first, embedding, state.gradients["embed"])
        gradients = state.gradients | {"embed": embed}
        return state._replace(gradients=gradients, pending=pending, sent_backward=dx)

    def weights(self, state, row):
        """W of a virtual stage."""

        def layer(kind, tie, number, gradients):
            saved = kind.saved.read(state.saved, row.saved, number)
            recomputed = kind.recomputed.read(state.recomputed, row.recomputed, number)
            pending = kind.pending.read(state.pending, row.pending, number)
            operands = _tied(tie, (*self.layer(kind, row, number), saved, recomputed, pending))
            new = kind.actions.weights(*operands)
            index = 0 if self.work.shared else self.block_index(row, number)
            groups = list(split_groups(gradients))
            # Micro-batches add up in float32 in the loop's state: none has a gradient of its own.
            groups[kind.group] = jax.tree.map(
                lambda total, g: total.at[index].add(g), groups[kind.group], new
            )
            return join_groups(groups)

        blocks = self.each_block(WEIGHTS, row, layer, state.gradients["blocks"])
        return state._replace(gradients=state.gradients | {"blocks": blocks})

    def each_block(self, action, row, body, carry, reverse=False):
        """Runs `body(kind, loop index, number of the block, carry)` for the row's blocks.

        With several kinds, an inner loop for each runs once if the block is of the kind.  In
        reverse the number counts down, because a loop with a traced count only counts up.
        """
        trips = self.trips(row, action)
        number = lambda trip: trips - 1 - trip if reverse else trip  # noqa: E731

        def block(trip, carry):
            if len(self.kinds) == 1:
                return body(self.kinds[0], number(trip), number(trip), carry)
            current = self.places[row.chunk, number(trip), 0]
            for index, kind in enumerate(self.kinds):
                runs = (current == index).astype(jnp.int32)
                inner = lambda i, carry, kind=kind: body(kind, i, number(trip), carry)  # noqa: E731
                carry = _loop(_scope(action, index), runs, inner, carry)
            return carry

        return _loop(BLOCKS[action], trips, block, carry)

    def trips(self, row, action, virtual_stage=None):
        """Returns the trip count of an action in this row.

        It is the number of blocks; with a virtual stage, 1 if the row belongs to it, else 0.
        """
        if virtual_stage is None:
            return jnp.where(row.action == action, self.layers[row.chunk], 0)
        table = self.plan.table
        # Virtual stages go around the stages, chunk after chunk.
        current = row.chunk * table.stages + self.stage
        runs = (row.action == action) & (current == virtual_stage % table.virtual_stages)
        return runs.astype(jnp.int32)

    def block_index(self, row, number):
        """Returns the index of a block in the arrays of its group."""
        if self.places is not None:
            return self.places[row.chunk, number, 1]
        return row.chunk * self.plan.division.capacity + number

    def layer(self, kind, row, number):
        """Returns (params, (what is not trained, micro-batch)) of a block."""
        index = 0 if self.work.shared else self.block_index(row, number)
        params, rest = _read(self.groups[kind.group], index)
        return params, (rest, self.block_batch(row.micro_batch))


class _Places(NamedTuple):
    """Which of the buffers that all kinds share have the values of a kind."""

    indices: tuple[int, ...]

    def read(self, buffers, *at):
        return _read(tuple(buffers[i] for i in self.indices), *at)

    def write(self, buffers, values, *at):
        written = _write(tuple(buffers[i] for i in self.indices), values, *at)
        after = dict(enumerate(buffers)) | dict(zip(self.indices, written))
        return tuple(after.values())


class _KindActions(NamedTuple):
    """The actions of a kind, and where its values are."""

    actions: LayerActions
    group: int
    saved: _Places
    recomputed: _Places
    pending: _Places


def _actions(kinds, groups, x, block_batch):
    """Returns (`_KindActions` of each kind, {buffer: contents}, shapes of a block's metrics).

    Kinds share equal contents, and have the same metrics.
    """
    made, metrics = [], {}
    contents: dict[str, list] = {"saved": [], "recomputed": [], "pending": []}
    for kind in kinds:
        # Of one block: the first axis is the blocks of the stage.
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), groups[kind.group])
        params, rest = one
        block = params, (rest, jax.eval_shape(lambda: block_batch(0)))

        def layer(params, others, x, kind=kind):
            rest, micro_batch = others
            return kind.layer(params, rest, x, micro_batch)

        actions = layer_actions(layer, *block, x, kind.recompute)
        _, metrics, saved = jax.eval_shape(actions.forward, *block, x)
        recomputed = jax.eval_shape(actions.recompute, *block, saved)
        _, pending = jax.eval_shape(actions.backward, *block, saved, recomputed, x)
        values = {"saved": saved, "recomputed": recomputed, "pending": pending}
        places = (_places(contents[name], leaves) for name, leaves in values.items())
        made.append(_KindActions(actions, kind.group, *places))
    return made, {name: tuple(leaves) for name, leaves in contents.items()}, metrics


def _places(shared, leaves):
    """Returns the `_Places` of a kind's leaves in a shared list, to which it adds what is new."""
    # Kinds share buffers; the values of one kind do not.
    free, indices = list(range(len(shared))), []
    for leaf in leaves:
        same = (i for i in free if (shared[i].shape, shared[i].dtype) == (leaf.shape, leaf.dtype))
        index = next(same, len(shared))
        if index == len(shared):
            shared.append(leaf)
        else:
            free.remove(index)
        indices.append(index)
    return _Places(tuple(indices))


def _loop(scope, trips, body, carry):
    """Runs a loop with a traced trip count, in the named scope that `trip_counts` uses."""
    # No `while` of a condition: the compiler's report finds a loop's length by its scope.
    with jax.named_scope(scope):
        return lax.fori_loop(0, trips, body, carry)


def _tied(number, operands):
    """Ties the operands of a loop body to the loop index.

    Otherwise the compiler would hoist loop-invariant code out of the loop, and run it even if the
    trip count is zero.
    """
    return lax.optimization_barrier((number, operands))[1]


def _read(buffers, *indices):
    """Returns each leaf at the indices; negative ones read index 0."""
    at: list[ArrayLike] = [jnp.maximum(i, 0) for i in indices]

    def read(leaf):
        start = (*at, *[0] * (leaf.ndim - len(at)))
        sizes = (*[1] * len(at), *leaf.shape[len(at) :])
        return lax.dynamic_slice(leaf, start, sizes).reshape(leaf.shape[len(at) :])

    return jax.tree.map(read, buffers)


def _write(buffers, content, *indices):
    """Returns the buffers with the content at the indices; negative ones write index 0."""
    at: list[ArrayLike] = [jnp.maximum(i, 0) for i in indices]

    def write(leaf, new):
        start = (*at, *[0] * (leaf.ndim - len(at)))
        return lax.dynamic_update_slice(leaf, new.reshape(*[1] * len(at), *new.shape), start)

    return jax.tree.map(write, buffers, content)
