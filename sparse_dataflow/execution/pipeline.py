"""The `pipeline` executor: each stage holds some blocks, and micro-batches stream through.

One program for all stages: a loop over the ticks of a schedule's table (`schedules`).  In a tick a
stage takes in what its neighbours have sent and does one action: F, the forward of a part of the
blocks; R, its recomputation under remat=full; B, the gradient of its input; W, that of its weights
(`layer_actions`: nothing else is computed twice).  Everything kept between them lies in buffers
with the table's own number of slots, so memory follows the schedule and not the micro-batches.

The first part's F embeds, and its B adds the embedding's gradient; the last part's F runs the head
and leaves the gradient of the loss where its B looks for one.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from sparse_dataflow.errors import UserError
from sparse_dataflow.execution.layer_actions import LayerActions, layer_actions
from sparse_dataflow.execution.schedule_slots import Slots, allocate
from sparse_dataflow.execution.schedules import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    WEIGHTS,
    Schedule,
)
from sparse_dataflow.execution.whole import rematerialised_block
from sparse_dataflow.models import gpt
from sparse_dataflow.models.sizes import ModelConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a model's blocks lie on the stages, and when they run.

    Attributes:
      schedule: the table.
      slots: of its buffers.
      layers: int32 [stages, chunks], blocks of each part; their order is that of the parts.
      axis: of the mesh, over the stages.
    """

    schedule: Schedule
    slots: Slots
    layers: np.ndarray
    axis: str

    @property
    def room(self) -> int:
        """Blocks that every part has room for."""
        return int(self.layers.max())

    @property
    def places(self) -> np.ndarray:
        """int32 [stages * chunks * room], the block in each place, stage by stage; -1: none."""
        stages, chunks = self.layers.shape
        by_part = self.layers.T.reshape(-1)
        first = np.concatenate([[0], np.cumsum(by_part)[:-1]]).reshape(chunks, stages).T
        number = np.arange(self.room)
        held = np.where(number < self.layers[..., None], first[..., None] + number, -1)
        return held.reshape(-1).astype(np.int32)


def make_plan(
    model: ModelConfig, schedule: Schedule, layers: tuple[int, ...] = (), axis: str = "stage"
) -> Plan:
    """The plan of a model.

    Args:
      model: its blocks are divided and its remat obeyed.
      schedule: made with `recompute` where, and only where, the model has remat=full.
      layers: blocks of each part, in the model's order; evenly where empty, what is left over going
        to the first parts, as the last has the head.
      axis: of the mesh, over the stages.

    Raises:
      UserError: if the blocks cannot be divided so.
    """
    parts = schedule.parts
    if model.num_layers < parts:
        raise UserError(
            f"{model.num_layers} layers cannot be divided over {schedule.stages} stages of "
            f"{schedule.chunks} chunks; legal: at most {model.num_layers} stages times chunks."
        )
    if not layers:
        each, left = divmod(model.num_layers, parts)
        layers = tuple(each + (part < left) for part in range(parts))
    if len(layers) != parts or min(layers) < 1 or sum(layers) != model.num_layers:
        raise UserError(
            f"A division into {list(layers)} layers; legal: {parts} numbers of at least 1 whose "
            f"sum is {model.num_layers}."
        )
    if schedule.recompute != (model.remat == "full"):
        raise ValueError("A schedule has ticks of recomputation where the model has remat=full.")
    by_stage = np.array(layers, np.int32).reshape(schedule.chunks, schedule.stages).T
    return Plan(schedule, allocate(schedule), by_stage, axis)


def to_stages(plan: Plan, blocks: Any) -> Any:
    """Leaves [num_layers, ...] -> [stages * room of a stage, ...], to be cut over the stage axis.

    Places without a block hold copies of the first, which nothing reads.
    """
    places = plan.places
    if np.array_equal(places, np.arange(len(places))):
        return blocks
    return jax.tree.map(lambda leaf: leaf[np.maximum(places, 0)], blocks)


