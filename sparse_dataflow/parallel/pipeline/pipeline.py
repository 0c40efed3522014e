"""Micro-batches stream through the stages of a pipeline, each of which holds some blocks.

One program for all stages: a loop over the ticks of a schedule's table (`schedules`).  In a tick a
stage takes in what its neighbours have sent and does one action: F, the forward of a part of the
blocks; R, its recomputation under remat=full; B, the gradient of its input; W, that of its weights
(`layer_actions`: nothing else is computed twice).  Everything kept between them lies in buffers
with the table's own number of slots, so memory follows the schedule and not the micro-batches.

The first part's F embeds, and its B adds the embedding's gradient; the last part's F runs the head
and leaves the gradient of the loss where its B looks for one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from sparse_dataflow.parallel.pipeline.layer_actions import layer_actions
from sparse_dataflow.parallel.pipeline.schedule_slots import Slots, allocate
from sparse_dataflow.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    WEIGHTS,
    Schedule,
)
from sparse_dataflow.parallel.pipeline.stages import Division


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What runs where and when.

    Attributes:
      division: of the model's blocks.
      schedule: the table.
      slots: of its buffers.
    """

    division: Division
    schedule: Schedule
    slots: Slots


def make_plan(division: Division, schedule: Schedule) -> Plan:
    """The plan of a division and a schedule of as many stages and chunks."""
    if (division.stages, division.chunks) != (schedule.stages, schedule.chunks):
        raise ValueError("The division and the schedule differ in stages or chunks.")
    return Plan(division, schedule, allocate(schedule))


BLOCKS = {
    FORWARD: "forward_blocks",
    RECOMPUTE: "recompute_blocks",
    BACKWARD: "backward_blocks",
    WEIGHTS: "weight_blocks",
}
"""Action -> the named scope of its loop over blocks."""

TICKS, HEAD, EMBED, EMBEDDING = "pipeline_ticks", "head", "embed_input", "embedding_gradient"
"""Other scopes: all ticks, the head with its gradient, the embedding, the embedding's gradient."""


def rounds(plan: Plan) -> dict[str, float]:
    """Named scope -> how often a step goes through it on the stage that does so most."""
    schedule, held = plan.schedule, plan.division.held
    found = {EMBED: float(schedule.micro_batches), HEAD: float(schedule.micro_batches)}
    found[EMBEDDING] = float(schedule.micro_batches)
    stages = np.arange(schedule.stages)[:, None]
    for action, name in BLOCKS.items():
        blocks = np.where(schedule.action == action, held[stages, schedule.chunk], 0)
        found[name] = float(blocks.sum(axis=1).max())
    for name in ("activation", "gradient"):
        arrives = (getattr(plan.slots, f"{name}_arrives") >= 0).any(axis=0)
        found[f"send_{name}"] = float(arrives.sum())
    return found


class Work(NamedTuple):
    """One stage's part of a model and of a batch.

    Attributes:
      embed: (params of `embed`, int32 [B, T] tokens) -> x.
      layer: (trained, held, x) -> x, of one block.
      head_loss: (params of `embed`, params of `head`, x, [B, T] targets, [B, T] weights) -> loss.
      params: {"embed", "blocks", "head"}, to be differentiated; leaves of "blocks" are
        [chunks * room, ...], this stage's own as `stages.to_stages` has put them.
      held: what blocks need beside, likewise.
      tokens: int32 [micro_batches, B, T + 1].
      weights: float32 [micro_batches, B, T].
    """

    embed: Callable
    layer: Callable
    head_loss: Callable
    params: dict
    held: Any
    tokens: jax.Array
    weights: jax.Array


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


def run_stage(plan: Plan, table: jax.Array, work: Work, axis: str = "stage"):
    """Does one stage's work, inside a `shard_map` over the stages.

    Args:
      plan: what runs where and when.
      table: int32 [ticks, fields of `Row`], this stage's own `rows`.
      work: what is done.
      axis: of the mesh, over the stages.

    Returns:
      (loss, gradients in work.params), float32: this stage's share of both.  Without backwards in
      the schedule the gradients are zeros.
    """
    stage = _Stage(plan, work, axis)
    acts = {
        FORWARD: stage.forward,
        RECOMPUTE: stage.recompute,
        BACKWARD: stage.backward,
        WEIGHTS: stage.weights,
    }

    def tick(state, row):
        row = Row(*row)
        state = stage.receive(state, row)
        for action in plan.schedule.actions:
            state = acts[action](state, row)
        return state, None

    with jax.named_scope(TICKS):
        state = lax.scan(tick, stage.start(), table)[0]
    return state.loss, state.gradients


