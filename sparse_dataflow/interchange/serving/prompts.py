"""How a reader takes a prompt and makes ids of text, and text of ids.

`readers.write_reader` puts this file into each reader of an export, so it has no imports of its own
in front: a reader is one file, and needs nothing of this package.
"""


class Text:
    """Makes ids of text and text of ids as config.json says under "text"."""

    def __init__(self, folder, rule):
        """Reads tokenizer.json."""
        from tokenizers import Tokenizer, decoders

        self.rule, self.silent = rule, set(rule["silent"])
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True  # Their names in a text are text.
        if hasattr(self.tokenizer.model, "dropout"):
            self.tokenizer.model.dropout = None
        if rule["joins"] == "ByteLevel":
            self.tokenizer.decoder = decoders.ByteLevel()

    def ids(self, text):
        """Returns the ids of a prompt, with those in front of it."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.rule["prefix"] + ids or [self.rule["start"]]

    def added(self, before, new):
        """Returns the text that new ids add to those before, up to the first end."""
        ends = [place for place, number in enumerate(new) if number in self.rule["ends"]]
        before, new = (
            [number for number in ids if number not in self.silent]
            for ids in (before, new[: ends[0]] if ends else new)
        )
        if self.rule["joins"] == "ByteLevel":
            return self._decoded(before + new)[len(self._decoded(before)) :]
        text, pending = "", b""
        last = [number for number in before if self._bytes(number) is None][-1:]
        for number in new:
            if (raw := self._bytes(number)) is not None:
                pending += raw
                continue
            text += pending.decode(errors="replace")
            text += self._decoded([*last, number])[len(self._decoded(last)) :]
            pending, last = b"", [number]
        return text + pending.decode(errors="replace")

    def _bytes(self, number):
        """Returns the bytes of a token that no token beside it changes, else None."""
        token = self.tokenizer.id_to_token(number) or ""
        if str(number) in self.rule["bytes"]:
            return bytes.fromhex(self.rule["bytes"][str(number)])
        return token.replace("\u2581", " ").encode() if self.rule["joins"] else None

    def _decoded(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def arguments(folder, fields, most):
    """Returns the arguments, with the `tokens` of the prompt, and its `Text`, None for ids."""
    import argparse
    import sys

    description = sys.modules["__main__"].__doc__
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=layout)
    parser.add_argument("prompt", help="a text, or ids with --ids")
    parser.add_argument("count", nargs="?", type=int, default=20, help="new tokens; 20 if left out")
    parser.add_argument("--ids", action="store_true", help="the prompt is token ids: '12 7 9'")
    given, text = parser.parse_args(), None
    vocabulary, words = fields["model"]["vocab_size"], given.prompt.split()
    if not given.ids and not fields.get("text"):
        parser.error("the tokenizer of this model is not known; give token ids, with --ids")
    if not given.ids:
        text = Text(folder, fields["text"])
        words = text.ids(given.prompt)
    elif not all(word.isdecimal() and int(word) < vocabulary for word in words):
        parser.error(f"--ids takes numbers from 0 to {vocabulary - 1}")
    if given.count < 1 or not 0 < len(words) < most:
        parser.error(
            f"a prompt of {len(words)} tokens and {given.count} new ones; legal: 1 or more of "
            f"each, and {most} in all"
        )
    if given.count > most - len(words):
        print(f"(The context of {most} tokens will be full.)", file=sys.stderr)
    given.tokens, given.count = list(map(int, words)), min(given.count, most - len(words))
    return given, text
