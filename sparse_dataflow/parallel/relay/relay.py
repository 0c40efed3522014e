"""The `relay` executor: sections laid out in time (L2L, arXiv 2002.05645).

One block at a time is on the device, and the next on its way to it.  All micro-batches of a step
pass through a block before the next one comes; what enters a block is stashed; the backward pass
walks the blocks in reverse, fetches each again and computes its forward again.  A gradient leaves
the device as soon as it is there, and the parameter server updates it on the host.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.parallel import CLIPPINGS
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.models.groups import group_index
from sparse_dataflow.optim.train_state import StepReport, TrainState
from sparse_dataflow.parallel.relay import programs as relay_programs
from sparse_dataflow.parallel.relay.depth_schedule import DepthSchedule
from sparse_dataflow.parallel.relay.host_state import EMBED, HEAD, Section, one_layer, section_name
from sparse_dataflow.parallel.relay.parameter_server import ParameterServer, ServerStep
from sparse_dataflow.parallel.relay.timeline import Timeline
from sparse_dataflow.planning.relay import PINNED_SETTING

STASHES = ("device", "host")


@dataclasses.dataclass(frozen=True)
class RelayConfig:
    """How the relay runs.

    Attributes:
      stash: where what enters each block waits for the backward pass: on the "device" (grows with
        the depth) or on the "host" (the device's memory does not depend on the depth).
      clipping: see `parameter_server`.
      depth: which blocks take part in which step.
    """

    stash: str = "device"
    clipping: str = "exact"
    depth: DepthSchedule = dataclasses.field(default_factory=DepthSchedule)

    def __post_init__(self):
        for name, legal in (("stash", STASHES), ("clipping", CLIPPINGS)):
            if getattr(self, name) not in legal:
                raise UserError(f"{name} {getattr(self, name)!r}: legal are {', '.join(legal)}.")


class Relay:
    """Programs, server and placement of one model's training; `train_step` and `eval_step` have
    the meaning of those of `training.programs.Compiled`.

    Attributes:
      programs: of each group of layers; `eval_programs` likewise, where something is evaluated.
      timeline: of the last training step.
      observe: called with a program's name before each dispatch, for accounts of memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        config: RelayConfig | None = None,
        *,
        eval_shape: tuple[int, int] | None = None,
        mesh: Mesh | None = None,
        storage: Any = None,
        pinned: bool | None = None,
    ):
        """Compiles the programs.

        Args:
          model: what is trained.
          training: batch shape and optimizer.
          config: how.
          eval_shape: (sequences, tokens) of an evaluation's batch; nothing is evaluated where None.
          mesh: whose axis "data" the batch is cut over; the default device alone where None.
          storage: of the masters and moments, see `parameter_server`.
          pinned: whether the device's copies wait in page-locked memory; where None they do on a
            backend other than the CPU.

        Raises:
          UserError: a batch that does not cut over the mesh.
        """
        self.model, self.training, self.config = model, training, config or RelayConfig()
        self.mesh = mesh
        self._cut: Sharding
        self._whole: Sharding
        if mesh is not None:
            self._cut, self._whole = relay_programs.data_shardings(mesh)
        else:
            self._cut = self._whole = SingleDeviceSharding(jax.local_devices()[0])
        # Between processes on CPUs, collectives of two programs at once meet in any order, and may
        # wait for each other for ever.
        self._one_at_a_time = jax.process_count() > 1 and jax.default_backend() == "cpu"
        relay_programs.refuse_uncut(training, self._cut.num_devices)
        rows = training.batch // training.micro_batches
        self._train_shape = (training.micro_batches, rows, training.sequence)
        self.programs = relay_programs.compiled(model, self._train_shape, mesh)
        self._eval_shape = (1, *eval_shape) if eval_shape else None
        if self._eval_shape:
            self.eval_programs = relay_programs.compiled(model, self._eval_shape, mesh, True)
        locked = jax.default_backend() != "cpu" if pinned is None else pinned
        self._pinned = self._whole.with_memory_kind("pinned_host")
        self.server = ParameterServer(
            model,
            training,
            self._put,
            clipping=self.config.clipping,
            storage=storage,
            pinned=self._pinned if locked else None,
        )
        self._depth = DepthSchedule()
        self._watching = ThreadPoolExecutor(1, "watch")
        self.timeline = Timeline()
        self.observe: Callable[[str], None] = lambda program: None

    def begin(self, training: TrainingConfig) -> None:
        """Settles the run's length and seed, on which the depth of a step depends; before, all
        blocks take part in every step."""
        self.training, self._depth = training, self.config.depth

    def bring(self, params: dict, section: Section, *more: Any) -> tuple:
        """A section's parameters, and other host arrays, on the device."""
        return jax.block_until_ready(self._put((self.server.copy(params, section), *more)))

    def bring_to_one(self, params: dict, section: Section, *more: Any) -> tuple:
        """As `bring`, on this process's first device alone."""
        device = SingleDeviceSharding(jax.local_devices()[0])

        def one(leaf):
            own = leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf
            return jax.device_put(own, device, may_alias=False)

        return jax.block_until_ready(jax.tree.map(one, (self.server.copy(params, section), *more)))

    def train_step(
        self, state: TrainState, tokens: np.ndarray, learning_rate: float
    ) -> tuple[TrainState, StepReport]:
        """One optimizer step; the state's arrays are given up.

        Args:
          state: with host arrays, of `host_state.fresh_state`.
          tokens: int32 [batch, sequence + 1], the whole batch in every process.
          learning_rate: of the step.

        Raises:
          UserError: the device failed; what was saved before stays whole.
        """
        step = int(state.step)
        self.timeline = Timeline()
        blocks = self._depth.active(
            self.model.num_layers, step, self.training.steps, self.training.seed
        )
        sections: list[Section] = [EMBED, *blocks, HEAD]
        with device_errors_told(f"step {step + 1}"):
            server = ServerStep(self.server, state, sections, learning_rate, self.timeline)
            batch = self._batch(tokens, None, self._train_shape)
            loss = self._pass(server, state.tables, blocks, batch)
            after, norms = server.finish()
        return after, StepReport(np.float32(loss), norms)

    def _pass(self, server: ServerStep, tables, blocks: tuple[int, ...], batch) -> jax.Array:
        """Forward and backward through the sections in time."""
        run, stash = self._run, []
        inputs, targets, weights = batch
        (params,) = server.fetch(EMBED).result()
        x, _ = run(EMBED, "embed", params, inputs)

        def forward(block, fetched):
            nonlocal x
            stash.append(self._stashed(x))
            x, done = run(block, "forward", *fetched, x)
            return done

        _walk(blocks, lambda block: server.fetch(block, _one_layer(tables, block)), forward)

        params, embed = (server.fetch(section).result()[0] for section in (HEAD, EMBED))
        (loss, dx, (head, embedding)), _ = run(
            HEAD, "head", params, embed["tokens"], x, targets, weights
        )
        del x, params, embed
        server.give(HEAD, head)
        del head

        def backward(block, fetched):
            nonlocal dx
            (dx, gradient), done = run(block, "backward", *fetched, dx)
            server.give(block, gradient)
            return done

        _walk(
            blocks[::-1],
            lambda block: server.fetch(block, _one_layer(tables, block), stash.pop()),
            backward,
        )
        gradient, _ = run(EMBED, "embed_backward", inputs, dx, embedding)
        server.give(EMBED, gradient)
        return jax.device_get(loss)

    def _run(self, section: Section, name: str, *arguments) -> tuple[Any, Future]:
        """(what a program gives, told when it is ready)."""
        self.observe(name)
        dispatched = time.perf_counter()
        found = getattr(self._of(self.programs, section), name)(*arguments)
        if self._one_at_a_time:
            jax.block_until_ready(found)
        # All of a program's results are ready at once, and the watch keeps what it waits for alive:
        # it takes a small one.  What the next program takes over (dx) cannot be waited for.
        kept = min(jax.tree.leaves(found[1] if name == "backward" else found), key=lambda a: a.size)
        done = self._watching.submit(_watch, kept, dispatched, section_name(section), self.timeline)
        return found, done

    def _of(self, programs, section):
        """Of each group's programs those of a section."""
        return programs[group_index(self.model, section) if isinstance(section, int) else 0]

    def eval_step(self, params: dict, tables: dict, tokens, weights) -> np.ndarray:
        """Float32 [] sum of weighted losses in nats, over int32 [B, T + 1] tokens; all blocks take
        part.

        Raises:
          UserError: the device failed.
        """
        with device_errors_told("an evaluation"):
            return self._evaluated(params, tables, tokens, weights)

    def _evaluated(self, params, tables, tokens, weights):
        run, timeline = self.eval_programs[0], Timeline()
        inputs, targets, weights = self._batch(tokens, weights, self._eval_shape)
        fetch = lambda section, *more: self.server.fetching.submit(  # noqa: E731
            self.bring, params, section, *more
        )
        x = run.embed(*fetch(EMBED).result(), inputs)

        def forward(block, fetched):
            nonlocal x
            x = self._of(self.eval_programs, block).forward(*fetched, x)
            return self._watching.submit(_watch, x, 0.0, section_name(block), timeline)

        blocks = range(self.model.num_layers)
        _walk(blocks, lambda block: fetch(block, _one_layer(tables, block)), forward)
        (head,), (embed,) = (fetch(section).result() for section in (HEAD, EMBED))
        return jax.device_get(run.head(head, embed["tokens"], x, targets, weights))

    def _stashed(self, x):
        return jax.device_put(x, self._host_of(x)) if self.config.stash == "host" else x

    def _host_of(self, x):
        return x.sharding.with_memory_kind("pinned_host")

    def _batch(self, tokens, weights, shape):
        """(inputs, targets, weights) on the device, cut into micro-batches."""
        if weights is None:
            weights = np.full(tokens[:, 1:].shape, 1 / tokens[:, 1:].size, np.float32)
        parts = tokens[:, :-1], tokens[:, 1:], weights
        return tuple(_placed(np.ascontiguousarray(p).reshape(shape), self._cut) for p in parts)

    def _put(self, tree):
        """Host arrays, and what is stashed on the host, on the device."""

        def one(leaf):
            if isinstance(leaf, jax.Array):
                return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
            return _placed(leaf, self._whole)

        return jax.tree.map(one, tree)


