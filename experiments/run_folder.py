"""The run folder: made, kept only if a run starts in it, and checked when a run goes on."""

import contextlib
import datetime
import json
from collections.abc import Iterator
from pathlib import Path

from experiments.recipes import Variant
from sparse_dataflow.data.corpora import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.distributed import processes
from sparse_dataflow.evaluation.trained import CONFIG, TOKENIZER
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_difference import differences
from sparse_dataflow.files.links import refuse_leaving

_PROBE = ".writable"
_DIFFERENCES_SHOWN = 3


@contextlib.contextmanager
def opened(experiment: str, values) -> Iterator[Path]:
    """The folder that --out names, or a new one; proven writable by the first process.

    If the block fails before a config.json is there, whatever was made is removed.

    Raises:
      UserError: it cannot be written.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path(processes.told(values.out or f"runs/{experiment}-{stamp}"))
    if not processes.first():
        yield folder
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]

    def probe():
        folder.mkdir(parents=True, exist_ok=True)
        storage.replace(folder / _PROBE, b"")
        (folder / _PROBE).unlink(missing_ok=True)

    try:
        storage.retried(f"Making {folder}", probe)
    except OSError as error:
        _remove(folder, made)
        raise UserError(
            f"Run folder {folder} cannot be written: {error.strerror}; name another with --out."
        ) from error
    try:
        yield folder
    except BaseException:
        if not (folder / CONFIG).exists():
            _remove(folder, made)
        raise


def _remove(folder, made):
    with contextlib.suppress(OSError):
        for name in (TOKENIZER, _PROBE):
            (folder / name).unlink(missing_ok=True)
        for path in made:
            path.rmdir()


def start(folder: Path, config: dict, tokenizer: Tokenizer) -> None:
    """Writes what a run is before its first step; config.json last, whole or not at all.

    Raises:
      UserError: the folder cannot be written.
    """
    if not processes.first():
        return
    try:
        tokenizer.save(folder / TOKENIZER)
        storage.replace(folder / CONFIG, json.dumps(config, indent=1).encode() + b"\n")
    except OSError as error:
        raise UserError(f"Run folder {folder} cannot be written: {error.strerror}.") from error


def read(folder: Path, experiment: str, names: list[str]) -> dict:
    """config.json of a run to go on with.

    Args:
      folder: of the run.
      experiment: that goes on with it.
      names: of the variants that its flags describe.

    Raises:
      UserError: it is another experiment's, damaged, or leads out of its folder.
    """
    path = folder / CONFIG
    refuse_leaving(folder)
    try:
        config = json_files.load(path)
        other, corpus = config["experiment"], config["corpus"]["hash"]
        hashes = [corpus, config["tokenizer"]]
        steps = [config["variants"][name]["training"]["steps"] for name in names]
        config["date"], config["machine"], config["versions"], config["command"][0].split()
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}).") from None
    if other != experiment:
        raise UserError(
            f"{folder} is a run of {other}; go on with it by "
            f"python -m experiments.{other} --resume={folder}."
        )
    if not all(type(n) is int and n > 0 for n in steps) or not all(
        isinstance(text, str) for text in hashes
    ):
        raise UserError(f"{path} is damaged: its steps or hashes are none.")
    return config


def refuse_other_data(folder: Path, config: dict, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Refuses to go on with a run on text, or with tokens, that it was not started on.

    Raises:
      UserError: the corpus or the tokenizer has changed, or the saved tokenizer is damaged.
    """
    if corpus.content_hash != config["corpus"]["hash"]:
        raise UserError(
            f"The corpus {corpus.name} has changed since {folder} was started. Put it back as it "
            "was, or start a new run without --resume."
        )
    kept = Tokenizer.load(folder / TOKENIZER).content_hash
    if not kept == config["tokenizer"] == tokenizer.content_hash:
        raise UserError(
            f"The tokenizer of {folder} is not the one that its corpus gives here "
            f"({kept[:12]} and {tokenizer.content_hash[:12]}; its {CONFIG} says "
            f"{config['tokenizer'][:12]}). Put {TOKENIZER} back, or start a new run without "
            "--resume."
        )


def refuse_other_variants(folder: Path, config: dict, variants: list[Variant]) -> None:
    """Refuses to go on where the saved flags no longer give the saved models and training.

    Raises:
      UserError: naming what differs.
    """
    here = {v.name: json.loads(json.dumps(v.to_json())) for v in variants}
    found = [
        f"{name} is {was} there and {now} here"
        for name, was, now in differences(config["variants"], here)
        if not name.endswith(".remat")
    ]
    if found:
        more = len(found) - _DIFFERENCES_SHOWN
        raise UserError(
            f"{folder / CONFIG} does not fit its own flags: {'; '.join(found[:_DIFFERENCES_SHOWN])}"
            f"{f'; and {more} more' if more > 0 else ''}. It was changed, or made by another "
            "version; start a new run without --resume."
        )
