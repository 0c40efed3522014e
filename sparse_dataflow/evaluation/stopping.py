"""Incremental decoding of tokens to text, which ends at the first stop string."""

import codecs
from collections.abc import Sequence

from sparse_dataflow.data.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes the tokens of one continuation.

    Attributes:
      text: released text; complete once `stopped_by` is set.
      tokens: all tokens but the end-of-text token.
      stopped_by: reason of the end; "" until then.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        """Creates a decoder; stop strings may begin and end inside tokens."""
        self.text, self.stopped_by = "", ""
        self.tokens: list[int] = []
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def add(self, token: int) -> str:
        """Adds a token and returns the text that it releases; returns "" after the end."""
        if self.stopped_by:
            return ""
        if token == self._tokenizer.eot_id:
            return self.end("end")
        self.tokens.append(token)
        self._pending += self._decoder.decode(self._tokenizer.token_to_bytes(token))
        return self._release_certain()

    def end(self, reason: str) -> str:
        """Ends the text for `reason` unless it has ended; returns the remaining text."""
        if self.stopped_by:
            return ""
        self._pending += self._decoder.decode(b"", final=True)
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
        self.text += text
        return text
