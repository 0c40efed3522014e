"""The eager parameter server (L2L, arXiv 2002.05645, section 3).

Parameters, gradients and moments live in host memory. One section at a time moves to the device;
its update runs on the host as soon as its gradient arrives, while the device computes.

One thread fetches, one returns gradients, several update. Gradients are clipped in one of two ways:

- "exact": by the global norm, as in every executor. No update may start before the last gradient
  arrives. Host memory holds all gradients (as much as the device's copies of the parameters), and
  the updates follow the backward pass: one extra host pass that does not overlap with compute.
- "eager": each section by its own norm, to `clip` / sqrt(sections), which keeps the global norm
  below `clip`; updates overlap with compute.  With `skip_spikes` a step is accepted as a whole, so
  its updates wait for the last gradient as those of "exact" do.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.layer_groups import group_index, layer_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.state_roles import dotted_path
from sparse_dataflow.core.model.partition import ArrayTree, legal
from sparse_dataflow.core.optim import matrix_leaves
from sparse_dataflow.core.optim.muon import Matrices
from sparse_dataflow.core.optim.muon_updates import matrices_like
from sparse_dataflow.core.optim.optimizers import (
    TrainState,
    at_step,
    learning_rate_multipliers,
    rows_left_alone,
    weight_decays,
)
from sparse_dataflow.hardware.detect import cpu_count
from sparse_dataflow.relay import host_optimizer
from sparse_dataflow.relay.clipping import updates_at_once
from sparse_dataflow.relay.host_optimizer import Leaf, Rates
from sparse_dataflow.relay.host_state import (
    Section,
    all_sections,
    count_of,
    layer_view,
    moment_trees,
    section_name,
    view,
    with_moments,
)
from sparse_dataflow.relay.relay_programs import device_dtype
from sparse_dataflow.relay.timeline import Timeline

IN_FLIGHT = 2
"""Sections with gradients on the device at once: one is computed, one is returned to the host."""


class LeafFacts(NamedTuple):
    """What the update of one leaf needs and no step changes.

    Attributes:
      path: in its section.
      multiplier: of the learning rate.
      decay: decoupled weight decay; 0 for none.
      matrices: those of a weight that Muon updates; None for others.
      device_dtype: dtype of the device's copy.
    """

    path: tuple
    multiplier: float
    decay: float
    matrices: Matrices | None
    device_dtype: np.dtype


def _facts(model, training, section, masters, rest) -> list[LeafFacts]:
    group = model
    if isinstance(section, int):
        # Multipliers depend on a layer's density, which differs by group.
        group = layer_groups(model)[group_index(model, section)].model
    section_rest = view(rest, section) if rest else ()
    multipliers = learning_rate_multipliers(group, training, masters, section_rest)
    columns = zip(
        jax.tree_util.tree_leaves_with_path(masters),
        jax.tree.leaves(multipliers),
        jax.tree.leaves(weight_decays(model, training, masters)),
        jax.tree.leaves(matrices_like(model, masters, section_rest)),
        strict=True,
    )

    def facts(path, multiplier, decay, matrices):
        # Matrices of the vocabulary and vectors stay with AdamW under Muon.
        has_muon = training.optimizer == "muon" and matrix_leaves.has_muon(model, path)
        return LeafFacts(
            path, multiplier, decay, matrices if has_muon else None, device_dtype(model, path)
        )

    return [facts(path, *others) for (path, _), *others in columns]


class InMemory:
    """Storage in which updates overwrite the arrays that they read."""

    def target(self, params: dict, mu: dict, nu: dict) -> tuple[dict, dict, dict]:
        """Returns the trees for the results of an update of these trees."""
        return params, mu, nu

    def updated(self, section: Section, views: tuple) -> None:
        """Called when the three views of a section hold its results."""

    def commit(self, state: TrainState) -> None:
        """Called when a step is complete."""

    def close(self) -> None:
        """Called at the end of the training."""


class ParameterServer:
    """State that outlives a step: threads, the device's copies, gradient buffers.

    Attributes:
      storage: receives updates, as `InMemory` does.
      updates_at_once: whether a section is updated as soon as its gradient arrives.
    """

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        put: Callable[[ArrayTree], ArrayTree],
        *,
        clipping: str = "exact",
        copies: bool = True,
        pinned: jax.sharding.Sharding | None = None,
    ):
        """Starts the threads.

        Args:
          model: gives the dtype of the device's copies.
          training: gives clip and weight decay.
          put: copies a tree of host arrays to the device.
          clipping: "exact" or "eager".
          copies: whether the device's copies are kept; else each is made when it is fetched.
          pinned: sharding in page-locked host memory for the device's copies; pageable memory if
            None.
        """
        self.model, self.training, self.put = model, training, put
        self.clipping, self.copies, self.pinned = clipping, copies, pinned
        self.updates_at_once = updates_at_once(training, clipping)
        self.storage: Any = InMemory()
        self.threads = cpu_count()
        # One thread for each direction, so that copies are in order and both directions overlap.
        self.fetching = ThreadPoolExecutor(1, "fetch")
        self.returning = ThreadPoolExecutor(1, "return")
        self.updating = ThreadPoolExecutor(self.threads, "update")
        self.buffers: dict[Section, list[np.ndarray]] = {}
        self._copies: dict[Section, ArrayTree] = {}
        self._copied: dict | None = None
        self._facts: dict[Section, list[LeafFacts]] = {}
        self._facts_rest: ArrayTree = None
        self._rest: ArrayTree = None
        self._rest_copies: dict[Section, ArrayTree] = {}

    def copy(self, params: dict, section: Section) -> ArrayTree:
        """Returns the host arrays from which the device reads a section's parameters.

        These are the masters if they have the same dtype and need no page-locked memory.
        """
        if not self.copies:
            return self._new_copy(view(params, section))
        # By identity: a step returns a new dict even where arrays are updated in place, so an old
        # dict cannot pass for the new state.
        if params is not self._copied:
            self._copies, self._copied = {}, params
        if section not in self._copies:
            self._copies[section] = self._new_copy(view(params, section))
        return self._copies[section]

    def section(self, params: dict, rest: ArrayTree, section: Section) -> tuple[dict, dict]:
        """Returns what is trained and what is not of a section, which the device reads from host;
        see `copy`."""
        return self.copy(params, section), self._pinned(rest, section) if rest else {}

    def _pinned(self, rest: dict, section: Section) -> ArrayTree:
        """Returns the host arrays from which the device reads what is not trained of a section."""
        # Layouts and frozen weights change only between steps, as a new tree.
        if rest is not self._rest:
            self._rest, self._rest_copies = rest, {}
        if section not in self._rest_copies:
            section_rest = jax.tree.map(np.asarray, view(rest, section))
            self._rest_copies[section] = self.pin(section_rest)
        return self._rest_copies[section]

    def adopt(self, params: dict, copies: dict[Section, ArrayTree]) -> None:
        """Sets the copies of new parameters, which the updates wrote."""
        self._copied, self._copies = params, copies

    def pin(self, copy: object) -> ArrayTree:
        """Moves a finished copy to page-locked memory if the device reads from there."""
        return copy if self.pinned is None else jax.device_put(copy, self.pinned)

    def facts(self, section: Section, masters: object, rest: object) -> list["LeafFacts"]:
        """Returns the facts of each leaf of a section; computed once for the layouts of a state."""
        if rest is not self._facts_rest:
            self._facts, self._facts_rest = {}, rest
        if section not in self._facts:
            self._facts[section] = _facts(self.model, self.training, section, masters, rest)
        return self._facts[section]

    def to_host(self, gradient: jax.Array) -> np.ndarray:
        """Copies a gradient to host memory, through page-locked memory if it is used."""
        # Gradients are replicated, so one device's copy is enough.
        local = gradient.addressable_data(0)
        if self.pinned is not None:
            local = jax.device_put(local, local.sharding.with_memory_kind("pinned_host"))
        return np.asarray(local)

    def _new_copy(self, masters):
        def copy(path, master):
            dtype = device_dtype(self.model, path)
            if dtype == master.dtype:
                return master
            out = np.empty(master.shape, dtype)
            flat, flat_out = master.reshape(-1), out.reshape(-1)
            # One leaf may be most of a section (an embedding), so leaves are divided over threads.
            for where in host_optimizer.pieces(master.size, self.threads):
                job = self.updating.submit(host_optimizer.narrow, flat[where], flat_out[where])
                jobs.append(job)
            return out

        jobs: list[Future] = []
        copies = jax.tree_util.tree_map_with_path(copy, masters)
        # A copy must be whole before it is pinned: `device_put` reads it at once.
        for job in jobs:
            job.result()
        return self.pin(copies)


class ServerStep:
    """The server during one step: fetches sections, receives gradients, finishes all updates."""

    def __init__(
        self,
        server: ParameterServer,
        state: TrainState,
        sections: list[Section],
        learning_rate: float,
        timeline: Timeline,
    ):
        """Starts a step.

        Args:
          state: state with host arrays, which are donated.
          sections: sections that take part and are trained; the others stay unchanged.
          timeline: receives the spans of all work.
        """
        self._server, self._state, self._timeline = server, state, timeline
        self._sections, self._learning_rate = sections, float(learning_rate)
        # Optimizers number their updates from 1.
        self._count = count_of(state.moments) + 1
        self._before = state.params, *moment_trees(state.moments)
        self._after = server.storage.target(*self._before)
        self._alone = rows_left_alone(server.training, state.moments)
        self._in_flight: collections.deque[Future] = collections.deque()
        self._gradients: dict[Section, list[np.ndarray]] = {}
        self._squares: dict[Section, dict[str, float]] = {}
        self._updates: dict[Section, list[Future]] = {}
        self._copies: dict[Section, ArrayTree] = {}

    def trains(self, section: Section) -> bool:
        """Returns whether a section takes part and has parameters to train."""
        return section in self._sections

    def fetch(self, section: Section, *more: object) -> Future:
        """Starts copying a `ParameterServer.section`, and other host arrays, to the device."""
        return self._server.fetching.submit(self._fetch, section, more)

    def _fetch(self, section, more):
        arrays = self._server.section(self._state.params, self._state.rest, section)
        with self._timeline.span("fetch", section_name(section)):
            return jax.block_until_ready(self._server.put((arrays, *more)))

    def push(self, section: Section, gradient: object) -> None:
        """Starts returning a gradient to the host.

        Blocks while `IN_FLIGHT` gradients are on the device, however slow the host is.
        """
        paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(gradient))
        job = self._server.returning.submit(self._return, section, paths, [*leaves])
        self._in_flight.append(job)
        while len(self._in_flight) >= IN_FLIGHT:
            self._in_flight.popleft().result()

    def _return(self, section, paths, leaves):
        # Outside of the span, which shows the transfer and not the computation before it.
        jax.block_until_ready(leaves)
        with self._timeline.span("return", section_name(section)):
            gradients = self._buffers(section, leaves)
            # `pop` frees each leaf on the device at once: this thread still references the list.
            for to in gradients:
                np.copyto(to, self._server.to_host(leaves.pop(0)))
        self._squares[section] = square_sums(zip(paths, gradients))
        if not self._server.updates_at_once:
            self._gradients[section] = gradients
            return
        self._update(section, gradients, self._section_factor(section))
        # The newest updates may run on, beside the device. Waiting for older ones bounds the
        # gradients in host memory, and pins their copies while the device computes.
        for other in list(self._updates)[:-IN_FLIGHT]:
            self._finish_update(other)

    def _section_factor(self, section):
        """Returns the factor of eager clipping."""
        # n squares of at most clip^2 / n add up to at most clip^2.
        limit = self._server.training.clip / math.sqrt(len(self._sections))
        return _clip_factor(math.sqrt(sum(self._squares[section].values())), limit)

    def _global_factor(self):
        """Returns the factor of exact clipping."""
        # In the order of the sections, not of arrival. A sum of floats depends on its order, and
        # the same step must give the same bits.
        norm = math.sqrt(sum(sum(self._squares[section].values()) for section in self._sections))
        return _clip_factor(norm, self._server.training.clip)

    def _buffers(self, section, leaves):
        """Returns host arrays for a gradient; updates that wait reuse them in every step."""
        if self._server.updates_at_once:
            # Several updates run at once, so buffers cannot be reused before all have ended.
            return [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        # All sections' gradients exist at once until the last has arrived; new ones in each step
        # would be paid for in page faults.
        buffers = self._server.buffers
        if section not in buffers:
            buffers[section] = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        return buffers[section]

    def _update(self, section, gradients, factor):
        """Starts the update of a section on the update threads."""
        server, training = self._server, self._server.training
        masters = view(self._before[0], section)
        leaves = server.facts(section, masters, self._state.rest)
        before = after = _leaves(leaves, self._before, section)
        # The same views otherwise, so that an update in place needs no copy.
        if self._after is not self._before:
            after = _leaves(leaves, self._after, section)
        # Without kept copies the masters stand for them and are not written twice.
        old_copies = jax.tree.leaves(
            server.copy(self._state.params, section) if server.copies else masters
        )
        has_muon = training.optimizer == "muon"
        scales = _update_scales(server.model, masters) if has_muon else {}
        copies, work = [], []
        for leaf, old, new, gradient, copy in zip(
            leaves, before, after, gradients, old_copies, strict=True
        ):
            update, unit = host_optimizer.update, 1
            if leaf.matrices is not None:
                update = functools.partial(
                    host_optimizer.update_matrices,
                    matrices=leaf.matrices,
                    scale=scales.get(leaf.path, 1.0),
                )
                unit = math.prod(leaf.matrices.unit)
            # A float32 copy (norms, routers) is the master itself.
            if not server.copies or leaf.device_dtype == new.parameter.dtype:
                copy = None
            elif not isinstance(copy, np.ndarray):  # A page-locked copy is a jax array.
                copy = np.empty(copy.shape, jnp.bfloat16)
            copies.append(new.parameter if copy is None else copy)
            rate = self._learning_rate * leaf.multiplier
            betas = training.b1, training.b2, training.epsilon
            rates = Rates(self._count, factor, rate, leaf.decay, *betas)
            rows = _updated_rows(leaf.path, self._alone)
            if not training.is_built_in:
                axes = matrix_leaves.weight_axes(server.model, leaf.path)
                update = functools.partial(
                    host_optimizer.update_weights, training=training, axes=axes, rows=rows
                )
                flat = None if copy is None else copy.reshape(-1)
                # Its state has arrays of other shapes, which ranges of elements do not divide.
                whole = functools.partial(update, old, gradient, rates, new, flat)
                work.append((gradient.size, whole))
                continue
            for where, is_updated in _pieces(gradient, rows, server.threads, unit):
                rounded = None if copy is None else copy.reshape(-1)[where]
                flat = gradient.reshape(-1)[where]
                # Moments of the others change, as under every executor.
                piece_rates = rates if is_updated else rates._replace(learning_rate=0.0)
                piece = old.piece(where)
                after_piece = piece if new is old else new.piece(where)
                job = (piece, flat, piece_rates, after_piece, rounded)
                work.append((flat.size, functools.partial(update, *job)))
        if server.copies:
            self._copies[section] = jax.tree.unflatten(jax.tree.structure(masters), copies)
        self._updates[section] = [
            server.updating.submit(self._timed, section, jobs) for jobs in _batched(work)
        ]

    def _timed(self, section, jobs):
        with self._timeline.span("update", section_name(section)):
            for job in jobs:
                job()

    def _finish_update(self, section):
        """Waits for a section's update, then pins its copy and notifies the storage."""
        if jobs := self._updates.get(section):
            wait(jobs)
            for job in jobs:
                job.result()
            self._updates[section] = []
            self._keep_legal(section)
            if self._server.copies:
                self._copies[section] = self._server.pin(self._copies[section])
            views = tuple(view(tree, section) for tree in self._after)
            self._server.storage.updated(section, views)

    def _keep_legal(self, section):
        """Makes the updated masters of a section and their copies legal; see `partition.legal`."""
        rest = self._state.rest if isinstance(section, int) else ()
        rest = layer_view(rest["blocks"], section) if rest else ()
        updated = [view(self._after[0], section)]
        updated += [self._copies[section]] if self._server.copies else []
        for arrays in updated:
            legal_arrays = jax.tree.leaves(legal(self._server.model, arrays, rest))
            for array, legal_array in zip(jax.tree.leaves(arrays), legal_arrays, strict=True):
                if legal_array is not array:
                    np.copyto(array, legal_array)

    def finish(
        self, accepts: Callable[[dict[str, float]], bool] = lambda norms: True
    ) -> tuple[TrainState, dict[str, float]]:
        """Waits for all gradients and updates.

        Args:
          accepts: gradient norm by parameter group -> whether parameters and moments change; not
            for a server that `updates_at_once`.

        Returns:
          (state after the step, squared gradient norm by parameter group).
        """
        while self._in_flight:
            self._in_flight.popleft().result()
        squares, updated = group_squares(self._squares), self._sections
        if not accepts({group: math.sqrt(square) for group, square in squares.items()}):
            # A step that is not accepted leaves parameters and moments, and is no step of Adam's
            # bias correction.
            updated, self._count = [], self._count - 1
        elif not self._server.updates_at_once:
            exact = self._server.clipping == "exact"
            factor = self._global_factor() if exact else 0.0
            for section in self._sections:
                each = factor if exact else self._section_factor(section)
                self._update(section, self._gradients[section], each)
        for section in updated:
            self._finish_update(section)
        for section in set(all_sections(self._server.model.stored_layers)) - set(updated):
            self._copy_unchanged(section)
        params, mu, nu = self._after
        params = dict(params)
        moments = with_moments(self._state.moments, self._count, mu, nu)
        state = self._state._replace(params=params, moments=moments)
        state = at_step(state, np.asarray(self._state.step + 1, np.int32))
        self._server.adopt(params, self._copies)
        self._server.storage.commit(state)
        return state, squares

    def _copy_unchanged(self, section):
        """Copies a section that took no part to the trees of the results."""
        views = []
        for old, new in zip(self._before, self._after):
            views.append(view(new, section))
            if old is not new:
                jax.tree.map(np.copyto, views[-1], view(old, section))
        self._server.storage.updated(section, tuple(views))


