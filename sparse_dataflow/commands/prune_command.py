"""The command `prune`: `sd.prune` of a model in a directory, on the texts of a corpus."""

from typing import Any

from sparse_dataflow.commands import program_cache
from sparse_dataflow.commands.prune import prune
from sparse_dataflow.data import cache, corpora
from sparse_dataflow.files.errors import UserError

_LETTERS_PER_TOKEN = 16
"""Letters that are read for a token, more than one has in any language's prose."""


def prune_model(options: Any) -> None:
    """Prunes the model of the flags of `experiments.prune`.

    Raises:
      UserError: as `sd.prune`, or the corpus has no text.
    """
    program_cache.keep_programs()
    pruned = prune(
        options.run,
        _texts(options.texts, options.tokens),
        density=None if ":" in options.block else options.density,
        block=options.block,
        rounds=options.rounds or None,
        out=options.out,
        dtype=options.dtype,
        tokens=options.tokens,
    )
    worst = max(pruned.errors, key=pruned.errors.__getitem__)
    print(f"largest held-out error: {pruned.errors[worst]:.2%} ({worst})")
    print(pruned.model)


def _texts(name, tokens):
    """Returns the first training documents of a corpus, with letters for so many tokens."""
    corpus = corpora.load_corpus(name, cache.FOLDER)
    if corpus.ids:
        raise UserError(f"--texts={name} has token ids; legal: a corpus of text.")
    texts, letters = [], 0
    for document in corpus.train:
        texts.append(document.text)
        letters += len(document.text)
        if letters >= _LETTERS_PER_TOKEN * tokens:
            break
    return texts
