import pathlib
import random
import sys

import pytest

from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import Document

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(scope="session")
def prose():
    """An in-memory corpus of 40 + 6 documents of several languages and code."""
    words = ["the", "block", "of", "weights", "dünn", "疎", "через", "λ\tx", "=", "f(y)\n"]
    words += ["if", "123", "4.5e-6", "'q'", "\r\n", "🙂"]
    random_ = random.Random(0)

    def document(name):
        text = " ".join(random_.choices(words, k=random_.randint(50, 400)))
        return Document(name, text + "\n")

    return Corpus(
        name="prose",
        train=[document(f"t{i}") for i in range(40)],
        validation=[document(f"v{i}") for i in range(6)],
        content_hash="ab" * 32,
    )
