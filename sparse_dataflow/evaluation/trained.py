"""A trained model, read from its run folder: what evaluation, generation and export begin with."""

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
    """One variant of a run at one checkpoint.

    Attributes:
      folder: the run's.
      variant: "sparse" or "dense".
      model: of the checkpoint's own phase.
      params: float32 masters; see `models.gpt`.
      tables: numpy layout tables, which programs are specialised to.
      tokenizer: the run's.
      step: optimizer steps done.
      training: how it was trained.
      record: what the run was started with; None where there is no run folder.
      facts: what the checkpoint says beside its arrays ("seconds", "bits_per_byte", ...).
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
        """Tokens that the model was trained to see at once."""
        return self.training.sequence


def load(run_folder: str | Path, variant: str, checkpoint: str = NEWEST) -> Trained:
    """A variant's model from a checkpoint whose every byte was verified.

    Nothing in the folder is changed; the run may still be going on.

    Args:
      run_folder: of the run.
      variant: "sparse" or "dense", where the run has it.
      checkpoint: "newest", "best" (lowest held-out loss of those kept) or a step's number.

    Raises:
      UserError: there is no such run, variant, tokenizer or checkpoint, or it is damaged.
    """
    folder = Path(run_folder).expanduser()
    config = read_config(folder)
    record = read_record(folder, config)
    if variant not in config.variants:
        raise UserError(
            f"The run {folder} has no variant {variant!r}; it has: {', '.join(config.variants)}."
        )
    tokenizer = read_tokenizer(folder, record)
    chosen = read_variants(config, record)[variant]
    model, training, evolution = chosen.model, chosen.training, chosen.evolution
    known = identity(model, training, evolution, tokenizer.content_hash)
    where = folder / variant / "checkpoints"
    checkpoints = Checkpoints(where, config=known, read_only=True)
    found = phases(model, evolution, training.steps)

    def wanted(step, extra):
        state = abstract_saved_state(SavedProgress.from_extra(extra, found).phases, training, step)
        # The optimizer's part is read because it is there, and never reaches the device.
        on_host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), state.moments)
        return state._replace(moments=on_host)

    restored = checkpoints.restore(wanted, _step(checkpoints, checkpoint))
    if restored is None:
        raise UserError(f"The run {folder} has no checkpoint of {variant} yet: {where} is empty.")
    state, facts = restored
    step = int(state.step)
    return Trained(
        folder,
        variant,
        found[phase_before(found, step)].model,
        state.params,
        state.tables,
        tokenizer,
        step,
        training,
        record,
        facts,
    )


def _step(checkpoints, name):
    """The step that `name` asks for; None for the newest whole one."""
    if name == NEWEST:
        return None
    if name == BEST:
        return checkpoints.best_step()
    if not name.isdecimal():
        raise UserError(f"There is no checkpoint {name!r}; legal: {NEWEST}, {BEST} or a step.")
    return int(name)
