"""Text for which a tokenizer has no token: what the ids of a text do not say of it."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sparse_dataflow.data import tokenizer_library
from sparse_dataflow.files.errors import UserError

_LOG = logging.getLogger(__name__)


class LostText:
    """Counts text without a token, and says once that there is some."""

    def __init__(self, engine: Any, special_ids: Mapping[str, int], unknown: str | None):
        """Creates a counter.

        Args:
          engine: the library's tokenizer.
          special_ids: id of each special token by its text.
          unknown: the special token that stands for text without a token, if any.
        """
        self._engine = engine
        self._names = {number: name for name, number in special_ids.items()}
        self._unknown = special_ids.get(unknown or "", -1)
        # Whether each character so far has no token; spaces may divide tokens instead.
        self._left_out: dict[str, bool] = {}
        self._said = False

    def count(self, texts: Sequence[str], ids: Iterable[np.ndarray]) -> Counter[str]:
        """Counts what the ids of texts do not say of them.

        Args:
          texts: encoded texts.
          ids: int [tokens] of each.

        Returns:
          How often each special token is in the ids, as the unknown one is for text without a
          token, and how often each character is in the texts for which there is no id.
        """
        counts: Counter[str] = Counter()
        special = list(self._names)
        for row in ids:
            counts.update(self._names[number] for number in row[np.isin(row, special)].tolist())
        for character in set().union(*texts):
            if character not in self._left_out:
                self._left_out[character] = not character.isspace() and self._leaves_out(character)
            if self._left_out[character]:
                counts[character] += sum(text.count(character) for text in texts)
        return counts

    def _leaves_out(self, character):
        try:
            with tokenizer_library.failures("encode a text"):
                return not self._engine.encode(character, add_special_tokens=False).ids
        except UserError:  # A text is refused where it has something unknown.
            return False

    def say(self, texts: Sequence[str], ids: Iterable[np.ndarray], chat: bool = False) -> None:
        """Says once that ids leave out something of texts.

        Args:
          texts: encoded texts.
          ids: int [tokens] of each.
          chat: whether special tokens are meant, but for the unknown one.
        """
        if self._said:
            return
        if chat:
            ids = [row[row == self._unknown] for row in ids]
        if lost := self.count(texts, ids):
            self._said = True
            _LOG.warning("%s", lost_words(lost))


def lost_words(lost: Counter[str]) -> str:
    """Returns a clause for what `LostText` counted."""
    names = [f"{name!r} ({count:,} times)" for name, count in lost.most_common(3)]
    more = f" and {len(lost) - len(names):,} more" if len(lost) > len(names) else ""
    return (
        "the tokenizer has no token for some of the text; special tokens in its place, or "
        f"characters that are left out: {', '.join(names)}{more}"
    )
