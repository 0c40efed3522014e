"""Text of few symbols, so that little of a small model is embedding and output layer.

Letters are lower case and digits are 0; the commonest symbols stay, all others are one.
"""

import dataclasses

import numpy as np

from sparse_dataflow.data import cache
from sparse_dataflow.data.corpora import load_corpus

from ..holdout import three_splits


@dataclasses.dataclass(frozen=True)
class Text:
    """Symbols of three splits, uint8.

    Attributes:
      splits: "train", "tuning" for the choice of rates, "held_out" for what is reported.
      symbols: which text a symbol stands for, by id; the last one is all others.
      content_hash: of the corpus.
    """

    splits: dict[str, np.ndarray]
    symbols: str
    content_hash: str

    def batches(self, rng: np.random.Generator, steps: int, batch: int, length: int) -> np.ndarray:
        """Returns int32 [steps, batch, length + 1] windows of the training text."""
        train = self.splits["train"]
        starts = rng.integers(0, len(train) - length, (steps, batch, 1))
        return train[starts + np.arange(length + 1)].astype(np.int32)

    def windows(self, split: str, length: int, most: int = 2**14) -> np.ndarray:
        """Returns int32 [windows, length + 1] of a split, evenly spaced, at most `most`."""
        ids = self.splits[split]
        count = min(most, (len(ids) - 1) // length)
        starts = np.linspace(0, len(ids) - length - 1, count).astype(int)
        return ids[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def read(corpus: str, vocabulary: int) -> Text:
    """Returns a corpus in `vocabulary` symbols.

    Raises:
      UserError: the corpus cannot be read or split.
    """
    loaded, tuning = three_splits(load_corpus(corpus, cache.FOLDER))
    folded = bytes(ord("0") if chr(i).isdigit() else ord(chr(i).lower()) for i in range(128))
    folded += bytes(range(128, 256))

    def joined(documents, start, stop):
        text = b"\0".join(documents[i].text.encode() for i in range(start, stop))
        return np.frombuffer(text.translate(folded), np.uint8)

    count = len(loaded.validation)
    splits = {
        "train": joined(loaded.train, 0, len(loaded.train)),
        "tuning": joined(loaded.validation, 0, tuning),
        "held_out": joined(loaded.validation, tuning, count),
    }
    common = np.argsort(-np.bincount(splits["train"], minlength=256), kind="stable")
    common = common[: vocabulary - 1]
    ids = np.full(256, vocabulary - 1, np.uint8)
    ids[common] = np.arange(len(common))
    symbols = "".join(map(chr, common))
    return Text({k: ids[v] for k, v in splits.items()}, symbols, loaded.content_hash)
