"""Log-likelihoods of many continuations of unequal length, in few batches of few shapes.

A request is (context tokens, continuation tokens). Requests are sorted by length and cut into
batches of about equally many tokens; lengths are rounded up to at most `BUCKETS` values, so that a
pass compiles few programs, chosen so that the least is padded. Padding stands behind the request,
where a causal model cannot see it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from sparse_dataflow.errors import UserError
from sparse_dataflow.evaluation.trained import Trained
from sparse_dataflow.execution import whole

Request = tuple[Sequence[int], Sequence[int]]
Score = tuple[float, bool]
"""Log-likelihood of the continuation in nats, and whether greedy decoding would have written it."""

Forward = Callable[[np.ndarray], tuple[jax.Array, jax.Array]]
"""int32 [B, T + 1] tokens -> float32 [B, T] losses of the last T, bool [B, T] whether likeliest."""

BUCKETS = 6
"""Most lengths of a pass."""

_PADDING = 0.1  # Share of padded tokens that is not worth another program.
_MULTIPLE = 2


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one call of a forward takes.

    Attributes:
      context: the most tokens that the model sees at once.
      tokens: about how many a batch holds, as a micro-batch of the training does.
      rows_multiple: the number of rows is a multiple of this, as a mesh may ask for.
    """

    context: int
    tokens: int
    rows_multiple: int = 1

    def rows(self, length: int) -> int:
        """Rows of a batch of sequences of this length."""
        fit = max(1, self.tokens // length)
        return max(1, fit // self.rows_multiple) * self.rows_multiple


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a pass did.

    Attributes:
      requests: how many were scored.
      truncated: how many lost tokens on the left to fit the context.
      tokens: that the requests hold, after truncation.
      padded: tokens that the programs ran over, padding included.
      lengths: the sequence lengths that were run.
    """

    requests: int = 0
    truncated: int = 0
    tokens: int = 0
    padded: int = 0
    lengths: frozenset[int] = frozenset()

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            *(getattr(self, f.name) + getattr(other, f.name) for f in _COUNTED),
            lengths=self.lengths | other.lengths,
        )


_COUNTED = dataclasses.fields(Counts)[:-1]


def forward_of(trained: Trained) -> Forward:
    """The model as one program on the default device, specialised to its layouts."""
    program = jax.jit(
        lambda params, tokens: whole.token_scores(trained.model, params, trained.tables, tokens)
    )
    return lambda tokens: program(trained.params, tokens)


def limits_of(trained: Trained) -> Limits:
    """Batches as large as the training's micro-batches, which are known to fit the device."""
    training = trained.training
    rows = training.batch // training.micro_batches
    return Limits(training.sequence, rows * training.sequence)


def score(
    forward: Forward, limits: Limits, requests: Sequence[Request]
) -> tuple[list[Score], Counts]:
    """Scores each continuation after its context; in the order of the requests.

    A request longer than the model's context loses tokens on the left.

    Raises:
      UserError: a continuation alone is longer than the context, or a context is empty.
    """
    rows = [_fitted(request, limits.context) for request in requests]
    lengths = [len(tokens) - 1 for tokens, _ in rows]
    buckets = bucket_lengths(lengths, limits.context)
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    scores: list[Score] = [(0.0, True)] * len(rows)
    padded, running = 0, []
    for chosen, length in _batches(order, lengths, buckets, limits):
        batch = np.zeros((limits.rows(length), length + 1), np.int32)
        for row, i in enumerate(chosen):
            batch[row, : len(rows[i][0])] = rows[i][0]
        padded += batch[:, 1:].size
        running.append((chosen, forward(batch)))
        if len(running) > 2:  # The device works ahead, without holding every result.
            _collect(running.pop(0), rows, scores)
    for results in running:
        _collect(results, rows, scores)
    truncated = sum(len(a) + len(b) > limits.context + 1 for a, b in requests)
    counts = Counts(len(rows), truncated, sum(lengths), padded, frozenset(buckets))
    return scores, counts


def bucket_lengths(lengths: Sequence[int], context: int, buckets: int = BUCKETS) -> list[int]:
    """As few sequence lengths, ascending, as pad these lengths by at most a tenth in all.

    There are never more than `buckets`; those found pad the least of all as many, by dynamic
    programming. They are even, or the context itself.
    """
    rounded = [min(-(-length // _MULTIPLE) * _MULTIPLE, context) for length in lengths]
    values, counts = np.unique(rounded, return_counts=True)
    # best[k][j]: padded tokens of the first j values in k buckets, each as long as its last value.
    best = [np.array([0.0, *[np.inf] * len(values)])]
    cut = []
    total = np.concatenate([[0], np.cumsum(counts)])
    enough = (1 + _PADDING) * sum(lengths)
    while len(cut) < min(buckets, len(values)) and best[-1][-1] > enough:
        row, where = [np.inf], [0]
        for j in range(1, len(values) + 1):
            costs = best[-1][:j] + values[j - 1] * (total[j] - total[:j])
            where.append(int(np.argmin(costs)))
            row.append(costs[where[-1]])
        best.append(np.array(row))
        cut.append(where)
    chosen, end = [], len(values)
    for where in reversed(cut):
        chosen.append(int(values[end - 1]))
        end = where[end]
    return sorted(chosen)


def _fitted(request, context) -> tuple[np.ndarray, int]:
    """(at most context + 1 tokens, how many of the last are scored)."""
    before, after = request
    if len(after) > context:
        raise UserError(
            f"A continuation of {len(after)} tokens cannot be scored: the model sees {context} "
            "at once. Shorten that task's answers, or evaluate a model of a longer --sequence."
        )
    if not len(before):
        raise UserError("A continuation cannot be scored after no token at all.")
    return np.asarray([*before, *after], np.int32)[-(context + 1) :], len(after)


def _batches(order, lengths, buckets, limits) -> Iterator[tuple[list[int], int]]:
    """Longest first, so that the rows which the last batch of a length leaves go to the next."""
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        length = next(bucket for bucket in buckets if bucket >= longest)
        stop = start + limits.rows(length)
        yield order[start:stop], length
        start = stop


def _collect(results, rows, scores):
    chosen, outputs = results
    losses, largest = jax.device_get(outputs)
    for row, i in enumerate(chosen):
        tokens, scored = rows[i]
        end = len(tokens) - 1
        span = slice(end - scored, end)
        loss = losses[row, span].sum(dtype=np.float64)
        scores[i] = (-float(loss), bool(largest[row, span].all()))