def from_stages(plan: Plan, blocks: Any) -> Any:
    """The inverse of `to_stages`."""
    places = plan.places
    if np.array_equal(places, np.arange(len(places))):
        return blocks
    order = np.argsort(places, kind="stable")[np.sum(places < 0) :]
    return jax.tree.map(lambda leaf: leaf[order], blocks)


class _State(NamedTuple):
    """What a stage carries from tick to tick; arrays of buffers begin with their slots."""

    loss: Any
    gradients: Any
    saved: Any
    recomputed: Any
    pending: Any
    activation: Any
    gradient: Any
    sent_forward: Any
    sent_backward: Any


class Row(NamedTuple):
    """What one stage does in one tick, int32 [] each; see `Schedule` and `Slots`."""

    action: Any
    micro_batch: Any
    chunk: Any
    saved: Any
    recomputed: Any
    pending: Any
    activation: Any
    gradient: Any
    activation_arrives: Any
    gradient_arrives: Any
    any_activation_arrives: Any
    any_gradient_arrives: Any


def rows(plan: Plan) -> np.ndarray:
    """The plan's table as data: int32 [stages, ticks, fields of `Row`]."""
    columns = []
    for name in Row._fields:
        at = plan.schedule if hasattr(plan.schedule, name) else plan.slots
        column = getattr(at, name.removeprefix("any_"))
        if name.startswith("any_"):
            column = np.broadcast_to((column >= 0).any(axis=0), column.shape)
        columns.append(column)
    return np.stack(columns, axis=2).astype(np.int32)


def stage_loss_and_gradients(
    model: ModelConfig,
    plan: Plan,
    table: jax.Array,
    params: dict,
    tables: dict,
    tokens: jax.Array,
    total: int,
):
    """One stage's part of the loss and of the gradients, inside a `shard_map` over the stages.

    Args:
      model: its blocks are those of the plan.
      plan: how they lie on the stages.
      table: int32 [ticks, fields of `Row`], this stage's own `rows`.
      params: the model's; of "blocks" those of this stage, as `to_stages` has put them.
      tables: layout tables of these blocks.
      tokens: int32 [micro_batches, B, T + 1], this device's own sequences.
      total: tokens in the mean, over all devices.

    Returns:
      (loss, gradients in params), float32; the loss and the gradients of "embed" and "head" are to
      be summed over the stages, and all over the axes that share the batch.
    """
    run = _Stage(model, plan, params, tables, tokens, total)

    def tick(state, row):
        row = Row(*row)
        for act in (run.receive, run.forward, run.recompute, run.backward, run.weights):
            state = act(state, row)
        return state, None

    state = lax.scan(tick, run.start(), table)[0]
    return state.loss, state.gradients


def loss_and_gradients(
    model: ModelConfig,
    plan: Plan,
    mesh: jax.sharding.Mesh,
    params: dict,
    tables: dict,
    tokens: jax.Array,
):
    """Mean next-token loss of int32 [B, T + 1] tokens and its gradient in params, over a mesh.

    What `whole.loss_and_gradients` gives, to rounding; the micro-batches are the schedule's.
    Sequences are cut over the mesh's axes other than the plan's.
    """
    count = plan.schedule.micro_batches
    shared = tuple(name for name in mesh.axis_names if name != plan.axis)
    staged, whole = P(plan.axis), P()
    specs = {"embed": whole, "blocks": staged, "head": whole}

    def local(table, params, tables, tokens):
        loss, gradients = stage_loss_and_gradients(
            model, plan, table[0], params, tables, tokens, total
        )
        everywhere = {name: gradients[name] for name in ("embed", "head")}
        loss, everywhere = lax.psum((loss, everywhere), plan.axis)
        return lax.psum((loss, gradients | everywhere), shared)

    total = tokens[:, 1:].size
    params = params | {"blocks": to_stages(plan, params["blocks"])}
    tables = to_stages(plan, jax.tree.map(jnp.asarray, tables))
    tokens = tokens.reshape(count, -1, tokens.shape[1])
    loss, gradients = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(staged, specs, staged, P(None, shared)),
        out_specs=(whole, specs),
        # What is summed over which axis is written out.
        check_vma=False,
    )(rows(plan), params, tables, tokens)
    return loss, gradients | {"blocks": from_stages(plan, gradients["blocks"])}


