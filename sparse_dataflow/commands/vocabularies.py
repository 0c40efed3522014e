"""The tokens that a run adds to those of its weights: learned, measured and told."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from sparse_dataflow.core.messages import say
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.interchange import extended_vocabulary
from sparse_dataflow.interchange.extended_vocabulary import fertility
from sparse_dataflow.runs.run_config import DataConfig

MEASURED_CHARACTERS = 2**20
"""Most characters of the held-out text of a corpus by which tokenizers are compared."""


def learned(base: Tokenizer, corpus: Corpus, data: DataConfig, cache_dir: Path) -> Tokenizer:
    """Returns the tokenizer of a run with `data.extend_vocabulary`, and says what it adds.

    Raises:
      UserError: see `extended_vocabulary.learned`.
    """
    tokenizer = extended_vocabulary.learned(base, corpus, data.extend_vocabulary, cache_dir)
    added = len(tokenizer.tokens) - len(base.tokens)
    say(f"vocabulary: {added:,} more tokens, {tokenizer.vocab_size:,} rows")
    lost = {name for name, _ in base.identity.files} - {n for n, _ in tokenizer.identity.files}
    if lost:
        say(f"  not in an export, as they have the old tokens alone: {', '.join(sorted(lost))}")
    return tokenizer


def measured(base: Tokenizer, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, object]:
    """Returns what the new tokens change on held-out text, as JSON values, and says it.

    Returns:
      {"tokens": number of new tokens, "first_id": the first id that they have in tokenizer.json,
      "corpora": {name: {"tokens_per_word": [before, after], "bytes_per_token": [before, after]}}}.
    """
    sources = corpus.mixture or (("", corpus, 1.0),)
    corpora = {}
    for name, source, _ in sources:
        texts = list(_some(document.text for document in source.validation))
        before, after = fertility(base, texts), fertility(tokenizer, texts)
        corpora[name or source.name] = {
            field: [getattr(before, field), getattr(after, field)] for field in before._fields
        }
        say(f"  {_words(name or source.name, corpora[name or source.name])}")
    first = len(base.tokens)
    return {
        "tokens": len(tokenizer.tokens) - first,
        "first_id": int(tokenizer.original_ids[first]),
        "corpora": corpora,
    }


def notes(record: RunRecord) -> list[str]:
    """Returns the sentences of a report about the new tokens of a run."""
    vocabulary = (record.init_from or {}).get("vocabulary")
    if not isinstance(vocabulary, Mapping):
        return []
    corpora = "; ".join(_words(name, figures) for name, figures in vocabulary["corpora"].items())
    return [
        f"The vocabulary has {vocabulary['tokens']:,} more tokens than that of the weights, from "
        f"id {vocabulary['first_id']:,}. Held out, {corpora}."
    ]


def _words(name, figures):
    words, size = figures["tokens_per_word"], figures["bytes_per_token"]
    return (
        f"{name}: {words[0]:.2f} tokens a word before, {words[1]:.2f} after "
        f"({size[0]:.2f} and {size[1]:.2f} bytes a token)"
    )


def _some(texts: Iterable[str]) -> Iterable[str]:
    characters = 0
    for text in texts:
        yield text[: MEASURED_CHARACTERS - characters]
        characters += len(text)
        if characters >= MEASURED_CHARACTERS:
            return
