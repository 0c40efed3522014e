"""The `relay` executor: sections run one after the other (L2L, arXiv 2002.05645).

The device holds one block while it prefetches the next. All micro-batches of a step pass through a
block before the next one, and the input of each block is stashed. The backward pass visits the
blocks in reverse, fetches each again and recomputes its forward pass. Each gradient returns to the
host as soon as it is computed, where the parameter server updates its section.

A block that all layers share is fetched once a step, and its gradients are summed on the device.
"""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.depth import DepthSchedule
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.whole import micro_batches
from sparse_dataflow.core.model.partition import ArrayTree
from sparse_dataflow.core.optim.loss_spikes import is_accepted
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.step_metrics import Metrics, Norm, StepReport, stacked
from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.relay import relay_programs
from sparse_dataflow.relay.host_state import EMBED, HEAD, Section, section_name, view
from sparse_dataflow.relay.parameter_server import ParameterServer, ServerStep
from sparse_dataflow.relay.pinned_memory import PINNED_SETTING
from sparse_dataflow.relay.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class RelayConfig:
    """Options of the relay.

    Attributes:
      stash: where block inputs wait for the backward pass: on the "device" (memory grows with
        depth) or on the "host" (device memory is independent of depth).
      clipping: see `parameter_server`.
      depth: blocks that take part in each step.
      copies: whether host memory keeps the device's copies; the results are the same.
    """

    stash: str = "device"
    clipping: str = "exact"
    depth: DepthSchedule = dataclasses.field(default_factory=DepthSchedule)
    copies: bool = True


