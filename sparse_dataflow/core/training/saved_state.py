"""The content of a training's checkpoints, and the config that must match to restore one."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import PRECISIONS, LinearSpec
from sparse_dataflow.core.config.settings import without_removed
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.evolution import METHODS
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.partition import ArrayTree, legal, merged
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training.length import Length
from sparse_dataflow.core.training.phases import Phase, phase_before, with_starts, with_stop
from sparse_dataflow.core.training.step import abstract_state
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

# Without remat, which changes no results and so is in no identity.
_DEFAULTS: dict[str, json_files.JsonObject] = {
    part: {
        field.name: field.default
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING and field.name != "remat"
    }
    for part, config in (
        ("model", ModelConfig),
        ("training", TrainingConfig),
        ("evolution", EvolutionConfig),
    )
}
_READ_WITH = {
    "teacher_weight": ("teacher",),
    "teacher_first": ("teacher",),
    "adapter_alpha": ("adapter_rank",),
    "frozen_dtype": ("adapter_rank", "side_width"),
}
"""Settings of `TrainingConfig` that nothing reads where some others are empty or 0."""


def micro_batches_matter(experts: int, precision: str, method: str) -> bool:
    """Returns whether the number of micro-batches changes results by more than rounding.

    Experts balance their load, 8-bit numbers have their scales and methods of evolution measure
    gradients and activations by micro-batches.

    Args:
      experts: see `ModelConfig`.
      precision: see `ModelConfig`.
      method: see `EvolutionConfig`.
    """
    methods = METHODS.items()
    measures = [name for name, each in methods if each.reads_gradients or each.reads_activations]
    return bool(experts) or precision != PRECISIONS[0] or method in measures


def _without_free_settings(saved):
    """Sets defaults for settings of an `identity` that do not change its results."""
    model, training, evolution = (saved.get(name) for name in ("model", "training", "evolution"))
    if not all(isinstance(part, dict) for part in (model, training, evolution)):
        return saved
    read = model.get("experts"), model.get("precision"), evolution.get("method")
    if not micro_batches_matter(*read):
        default = _DEFAULTS["training"]["micro_batches"]
        saved = saved | {"training": training | {"micro_batches": default}}
    return saved


def identity(
    model: ModelConfig, training: TrainingConfig, evolution: EvolutionConfig, tokenizer_hash: str
) -> json_files.JsonObject:
    """Returns the config that a checkpoint stores and that restoring compares, JSON-able.

    It has no setting that does not change results: remat, and defaults for those of _READ_WITH and
    for micro-batches that do not matter.
    """
    model_fields, training_fields = model.to_json(), dataclasses.asdict(training)
    del model_fields["remat"]
    for name, readers in _READ_WITH.items():
        if not any(training_fields[reader] for reader in readers):
            training_fields[name] = _DEFAULTS["training"][name]
    return _without_free_settings(
        {
            "model": model_fields,
            "training": training_fields,
            "evolution": dataclasses.asdict(evolution),
            "tokenizer": tokenizer_hash,
        }
    )


def completed(saved: Mapping[str, object]) -> json_files.JsonObject:
    """Returns the `identity` of a checkpoint, with defaults for settings that are younger than it,
    and without settings that were removed since.

    Args:
      saved: JSON values, which are not trusted.
    """
    whole = {
        part: _filled(without_removed(part, value), _DEFAULTS.get(part, {}))
        for part, value in saved.items()
    }
    model = whole.get("model")
    if isinstance(model, dict) and isinstance(model["linears"], dict):
        spec = dataclasses.asdict(LinearSpec())
        model["linears"] = {name: _filled(v, spec) for name, v in model["linears"].items()}
    return _without_free_settings(whole)


def _filled(value, defaults):
    return {**defaults, **value} if isinstance(value, dict) else value


@dataclasses.dataclass(frozen=True)
class FrozenBase:
    """The frozen weights of a training of adapters, which its checkpoints do not store.

    Attributes:
      source: where the weights are and their hash, as JSON values.
      read: returns `TrainState.rest`.
    """

    source: Mapping[str, object]
    read: Callable[[], dict]


class SavedState(NamedTuple):
    """The arrays of a checkpoint, by the names that they have in every release.

    Attributes:
      tables: {projection: `LayoutTables` in numpy} of each layer group.
      frozen: masks; or () where the base of adapters is read elsewhere.
      step: see `TrainState`, also for the others.
    """

    step: Any
    params: dict
    moments: ArrayTree
    tables: ArrayTree
    key: Any
    frozen: ArrayTree = ()

    @classmethod
    def of(cls, state: TrainState, has_base: bool = False) -> "SavedState":
        """Returns what is saved of a state.

        Args:
          has_base: whether what is no layout and not trained is read elsewhere.
        """
        frozen, layouts = stacks.split_layouts(state.rest)
        return cls(
            state.step,
            state.params,
            state.moments,
            stacks.layouts_by_name(layouts),
            state.key,
            () if has_base else frozen,
        )

    def state(self, model: ModelConfig) -> TrainState:
        """Returns the state of a model; what an older release left is made legal."""
        rest = merged(self.frozen, stacks.layout_tree(model, self.tables))
        params = legal(model, self.params, rest)
        return TrainState(self.step, params, self.moments, self.key, rest)


@dataclasses.dataclass(frozen=True)
class SavedProgress:
    """The values of a checkpoint that are not arrays.

    Attributes:
      seconds: training time until the checkpoint's step.
      phases: with the first steps known then.
      positions: of a streamed corpus; see `TrainBatches.positions`.
      length: the number of steps as revised until then; None before the first checkpoint.
    """

    seconds: float
    phases: tuple[Phase, ...]
    positions: object = None
    length: Length | None = None

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any], planned: tuple[Phase, ...]) -> "SavedProgress":
        """Reads a checkpoint's extra.json, which is not trusted.

        Args:
          extra: its content.
          planned: the phases of the training as planned.

        Raises:
          UserError: `extra` is not from a training with these phases.
        """
        with reading_extra():
            starts, seconds = extra["starts"], float(extra["seconds"])
            if not all(type(start) is int for start in starts) or sorted(starts) != starts:
                raise ValueError("its phases are out of order")
            length = Length.from_json(planned[-1].stop, extra.get("length"))
            phases = with_stop(with_starts(planned, starts), length.total)
            return cls(seconds, phases, extra.get("data_positions"), length)


@contextlib.contextmanager
def reading_extra():
    """Turns what a malformed extra.json raises into a UserError."""
    try:
        yield
    except json_files.MALFORMED as error:
        raise UserError(
            f"A checkpoint's extra.json was not written by this training ({error}). Move its "
            "folder away to resume from the previous checkpoint."
        ) from None


def refuse_other_layouts(state: TrainState, phase: Phase) -> None:
    """Refuses the layouts of a checkpoint that the phase's programs were not specialised to.

    Raises:
      UserError: a pattern of this version chooses other blocks than the version that trained.
    """
    # Programs of such a phase read their tables, whichever they are.
    if phase.runtime_layouts:
        return
    saved = stacks.layouts_of(phase.model, state.rest)
    expected = model_layouts.layouts(phase.model)
    if names := sorted(name for name in expected if saved[name] != expected[name]):
        raise UserError(
            f"The checkpoint's layouts of {', '.join(names)} are not those of its pattern, which "
            "another version of this project made otherwise; legal: that version, or a new run."
        )


def abstract_saved_state(
    phases: Sequence[Phase],
    training: TrainingConfig,
    step: int,
    executor: Executor = SINGLE_DEVICE,
) -> SavedState:
    """Returns shapes, dtypes and shardings of the saved state after `step` steps.

    Its layout tables are numpy arrays.
    """
    model = phases[phase_before(phases, step)].model
    state = abstract_state(model, training, executor).with_layouts(model)
    return SavedState.of(state, has_base=training.freezes)
