"""The relay as an `Executor`: its states, programs and folder of mapped files."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from sparse_dataflow.core import collectives
from sparse_dataflow.core.config.depth import DepthSchedule
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import compatibility
from sparse_dataflow.core.executors.executor import MultiProgramExecutor
from sparse_dataflow.core.model.stacks import split_layouts, with_groups
from sparse_dataflow.core.optim.finite import non_finite
from sparse_dataflow.core.optim.optimizers import TrainState, with_steps_left
from sparse_dataflow.relay import host_state, relay_programs, server_files
from sparse_dataflow.relay.probe import block_gradient_norms
from sparse_dataflow.relay.relay import Relay, RelayConfig, translated_device_errors
from sparse_dataflow.relay.server_files import MappedFiles


@dataclasses.dataclass(frozen=True)
class RelayExecutor(MultiProgramExecutor):
    """One block at a time on the device; states are numpy arrays in host memory.

    Attributes:
      config: options of the relay.
      server_dir: folder of mapped files for masters and moments; host memory if empty.
      mesh: its axis "data" shards each micro-batch; a single device if None. Without devices it
        plans and does not train.
    """

    config: RelayConfig = dataclasses.field(default_factory=RelayConfig)
    server_dir: str = ""
    mesh: Mesh | AbstractMesh | None = None

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def depth(self) -> DepthSchedule:
        return self.config.depth

    def describe(self) -> str:
        return f"the relay on {self.devices} device{'s' if self.devices > 1 else ''}"

    @property
    def parallelisms(self) -> tuple[str, ...]:
        depth = (compatibility.RELAY_DEPTH.words,) if self.depth != DepthSchedule() else ()
        devices = (compatibility.RELAY_DEVICES.words,) if self.devices > 1 else ()
        return compatibility.RELAY.words, *depth, *devices

    def check(self, model: ModelConfig, training: TrainingConfig) -> None:
        super().check(model, training)
        relay_programs.refuse_unsupported(training, self.devices)

    def refuse_unusable_files(self, needs: Mapping[str, int]) -> None:
        """Refuses a `server_dir` without room for the files of all trainings.

        Args:
          needs: name of each variant -> bytes of its files.

        Raises:
          UserError: see `server_files.refuse_unusable`.
        """
        if self.server_dir:
            folders = {self._folder(name): size for name, size in needs.items()}
            server_files.refuse_unusable(Path(self.server_dir).absolute(), folders)

    def _folder(self, name):
        # The folder of process 0 does not depend on the number of processes, so that a run can
        # resume with another number.
        suffix = "" if collectives.is_first() else f"-process{jax.process_index()}"
        return Path(self.server_dir).absolute() / f"{name}{suffix}"

    def arrays(self, state, model, changing, batch):
        """Returns the arrays that stay on a device between programs; see `planner.relay_step`."""
        return {"batch": batch}

    def initial_state(self, model: ModelConfig, training: TrainingConfig) -> TrainState:
        """See `MultiProgramExecutor`; in host memory."""
        return host_state.fresh_state(model, training, None, self._starting_blocks(model))

    def abstract_state(self, model: ModelConfig, training: TrainingConfig) -> TrainState:
        """See `MultiProgramExecutor`; zeroed numpy arrays, allocated when a checkpoint is read."""
        shapes = host_state.abstract_state(model, training)
        params, mu, nu = host_state.zeros(model, training)
        moments = with_steps_left(training, host_state.with_moments(shapes.moments, 0, mu, nu))
        return shapes._replace(step=np.zeros((), np.int32), params=params, moments=moments)

    def programs(
        self, model: ModelConfig, training: TrainingConfig, data, changing: bool
    ) -> dict[str, Any]:
        assert not isinstance(self.mesh, AbstractMesh), "planned devices do not train"
        held_out = data.validation[0].tokens.shape
        options = relay_programs.Options(
            padded=data.train.example.token_weights is not None,
            teacher_width=data.teacher.width if training.teacher else 0,
        )
        relay = Relay(
            model,
            training,
            self.config,
            eval_shape=held_out,
            mesh=self.mesh,
            changing=changing,
            options=options,
        )

        def train_step(state, rest, *arguments):
            return relay.train_step(state._replace(rest=rest), *arguments)

        return {
            "train_step": train_step,
            "eval_step": relay.eval_step,
            "place_layouts": functools.partial(self.place_layouts, model=model, changing=changing),
            "gradient_norms": functools.partial(_gradient_norms, relay),
            "start_state": functools.partial(self._start, relay),
            "timeline": lambda: relay.timeline.spans,
            "close": lambda: relay.server.storage.close(),
        }

    def _start(
        self,
        relay: Relay,
        name: str,
        training: TrainingConfig,
        identity: Mapping[str, object],
        saved: int | None,
        state: Callable[[], TrainState],
        from_seed: bool,
        completed: Callable[[Mapping[str, object]], Mapping[str, object]] = dict,
    ) -> TrainState:
        """Sets the relay's run length and returns the state to continue from.

        Takes what `training.programs.Compiled.start_state` does.
        """
        relay.start(training)
        if not self.server_dir:
            return self.place(state(), relay.model)
        model = relay.model
        abstract = host_state.abstract_state(model, training)
        # Only what changes is written to the slots. The frozen base is read from its source again.
        if training.freezes:
            abstract = abstract._replace(rest=split_layouts(abstract.rest)[1])
        files = MappedFiles(self._folder(name), abstract, identity, completed)
        relay.server.storage = files
        restored = _restore_common_step(files, training)
        # A checkpoint that is newer than the files comes from a copied run folder, or from files
        # that were lost; it wins.
        if restored is not None and (saved is None or int(restored.step) >= saved):
            # The files have what is trained.
            return restored._replace(rest=state().rest) if training.freezes else restored
        if saved is None and from_seed:
            blocks = self._starting_blocks(model)
            return files.new_state(
                lambda *trees: host_state.fresh_state(model, training, trees, blocks)
            )
        return files.new_state(lambda *trees: host_state.copied_state(state(), trees))

    def _starting_blocks(self, model):
        return self.config.depth.starting_blocks(model.num_layers)

    def place(self, state, model):
        """Converts every array to writable numpy."""
        fields = {"step": state.step, "params": state.params, "moments": state.moments}
        rest = jax.tree.map(np.asarray, state.rest)
        return state._replace(**jax.tree.map(_writable, fields), rest=rest)

    def place_layouts(self, rest, model, changing):
        return rest if changing else with_groups(rest)


def _restore_common_step(files, training):
    """Restores the newest step that the files of every process have; None if there is none, or if
    it is not finite."""
    key = host_state.training_key(training)
    state = files.restore(key)
    step = collectives.minimum(-1 if state is None else int(state.step))
    if state is not None and int(state.step) > step:
        state = files.restore(key, step)
    # A non-finite state is saved as any other; continuing from it would repeat the divergence.
    missing = state is None or int(state.step) != step or bool(non_finite(state))
    # All or none: with different steps on two processes, the collectives of training would mix
    # them.
    if collectives.any_process(missing):
        return None
    return state._replace(moments=with_steps_left(training, state.moments, step))


def _gradient_norms(relay, params, rest, batch):
    # The first device of every process computes the norms of all rows, so that the layouts do not
    # depend on the number of devices.
    fetch = functools.partial(relay.to_first_device, params, rest)
    with translated_device_errors("an update of the layouts"):
        return block_gradient_norms(relay.model, fetch, jax.tree.map(np.asarray, batch))


def _writable(leaf):
    writable = isinstance(leaf, np.ndarray) and leaf.flags.writeable
    return leaf if writable else np.array(leaf)