@contextlib.contextmanager
def device_errors_told(where: str) -> Iterator[None]:
    """Inside, the runtime's errors are told in words.

    Raises:
      UserError: the device failed `where`, or page-locked memory is at its limit.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        saved = "what was saved before is whole: go on with --resume."
        # XLA calls its pool of page-locked memory "host memory", and the device's by other names.
        if "host memory" in str(error):
            raise UserError(
                f"Page-locked host memory is at its limit in {where} ({first_line(error)}). Set "
                f"{PINNED_SETTING} to more GiB in the environment; {saved}"
            ) from error
        raise UserError(
            f"The device failed in {where} ({first_line(error)}). The run ends here; {saved}"
        ) from error


def _walk(
    blocks: Iterable[int],
    fetch: Callable[[int], Future],
    compute: Callable[[int, Any], Future],
) -> None:
    """Computes block after block while the next one is fetched.

    A fetch begins when the computation before the last one is done, so that no more than two
    blocks are on the device, and the device has always one more computation to go on with.
    """
    blocks = list(blocks)
    before, ahead = None, fetch(blocks[0])
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        done = compute(block, ahead.result())
        if before is not None:
            before.result()
        if following is not None:
            ahead = fetch(following)
        before = done


def _watch(result, dispatched, section, timeline):
    """Waits for a program's result; programs run one after the other."""
    earlier = [span.stop for span in timeline.spans if span.kind == "compute"]
    start = max([dispatched, *earlier[-1:]])
    jax.block_until_ready(result)
    timeline.add("compute", section, start, time.perf_counter())


def _one_layer(tables, layer):
    return jax.tree.map(np.asarray, one_layer(tables, layer))


def _placed(array, sharding):
    """A copy of a host array, the same in every process."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding, may_alias=False)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
