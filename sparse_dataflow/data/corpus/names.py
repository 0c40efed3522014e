"""Names of corpora, and what is refused by a name or by what its folder lists."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sparse_dataflow.data import hub, tfds_copies, token_files
from sparse_dataflow.data.cache import resolved
from sparse_dataflow.data.corpus.mixtures import exists, mixture_weights
from sparse_dataflow.data.local_files import LEGAL_FILES, LocalSource, has_text_suffix
from sparse_dataflow.files import addresses
from sparse_dataflow.files.errors import UserError

LEGAL_CORPORA = (
    f"'python_stdlib', a folder or file of {LEGAL_FILES}, a saved Hugging Face dataset, "
    "the address of one such as 'gs://BUCKET/PATH', 'hf:OWNER/NAME' such as 'hf:allenai/c4/en', a "
    "tfds name with a text feature or the folder of a prepared copy, or a mixture "
    "'NAME:WEIGHT,NAME:WEIGHT'"
)
BUILT_IN = ("python_stdlib",)


def is_path(name: str) -> bool:
    """Returns whether a name is that of a path or an address."""
    if addresses.is_address(name) or exists(name):
        return True
    return name.startswith(("/", ".", "~", "\\")) or has_text_suffix(name)


def has_ids(name: str, column: str = "") -> bool | None:
    """Returns whether a corpus has token ids; None where its folder does not say so."""
    sources = list(mixture_weights(name) or (name,))
    paths = [Path(source).expanduser() for source in sources if source not in BUILT_IN]
    if any(addresses.is_address(source) for source in sources):
        return None
    if len(paths) < len(sources) or not all(path.exists() for path in paths):
        return None
    return any(
        not tfds_copies.is_prepared(path) and token_files.has_token_ids(path, column)
        for path in paths
    )


def refuse_missing(name: str, cache_dir: Path, examples: bool = False, column: str = "") -> None:
    """Refuses a corpus that `load_corpus` would refuse for what its folder lists.

    Reads no text, and asks no store and no hub.

    Raises:
      UserError: a file or folder is missing or has none of the files that are read, or a name is
        none of tfds.
    """
    for source in mixture_weights(name) or (name,):
        if source in BUILT_IN or source.startswith(hub.PREFIX) or addresses.is_address(source):
            continue
        path = Path(source).expanduser()
        if tfds_copies.is_prepared(path) or hub.is_saved_dataset(path):
            continue
        if is_path(source):
            LocalSource(path, examples, column).refuse_empty(
                () if examples else token_files.SUFFIXES
            )
        elif not examples:
            with quiet():
                tfds_copies.refuse_unknown(source, resolved(cache_dir), LEGAL_CORPORA)


def refuse_other_tokenizer(tokenizer: str, name: str, has_ids: bool) -> None:
    """Refuses `data.tokenizer` where it reads another kind of corpus: text, or token ids.

    Raises:
      UserError: naming the legal tokenizers.
    """
    if has_ids and tokenizer == "bpe":
        raise UserError(
            f"--corpus={name} has token ids and no text to train a tokenizer on; legal for "
            "data.tokenizer: the one that wrote them (gpt2, DIR, hf:NAME), or none with its size "
            "in model.vocab_size."
        )
    if tokenizer == "none" and not has_ids:
        raise UserError(
            f"data.tokenizer=none is for a corpus of token ids, and --corpus={name} is "
            "text; legal: bpe, gpt2, DIR, hf:NAME."
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences tfds on the terminal, except for its progress bars."""
    from absl import logging as absl_logging

    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        absl_logging.set_verbosity(verbosity)
