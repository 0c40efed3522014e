"""The files that describe a run: config.json, run.json (the `RunRecord`) and tokenizer.json."""

import contextlib
import dataclasses
import hashlib
import json
import re
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.data import held_out
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError, redact_json, refuse_secrets
from sparse_dataflow.files.folders import refuse_outside_links
from sparse_dataflow.runs.run_config import RunConfig
from sparse_dataflow.runs.variants import variants

_MAX_BYTES = 4 * 2**20
PYTHON_CALL = "sd."
"""Begins the command of a run that `sd.train` began."""

CONFIG, RECORD, TOKENIZER = "config.json", "run.json", "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run was started with in addition to its config, as in run.json.

    Attributes:
      experiment: module name of the experiment, such as "gpt13b_sparse".
      command: words of the command line; of `sd.train`, the Python call alone.
      date: date and time of the start, ISO 8601 in UTC.
      versions: package -> version.
      machine: chip and architecture.
      corpus_hash: hash of its text.
      tokenizer: hash of the tokenizer.
      vocab_size: number of tokens of the tokenizer.
      steps: variant -> number of optimizer steps.
      init_from: source of the initial weights; None if they were drawn from the seed.
      teacher: source of the teacher's weights; None without a teacher.
      code: {"commit", "dirty"} of the package; {} if unknown.
      host: name of the host that began the run; "" if unknown.
      seed: of initial weights and batches; None in runs of older versions.
      rounded_weights: see `TokenMixture`; runs of older versions do not say it.
      id: drawn once for a run; "" in runs of older versions.
      split_version: `held_out.VERSION` of the run.
    """

    experiment: str
    command: tuple[str, ...]
    date: str
    versions: Mapping[str, str]
    machine: str
    corpus: str
    corpus_hash: str
    tokenizer: str
    vocab_size: int
    steps: Mapping[str, int]
    init_from: json_files.JsonObject | None = None
    teacher: json_files.JsonObject | None = None
    code: json_files.JsonObject = dataclasses.field(default_factory=dict)
    host: str = ""
    seed: int | None = None
    rounded_weights: bool = True
    id: str = ""
    split_version: int = 1

    def __post_init__(self):
        object.__setattr__(self, "command", tuple(self.command))
        for name in (
            "experiment",
            "date",
            "machine",
            "corpus",
            "corpus_hash",
            "tokenizer",
            "host",
            "id",
        ):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"its {name} is not a string")
        if not all(isinstance(word, str) for word in self.command) or not self.command:
            raise ValueError("its command is not a list of words")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.experiment):
            raise ValueError("its experiment is not a module name")
        counts = {"vocab_size": self.vocab_size, "split_version": self.split_version, **self.steps}
        for name, count in counts.items():
            if type(count) is not int or count < 1:
                raise ValueError(f"its {name} is not an integer of 1 or more")
        if type(self.rounded_weights) is not bool:
            raise ValueError("its rounded_weights is neither true nor false")
        # Raises if one is no mapping.
        dict(self.versions), dict(self.code)

    def refuse_other_corpus(self, folder: Path, corpus: Corpus, advice: str) -> None:
        """Checks that a corpus is that of the run, in every document and on which side it is.

        Args:
          folder: of the run.
          advice: what to do where the text has changed.

        Raises:
          UserError: otherwise.
        """
        if corpus.content_hash == self.corpus_hash:
            return
        if self.split_version != held_out.VERSION:
            raise UserError(
                f"{folder} was begun by an older version of this package, which held out other "
                f"documents of {corpus.name}; use that version with it, or start a new run."
            )
        raise UserError(f"The corpus {corpus.name} has changed since {folder} was started{advice}")

    @property
    def identity(self) -> str:
        """Id of the run; of older versions a digest of when, where and with what it began."""
        text = json.dumps([self.date, self.host, self.command, self.corpus_hash])
        return self.id or hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def replay(self) -> str:
        """The command line for a shell, or the Python call, that trains the same again."""
        program, *arguments = self.command
        if program.startswith(PYTHON_CALL):
            return program
        return shlex.join([*program.split(), *arguments])

    @property
    def code_in_words(self) -> str:
        """The commit and whether files differed from it; "" if unknown."""
        commit = str(self.code.get("commit", ""))[:12]
        return commit + ", with changed files" * bool(commit and self.code.get("dirty"))

    def to_json(self) -> json_files.JsonObject:
        """Returns the fields, the command without secrets; `RunRecord(**fields)` is the inverse."""
        return {**vars(self), "command": redact_json(self.command)}


def new_id() -> str:
    """Draws the id of a run."""
    return secrets.token_hex(8)


def to_bytes(fields: Mapping[str, object]) -> bytes:
    """Returns the bytes of a JSON file of a run, which is read again as it was.

    Raises:
      UserError: a field holds a secret; see `refuse_secrets`.
    """
    refuse_secrets({name: value for name, value in fields.items() if name != "command"})
    return json.dumps(dict(fields), indent=1).encode() + b"\n"


def read_config(folder: str | Path) -> RunConfig:
    """Reads config.json of a run.

    Raises:
      UserError: the file is missing, damaged or of an older version, or the folder has links that
        lead out of it.
    """
    path = Path(folder).expanduser() / CONFIG
    fields = _read(path, folder)
    if isinstance(fields, dict) and "flags" in fields and "variants" in fields:
        raise UserError(
            f"{folder} is a run of an older sparse_dataflow version, which this version cannot "
            "read; start a new run, or use that version."
        )
    if isinstance(fields, dict) and "model_type" in fields:
        raise UserError(
            f"{folder} is an exported model or a Hugging Face directory, not a run folder. "
            f"Give the run that was exported, or train from it with --init_from={folder}; "
            "generate and evaluate take it as it is."
        )
    with _damage_in_words(path):
        config = RunConfig.from_json(fields)
    refuse_outside_links(path.parent)
    return config


def read_record(folder: str | Path, config: RunConfig) -> RunRecord:
    """Reads run.json of a run with this config.

    Raises:
      UserError: the file is missing or damaged, or does not fit the config.
    """
    path = Path(folder).expanduser() / RECORD
    fields = _read(path, folder)
    with _damage_in_words(path):
        record = RunRecord(**fields)
        if set(config.variants) != set(record.steps):
            raise ValueError(f"its steps do not fit the models of {CONFIG}")
    return record


def _read(path, folder):
    if not path.exists():
        raise UserError(f"{folder} is not a run folder: it has no {path.name}.")
    with _damage_in_words(path):
        return json_files.load(path, _MAX_BYTES)


@contextlib.contextmanager
def _damage_in_words(path):
    """Turns errors of unexpected content into a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}).") from None


def read_variants(config: RunConfig, record: RunRecord) -> dict[str, Variant]:
    """Returns name -> variant of a run, with the vocabulary size and steps of its start."""
    return {v.name: v for v in variants(config, record.vocab_size, record.steps)}


def read_tokenizer(folder: str | Path, record: RunRecord) -> Tokenizer:
    """Reads the tokenizer that a run was trained with.

    Raises:
      UserError: the file is missing or unreadable, or its hash is not that of run.json.
    """
    path = Path(folder).expanduser() / TOKENIZER
    if not path.exists():
        raise UserError(
            f"The run {folder} has no {TOKENIZER}; restore the file from a copy of the run."
        )
    tokenizer = Tokenizer.load(path)
    if tokenizer.content_hash != record.tokenizer:
        raise UserError(
            f"{path} is not the tokenizer that the run was trained with; restore that file."
        )
    return tokenizer
