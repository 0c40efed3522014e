"""What studies share: one config with changes of their own, and trainings that resume.

A study trains many models on one corpus, each into a folder of its own.
"""

import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from sparse_dataflow.commands.job.train_models import EVALUATIONS_A_RUN
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.commands.request import Request, spelling
from sparse_dataflow.commands.train import detect_chip
from sparse_dataflow.commands.training_data import (
    FINAL_WINDOWS,
    corpus_of,
    tokenizer_of,
    training_data,
)
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training import hooks
from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.core.training.loop import Trainer, advance_side_by_side
from sparse_dataflow.core.training.phases import Variant, refuse_unfit
from sparse_dataflow.core.training.programs import TrainingData, compile_programs
from sparse_dataflow.core.training.saved_state import abstract_saved_state, completed, identity
from sparse_dataflow.core.training.teacher import Teacher
from sparse_dataflow.data.batches import EvalBatches
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import folders, json_files, storage
from sparse_dataflow.files.errors import UserError, refuse_secrets
from sparse_dataflow.files.json_files import differences
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.hardware.detect import keep_freed_memory
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.monitoring.metrics import MetricsWriter, read_metrics
from sparse_dataflow.monitoring.time_left import Progress, Show, TimeLeft
from sparse_dataflow.pruning.changes import change_of
from sparse_dataflow.runs import variants
from sparse_dataflow.runs.run_config import RunConfig

from .holdout import three_splits

_UNUSED = ("training.seed", "training.teacher", "run.", "parallel.")
"""Settings, and parts with a dot, that no study takes from its command line."""
_DIFFERENCES_SHOWN = 4

TUNING, HELD_OUT = "tuning", "held_out"
"""Splits of a study that chooses hyperparameters: for the choice, and for the reported loss."""

FINAL_TOKENS = 2**18
"""Tokens of a split that the evaluation after the last step reads, or FINAL_WINDOWS if more."""


