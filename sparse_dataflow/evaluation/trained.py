"""Trained models loaded from run folders, for evaluation, generation and export."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparse_dataflow.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.training.phases import phase_before, phases
from sparse_dataflow.training.run_files import (
    RunRecord,
    read_config,
    read_record,
    read_tokenizer,
    read_variants,
)
from sparse_dataflow.training.saved_state import SavedProgress, abstract_saved_state, identity

NEWEST, BEST = "newest", "best"


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A checkpoint of one variant of a run.

    Attributes:
      folder: run folder.
      variant: "sparse" or "dense".
      model: model config in the checkpoint's phase.
      params: float32 master weights; see `models.gpt`.
      tables: numpy layout tables, which programs are specialised to.
      tokenizer: tokenizer of the run.
      step: number of optimizer steps.
      training: training config.
      record: what the run was started with; None where there is no run folder.
      facts: checkpoint metadata ("seconds", "bits_per_byte", ...).
    """

    folder: Path
    variant: str
    model: ModelConfig
    params: dict
    tables: dict
    tokenizer: Tokenizer
    step: int
    training: TrainingConfig
    record: RunRecord | None
    facts: Mapping[str, Any]

    @property
    def context(self) -> int:
        """Context length of the training in tokens."""
        return self.training.sequence

    @property
    def saved_record(self) -> RunRecord:
        """The record of a model that was loaded from a run folder."""
        assert self.record is not None
        return self.record


def load(run_folder: str | Path, variant: str, checkpoint: str = NEWEST) -> Trained:
    """Loads a variant's model from a checkpoint and verifies all of its bytes.

    Does not change the folder; the run may still be in progress.

    Args:
      run_folder: run folder.
      variant: variant of the run, "sparse" or "dense".
      checkpoint: "newest", "best" (lowest held-out loss) or a step number.

    Raises:
      UserError: the run, variant, tokenizer or checkpoint is missing or damaged.
    """
    folder = Path(run_folder).expanduser()
    config = read_config(folder)
    record = read_record(folder, config)
    if variant not in config.variants:
        raise UserError(
            f"The run {folder} has no variant {variant!r}; legal: {', '.join(config.variants)}."
        )
    tokenizer = read_tokenizer(folder, record)
    chosen = read_variants(config, record)[variant]
    model, training, evolution = chosen.model, chosen.training, chosen.evolution
    config_identity = identity(model, training, evolution, tokenizer.content_hash)
    path = folder / variant / "checkpoints"
    checkpoints = Checkpoints(path, config=config_identity, read_only=True)
    model_phases = phases(model, evolution, training.steps)

    def template(step, extra):
        state = abstract_saved_state(
            SavedProgress.from_extra(extra, model_phases).phases, training, step
        )
        # Optimizer moments stay on the host: only the parameters are used.
        on_host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), state.moments)
        return state._replace(moments=on_host)

    restored = checkpoints.restore(template, _step(checkpoints, checkpoint))
    if restored is None:
        raise UserError(f"The run {folder} has no checkpoint of {variant} yet: {path} is empty.")
    state, facts = restored
    step = int(state.step)
    return Trained(
        folder,
        variant,
        model_phases[phase_before(model_phases, step)].model,
        state.params,
        state.tables,
        tokenizer,
        step,
        training,
        record,
        facts,
    )


def _step(checkpoints, name):
    """Returns the step of checkpoint `name`; None for the newest complete one."""
    if name == NEWEST:
        return None
    if name == BEST:
        return checkpoints.best_step()
    if not name.isdecimal():
        raise UserError(
            f"There is no checkpoint {name!r}; legal: {NEWEST}, {BEST} or a step number."
        )
    return int(name)
