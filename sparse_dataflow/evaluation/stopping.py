"""Text from tokens as they come: whole characters, and an end at the first stop string."""

import codecs
from collections.abc import Sequence

from sparse_dataflow.data.tokenizer import Tokenizer


class Writer:
    """Collects the tokens of one continuation.

    Attributes:
      text: what is certain so far; all of it once `stopped_by` is set.
      tokens: every token but an end of text.
      stopped_by: "" while it goes on.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        """Stop strings may begin and end anywhere within tokens."""
        self.text, self.stopped_by = "", ""
        self.tokens: list[int] = []
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, token: int) -> str:
        """One token more; returns the text that became certain by it, "" after the end."""
        if self.stopped_by:
            return ""
        if token == self._tokenizer.eot_id:
            return self.end("end")
        self.tokens.append(token)
        self._held += self._decoder.decode(self._tokenizer.bytes_of(token))
        return self._settle()

    def end(self, reason: str) -> str:
        """Ends it for `reason` unless it has ended; returns the text that was held back."""
        if self.stopped_by:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        text = self._settle()
        if not self.stopped_by:
            self.stopped_by = reason
            text += self._release(len(self._held))
        return text

    def _settle(self):
        found = [place for place in map(self._held.find, self._stop) if place >= 0]
        if found:
            self.stopped_by = "stop"
            return self._release(min(found))
        return self._release(len(self._held) - self._possible_stop())

    def _possible_stop(self):
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, length):
        text, self._held = self._held[:length], self._held[length:]
        self.text += text
        return text