class _Stage:
    """What a stage does in a tick: (state, row of the table) -> state.

    Each action is a loop that runs zero times where it is not the row's: unlike a branch, a loop
    never copies the buffers that it carries.
    """

    def __init__(self, plan, work, axis):
        self.plan, self.work, self.axis = plan, work, axis
        self.stage = lax.axis_index(axis)
        self.layers = jnp.asarray(plan.division.held)[self.stage]
        self.trains = BACKWARD in plan.schedule.actions
        self.blocks = work.params["blocks"], work.held
        self.x = jax.eval_shape(lambda: self.embed(work.params["embed"], 0))
        self.one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), self.blocks)
        again = RECOMPUTE in plan.schedule.actions
        params, tables = self.one
        self.actions = layer_actions(work.layer, params, tables, self.x, again)

    def embed(self, params, micro_batch):
        return self.work.embed(params, self.work.tokens[micro_batch, :, :-1])

    def head_loss(self, embed, head, x, micro_batch):
        targets, weights = self.work.tokens[micro_batch, :, 1:], self.work.weights[micro_batch]
        return self.work.head_loss(embed, head, x, targets, weights)

    def start(self):
        """Empty buffers and zero gradients."""
        room, peak, actions = self.plan.division.room, self.plan.slots.peak, self.actions
        _, saved = jax.eval_shape(actions.forward, *self.one, self.x)
        recomputed = jax.eval_shape(actions.recompute, *self.one, saved)
        _, pending = jax.eval_shape(actions.backward, *self.one, saved, recomputed, self.x)

        def buffer(name, content, *inside):
            slots = int(peak[name].max())
            return jax.tree.map(lambda a: jnp.zeros((slots, *inside, *a.shape), a.dtype), content)

        return _State(
            jnp.zeros(()),
            jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), self.work.params),
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
        slots = self.plan.slots

        def exchange(name, sent, step):
            buffer, slot = getattr(state, name), getattr(row, name + "_arrives")
            if not (getattr(slots, name + "_arrives") >= 0).any():
                return buffer
            ring = [(stage, (stage + step) % stages) for stage in range(stages)]
            move = lambda: lax.ppermute(sent, self.axis, ring)  # noqa: E731
            with jax.named_scope(f"send_{name}"):
                arrived = lax.cond(getattr(row, f"any_{name}_arrives") > 0, move, lambda: sent)
            return _write(buffer, jnp.where(slot < 0, _read(buffer, slot), arrived), slot)

        return state._replace(
            activation=exchange("activation", state.sent_forward, 1),
            gradient=exchange("gradient", state.sent_backward, -1),
        )

    def forward(self, state, row):
        """F of the row's part, with the embedding before the first and the head after the last."""
        params = self.work.params
        x = self.embed_or_read(state, row)

        def layer(number, carry):
            x, saved = carry
            y, keep = self.actions.forward(*_here(number, (*self.layer(row, number), x)))
            return y, _write(saved, keep, row.saved, number) if self.trains else saved

        x, saved = _loop(BLOCKS[FORWARD], self.times(row, FORWARD), layer, (x, state.saved))

        def head(number, carry):
            loss, embed, head, gradient = carry
            operands = _here(number, (params["embed"], params["head"], x, row.micro_batch))
            if not self.trains:
                return loss + self.head_loss(*operands), embed, head, gradient
            more, (dembed, dhead, dx) = jax.value_and_grad(self.head_loss, (0, 1, 2))(*operands)
            embed, head = jax.tree.map(jnp.add, (embed, head), (dembed, dhead))
            return loss + more, embed, head, _write(gradient, dx, row.gradient)

        ends = state.loss, state.gradients["embed"], state.gradients["head"], state.gradient
        loss, embed, head, gradient = _loop(HEAD, self.times(row, FORWARD, part=-1), head, ends)
        return state._replace(
            loss=loss,
            gradients=state.gradients | {"embed": embed, "head": head},
            saved=saved,
            gradient=gradient,
            sent_forward=x,
        )

    def embed_or_read(self, state, row):
        """The input of the row's forward."""
        embed = lambda: self.embed(self.work.params["embed"], row.micro_batch)  # noqa: E731
        if self.plan.schedule.parts == 1:
            return embed()
        read = lambda: _read(state.activation, row.activation)  # noqa: E731
        with jax.named_scope(EMBED):
            return lax.cond(self.times(row, FORWARD, part=0) > 0, embed, read)

    def recompute(self, state, row):
        """R of the row's part."""

        def layer(number, recomputed):
            saved = _read(state.saved, row.saved, number)
            operands = _here(number, (*self.layer(row, number), saved))
            again = self.actions.recompute(*operands)
            return _write(recomputed, again, row.recomputed, number)

        times = self.times(row, RECOMPUTE)
        recomputed = _loop(BLOCKS[RECOMPUTE], times, layer, state.recomputed)
        return state._replace(recomputed=recomputed)

    def backward(self, state, row):
        """B of the row's part, with the embedding's gradient after the first."""
        times = self.times(row, BACKWARD)

        def layer(done, carry):
            dy, pending = carry
            number = times - 1 - done
            saved = _read(state.saved, row.saved, number)
            again = _read(state.recomputed, row.recomputed, number)
            operands = _here(number, (*self.layer(row, number), saved, again, dy))
            dx, keep = self.actions.backward(*operands)
            return dx, _write(pending, keep, row.pending, number)

        dy = _read(state.gradient, row.gradient)
        dx, pending = _loop(BLOCKS[BACKWARD], times, layer, (dy, state.pending))

        def embedding(number, gradient):
            own, dy = _here(number, (self.work.params["embed"], dx))
            _, pullback = jax.vjp(lambda params: self.embed(params, row.micro_batch), own)
            return jax.tree.map(jnp.add, gradient, pullback(dy)[0])

        first = self.times(row, BACKWARD, part=0)
        embed = _loop(EMBEDDING, first, embedding, state.gradients["embed"])
        gradients = state.gradients | {"embed": embed}
        return state._replace(gradients=gradients, pending=pending, sent_backward=dx)

    def weights(self, state, row):
        """W of the row's part."""

        def layer(number, gradients):
            saved = _read(state.saved, row.saved, number)
            again = _read(state.recomputed, row.recomputed, number)
            pending = _read(state.pending, row.pending, number)
            operands = _here(number, (*self.layer(row, number), saved, again, pending))
            new = self.actions.weights(*operands)
            place = self.place(row, number)
            return jax.tree.map(lambda total, g: total.at[place].add(g), gradients, new)

        times = self.times(row, WEIGHTS)
        blocks = _loop(BLOCKS[WEIGHTS], times, layer, state.gradients["blocks"])
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
        return row.chunk * self.plan.division.room + number

    def layer(self, row, number):
        """(params, tables) of a block of the row's part."""
        return _read(self.blocks, self.place(row, number))


