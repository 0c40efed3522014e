"""Incremental decoding of tokens to text, which ends at the first stop string."""

import codecs
from collections.abc import Sequence

from sparse_dataflow.data.tokenizer import Tokenizer

_FIRST_MARK = 0xDC00


class StreamDecoder:
    """Decodes the tokens of one continuation.

    Attributes:
      text: released text; complete once `stopped_by` is set.
      tokens: all tokens but the one that ends the text.
      stopped_by: reason of the end; "" until then.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()):
        """Creates a decoder.

        Args:
          stop: strings that end the text; they may begin and end inside tokens, and may have
            special tokens.
          before: ids in front of the continuation, on which the space between words may depend.
        """
        self.text, self.stopped_by = "", ""
        self.tokens: list[int] = []
        # A special token writes no text. One that a stop string has whole is pending as a lone
        # surrogate, which no UTF-8 decodes to, and is not released.
        self._marks: dict[int, str] = {}
        marked = {string: string for string in stop}
        specials = tokenizer.special_ids if stop else {}
        # The longest first: one special token may be part of another's text.
        for token, number in sorted(specials.items(), key=lambda item: -len(item[0])):
            if token and any(token in string for string in marked.values()):
                mark = self._marks[number] = chr(_FIRST_MARK + len(self._marks))
                marked = {s: string.replace(token, mark) for s, string in marked.items()}
        self._tokenizer = tokenizer
        self._stop = tuple(dict.fromkeys([*stop, *marked.values()]))
        joins = tokenizer.open_ids is None
        self._writer = _Bytes(tokenizer) if joins else _Neighbours(tokenizer, before)
        self._pending = ""

    def add(self, token: int) -> str:
        """Adds a token and returns the text that it releases; returns "" after the end."""
        if self.stopped_by:
            return ""
        if token in self._tokenizer.ends:
            return self.end("end")
        self.tokens.append(token)
        if token in self._marks:
            self._pending += self._writer.end() + self._marks[token]
        else:
            self._pending += self._writer.add(token)
        return self._release_certain()

    def end(self, reason: str) -> str:
        """Ends the text for `reason` unless it has ended; returns the remaining text."""
        if self.stopped_by:
            return ""
        self._pending += self._writer.end()
        text = self._release_certain()
        if not self.stopped_by:
            self.stopped_by = reason
            text += self._release(len(self._pending))
        return text

    def _release_certain(self):
        matches = [index for index in map(self._pending.find, self._stop) if index >= 0]
        if matches:
            self.stopped_by = "stop"
            return self._release(min(matches))
        return self._release(len(self._pending) - self._possible_stop())

    def _possible_stop(self):
        """Returns the length of the longest pending suffix that starts a stop string."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, length):
        text, self._pending = self._pending[:length], self._pending[length:]
        text = "".join(c for c in text if not 0 <= ord(c) - _FIRST_MARK < len(self._marks))
        self.text += text
        return text


class _Bytes:
    """Writes tokens whose bytes follow one another."""

    def __init__(self, tokenizer: Tokenizer):
        self._bytes_of = tokenizer.token_to_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Returns the text that a token completes."""
        return self._decoder.decode(self._bytes_of(token))

    def end(self) -> str:
        """Returns the text that is held back."""
        return self._decoder.decode(b"", final=True)


class _Neighbours:
    """Writes tokens as the library does, which sees the one in front; bytes follow one another."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]):
        assert tokenizer.open_ids is not None
        self._tokenizer, self._open = tokenizer, tokenizer.open_ids
        self._bytes = _Bytes(tokenizer)
        sized = tokenizer.token_bytes
        self._before = [i for i in before if sized[i] and i not in self._open][-1:]

    def add(self, token: int) -> str:
        """Returns the text that a token completes."""
        if not self._tokenizer.token_bytes[token]:
            return ""
        if token in self._open:
            return self._bytes.add(token)
        text = self.end() + self._tokenizer.decode_after(self._before, [token])
        self._before = [token]
        return text

    def end(self) -> str:
        """Returns the text that is held back."""
        text, self._bytes = self._bytes.end(), _Bytes(self._tokenizer)
        return text
