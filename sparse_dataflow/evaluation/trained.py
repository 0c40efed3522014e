"""Trained models loaded from run folders, for evaluation, generation and export."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparse_dataflow.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.links import refuse_leaving
from sparse_dataflow.models.sizes import ModelConfig
from sparse_dataflow.optim.optimizers import TrainingConfig
from sparse_dataflow.sparsity.evolution import EvolutionConfig
from sparse_dataflow.training.phases import phase_before, phases
from sparse_dataflow.training.saved_state import Kept, identity, saved_state

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
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
      config: content of the run's config.json.
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
    config: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def context(self) -> int:
        """Context length of the training in tokens."""
        return self.training.sequence


def read_config(folder: str | Path) -> dict[str, Any]:
    """Reads the config.json of a run.

    Raises:
      UserError: the file is missing or damaged.
    """
    path = Path(folder).expanduser() / CONFIG
    if not path.exists():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}.")
    try:
        config = json_files.load(path)
        if not config["variants"] or not isinstance(config["corpus"]["name"], str):
            raise ValueError("it has no variants or no corpus name")
        for name, fields in config["variants"].items():
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"{name!r} is not a legal variant name")
            _configs(fields)
    except UserError:
        raise
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}).") from None
    refuse_leaving(path.parent)
    return config


def read_tokenizer(folder: str | Path, config: Mapping[str, Any]) -> Tokenizer:
    """Reads the tokenizer of a run.

    Raises:
      UserError: the file is missing, cannot be read or differs from the hash in config.json.
    """
    path = Path(folder).expanduser() / TOKENIZER
    if not path.exists():
        raise UserError(
            f"The run {folder} has no {TOKENIZER}, so its tokens cannot be decoded. Restore the "
            "file from a copy of the run."
        )
    tokenizer = Tokenizer.load(path)
    if tokenizer.content_hash != config.get("tokenizer"):
        raise UserError(
            f"{path} is not the tokenizer that the run was trained with. Restore the original file."
        )
    return tokenizer


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
    if variant not in config["variants"]:
        raise UserError(
            f"The run {folder} has no variant {variant!r}; legal: {', '.join(config['variants'])}."
        )
    tokenizer = read_tokenizer(folder, config)
    model, training, evolution = _configs(config["variants"][variant])
    config_identity = identity(model, training, evolution, tokenizer.content_hash)
    path = folder / variant / "checkpoints"
    checkpoints = Checkpoints(path, config=config_identity, read_only=True)
    model_phases = phases(model, evolution, training.steps)

    def template(step, extra):
        state = saved_state(Kept.read(extra, model_phases).phases, training, step)
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
        config,
        facts,
    )


def _configs(fields):
    return (
        ModelConfig.from_json(fields["model"]),
        TrainingConfig(**fields["training"]),
        EvolutionConfig(**fields["evolution"]),
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
