"""The files that say what a run is: its config, what it was started with, and its tokenizer."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparse_dataflow.config.run import RunConfig
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.links import refuse_outside_links
from sparse_dataflow.files.redaction import redact_json
from sparse_dataflow.training.variants import Variant, variants

CONFIG, RECORD, TOKENIZER = "config.json", "run.json", "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run was started with beside its config, as in run.json.

    Attributes:
      experiment: module name of the experiment, "gpt13b_sparse".
      command: its command line.
      date: of the start, ISO 8601 in UTC.
      versions: package -> version.
      machine: chip and architecture.
      corpus: name of the corpus.
      corpus_hash: of its text.
      tokenizer: hash of the tokenizer.
      vocab_size: its tokens.
      steps: variant -> optimizer steps.
      init_from: what the weights began as; None where they were drawn.
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
    init_from: Mapping[str, Any] | None = None

    def __post_init__(self):
        object.__setattr__(self, "command", tuple(self.command))
        for name in ("experiment", "date", "machine", "corpus", "corpus_hash", "tokenizer"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"its {name} is no text")
        if not all(isinstance(word, str) for word in self.command) or not self.command:
            raise ValueError("its command is no list of words")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.experiment):
            raise ValueError("its experiment is no module's name")
        counts = {"vocab_size": self.vocab_size, **self.steps}
        for name, count in counts.items():
            if type(count) is not int or count < 1:
                raise ValueError(f"its {name} is no number of 1 or more")
        dict(self.versions)

    def to_json(self) -> dict[str, Any]:
        """The fields, without secrets; `RunRecord(**fields)` is its inverse."""
        fields = {**vars(self), "command": list(self.command)}
        return redact_json(fields)


def to_bytes(fields: Mapping[str, Any]) -> bytes:
    """JSON as these files hold it."""
    return json.dumps(redact_json(dict(fields)), indent=1).encode() + b"\n"


def read_config(folder: str | Path) -> RunConfig:
    """config.json of a run.

    Raises:
      UserError: there is none, it is damaged, of an older version, or leads out of its folder.
    """
    path = Path(folder).expanduser() / CONFIG
    fields = _read(path, folder)
    if isinstance(fields, dict) and "flags" in fields and "variants" in fields:
        raise UserError(
            f"{folder} is a run of an older sparse_dataflow, whose config.json this version does "
            "not read; start a new run, or use that version."
        )
    if isinstance(fields, dict) and "model_type" in fields:
        raise UserError(
            f"{folder} is an exported model or a Hugging Face directory, not a run folder. "
            f"Give the run that was exported, or train from it with --init_from={folder}."
        )
    try:
        config = RunConfig.from_json(fields)
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}).") from None
    refuse_outside_links(path.parent)
    return config


def read_record(folder: str | Path, config: RunConfig) -> RunRecord:
    """run.json of a run with this config.

    Raises:
      UserError: there is none, or it is damaged or does not fit the config.
    """
    path = Path(folder).expanduser() / RECORD
    fields = _read(path, folder)
    try:
        record = RunRecord(**fields)
        missing = set(config.variants) ^ set(record.steps)
        if missing:
            raise ValueError(f"its steps do not fit the models of {CONFIG}")
        return record
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}).") from None


def _read(path, folder):
    if not path.exists():
        raise UserError(f"{folder} is not a run folder: it has no {path.name}.")
    try:
        return json_files.load(path)
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}).") from None


def read_variants(config: RunConfig, record: RunRecord) -> dict[str, Variant]:
    """Name -> variant of a run, with the vocabulary and steps that it was started with."""
    return {v.name: v for v in variants(config, record.vocab_size, record.steps)}


def read_tokenizer(folder: str | Path, record: RunRecord) -> Tokenizer:
    """The tokenizer that a run was trained with.

    Raises:
      UserError: the run has none, it cannot be read, or it is not the one of run.json.
    """
    path = Path(folder).expanduser() / TOKENIZER
    if not path.exists():
        raise UserError(
            f"The run {folder} has no {TOKENIZER}, so its tokens cannot be decoded. Restore the "
            "file from a copy of the run."
        )
    tokenizer = Tokenizer.load(path)
    if tokenizer.content_hash != record.tokenizer:
        raise UserError(
            f"{path} is not the tokenizer that the run was trained with. Restore the original file."
        )
    return tokenizer
