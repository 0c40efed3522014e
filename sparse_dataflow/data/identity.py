"""What a model directory says of its tokens beyond the text of its tokenizer."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Identity:
    """Special ids of an imported tokenizer, and the files that it came with.

    Attributes:
      prefix: ids in front of every text, which the post-processor of tokenizer.json adds.
      ends: ids that end a generated text; () for the end of text alone.
      start: id that an empty prompt becomes where `prefix` is (); None for the end of text.
      files: (name, content) of the other files of the directory that an export writes back, such
        as generation_config.json. A content has one Latin-1 character a byte.
    """

    prefix: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    start: int | None = None
    files: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False)

    def content(self, name: str) -> bytes | None:
        """Returns the bytes of a file; None if the directory had none of this name."""
        text = dict(self.files).get(name)
        return None if text is None else text.encode("latin-1")

    def checked(self, vocab_size: int) -> "Identity":
        """Returns itself; raises ValueError if an id is not in the vocabulary."""
        ids = [*self.prefix, *self.ends, *([] if self.start is None else [self.start])]
        if not all(type(number) is int and 0 <= number < vocab_size for number in ids):
            raise ValueError(f"its special ids {ids} must be whole numbers under {vocab_size}")
        return self

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values that `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Identity":
        """Reads what `to_json` returned; raises KeyError, TypeError or ValueError otherwise."""
        files = tuple((str(name), str(content)) for name, content in fields["files"])
        return cls(tuple(fields["prefix"]), tuple(fields["ends"]), fields["start"], files)


NO_IDENTITY = Identity()
"""That of a tokenizer that was not imported."""