def _loop(scope, times, body, carry):
    """A loop whose length is data, under the name by which `rounds` tells how long it is."""
    with jax.named_scope(scope):
        return lax.fori_loop(0, times, body, carry)


def _here(number, operands):
    """The operands of a round of a loop, tied to its number.

    What does not change from round to round the compiler would compute before the loop, and so in
    every tick in which the loop has no round.
    """
    return lax.optimization_barrier((number, operands))[1]


def _read(buffers, *indices):
    """Each leaf's content at the indices, of which negative ones are taken for 0."""
    at: list[ArrayLike] = [jnp.maximum(i, 0) for i in indices]

    def one(leaf):
        start = (*at, *[0] * (leaf.ndim - len(at)))
        sizes = (*[1] * len(at), *leaf.shape[len(at) :])
        return lax.dynamic_slice(leaf, start, sizes).reshape(leaf.shape[len(at) :])

    return jax.tree.map(one, buffers)


def _write(buffers, content, *indices):
    """The buffers with the content at the indices, negative ones as in `_read`."""
    at: list[ArrayLike] = [jnp.maximum(i, 0) for i in indices]

    def one(leaf, new):
        start = (*at, *[0] * (leaf.ndim - len(at)))
        return lax.dynamic_update_slice(leaf, new.reshape(*[1] * len(at), *new.shape), start)

    return jax.tree.map(one, buffers, content)
