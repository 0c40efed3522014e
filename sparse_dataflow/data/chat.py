"""Examples of prompts with answers, and chat templates, which render a conversation as text.

Templates are untrusted text of a model's directory.  They run in a process with limits, in Jinja's
sandbox with the settings of `transformers`, except that there is no clock, so that a conversation
has the same text on every day.  A template that needs a date gets a fixed one.
"""

import dataclasses
import datetime
import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sparse_dataflow.data import template_sandbox
from sparse_dataflow.data.template_child import CLOSE, OPEN
from sparse_dataflow.files.errors import UserError, first_line

Message = Mapping[str, object]

USER, ASSISTANT = "user", "assistant"

_LOG = logging.getLogger(__name__)

_MARK, _NEXT = "\ufdd2content\ufdd3", "\ufdd4next\ufdd5"
"""Characters that Unicode reserves for a program's own use, so that no text has them."""

_TESTS_THE_CLOCK = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")
_DATE = datetime.date(2024, 7, 26)
"""Date for templates that ask for it in any case; it is the default of Llama 3.1's."""


class Rendered(NamedTuple):
    """The text of a conversation.

    Attributes:
      pieces: (text, whether it is an answer), in order.
      changed: answers that the template writes otherwise once further messages follow, so that they
        are no answers here.
      unprompted: answers that do not follow the prompt that the template makes for them, such as a
        prompt that begins a thought.
    """

    pieces: list[tuple[str, bool]]
    changed: int = 0
    unprompted: int = 0


def checked_example(record: object) -> str:
    """Returns an example in canonical JSON.

    An example is {"prompt": string, "answer": string}, or {"messages": [{"role": string, "content":
    string}, ...]} with an answer of the assistant; other fields are left out.

    Raises:
      ValueError: it is no example; the message completes "FILE, line N, ".
    """
    if not isinstance(record, dict) or not {"prompt", "answer", "messages"} & set(record):
        raise ValueError('has neither "prompt" and "answer" nor "messages"')
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ValueError('needs "messages", a list of {"role": string, "content": string}')
        answers = [m["content"] for m in messages if m["role"] == ASSISTANT]
        if not answers:
            raise ValueError(f'has no message of the role "{ASSISTANT}"')
        if not all(answer.strip() for answer in answers):
            raise ValueError("has an empty answer")
        return _canonical({"messages": messages})
    for name in ("prompt", "answer"):
        if not isinstance(record.get(name), str):
            raise ValueError(f'has no field "{name}" with a string in it')
        if not record[name].strip():
            raise ValueError(f"has an empty {name}")
    return _canonical({name: record[name] for name in ("prompt", "answer")})


