"""A router that picks, for each prompt, the expert whose training text resembles it most.

Naive Bayes with equal priors: the expert whose text gives the prompt the largest probability, by
the bigram model of `Ngrams`.  SN40L (arXiv 2405.07518) has a language model as router.  A bigram
model needs no training run, no place on the device and no switch, and does not prefer the expert
with the best loss.  Tokens are those of GPT-2 for every expert, whatever its own tokenizer is:
probabilities over different vocabularies cannot be compared, and a bigram of bytes sees no words.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import gpt2_tokenizer
from sparse_dataflow.evaluation.ngrams import Ngrams

TEXT_BYTES = 2**22
"""UTF-8 bytes of an expert's training text that are counted: about a million tokens."""

_DOCUMENTS = 2**16
_DOCUMENT_CHARACTERS = 2**16


class Router:
    """Bigram models of the training texts of experts."""

    def __init__(self, corpora: Mapping[str, Corpus]):
        """Counts up to `TEXT_BYTES` of each expert's training documents, in a random order.

        Args:
          corpora: name of the expert -> its corpus.

        Raises:
          UserError: the package of GPT-2's tokenizer is not installed, or a document is damaged.
        """
        self._tokenizer = gpt2_tokenizer()
        self._ngrams = {name: self._counted(corpus) for name, corpus in corpora.items()}

    def _counted(self, corpus):
        documents = self._tokenizer.encode_documents(list(_sample(corpus, TEXT_BYTES)))
        tokens = np.concatenate([[self._tokenizer.eot_id], *documents])
        return Ngrams(tokens, self._tokenizer.vocab_size)

    def log_probabilities(self, texts: Sequence[str]) -> dict[str, list[float]]:
        """Returns, for each expert, the log-probability (nats) of each text in its training."""
        tokens = self._tokenizer.encode_batch(list(texts))
        requests = [([self._tokenizer.eot_id], text.tolist()) for text in tokens]
        return {
            name: [score for score, _ in ngrams.score_bigram(requests)[0]]
            for name, ngrams in self._ngrams.items()
        }

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """Returns the name of the expert of each text; the first of equal ones, as for ""."""
        scores = self.log_probabilities(texts)
        return [max(scores, key=lambda name: scores[name][i]) for i in range(len(texts))]


def _sample(corpus: Corpus, limit: int) -> Iterator[str]:
    """Yields training texts of about `limit` bytes; of a mixture, by its weights."""
    if corpus.mixture:
        for _, source, weight in corpus.mixture:
            yield from _sample(source, round(limit * weight))
        return
    count = len(corpus.train)
    # Seeded, so that a composition routes the same prompt alike in every process.
    order = np.random.default_rng(0).choice(count, min(count, _DOCUMENTS), replace=False)
    for number in order.tolist():
        text = corpus.train[number].text[:_DOCUMENT_CHARACTERS]
        yield text
        limit -= len(text.encode())
        if limit <= 0:
            return
