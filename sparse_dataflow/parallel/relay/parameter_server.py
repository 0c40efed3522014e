"""The eager parameter server (L2L, arXiv 2002.05645, section 3): parameters, gradients and moments
live in host memory; one section at a time goes to the device, and its update is made beside the
device's work as soon as its gradient is there.

Threads: one fetches, one takes gradients back, several update.  A gradient is clipped in one of two
ways:

- "exact": by the global norm, as every executor does.  No gradient may be applied before the last
  one is there, so all of them are held in host memory (as large as the device's copy of the
  parameters) and the updates follow the backward pass: one more pass over them, hidden by nothing.
- "eager": each section by its own norm, to `clip` / sqrt(sections), so that the global norm is
  never above `clip`; updates run while the device computes.
"""

import collections
import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models.groups import groups, of_layer
from sparse_dataflow.optim.optimizers import adam_state, decay_mask, learning_rate_multipliers
from sparse_dataflow.optim.train_state import TrainState
from sparse_dataflow.parallel.relay import host_optimizer
from sparse_dataflow.parallel.relay.host_optimizer import Leaf, Rates
from sparse_dataflow.parallel.relay.host_state import (
    Section,
    all_sections,
    section_name,
    view,
    with_adam,
)
from sparse_dataflow.parallel.relay.programs import device_dtype
from sparse_dataflow.parallel.relay.timeline import Timeline

CLIPPINGS = ("exact", "eager")
IN_FLIGHT = 2
"""Sections whose gradients may be on the device at once: one computed, one on its way from it."""


class InMemory:
    """Where updates go: to the arrays that they read."""

    def target(self, params: dict, mu: dict, nu: dict) -> tuple[dict, dict, dict]:
        """Trees that take the results of an update of these."""
        return params, mu, nu

    def updated(self, section: Section, views: tuple) -> None:
        """Told when the three views of a section hold its results."""

    def commit(self, state: TrainState) -> None:
        """Told when a step is complete."""


class ParameterServer:
    """Holds what outlasts a step: threads, the device's copies, room for gradients."""

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        put: Callable[[Any], Any],
        *,
        clipping: str = "exact",
        storage: Any = None,
        pinned: jax.sharding.Sharding | None = None,
        threads: int | None = None,
    ):
        """Starts its threads.

        Args:
          model: decides what the device holds of a parameter.
          training: clip and weight decay.
          put: a tree of host arrays -> the same on the device, a copy.
          clipping: one of CLIPPINGS.
          storage: takes updates; `InMemory` where None.
          pinned: page-locked host memory in which the device's copies wait, where the backend has
            it; pageable where None.
          threads: that update; one a core where None.

        Raises:
          UserError: an unknown clipping.
        """
        if clipping not in CLIPPINGS:
            raise UserError(f"clipping {clipping!r} is unknown; legal: {', '.join(CLIPPINGS)}.")
        self.model, self.training, self.put = model, training, put
        self.clipping, self.storage, self.pinned = clipping, storage or InMemory(), pinned
        self.threads = threads or len(getattr(os, "sched_getaffinity", lambda _: range(4))(0))
        self.fetching = ThreadPoolExecutor(1, "fetch")
        self.returning = ThreadPoolExecutor(1, "return")
        self.updating = ThreadPoolExecutor(self.threads, "update")
        self.room: dict[Section, list[np.ndarray]] = {}
        self._copies: dict[Section, Any] = {}
        self._copied: dict | None = None

    def copy(self, params: dict, section: Section) -> Any:
        """The host arrays that a section's parameters on the device are read from: its masters,
        where they have the same dtype and need no page-locked memory."""
        if params is not self._copied:
            self._copies, self._copied = {}, params
        if section not in self._copies:
            self._copies[section] = self._made_copy(view(params, section))
        return self._copies[section]

    def adopt(self, params: dict, copies: dict[Section, Any]) -> None:
        """Takes the copies that updates have brought up to date for new parameters."""
        self._copied, self._copies = params, copies

    def published(self, copy: Any) -> Any:
        """A copy that an update has finished, where the device reads it from."""
        return copy if self.pinned is None else jax.device_put(copy, self.pinned)

    def returned(self, gradient: jax.Array) -> np.ndarray:
        """A gradient in host memory; through page-locked memory where copies wait there."""
        own = gradient.addressable_data(0)
        if self.pinned is not None:
            own = jax.device_put(own, own.sharding.with_memory_kind("pinned_host"))
        return np.asarray(own)

    def _made_copy(self, masters):
        def one(path, master):
            dtype = device_dtype(self.model, path)
            if dtype == master.dtype:
                return master
            out = np.empty(master.shape, dtype)
            host_optimizer.narrow(master.reshape(-1), out.reshape(-1))
            return out

        return self.published(jax.tree_util.tree_map_with_path(one, masters))


