"""Examples of prompts with answers, and chat templates, which render a conversation as text.

Templates are untrusted text of a model's directory.  They run in Jinja's sandbox with the settings
of `transformers`, except that there is no clock, so that a conversation has the same text on every
day.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes

from sparse_dataflow.data.template_sandbox import TemplateSandbox
from sparse_dataflow.files.errors import UserError, first_line

Message = Mapping[str, Any]

USER, ASSISTANT = "user", "assistant"


class Rendered(NamedTuple):
    """The text of a conversation.

    Attributes:
      pieces: (text, whether it is an answer), in order.
      changed: answers that the template writes otherwise once further messages follow, so that they
        are no answers here.
    """

    pieces: list[tuple[str, bool]]
    changed: int = 0


def checked_example(record: Any) -> str:
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
      text: of the template.
      special_tokens: (name such as "eos_token", its text) pairs.
    """

    text: str
    special_tokens: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        pairs = [word for pair in self.special_tokens for word in pair]
        if not all(isinstance(word, str) for word in (self.text, *pairs)):
            raise ValueError("a chat template and its special tokens must be text")

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        environment = TemplateSandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.globals["raise_exception"] = _raise
        return environment.from_string(self.text)

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Returns the text of messages.

        Args:
          messages: have "role" and "content".
          prompt: whether to begin the answer that the model is to give.

        Raises:
          UserError: the template refuses the messages or is not valid.
        """
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=prompt,
                **dict(self.special_tokens),
            )
        except Exception as error:  # A template can fail in any way.
            raise UserError(f"The chat template cannot render this: {first_line(error)}") from None

    def answers(self, messages: Sequence[Message]) -> Rendered:
        """Returns the text of a conversation, divided at the answers of the assistant.

        An answer is what follows the prompt that the template makes of the messages before it, up
        to the end of the assistant's turn.

        Raises:
          UserError: see `render`.
        """
        text = self.render(messages)
        pieces: list[tuple[str, bool]] = []
        end = changed = 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before, through = messages[:number], self.render(messages[: number + 1])
            prompts = [self.render(before, True)] + ([self.render(before)] if before else [])
            prompt = next((p for p in prompts if through.startswith(p)), None)
            if prompt is None or len(prompt) < end or not text.startswith(through):
                changed += 1
                continue
            pieces.append((text[end : len(prompt)], False))
            end = len(through)
            pieces.append((text[len(prompt) : end], True))
        pieces.append((text[end:], False))
        return Rendered([piece for piece in pieces if piece[0]], changed)


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} of some templates, which marks answers; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        """Returns the nodes inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message):
    raise jinja2.TemplateError(message)