def _leaves(facts, trees, section) -> list[Leaf]:
    """Returns the leaves of a section's trees; nu lacks Muon's matrices, or is empty."""
    params, mu, nu = (view(tree, section) for tree in trees)
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(params)
    second = iter(jax.tree.leaves(nu))
    params, mu = jax.tree.leaves(params), structure.flatten_up_to(mu)
    return [
        Leaf(p, m, next(second, None) if leaf.matrices is None else None)
        for leaf, p, m in zip(facts, params, mu, strict=True)
    ]


def _update_scales(model, masters):
    """Returns {path: `Weight.update_scales`} of a section before its update."""
    scales = matrix_leaves.update_scales(model, masters)
    return {path: float(np.squeeze(s)) for path, s in jax.tree_util.tree_leaves_with_path(scales)}


def _updated_rows(path, alone):
    """Returns the rows of a leaf that a step updates, see `optimizers.rows_left_alone`; None for
    all."""
    if alone is None:
        return None
    first, count = alone if path[-1].key in matrix_leaves.VOCABULARY else (0, 0)
    return slice(first, first + count)


def _pieces(gradient, rows, threads, unit):
    """Yields (range of elements, whether they are in `rows`) for the jobs of a leaf."""
    start, stop = 0, gradient.size
    if rows is not None:
        inner = gradient.size // len(gradient) if gradient.ndim else 0
        start, stop = inner * rows.start, inner * rows.stop
    for first, last, inside in ((0, start, False), (start, stop, True), (stop, None, False)):
        size = (gradient.size if last is None else last) - first
        for where in host_optimizer.pieces(size, threads, unit):
            yield slice(first + where.start, first + where.stop), inside


def _batched(work):
    """Yields lists of jobs from (elements, job): small jobs share a list, a thread's task."""
    batch, size = [], 0
    for elements, job in work:
        batch.append(job)
        size += elements
        if size >= host_optimizer.PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def square_sums(leaves: Iterable[tuple[tuple, np.ndarray]]) -> dict[str, float]:
    """Returns {dotted path: sum of squares} of a section's leaves with their paths."""
    return {dotted_path(path): host_optimizer.square_sum(leaf) for path, leaf in leaves}


def group_squares(squares: dict[Section, dict[str, float]]) -> dict[str, float]:
    """Returns the sum of squares by parameter group; see `optimizers.group_squares`."""
    total: dict[str, float] = collections.defaultdict(float)
    # Always in one order, on which a sum of floats depends.
    for section in sorted(squares, key=str):
        for leaf, value in squares[section].items():
            group = f"blocks.{leaf.split('.')[0]}" if isinstance(section, int) else section
            total[group] += value
    return dict(total)


def _clip_factor(norm, limit):
    """Returns the factor of `optax.clip_by_global_norm`: 0 if the norm is infinite, NaN if NaN."""
    return 1.0 if norm < limit else limit / norm
