"""From a config to a resolved run: its plan, executor, text, tokenizer and models."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparse_dataflow.commands import devices, run_folder, vocabularies
from sparse_dataflow.commands.job.beginning import Beginning
from sparse_dataflow.commands.preflight import relay_plan, settling
from sparse_dataflow.commands.training_data import corpus_of, tokenizer_of
from sparse_dataflow.core.executors.executor import Executor
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.ops import quantized
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.core.training.loop import StepDone
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.data import cache, hub
from sparse_dataflow.data.corpora import corpus_of_texts
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import KINDS, Tokenizer
from sparse_dataflow.evaluation import run_files
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.relay.relay_executor import RelayExecutor
from sparse_dataflow.runs.allocation import allocation_table
from sparse_dataflow.runs.run_config import RunConfig
from sparse_dataflow.runs.variants import variants


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run: a new one, or one that goes on.

    Attributes:
      experiment: name of the experiment, which the run folder keeps.
      command: words of the command line, or the Python call, that began it.
      folder: the run folder, which this process has locked.
      clock: counts the seconds since the start.
      check_folder: raises UserError if the folder was deleted or moved.
      resume: whether the folder has a run, which goes on.
      metrics: see `train.train`.
      texts: see `train.train`.
    """

    experiment: str
    command: tuple[str, ...]
    folder: Path
    clock: Clock
    check_folder: Callable[[], None]
    resume: bool
    metrics: Mapping[str, Callable[[StepDone], float]]
    texts: Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A run of which nothing is open any more but the number of steps.

    Attributes:
      config: with its plan, and the rows of new tokens.
      chip: of this process, with the peak of the dtype that the run computes in.
      executor: runs the programs of all models.
      record: of a resumed run; None for a new one.
      corpus: what is trained on.
      tokenizer: reads it.
      beginning: the weights that the run begins with.
      models: one after the other takes a step.
    """

    config: RunConfig
    chip: Chip
    executor: Executor
    record: RunRecord | None
    corpus: Corpus
    tokenizer: Tokenizer
    beginning: Beginning
    models: list[Variant]


def resolve(config: RunConfig, start: Start) -> Resolved:
    """Settles what a config leaves open, for these devices and this corpus.

    Args:
      config: of the run; its paths exist.
      start: new, or of a run in the folder.

    Raises:
      UserError: these devices cannot train it, or the folder has another run.
    """
    folder = start.folder
    chip = hardware.detect([config.model.compute_dtype])
    # Before anything that is compiled or written: the plan is part of the config.
    free = start.resume and run_folder.MICRO_BATCHES not in run_folder.fixed_paths(config)
    planned = settling.settled(_begun(config, start), chip, free)
    made = devices.executor(planned)
    settled = settling.settled_remat(planned, chip, made)
    record = _saved_record(folder, settled) if start.resume else None
    executor = _checked(made, settled, chip)
    corpus = _corpus(settled, start.texts, record)
    beginning = Beginning.of(settled, folder, record)
    tokenizer, resolved = _with_tokenizer(settled, folder, corpus, beginning, start.resume)
    if record:
        run_folder.refuse_other_data(folder, record, corpus, tokenizer)
    models = variants(resolved, tokenizer.vocab_size, record.steps if record else None)
    for v in models:
        _say_allocation(v)
    return Resolved(resolved, chip, executor, record, corpus, tokenizer, beginning, models)


def _begun(config, start):
    """Returns the config with the rows of new tokens that a resumed run began with."""
    if not start.resume or not config.data.extend_vocabulary:
        return config
    return config.change(training__new_rows=run_files.read_config(start.folder).training.new_rows)


def _saved_record(folder, config) -> RunRecord:
    saved = run_files.read_config(folder)
    run_folder.refuse_other_config(folder, saved, config)
    return run_files.read_record(folder, saved)


def _checked(executor: Executor, config: RunConfig, chip: Chip) -> Executor:
    """Refuses what these devices cannot train, before any work; returns the executor, which may
    keep fewer copies."""
    planned, model = variants(config), config.model
    if model.quantized:
        quantized.library()
        say(chip.product_words(model.precision, model.compute_dtype))
    devices.check(executor, config, planned)
    if isinstance(executor, RelayExecutor):
        return relay_plan.settled(planned, chip, executor)
    return executor


def _corpus(config, texts, record) -> Corpus:
    """Returns the corpus of the texts, or of the config; a resumed run keeps the revision of a
    dataset on the hub."""
    if texts is None:
        streams = record is not None and hub.PREFIX in record.corpus
        return corpus_of(config.data, record.corpus if record and streams else "")
    if config.data.loss == "answers":
        raise UserError("data.loss=answers reads examples of data.corpus; give it, not texts.")
    data = config.data
    return corpus_of_texts(texts, validation=data.validation, column=data.column)


def _with_tokenizer(
    config: RunConfig, folder: Path, corpus: Corpus, beginning: Beginning, resume: bool
) -> tuple[Tokenizer, RunConfig]:
    """Returns the tokenizer of the weights to begin with, or of the config, and the config with the
    rows of the tokens that it adds."""
    named = config.data.tokenizer not in KINDS
    if resume and (beginning.named or corpus.streamed or named):
        return Tokenizer.load(folder / run_files.TOKENIZER), config
    if not beginning.named:
        return tokenizer_of(config, corpus), config
    base = beginning.tokenizer
    if not config.data.extend_vocabulary:
        return base, config
    tokenizer = vocabularies.learned(base, corpus, config.data, cache.FOLDER)
    rows = len(base.tokens), len(tokenizer.tokens) - len(base.tokens)
    return tokenizer, config.change(training__new_rows=rows)


def _say_allocation(variant):
    if variant.model.weight_words:
        sequence = variant.training.sequence
        flops = lambda model: cost.flops_per_token(model, sequence).sections  # noqa: E731
        say(allocation_table(variant.model, flops))
