"""How exported programs make ids of text and text of ids: the rule of `Tokenizer`, as data."""

import numpy as np

from sparse_dataflow.data import tokenizer_library
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files


def text_rule(tokenizer: Tokenizer) -> json_files.JsonObject | None:
    """Returns the field "text" of a config.json, which the programs read, in the ids of the export.

    Returns:
      None where no text has tokens.
      "prefix": ids in front of a prompt.  "start": id that an empty prompt becomes.  "ends": ids
      that end a text.  "silent": ids that write nothing.  "joins": "ByteLevel" or "ByteFallback"
      where the text of ids is their bytes one after another; "" where it depends on the id before.
      "bytes": {id: bytes in hexadecimal} of single bytes and parts of characters, where it is not
      "ByteLevel".
    """
    if not tokenizer.has_text:
        return None
    ids = np.asarray(tokenizer.original_ids or range(tokenizer.vocab_size))
    theirs = lambda numbers: ids[np.asarray(numbers, np.int64)].tolist()  # noqa: E731
    joins, split = "ByteLevel", frozenset[int]()
    if tokenizer.original:
        fields = json_files.parse(tokenizer.original)
        if not tokenizer_library.joins_bytes(fields):
            joins, split = "", tokenizer.open_ids or split
        elif fields["model"].get("byte_fallback"):
            names = tokenizer_library.vocabulary(fields)
            tokens = (n for t, n in names.items() if tokenizer_library.BYTE_TOKEN.fullmatch(t))
            joins = "ByteFallback"
            split = frozenset(tokenizer.ids_from_original[[*tokens]].tolist())
    return {
        "prefix": theirs(tokenizer.identity.prefix),
        "start": int(ids[tokenizer.start_id]),
        "ends": sorted(theirs(sorted(tokenizer.ends))),
        "silent": sorted(theirs(np.flatnonzero(tokenizer.token_bytes == 0))),
        "joins": joins,
        "bytes": {str(ids[n]): tokenizer.token_to_bytes(n).hex() for n in sorted(split)},
    }