class Relay:
    """Programs and parameter server of one model's training.

    `train_step` and `eval_step` are those of `training.programs.Compiled`.

    Attributes:
      programs: programs of each layer group.
      eval_programs: evaluation programs of each layer group, if `eval_shape` is given.
      timeline: timeline of the last training step.
      observe: called with a program's name before each dispatch, to measure memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        config: RelayConfig | None = None,
        *,
        eval_shape: tuple[int, int] | None = None,
        mesh: Mesh | None = None,
        pinned: bool | None = None,
        changing: bool = True,
        options: relay_programs.Options = relay_programs.NO_OPTIONS,
    ):
        """Compiles the programs.

        Args:
          training: batch shape and optimizer.
          config: options of the relay.
          eval_shape: (sequences, tokens) of an evaluation batch; None without evaluations.
          mesh: its axis "data" shards the batch; the default device if None.
          pinned: whether the device's copies are in page-locked memory; if None, on every backend
            but the CPU.
          changing: whether layouts may change; see `relay.programs.compile_groups`.
          options: what the training adds to the programs' arguments.

        Raises:
          UserError: the mesh does not divide the batch.
        """
        self.model, self.training, self.config = model, training, config or RelayConfig()
        self.mesh = mesh
        self._rows: Sharding
        self._replicated: Sharding
        if mesh is not None:
            self._rows, self._replicated = relay_programs.data_shardings(mesh)
        else:
            self._rows = self._replicated = SingleDeviceSharding(jax.local_devices()[0])
        # On CPUs, collectives of two concurrent programs run in any order on each process, and may
        # deadlock.
        self._serial = jax.process_count() > 1 and jax.default_backend() == "cpu"
        # A function and no method: a relay that is part of a cycle would hold its state until the
        # garbage collector runs.
        self._put = functools.partial(_put, self._replicated)
        relay_programs.refuse_unsupported(training, self._rows.num_devices)
        rows = training.batch // training.micro_batches
        options = options._replace(adapted=training.freezes)
        self._train_shape = (training.micro_batches, rows, training.sequence)
        self.programs = relay_programs.compile_groups(
            model, self._train_shape, mesh, changing=changing, options=options
        )
        kinds = relay_programs.layer_kinds(model, changing)
        self._kind_of_layer = tuple(map(list(dict.fromkeys(kinds)).index, kinds))
        if eval_shape:
            eval_options = options._replace(padded=False, teacher_width=0)
            self.eval_programs = relay_programs.compile_groups(
                model, (1, *eval_shape), mesh, True, changing, eval_options
            )
        pinned = jax.default_backend() != "cpu" if pinned is None else pinned
        self.server = ParameterServer(
            model,
            training,
            self._put,
            clipping=self.config.clipping,
            copies=self.config.copies,
            pinned=self._replicated.with_memory_kind("pinned_host") if pinned else None,
        )
        self._depth = DepthSchedule()
        self._watching = ThreadPoolExecutor(1, "watch")
        self.timeline = Timeline()
        self.observe: Callable[[str], None] = lambda program: None

    def start(self, training: TrainingConfig) -> None:
        """Sets the run's length and seed, and enables its depth schedule."""
        self.training, self._depth = training, self.config.depth

    def to_device(self, params: dict, rest: object, section: Section, *more: object) -> tuple:
        """Copies a `ParameterServer.section`, and other host arrays, to the device."""
        return jax.block_until_ready(self._put((self.server.section(params, rest, section), *more)))

    def to_first_device(self, params: dict, rest: object, section: Section) -> ArrayTree:
        """Copies as `to_device`, to this process's first device alone."""
        device = SingleDeviceSharding(jax.local_devices()[0])

        def put(leaf):
            local = leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf
            return jax.device_put(local, device, may_alias=False)

        return jax.block_until_ready(jax.tree.map(put, self.server.section(params, rest, section)))

    def train_step(
        self,
        state: TrainState,
        batch: Batch,
        learning_rate: float,
        limit: np.float32 | None = None,
    ) -> tuple[TrainState, StepReport]:
        """Runs one optimizer step; donates the state.

        Args:
          state: state with host arrays, as of `host_state.fresh_state`.
          batch: in host memory, the whole batch on every process.
          limit: highest accepted loss; if the loss is higher, or a gradient is not finite,
            parameters and moments do not change.  None for any.

        Raises:
          UserError: the device failed; earlier checkpoints stay valid.
        """
        step = int(state.step)
        self.timeline = Timeline()
        blocks = self._depth.active(
            self.model.num_layers, step, self.training.steps, self.training.seed
        )
        # A shared block is stored once, as section 0.
        sections: list[Section] = [EMBED, *((0,) if self.model.shared_layers else blocks), HEAD]
        if self.training.freezes:  # Sections without a trained parameter.
            sections = [each for each in sections if jax.tree.leaves(view(state.params, each))]
        with translated_device_errors(f"step {step + 1}"):
            server = ServerStep(self.server, state, sections, learning_rate, self.timeline)
            padded = batch.token_weights is not None
            batch = self._micro_batches(batch, self._train_shape[0], padded)
            metrics = self._forward_backward(server, blocks, batch)
            loss = metrics["loss"].number()
            after, squares = server.finish(
                lambda norms: limit is None or is_accepted(loss, norms, limit)
            )
        return after, StepReport({**metrics, "gradient_norm": Norm(squares)})

    def _forward_backward(
        self, server: ServerStep, blocks: tuple[int, ...], batch: Batch
    ) -> Metrics:
        """Runs the forward and the backward pass; returns the metrics of head and blocks."""
        run, stash, last = self._run, [], ()
        block_metrics: list[Metrics] = []
        block_batch = batch.for_blocks()
        (params,) = server.fetch(EMBED).result()
        x, _ = run(EMBED, "embed", params, batch.tokens)

        def forward(block, fetched):
            nonlocal x, last
            # Each block replaces the one before, whose weights are then free. Only those of the
            # last block survive the loop, for the backward pass, which begins with it.
            last = fetched
            stash.append(self._stashed(x))
            (x, metrics), done = run(block, "forward", *fetched, x, block_batch)
            block_metrics.append(metrics)
            return done

        fetch = self._block_fetch(server.fetch)
        _prefetch_loop(blocks, fetch, forward)

        # The embedding a second time: it was freed after its section, and may be the output layer.
        params, embed = (server.fetch(section).result()[0] for section in (HEAD, EMBED))
        tied = relay_programs.tied_output(self.model, embed)
        (head_metrics, dx, (head, embedding)), _ = run(HEAD, "head", params, tied, x, batch)
        # The head and the embedding may be as large as many blocks; nothing needs them during the
        # backward pass.
        del x, params, embed, tied
        if server.trains(HEAD):
            server.push(HEAD, head)
        del head
        total = None

        def backward(block, fetched):
            nonlocal dx, total
            (dx, gradient), done = run(block, "backward", *fetched, dx, block_batch)
            if not self.model.shared_layers:
                if server.trains(block):
                    server.push(block, gradient)
            elif total is None:
                total = _widened(gradient)
            else:
                total = _added(total, gradient)
            return done

        def fetch_again(block):
            nonlocal last
            boundary, kept, last = stash.pop(), last, ()
            if not kept:
                return fetch(block, boundary)
            # The forward pass ended with this block, which is still on the device.
            return self.server.fetching.submit(lambda: (*kept, *self._put((boundary,))))

        _prefetch_loop(blocks[::-1], fetch_again, backward)
        if total is not None:
            server.push(0, total)
        if server.trains(EMBED):
            gradient, _ = run(EMBED, "embed_backward", batch.tokens, dx, embedding)
            server.push(EMBED, gradient)
        # One copy for all metrics, at the end: a copy per block would stall the queue.
        head_metrics, block_metrics = jax.device_get((head_metrics, block_metrics))
        return {**head_metrics, **stacked(block_metrics)}

    def _block_fetch(self, fetch: Callable[..., Future]) -> Callable[..., Future]:
        """Returns (block, *more) -> future of its weights and `more` on the device.

        A block that all layers share is fetched once, by `fetch` (section, *more).
        """
        if not self.model.shared_layers:
            return fetch
        # A future and no value: the first block's fetch overlaps with the embedding.
        shared = fetch(0)

        def with_more(more):
            return *shared.result(), *self._put(more)

        return lambda block, *more: self.server.fetching.submit(with_more, more) if more else shared

    def _run(self, section: Section, name: str, *arguments) -> tuple[ArrayTree, Future]:
        """Runs a program; returns (its results, a future that is done when they are ready)."""
        self.observe(name)
        dispatched = time.perf_counter()
        results = getattr(self._group_programs(self.programs, section), name)(*arguments)
        if self._serial:
            jax.block_until_ready(results)
        # All results are ready at once. Wait for a small one, because the watch keeps it alive;
        # not for dx, because the next program donates it.
        candidates = jax.tree.leaves(results[1] if name == "backward" else results)
        smallest = min(candidates or [results[0].ravel()[:1]], key=lambda a: a.size)
        span = dispatched, section_name(section), self.timeline
        return results, self._watching.submit(_watch, smallest, *span)

    def _group_programs(self, programs, section):
        """Returns the programs of a section."""
        return programs[self._kind_of_layer[section] if isinstance(section, int) else 0]

    def eval_step(self, params: dict, rest: object, batch: Batch) -> Metrics:
        """Returns `whole.evaluation` of the batch.

        All blocks take part.

        Raises:
          UserError: the device failed.
        """
        with translated_device_errors("an evaluation"):
            return self._evaluate(params, rest, batch)

    def _evaluate(self, params, rest, batch):
        run, timeline = self.eval_programs[0], Timeline()
        batch = self._micro_batches(batch, 1)
        fetch = lambda section, *more: self.server.fetching.submit(  # noqa: E731
            self.to_device, params, rest, section, *more
        )
        x = run.embed(*fetch(EMBED).result(), batch.tokens)

        def forward(block, fetched):
            nonlocal x
            x = self._group_programs(self.eval_programs, block).forward(
                *fetched, x, batch.for_blocks()
            )
            return self._watching.submit(_watch, x, 0.0, section_name(block), timeline)

        blocks = range(self.model.num_layers)
        _prefetch_loop(blocks, self._block_fetch(fetch), forward)
        (head,), (embed,) = (fetch(section).result() for section in (HEAD, EMBED))
        tied = relay_programs.tied_output(self.model, embed)
        return jax.device_get(run.head(head, tied, x, batch))

    def _stashed(self, x):
        if self.config.stash == "device":
            return x
        return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))

    def _micro_batches(self, batch, count, padded=False):
        """Returns `whole.micro_batches` on the device."""
        batch = micro_batches(self.model, batch.weighted(), count, padded=padded)

        def put(tree, sharding):
            structure: jax.tree_util.PyTreeDef
            leaves, structure = jax.tree.flatten(tree)
            leaves = [np.asarray(leaf, order="C") for leaf in leaves]
            return structure.unflatten(_placed(leaves, sharding))

        others = batch.with_rows(dict.fromkeys(batch.rows))
        return put(others, self._replicated).with_rows(put(batch.rows, self._rows))


