"""What studies share: flags with changes of their own, trainings that are kept and gone on with.

A study trains many models on one corpus, each into a folder of its own.
"""

import dataclasses
import json
import types
from pathlib import Path

import jax

from experiments import gpt_run, recipes
from experiments.recipes import Variant
from sparse_dataflow.data import cache
from sparse_dataflow.data.corpora import Corpus, load_corpus
from sparse_dataflow.data.tokenizer import Tokenizer, load_tokenizer
from sparse_dataflow.files import folders, json_files, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.host_memory import keep_freed_memory
from sparse_dataflow.training.loop import Trainer
from sparse_dataflow.training.metrics import say
from sparse_dataflow.training.phases import refuse_unfit
from sparse_dataflow.training.programs import TrainingData, compile_programs
from sparse_dataflow.training.turns import advance_side_by_side

_SETTINGS = "settings.json"
_DEFAULTS = {
    "twin": "no",
    "minutes": 1.0,
    "steps": 1,
    "seed": 0,
    "pattern": "monarch",
    "density": 0.125,
    "density_budget": "uniform",
    "rank": 0,
    "hadamard": 0,
    "evolution": "static",
    "evolve_every": 100,
    "evolve_at": 0.0,
    "evolve_first": (),
    "evolve_plateau": 0,
    "parametrization": "standard",
    "warmup": 0.1,
    "final_rate": 0.1,
}


@dataclasses.dataclass(frozen=True)
class Study:
    """The flags of a study, every "auto" settled, and what it trains on.

    Attributes:
      asked: flag -> value.
      corpus: the documents.
      tokenizer: of them.
      chip: what it runs on.
    """

    asked: dict
    corpus: Corpus
    tokenizer: Tokenizer
    chip: hardware.Chip

    def settings(self, **changes) -> types.SimpleNamespace:
        """Flags of one training: those asked for, with changes, and defaults for the rest."""
        return types.SimpleNamespace(**{**_DEFAULTS, **self.asked, **changes})

    def variant(self, name: str, **changes) -> Variant:
        """The "sparse" or "dense" variant of `settings(**changes)`."""
        vocabulary = self.tokenizer.vocab_size
        return recipes.variants(self.settings(**changes), [name], vocabulary)[0]

    def data(self, variant: Variant, seed: int = 0) -> TrainingData:
        """The batches of a variant's shape, drawn by `seed`, and the held-out windows."""
        return gpt_run.training_data(self.settings(seed=seed), variant, self.corpus, self.tokenizer)


def begin(values, groups) -> Study:
    """Reads the flags, settles each "auto", loads corpus and tokenizer.

    Raises:
      UserError: in words, where the flags or the corpus cannot be used.
    """
    keep_freed_memory()
    asked = {flag.name: values[flag.name].value for group in groups for flag in group.flags}
    chip = hardware.detect(["float32" if values.dtype == "auto" else values.dtype])
    settings = types.SimpleNamespace(**{**_DEFAULTS, **asked})
    recipes.settle(settings, jax.default_backend(), chip.memory_bytes, sparse=True)
    asked |= {"scale": settings.scale, "dtype": settings.dtype}
    corpus = load_corpus(values.corpus, cache.FOLDER)
    vocabulary = recipes.vocab_size(settings)
    tokenizer = load_tokenizer(values.tokenizer, corpus, vocabulary, cache.FOLDER)
    return Study(asked, corpus, tokenizer, chip)


def train(label: str, variant: Variant, data: TrainingData, where: Path, stop) -> dict | None:
    """The result of one training, from where it was left; None if `stop()` came before its end.

    Args:
      label: names it on the terminal.
      variant: what is trained, for how many steps; a training that was begun keeps its own.
      data: of the variant's shape.
      where: folder of this training alone.
      stop: () -> whether to save and end.

    Returns:
      {"bits_per_byte", "loss" (nats a token), "steps", "tokens", "seconds", "flops"} of the whole
      training, measured on all held-out windows after the last step.
    """
    variant = variant.with_steps(_steps_begun(where) or variant.training.steps)
    refuse_unfit(variant.model, variant.evolution, variant.training.steps)
    programs = compile_programs(variant.stages, variant.training, data, variant.evolution)
    where.mkdir(parents=True, exist_ok=True)
    _keep(where / "steps.json", variant.training.steps)
    every = max(1, variant.training.steps // gpt_run.EVALUATIONS_A_RUN)
    trainer = Trainer(
        variant.name[:6],
        where,
        variant.model,
        variant.training,
        data,
        programs,
        evolution=variant.evolution,
        eval_every=every,
        checkpoint_every=2 * every,
        keep=1,
    )
    say(f"{label}, {variant.training.steps} steps into {where}")
    try:
        for _ in advance_side_by_side([trainer], stop):
            pass
        if not trainer.finished:
            return None
        final = trainer.evaluate_finally()
    finally:
        trainer.close()
    result = {
        "bits_per_byte": final["bits_per_byte"],
        "loss": final["loss"],
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "flops": trainer.flops,
    }
    _keep(where / "result.json", result)
    return result


def kept(where: Path) -> dict | None:
    """What `train` left there, if it came to its end."""
    path = where / "result.json"
    return _read(path, dict) if path.exists() else None


def _read(path, kind):
    """The JSON of a kind, an object or a number above 0, that a study left there; UserError where
    it is none."""
    try:
        found = json_files.load(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); remove it to make it anew.") from None
    if type(found) is not kind or (kind is int and found < 1):
        raise UserError(f"{path} is damaged; remove it to make it anew.")
    return found


def _steps_begun(where):
    """The steps that a training was begun with, which times measured anew do not change."""
    path = where / "steps.json"
    return _read(path, int) if path.exists() else None


def refuse_foreign(folder: Path, owner: str) -> None:
    """Refuses a folder that holds anything but the study `owner`; see `folders.refuse_foreign`."""
    folders.refuse_foreign(folder, owner, accept=_has_settings)


def _has_settings(folder):
    """Whether it is a study's folder of a version that left no mark; `keep_settings` compares."""
    try:
        return "scale" in json_files.load(folder / _SETTINGS).keys()
    except json_files.MALFORMED:
        return False


def keep_settings(folder: Path, settings: dict, owner: str) -> None:
    """Makes a study's folder with its settings, or checks that it holds trainings of the same.

    Raises:
      UserError: it holds trainings of other flags, or anything but the study `owner`, or cannot be
        written.
    """
    refuse_foreign(folder, owner)
    settings = json.loads(json.dumps(settings))
    path = folder / _SETTINGS
    if path.exists():
        # A folder is silent on flags that came later, whose defaults change nothing.
        saved = _DEFAULTS | _read(path, dict)
        wrong = [
            f"--{name}={value} (saved: {saved.get(name)})"
            for name, value in settings.items()
            if saved.get(name) != value
        ]
        if wrong:
            raise UserError(f"{folder} holds trainings of other flags: {', '.join(wrong)}.")
        return
    folders.claim(folder, owner)
    _keep(path, settings)


def _keep(path, value):
    """Writes a file of a study, whole or not at all; UserError where it cannot be written."""
    try:
        storage.replace(path, json.dumps(value, indent=1).encode() + b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
