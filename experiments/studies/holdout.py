"""Three splits of a corpus: training, tuning and held-out documents.

Studies choose hyperparameters on the tuning documents and report the loss of the held-out ones, so
a reported loss is not the best of many trials on the same text.
"""

import hashlib
from dataclasses import replace

import numpy as np

from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import ChainedDocuments, PickedDocuments
from sparse_dataflow.data.held_out import HOLD_OUT_EVERY, digests
from sparse_dataflow.files.errors import UserError

MOVED = 3
"""Twentieths of the documents that a small corpus moves from training to the held-out split."""

LARGE_VALIDATION = 1000
"""Documents of a validation split that is large enough to be cut in two."""


def three_splits(corpus: Corpus) -> tuple[Corpus, int]:
    """Returns the corpus with the tuning documents, then the held-out ones, as validation; and the
    number of tuning documents.

    A validation split of LARGE_VALIDATION documents is cut in two, and so is that of a stream, or
    one that data.validation names.  Any smaller one becomes the tuning split, and three twentieths
    of the training documents, chosen by the digest of their text, become the held-out split.

    Raises:
      UserError: the corpus has too few documents.
    """
    train, validation = corpus.train, corpus.validation
    count = len(validation)
    if corpus.ids:
        raise UserError(
            f"The corpus {corpus.name} has token ids; legal for a study that chooses "
            "hyperparameters: text, of which it holds out more documents."
        )
    # The training documents of a stream cannot be moved, as `train` is a sample of them.
    fixed = corpus.stream is not None or corpus.own_validation
    if fixed and count < 2:
        raise UserError(f"The held-out text of {corpus.name} is one document; legal: two or more.")
    if count >= LARGE_VALIDATION or fixed:
        tuning_documents = (count + 1) // 2
        order = np.concatenate([np.arange(0, count, 2), np.arange(1, count, 2)])
        validation = PickedDocuments(validation, order)
    else:
        hashes = digests(train)[:, 0]
        remainders = hashes % np.uint64(HOLD_OUT_EVERY)
        moved = (remainders >= 1) & (remainders <= MOVED)
        if moved.all() or not moved.any():
            raise UserError(
                f"The corpus {corpus.name} has {len(train)} training documents, too few for a "
                "held-out split of its own; legal: about 20 documents or more."
            )
        tuning_documents = count
        # In the order of their hashes, so that the first ones are a sample of all.
        ordered = np.argsort(hashes, kind="stable")
        held_out = PickedDocuments(train, ordered[moved[ordered]])
        validation = ChainedDocuments((validation, held_out))
        train = PickedDocuments(train, np.flatnonzero(~moved))
    content = hashlib.sha256(f"{corpus.content_hash} three splits {MOVED}".encode()).hexdigest()
    corpus = replace(corpus, train=train, validation=validation, content_hash=content)
    return corpus, tuning_documents