@jax.jit
def _widened(gradient):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)


@functools.partial(jax.jit, donate_argnums=0)
def _added(total, gradient):
    """Adds a layer's gradient of a shared block to their sum, in float32."""
    return jax.tree.map(jnp.add, total, gradient)


@contextlib.contextmanager
def translated_device_errors(activity: str) -> Iterator[None]:
    """Turns errors of jax's runtime into a UserError in a block.

    Raises:
      UserError: the device failed in `activity`, or page-locked memory is exhausted.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        saved = "earlier checkpoints are valid: continue with --resume."
        # XLA calls its pool of page-locked memory "host memory".
        if "host memory" in str(error):
            raise UserError(
                f"Page-locked host memory is exhausted in {activity} ({first_line(error)}). Set "
                f"{PINNED_SETTING} to more GiB in the environment; {saved}"
            ) from error
        raise UserError(
            f"The device failed in {activity} ({first_line(error)}). The run ends here; {saved}"
        ) from error


def _prefetch_loop(
    blocks: Iterable[int],
    fetch: Callable[[int], Future],
    compute: Callable[[int, ArrayTree], Future],
) -> None:
    """Computes block after block while it prefetches the next one.

    A fetch starts when the computation before the last one is done. So at most two blocks are on
    the device, and the device always has a queued computation.
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
    """Waits for a program's result and adds its span; programs run one after the other."""
    earlier = [span.stop for span in timeline.spans if span.kind == "compute"]
    # A program that was dispatched early waited for the one before.
    start = max([dispatched, *earlier[-1:]])
    jax.block_until_ready(result)
    timeline.add("compute", section, start, time.perf_counter())


def _put(sharding: Sharding, tree: object) -> ArrayTree:
    """Copies host arrays, and activations stashed on the host, to the device."""
    leaves, structure = jax.tree.flatten(tree)
    # All in one call: on small models a call for each takes longer than the copies.
    placed = iter(_placed([a for a in leaves if not isinstance(a, jax.Array)], sharding))

    def put(leaf):
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
        return next(placed)

    return jax.tree.unflatten(structure, [put(leaf) for leaf in leaves])


def _placed(arrays, sharding):
    """Copies host arrays, equal on every process, to the devices of a sharding."""
    if sharding.is_fully_addressable:
        # A CPU device could else use the host's memory itself, which updates overwrite.
        return jax.device_put(arrays, sharding, may_alias=False)
    return [jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for a in arrays]