def _canonical(example):
    text = json.dumps(example, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has an unpaired surrogate") from None
    return text


def _is_message(message):
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it may name.

    Attributes:
      special_tokens: (name such as "eos_token", its text) pairs.
    """

    text: str
    special_tokens: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        pairs = [word for pair in self.special_tokens for word in pair]
        if not all(isinstance(word, str) for word in (self.text, *pairs)):
            raise ValueError("a chat template and its special tokens must be text")

    @functools.cached_property
    def _date(self) -> str:
        """The date for a template that asks for it in any case."""
        if "strftime_now" not in self.text or _TESTS_THE_CLOCK.search(self.text):
            return ""
        _LOG.info("the chat template asks for the date, and gets %s", _DATE.isoformat())
        return _DATE.isoformat()

    def _marked(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Returns the text of messages, with marks around what the template says is generated."""
        values = {
            "messages": list(map(dict, messages)),
            "tools": None,
            "documents": None,
            "add_generation_prompt": prompt,
            **dict(self.special_tokens),
        }
        try:
            return template_sandbox.render(self.text, values, date=self._date)
        except UserError as error:
            reason = f"The chat template cannot render this: {first_line(error)}"
            raise type(error)(reason) from None

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Returns the text of messages.

        Args:
          messages: have "role" and "content".
          prompt: whether to begin the answer that the model is to give.

        Raises:
          UserError: the template refuses the messages or is not valid.
        """
        return self._marked(messages, prompt).replace(OPEN, "").replace(CLOSE, "")

    def answers(self, messages: Sequence[Message]) -> Rendered:
        """Returns the text of a conversation, divided at the answers of the assistant.

        An answer is what the tags {% generation %} of the template mark. Without them it follows
        the prompt that the template makes of the messages before it, and has the end of the turn.

        Raises:
          UserError: see `render`.
        """
        marked = self._marked(messages)
        numbers = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        if OPEN in marked:
            rows = [row.split(CLOSE) for row in marked.split(OPEN)]
            pieces = [(rows[0][0], False)]
            for answer, *rest in rows[1:]:
                pieces += [(answer, True), ("".join(rest), False)]
            missing = max(0, len(numbers) - len(rows) + 1)
            return Rendered([piece for piece in pieces if piece[0]], missing)
        pieces, end, changed, unprompted = [], 0, 0, 0
        for number in numbers:
            place = self._answer(marked, messages, number)
            if place is None or place[1] < end:
                changed += 1
                continue
            prompt, start, stop = place
            first = start if prompt is None else prompt
            unprompted += prompt is None
            pieces += [(marked[end:first], False), (marked[first:stop], True)]
            end = stop
        pieces.append((marked[end:], False))
        return Rendered([piece for piece in pieces if piece[0]], changed, unprompted)

    def _answer(self, text, messages, number):
        """Finds an answer in the text of a conversation.

        Returns:
          (end of its prompt or None if the text has another prompt, start of its content, end of
          its turn); None if the text does not have the answer.
        """
        content, before = messages[number]["content"], messages[:number]
        places = self._content(text, messages, number)
        if places is None or content.strip() not in text[slice(*places)]:
            return None
        start, stop = places
        prompted = self._tried(before, True)
        fits = prompted is not None and text.startswith(prompted) and len(prompted) <= start
        prompt = len(prompted) if fits else None
        # What follows the answer with and without later messages ends its turn.
        alone = [*before, messages[number]]
        tail = self._after(alone, number)
        if tail is not None:
            stop += _common(self._turn(tail, alone), text[stop:])
        return prompt, start, stop

    def _turn(self, tail, messages):
        """Returns what of `tail`, the text behind the last message, belongs to its turn.

        A template may write the header of an answer behind every conversation.
        """
        following = {"role": USER, "content": _NEXT}
        first, longer = self._tried([following]), [*messages, following]
        rest = self._after(longer, len(messages) - 1)
        if first is None or rest is None or _NEXT not in rest or rest.startswith(tail):
            return tail
        header, other = (whole[: whole.index(_NEXT)] for whole in (rest, first))
        # Their common end is the header of the next message; what is in front of it ends the turn.
        shared = header[len(header) - _common(header[::-1], other[::-1]) :]
        # A begin of text in front of the first header may end with the brackets of an end of turn.
        shared = shared if shared == other else shared.lstrip("|>])}")
        turn = header[: len(header) - len(shared)]
        return turn if turn and tail.startswith(turn) else tail

    def _content(self, text, messages, number):
        """Returns where the text has the content of a message: what changes with it."""
        other = dict(messages[number], content=_MARK)
        changed = self._tried([*messages[:number], other, *messages[number + 1 :]])
        if changed is None or _MARK not in changed:
            return None
        # No content begins as _MARK does, so both texts differ from its first character on.
        start = _common(text, changed)
        rest = len(changed) - changed.rindex(_MARK) - len(_MARK)
        # What follows must not depend on the content, as where it ends would not be known.
        if rest and text[-rest:] != changed[-rest:]:
            return None
        return start, len(text) - rest

    def _after(self, messages, number):
        """Returns the text behind the content of a message; None if the template drops it."""
        text = self._tried(messages)
        places = None if text is None else self._content(text, messages, number)
        return None if places is None else text[places[1] :]

    def _tried(self, messages, prompt=False):
        try:
            return self.render(messages, prompt)
        except template_sandbox.LimitExceeded:  # It would take as long with each conversation.
            raise
        except UserError:
            return None


def _common(left: str, right: str) -> int:
    """Returns the length of the longest common start."""
    pairs = enumerate(zip(left, right))
    return next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))
