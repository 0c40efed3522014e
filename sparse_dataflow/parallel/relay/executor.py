"""The relay as an `Executor`: what training asks of it, beside `relay.Relay`.

It is no single program, so it brings its own states and programs where others give functions to be
traced; see `executor.Executor` and `executor.OwnPrograms`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.distributed import processes
from sparse_dataflow.optim.train_state import TrainState
from sparse_dataflow.parallel.block_gradients import probed_rows
from sparse_dataflow.parallel.relay import host_optimizer, host_state, server_files
from sparse_dataflow.parallel.relay import programs as relay_programs
from sparse_dataflow.parallel.relay.host_state import all_sections, depth_of, view
from sparse_dataflow.parallel.relay.parameter_server import group_norms
from sparse_dataflow.parallel.relay.probe import block_gradient_norms
from sparse_dataflow.parallel.relay.relay import Relay, RelayConfig, device_errors_told
from sparse_dataflow.parallel.relay.server_files import MappedFiles


@dataclasses.dataclass(frozen=True)
class RelayExecutor:
    """One block at a time on the device; states are numpy arrays in host memory.

    Attributes:
      config: of the relay.
      server_dir: folder of mapped files for masters and moments; host memory where empty.
      mesh: whose axis "data" each micro-batch is cut over; one device where None.
    """

    config: RelayConfig = dataclasses.field(default_factory=RelayConfig)
    server_dir: str = ""
    mesh: Mesh | None = None

    @property
    def devices(self) -> int:
        """See `Executor`."""
        return 1 if self.mesh is None else self.mesh.size

    def describe(self) -> str:
        """See `Executor`."""
        return f"the relay on {self.devices} device{'s' if self.devices > 1 else ''}"

    def check(self, model: ModelConfig, training: TrainingConfig) -> None:
        """See `Executor`."""
        relay_programs.refuse_uncut(training, self.devices)

    def refuse_unusable_files(self, needs: Mapping[str, int]) -> None:
        """Refuses a `server_dir` that cannot take what the trainings need.

        Args:
          needs: name of each variant -> bytes of its files.

        Raises:
          UserError: see `server_files.refuse_unusable`.
        """
        if self.server_dir:
            folders = {self._folder(name): size for name, size in needs.items()}
            server_files.refuse_unusable(Path(self.server_dir).absolute(), folders)

    def _folder(self, name):
        # The first has the same folder however many there are, so that any number may go on.
        own = "" if processes.first() else f"-process{jax.process_index()}"
        return Path(self.server_dir).absolute() / f"{name}{own}"

    def arrays(self, state, tables, changing, batch):
        """See `Executor`: of what stays on a device between programs; `planning.relay` has all."""
        return {"batch": batch}

    def placed_shapes(self, state):
        """See `Executor`."""
        return state

    def initial_state(self, model: ModelConfig, training: TrainingConfig) -> TrainState:
        """See `OwnPrograms`: in host memory."""
        return host_state.fresh_state(model, training, None, self._starting(model))

    def abstract_state(self, model: ModelConfig, training: TrainingConfig) -> TrainState:
        """See `OwnPrograms`: numpy arrays whose memory is not taken before a checkpoint is read."""
        shapes = host_state.abstract_state(model, training)
        arrays = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype), (shapes.params, shapes.moments)
        )
        step = np.zeros((), np.int32)
        return shapes._replace(step=step, params=arrays[0], moments=arrays[1])

    def programs(self, model: ModelConfig, training: TrainingConfig, data) -> dict[str, Any]:
        """See `OwnPrograms`."""
        held_out = data.validation[0]["weights"].shape
        relay = Relay(model, training, self.config, eval_shape=held_out, mesh=self.mesh)
        return {
            "train_step": relay.train_step,
            "eval_step": relay.eval_step,
            "tables": lambda tables: tables,
            "gradient_norms": functools.partial(_gradient_norms, relay),
            "parameter_norms": parameter_norms,
            "start_state": functools.partial(self._start_state, relay),
            "timeline": lambda: relay.timeline.spans,
        }

    def _start_state(
        self,
        relay: Relay,
        name: str,
        training: TrainingConfig,
        identity: Mapping[str, Any],
        saved: int | None,
        state: Callable[[], TrainState],
        from_seed: bool,
    ) -> TrainState:
        """The state that a run goes on with, and the relay made ready for its length.

        Args:
          relay: whose steps follow.
          name: of the variant.
          training: of the run, whose length is known now.
          identity: of its checkpoints.
          saved: step of its newest checkpoint; None where there is none.
          state: reads that checkpoint, or gives the initial state.
          from_seed: whether the initial state is `initial_state`'s.
        """
        relay.begin(training)
        if not self.server_dir:
            return self.place(state())
        model = relay.model
        abstract = host_state.abstract_state(model, training)
        files = MappedFiles(self._folder(name), abstract, identity)
        relay.server.storage = files
        kept = _restored_together(files, host_state.training_key(training))
        if kept is not None and (saved is None or int(kept.step) >= saved):
            return kept
        if saved is None and from_seed:
            return files.new_state(
                lambda *trees: host_state.fresh_state(model, training, trees, self._starting(model))
            )
        return files.new_state(lambda *trees: host_state.copied_state(state(), trees))

    def _starting(self, model):
        return self.config.depth.starting_blocks(model.num_layers)

    def shardings(self, state):
        """See `Executor`."""
        return None

    def replicated(self):
        """See `Executor`."""
        return None

    def place(self, state):
        """Every array in numpy, writable."""
        arrays = jax.tree.map(_owned, (state.step, state.params, state.moments))
        return state._replace(step=arrays[0], params=arrays[1], moments=arrays[2])

    def canonical(self, state, model):
        """See `Executor`."""
        return state

    def tables(self, tables, changing):
        """See `Executor`."""
        return tables

    def rows(self, batch):
        """See `Executor`."""
        return None

    def put(self, batch, rows):
        """See `Executor`."""
        return batch


def parameter_norms(params: dict) -> dict[str, float]:
    """As `optim.train_state.group_norms`, of host arrays."""
    return group_norms(
        {
            section: {
                jax.tree_util.keystr(path, simple=True, separator="."): host_optimizer.square_sum(a)
                for path, a in jax.tree_util.tree_leaves_with_path(view(params, section))
            }
            for section in all_sections(depth_of(params))
        }
    )


def _restored_together(files, key):
    """The newest step that the files of every process have; None where there is none."""
    kept = files.restore(key)
    step = processes.least(-1 if kept is None else int(kept.step))
    if kept is not None and int(kept.step) > step:
        kept = files.restore(key, step)
    missing = kept is None or int(kept.step) != step
    return None if processes.anywhere(missing) else kept


def _gradient_norms(relay, params, tables, tokens):
    rows = np.asarray(tokens)[: probed_rows(relay.training)]
    # The rows are too few to cut: every process asks its own device for the same norms.
    fetch = functools.partial(relay.bring_to_one, params)
    with device_errors_told("an update of the layouts"):
        return block_gradient_norms(relay.model, fetch, tables, rows)


def _owned(leaf):
    writable = isinstance(leaf, np.ndarray) and leaf.flags.writeable
    return leaf if writable else np.array(leaf)