class _Stage:
    """What a stage does in a tick: (state, row of the table) -> state.

    Each action is a loop that runs zero times where it is not the row's: unlike a branch, a loop
    never copies the buffers that it carries.
    """

    def __init__(self, model, plan, params, tables, tokens, total):
        self.model, self.plan, self.params, self.tables = model, plan, params, tables
        self.tokens, self.weight = tokens, 1 / total
        self.stage = lax.axis_index(plan.axis)
        self.layers = jnp.asarray(plan.layers)[self.stage]
        self.x = jax.eval_shape(lambda: self.embed(params["embed"], 0))
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), self.blocks)
        self.actions: LayerActions = layer_actions(
            rematerialised_block(model), *one, self.x, plan.schedule.recompute
        )

    @property
    def blocks(self):
        return self.params["blocks"], self.tables

    def embed(self, params, micro_batch):
        return gpt.embed(self.model, params, self.tokens[micro_batch, :, :-1])

    def head_loss(self, embed, head, x, micro_batch):
        targets = self.tokens[micro_batch, :, 1:]
        weights = jnp.full(targets.shape, self.weight, jnp.float32)
        return gpt.head_loss(self.model, head, embed["tokens"], x, targets, weights)

    def start(self):
        """Empty buffers and zero gradients."""
        room, peak = self.plan.room, self.plan.slots.peak
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), self.blocks)
        _, saved = jax.eval_shape(self.actions.forward, *one, self.x)
        recomputed = jax.eval_shape(self.actions.recompute, *one, saved)
        _, pending = jax.eval_shape(self.actions.backward, *one, saved, recomputed, self.x)

        def buffer(name, content, *inside):
            slots = int(peak[name].max())
            return jax.tree.map(lambda a: jnp.zeros((slots, *inside, *a.shape), a.dtype), content)

        return _State(
            jnp.zeros(()),
            jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), self.params),
            buffer("saved", saved, room),
            buffer("recomputed", recomputed, room),
            buffer("pending", pending, room),
            buffer("activation", self.x),
            buffer("gradient", self.x),
            jnp.zeros(self.x.shape, self.x.dtype),
            jnp.zeros(self.x.shape, self.x.dtype),
        )

    def receive(self, state, row):
        """Takes in what the neighbours have sent; nothing travels in a tick that needs nothing."""
        stages = self.plan.schedule.stages
        if self.plan.schedule.parts == 1:
            return state

        def exchange(buffer, sent, slot, any_arrives, step):
            ring = [(stage, (stage + step) % stages) for stage in range(stages)]
            move = lambda: lax.ppermute(sent, self.plan.axis, ring)  # noqa: E731
            arrived = lax.cond(any_arrives > 0, move, lambda: sent)
            return _write(buffer, jnp.where(slot < 0, _read(buffer, slot), arrived), slot)

        activation = exchange(
            state.activation,
            state.sent_forward,
            row.activation_arrives,
            row.any_activation_arrives,
            1,
        )
        gradient = exchange(
            state.gradient, state.sent_backward, row.gradient_arrives, row.any_gradient_arrives, -1
        )
        return state._replace(activation=activation, gradient=gradient)

    def forward(self, state, row):
        """F of the row's part, with the embedding before the first and the head after the last."""
        x = lax.cond(
            self.times(row, FORWARD, part=0) > 0,
            lambda: self.embed(self.params["embed"], row.micro_batch),
            lambda: _read(state.activation, row.activation),
        )

        def layer(number, carry):
            x, saved = carry
            y, keep = self.actions.forward(*self.layer(row, number), x)
            return y, _write(saved, keep, row.saved, number)

        x, saved = lax.fori_loop(0, self.times(row, FORWARD), layer, (x, state.saved))

        def head(_, carry):
            loss, gradients, gradient = carry
            own = self.params["embed"], self.params["head"]
            more, (*new, dx) = jax.value_and_grad(self.head_loss, (0, 1, 2))(
                *own, x, row.micro_batch
            )
            gradients = jax.tree.map(jnp.add, gradients, tuple(new))
            return loss + more, gradients, _write(gradient, dx, row.gradient)

        ends = state.gradients["embed"], state.gradients["head"]
        loss, ends, gradient = lax.fori_loop(
            0, self.times(row, FORWARD, part=-1), head, (state.loss, ends, state.gradient)
        )
        gradients = state.gradients | {"embed": ends[0], "head": ends[1]}
        return state._replace(
            loss=loss, gradients=gradients, saved=saved, gradient=gradient, sent_forward=x
        )

    def recompute(self, state, row):
        """R of the row's part."""

        def layer(number, recomputed):
            saved = _read(state.saved, row.saved, number)
            again = self.actions.recompute(*self.layer(row, number), saved)
            return _write(recomputed, again, row.recomputed, number)

        times = self.times(row, RECOMPUTE)
        return state._replace(recomputed=lax.fori_loop(0, times, layer, state.recomputed))

    def backward(self, state, row):
        """B of the row's part, with the embedding's gradient after the first."""
        times = self.times(row, BACKWARD)

        def layer(done, carry):
            dy, pending = carry
            number = times - 1 - done
            saved = _read(state.saved, row.saved, number)
            again = _read(state.recomputed, row.recomputed, number)
            dx, keep = self.actions.backward(*self.layer(row, number), saved, again, dy)
            return dx, _write(pending, keep, row.pending, number)

        dy = _read(state.gradient, row.gradient)
        dx, pending = lax.fori_loop(0, times, layer, (dy, state.pending))

        def embedding(_, gradient):
            _, pullback = jax.vjp(lambda p: self.embed(p, row.micro_batch), self.params["embed"])
            return jax.tree.map(jnp.add, gradient, pullback(dx)[0])

        embed = lax.fori_loop(
            0, self.times(row, BACKWARD, part=0), embedding, state.gradients["embed"]
        )
        gradients = state.gradients | {"embed": embed}
        return state._replace(gradients=gradients, pending=pending, sent_backward=dx)

    def weights(self, state, row):
        """W of the row's part."""

        def layer(number, gradients):
            saved = _read(state.saved, row.saved, number)
            again = _read(state.recomputed, row.recomputed, number)
            pending = _read(state.pending, row.pending, number)
            new = self.actions.weights(*self.layer(row, number), saved, again, pending)
            place = self.place(row, number)
            return jax.tree.map(lambda total, g: total.at[place].add(g), gradients, new)

        times = self.times(row, WEIGHTS)
        blocks = lax.fori_loop(0, times, layer, state.gradients["blocks"])
        return state._replace(gradients=state.gradients | {"blocks": blocks})

    def times(self, row, action, part=None):
        """How many blocks the action has in this row; of one part alone, whether it has any."""
        if part is None:
            return jnp.where(row.action == action, self.layers[row.chunk], 0)
        schedule = self.plan.schedule
        own = row.chunk * schedule.stages + self.stage
        has = (row.action == action) & (own == part % schedule.parts)
        return has.astype(jnp.int32)

    def place(self, row, number):
        return row.chunk * self.plan.room + number

    def layer(self, row, number):
        """(params, tables) of a block of the row's part."""
        return _read(self.blocks, self.place(row, number))


def _read(buffers, *at):
    """Each leaf's content at the indices, of which negative ones are taken for 0."""
    at = [jnp.maximum(i, 0) for i in at]

    def one(leaf):
        start = (*at, *[0] * (leaf.ndim - len(at)))
        sizes = (*[1] * len(at), *leaf.shape[len(at) :])
        return lax.dynamic_slice(leaf, start, sizes).reshape(leaf.shape[len(at) :])

    return jax.tree.map(one, buffers)


def _write(buffers, content, *at):
    """The buffers with the content at the indices, negative ones as in `_read`."""
    at = [jnp.maximum(i, 0) for i in at]

    def one(leaf, new):
        start = (*at, *[0] * (leaf.ndim - len(at)))
        return lax.dynamic_update_slice(leaf, new.reshape(*[1] * len(at), *new.shape), start)

    return jax.tree.map(one, buffers, content)