@dataclasses.dataclass(frozen=True)
class Study:
    """The config that the trainings of a study change, and the data that they share.

    Attributes:
      config: every "auto" settled.
      corpus: the documents.
      tokenizer: tokenizer of the corpus.
      chip: the chip that trains.
      tuning_documents: number of validation documents, the first ones, that are the tuning split;
        0 for a study without one.
    """

    config: RunConfig
    corpus: Corpus
    tokenizer: Tokenizer
    chip: Chip
    tuning_documents: int = 0

    def variant(self, name: str, **changes: object) -> Variant:
        """The "sparse" or "dense" model of `config.change(**changes)`."""
        config = self.config.change(**changes)
        return variants.variant(config, name, self.tokenizer.vocab_size)

    def data(self, variant: Variant) -> TrainingData:
        """The batches of a variant's shape, drawn by its seed, and the held-out windows."""
        config = self.config.change(training__seed=variant.training.seed)
        return training_data(config, variant, self.corpus, self.tokenizer)

    def split_data(self, variant: Variant, split: str, windows: int) -> TrainingData:
        """`data`, evaluated on the TUNING or the HELD_OUT documents alone.

        Args:
          variant: gives shape and seed of the batches.
          split: TUNING or HELD_OUT.
          windows: windows of the periodic evaluations; the last one reads more.
        """
        data = self.data(variant)
        assert isinstance(data.final, EvalBatches)
        tokens = data.final.tokens[: len(data.final.tokens)]
        ends = np.flatnonzero(tokens == self.tokenizer.eot_id)
        first = int(ends[self.tuning_documents - 1]) + 1
        tokens = tokens[:first] if split == TUNING else tokens[first:]
        shape = variant.training.batch, variant.training.sequence
        most = max(FINAL_WINDOWS, FINAL_TOKENS // variant.training.sequence)
        periodic, final = (EvalBatches(tokens, *shape, count) for count in (windows, most))
        count = lambda batches: batches.total_bytes(self.tokenizer.token_bytes)  # noqa: E731
        return dataclasses.replace(
            data,
            validation=periodic,
            validation_bytes=count(periodic),
            final=final,
            final_bytes=count(final),
        )


def prepare(
    request: Request,
    varied: Sequence[str],
    fixed: Mapping[str, object],
    *,
    tuned: bool = False,
) -> Study:
    """Settles the config, loads corpus and tokenizer.

    Args:
      request: the command line.
      varied: paths that the study changes from training to training, so that a command line may
        not; "evolution." is every setting of that part.
      fixed: path -> value of what the study sets once.
      tuned: whether the study chooses hyperparameters, so that it needs a tuning split.

    Raises:
      UserError: the command line or the corpus cannot be used.
    """
    keep_freed_memory()
    refuse_set(request, (*_UNUSED, *varied, *fixed))
    request = dataclasses.replace(request, changes={**request.changes, **fixed})
    chip = detect_chip(request)
    config = _settled(request.config(jax.default_backend(), chip.memory_bytes), chip)
    corpus, tuning_documents = corpus_of(config.data), 0
    if corpus.mixture:
        raise UserError(
            f"--corpus={config.data.corpus} is a mixture; legal in a study: one corpus."
        )
    if tuned:
        corpus, tuning_documents = three_splits(corpus)
    return Study(config, corpus, tokenizer_of(config, corpus), chip, tuning_documents)


def refuse_set(request: Request, paths: Sequence[str]) -> None:
    """Refuses a command line that sets what a study sets itself.

    Args:
      paths: settings; "evolution." is every setting of that part.

    Raises:
      UserError: naming the setting.
    """
    for path in request.changes:
        if path in paths or f"{path.partition('.')[0]}." in paths:
            raise UserError(f"--set {path}: this study sets {path} itself; leave it out.")


def _settled(config: RunConfig, chip: Chip) -> RunConfig:
    """Returns the config with a plan of its dense model for one device, which every arm has."""
    machine = Machine(chip, 1, host=jax.default_backend() == "cpu")
    try:
        plan = settling.settle(config.dense(), machine).config
    except UserError:  # The study refuses each model that does not fit, and says what would.
        return config.without_auto()
    return config.change(
        training__micro_batches=plan.training.micro_batches, model__remat=plan.model.remat
    )


def train(
    label: str,
    variant: Variant,
    data: TrainingData,
    where: Path,
    stop,
    *,
    evaluations: int = EVALUATIONS_A_RUN,
    compiled: dict | None = None,
    keep_weights: bool = True,
    start: Callable[[], TrainState] | None = None,
) -> dict | None:
    """Trains one model to its end, resuming where it was stopped; None if `stop()` ends it before.

    Args:
      label: its name on the terminal.
      variant: the model and its steps; a training that resumes keeps the steps it began with.
      data: batches of the variant's shape.
      where: folder of this training alone.
      stop: () -> whether to save and end.
      evaluations: number of periodic evaluations.
      compiled: `cache` of `compile_programs`, for trainings of the same model.
      keep_weights: whether the checkpoints stay after the last step.
      start: returns the state before the first step; None for one that is drawn.

    Returns:
      {"bits_per_byte", "loss" (nats a token), "steps", "tokens", "seconds", "flops"} of the whole
      training, measured on all held-out windows after the last step; "step_seconds", the median;
      "curve", [[tokens, bits per byte]] of the periodic evaluations.
    """
    variant = variant.with_steps(_saved_steps(where) or variant.training.steps)
    refuse_unfit(variant.model, variant.evolution, variant.training.steps)
    evolution, training = variant.evolution, variant.training
    programs = compile_programs(
        variant.phase_specs,
        training,
        data,
        evolution,
        compiled,
        change=change_of(evolution, training),
    )
    where.mkdir(parents=True, exist_ok=True)
    _keep(where / "steps.json", variant.training.steps)
    every = max(1, variant.training.steps // evaluations)
    clock = Clock()
    progress = Progress(TimeLeft(clock.seconds_by_activity))
    trainer = Trainer(
        dataclasses.replace(variant, name=variant.name[:6]),
        where,
        data,
        programs,
        hooks.usual(
            every,
            2 * every,
            variant.training.skip_spikes,
            record=hooks.Record(note=progress.note),
            change=change_of(evolution, training),
            last=[Show(progress, every, 2 * every)],
        ),
        clock=clock,
        start=start,
        metrics=MetricsWriter,
        checkpoints=functools.partial(Checkpoints, keep=1),
    )
    say(f"{label}, {variant.training.steps} steps into {where}")
    with contextlib.closing(progress), contextlib.closing(trainer):
        progress.time_left.begin()
        for _ in advance_side_by_side([trainer], stop):
            pass
        if not trainer.finished:
            return None
        final = trainer.evaluate_finally()
    result = _result(trainer, final, read_metrics(where / "metrics.jsonl"))
    keep_result(where, result)
    if not keep_weights:
        shutil.rmtree(where / "checkpoints", ignore_errors=True)
    return result


def _result(trainer: Trainer, final: dict, rows: list[dict]) -> dict:
    """Returns the result of a training from its final evaluation and its metrics."""
    tokens = trainer.training.batch * trainer.training.sequence
    times = [tokens / row["tokens_per_second"] for row in rows if row["kind"] == "train"]
    return {
        "bits_per_byte": final["bits_per_byte"],
        "loss": final["loss"],
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "flops": trainer.flops,
        "step_seconds": float(np.median(times or [trainer.seconds / trainer.step])),
        "curve": [[r["tokens"], r["bits_per_byte"]] for r in rows if r["kind"] == "eval"],
    }


def trained(variant: Variant, tokenizer_hash: str, where: Path) -> Teacher:
    """Returns the model that `train` left in a folder, to learn from.

    Args:
      variant: that was trained there.
      tokenizer_hash: see `TrainingData`.
      where: the folder.

    Raises:
      UserError: it has no checkpoint of the variant.
    """
    variant = variant.with_steps(_saved_steps(where) or variant.training.steps)
    config = identity(variant.model, variant.training, variant.evolution, tokenizer_hash)
    checkpoints = Checkpoints(
        where / "checkpoints", config=config, completed=completed, read_only=True
    )
    restored = checkpoints.restore(
        lambda step, extra: abstract_saved_state(variant.phases, variant.training, step)
    )
    if restored is None:
        raise UserError(f"{where} has no checkpoint to learn from; remove it to train it anew.")
    model = variant.phases[-1].model
    return Teacher(model, jax.device_get(restored[0].state(model).merged))


def keep_result(where: Path, result: dict) -> None:
    """Writes the result of a training, which `read_result` then returns."""
    _keep(where / "result.json", result)


def read_result(where: Path) -> dict | None:
    """What `train` returned for this folder; None if it has not come to its end."""
    return _read(where / "result.json", dict)


def _read(path, kind):
    """JSON that a study wrote, an object or a number of 1 or more by `kind`; None if missing."""
    if not path.exists():
        return None
    try:
        value = json_files.load(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); remove it to make it anew.") from None
    if type(value) is not kind or (kind is int and value < 1):
        raise UserError(f"{path} is damaged; remove it to make it anew.")
    return value


def _saved_steps(where):
    """Steps that a training began with; new measurements of its speed do not change them."""
    return _read(where / "steps.json", int)


def keep_settings(folder: Path, config: RunConfig, owner: str, varied: Sequence[str] = ()) -> None:
    """Makes a study's folder with its config, or checks that it was made with the same one.

    A setting that the study's version did not have yet counts as its default.  The paths `varied`
    may differ, as the study's results name their values.

    Raises:
      UserError: it holds trainings of another config, or anything but the study `owner`, or cannot
        be written.
    """
    folders.refuse_foreign(folder, owner)
    settings = config.to_json()
    path = folder / "settings.json"
    saved = _read(path, dict)
    if saved is None:
        refuse_secrets(settings)
        folders.claim(folder, owner)
        _keep(path, settings)
        return
    with contextlib.suppress(UserError):  # what fits no config is named by `differences`
        saved = _as_read(RunConfig.from_json(saved).to_json())
    words = [
        f"{spelling(name)}={now} (saved: {before})"
        for name, before, now in differences(saved, _as_read(settings))
        if name not in varied
    ]
    if words:
        more = len(words) - _DIFFERENCES_SHOWN
        raise UserError(
            f"{folder} holds trainings of other settings: "
            f"{', '.join(words[:_DIFFERENCES_SHOWN])}{f', and {more} more' * (more > 0)}; "
            "name another folder with --out."
        )


def _as_read(value):
    """What reading the JSON of a value gives."""
    return json.loads(json.dumps(value))


def _keep(path, value):
    storage.replace_text(path, json.dumps(value, indent=1) + "\n")