class ServerStep:
    """The server during one step: sections are fetched, gradients given, all updates finished."""

    def __init__(
        self,
        server: ParameterServer,
        state: TrainState,
        sections: list[Section],
        learning_rate: float,
        timeline: Timeline,
    ):
        """Begins a step.

        Args:
          server: whose threads work.
          state: with host arrays; they are given up, as donated ones.
          sections: that take part; the others stay as they are.
          learning_rate: of the step.
          timeline: is told of all work.
        """
        self._server, self._state, self._timeline = server, state, timeline
        self._sections, self._learning_rate = sections, float(learning_rate)
        moments = adam_state(state.moments)
        self._count = int(moments.count) + 1
        self._before = state.params, moments.mu, moments.nu
        self._after = server.storage.target(*self._before)
        self._taken: collections.deque[Future] = collections.deque()
        self._held: dict[Section, list[np.ndarray]] = {}
        self._squares: dict[Section, dict[str, float]] = {}
        self._updates: dict[Section, list[Future]] = {}
        self._copies: dict[Section, Any] = {}

    def fetch(self, section: Section, *more: Any) -> Future:
        """Starts to bring a section's parameters, and other host arrays, to the device."""
        return self._server.fetching.submit(self._fetch, section, more)

    def _fetch(self, section, more):
        copy = self._server.copy(self._state.params, section)
        with self._timeline.span("fetch", section_name(section)):
            return jax.block_until_ready(self._server.put((copy, *more)))

    def give(self, section: Section, gradient: Any) -> None:
        """Takes a gradient from the device as soon as it is there.

        Waits until the next one has room beside those still on their way: however slow the host
        is, no more than `IN_FLIGHT` of them are on the device.
        """
        paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(gradient))
        self._taken.append(self._server.returning.submit(self._take, section, paths, [*leaves]))
        while len(self._taken) >= IN_FLIGHT:
            self._taken.popleft().result()

    def _take(self, section, paths, leaves):
        jax.block_until_ready(leaves)
        with self._timeline.span("return", section_name(section)):
            held = self._room(section, leaves)
            # A leaf that is read is let go: the thread's own arguments outlive the work.
            for to in held:
                np.copyto(to, self._server.returned(leaves.pop(0)))
        self._squares[section] = {
            jax.tree_util.keystr(path, simple=True, separator="."): host_optimizer.square_sum(g)
            for path, g in zip(paths, held)
        }
        if self._server.clipping == "exact":
            self._held[section] = held
            return
        limit = self._server.training.clip / math.sqrt(len(self._sections))
        norm = math.sqrt(sum(self._squares[section].values()))
        self._update(section, held, _clip_factor(norm, limit))
        for other in list(self._updates)[:-IN_FLIGHT]:
            self._finish_update(other)

    def _room(self, section, leaves):
        """Host arrays for a gradient; kept from step to step where all are held at once."""
        if self._server.clipping == "eager":
            return [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        room = self._server.room
        if section not in room:
            room[section] = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        return room[section]

    def _update(self, section, gradients, factor):
        """Starts the update of a section on the server's threads."""
        server = self._server
        masters = view(self._before[0], section)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(masters)]
        decayed = jax.tree.leaves(decay_mask(masters))
        model = server.model
        if isinstance(section, int):
            model = groups(model)[of_layer(model, section)].model
        multipliers = jax.tree.leaves(learning_rate_multipliers(model, server.training, masters))
        before = zip(*(jax.tree.leaves(view(tree, section)) for tree in self._before))
        after = list(zip(*(jax.tree.leaves(view(tree, section)) for tree in self._after)))
        room = jax.tree.leaves(server.copy(self._state.params, section))
        copies, jobs = [], []
        for number, old in enumerate(before):
            new, gradient = Leaf(*after[number]), gradients[number]
            narrow = None
            if device_dtype(server.model, paths[number]) != new.parameter.dtype:
                pageable = isinstance(room[number], np.ndarray)
                narrow = room[number] if pageable else np.empty(room[number].shape, jnp.bfloat16)
            copies.append(new.parameter if narrow is None else narrow)
            rates = Rates(
                self._count,
                factor,
                self._learning_rate * multipliers[number],
                server.training.weight_decay if decayed[number] else 0.0,
            )
            for where in host_optimizer.pieces(gradient.size, server.threads):
                part = None if narrow is None else narrow.reshape(-1)[where]
                flat = gradient.reshape(-1)[where]
                job = (Leaf(*old).piece(where), flat, rates, new.piece(where), part)
                jobs.append(server.updating.submit(self._timed, section, job))
        self._copies[section] = jax.tree.unflatten(jax.tree.structure(masters), copies)
        self._updates[section] = jobs

    def _timed(self, section, job):
        with self._timeline.span("update", section_name(section)):
            host_optimizer.update(*job)

    def _finish_update(self, section):
        """Waits for a section's update; its copy and its files are then ready."""
        if jobs := self._updates.get(section):
            wait(jobs)
            for job in jobs:
                job.result()
            self._updates[section] = []
            self._copies[section] = self._server.published(self._copies[section])
            views = tuple(view(tree, section) for tree in self._after)
            self._server.storage.updated(section, views)

    def finish(self) -> tuple[TrainState, dict[str, float]]:
        """Waits for all gradients and updates.

        Returns:
          (the state after the step, norm of the gradient by parameter group).
        """
        while self._taken:
            self._taken.popleft().result()
        if self._server.clipping == "exact":
            norm = math.sqrt(
                sum(sum(self._squares[section].values()) for section in self._sections)
            )
            factor = _clip_factor(norm, self._server.training.clip)
            for section in self._sections:
                self._update(section, self._held[section], factor)
        for section in self._sections:
            self._finish_update(section)
        for section in set(all_sections(self._server.model.num_layers)) - set(self._sections):
            self._keep(section)
        params, mu, nu = self._after
        params = dict(params)
        state = self._state._replace(
            step=np.asarray(self._state.step + 1, np.int32),
            params=params,
            moments=with_adam(self._state.moments, self._count, mu, nu),
        )
        self._server.adopt(params, self._copies)
        self._server.storage.commit(state)
        return state, group_norms(self._squares)

    def _keep(self, section):
        """A section that took no part is after the step as it was before."""
        views = []
        for old, new in zip(self._before, self._after):
            views.append(view(new, section))
            if old is not new:
                jax.tree.map(np.copyto, views[-1], view(old, section))
        self._server.storage.updated(section, tuple(views))


def group_norms(squares: dict[Section, dict[str, float]]) -> dict[str, float]:
    """Euclidean norm by parameter group, as `optim.train_state.group_norms`, of sums of squares."""
    total: dict[str, float] = collections.defaultdict(float)
    for section in sorted(squares, key=str):
        for leaf, value in squares[section].items():
            group = f"blocks.{leaf.split('.')[0]}" if isinstance(section, int) else section
            total[group] += value
    return {group: math.sqrt(value) for group, value in total.items()}


def _clip_factor(norm, limit):
    """As `optax.clip_by_global_norm`; not finite where the norm is not."""
    return 1.0 if norm < limit else limit / norm
