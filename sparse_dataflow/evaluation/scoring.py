"""Log-likelihoods of many continuations of unequal length, in few batches of few shapes.

A request is (context tokens, continuation tokens). Requests are sorted by length and cut into
batches of about equally many tokens; lengths are rounded up to at most `BUCKETS` values, so that a
pass compiles few programs, chosen so that the least is padded. Padding stands behind the request,
where a causal model cannot see it. Only continuations meet the vocabulary; batches of one length
have about equally many of their tokens, and so one shape.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from sparse_dataflow.evaluation.trained import Trained
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.parallel import whole

Request = tuple[Sequence[int], Sequence[int]]
Score = tuple[float, bool]
"""Log-likelihood of the continuation in nats, and whether greedy decoding would have written it."""

Forward = Callable[[np.ndarray, np.ndarray], tuple[jax.Array, jax.Array]]
"""(int32 [B, T + 1] tokens, int32 [parts, S] places) -> float32 [parts, S] losses, bool [parts, S]
whether likeliest. Places of part i are indices into the targets, the last T tokens of each row, of
the i-th B / parts rows."""

BUCKETS = 6
"""Most lengths of a pass."""

_PADDING = 0.1  # Share of padded tokens that is not worth another program.
_MULTIPLE = 2
_PLACES_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one call of a forward takes.

    Attributes:
      context: the most tokens that the model sees at once.
      tokens: about how many a batch holds, as a micro-batch of the training does.
      parts: what the rows are dealt out to, as by a mesh; divides their number.
    """

    context: int
    tokens: int
    parts: int = 1

    def rows(self, length: int) -> int:
        """Rows of a batch of sequences of this length."""
        fit = max(1, self.tokens // length)
        return max(1, fit // self.parts) * self.parts

    def every_place(self, length: int) -> np.ndarray:
        """Int32 [parts, S]: all places of a batch of this length."""
        part = np.arange(self.rows(length) // self.parts * length, dtype=np.int32)
        return np.tile(part, (self.parts, 1))


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
            self.requests + other.requests,
            self.truncated + other.truncated,
            self.tokens + other.tokens,
            self.padded + other.padded,
            self.lengths | other.lengths,
        )


def forward_of(trained: Trained) -> Forward:
    """The model as one program on the default device, specialised to its layouts."""

    @jax.jit
    def program(params, tokens, places):
        found = whole.token_scores(
            trained.model, params, trained.tables, tokens, places.reshape(-1)
        )
        return tuple(part[None] for part in found)

    return lambda tokens, places: program(trained.params, tokens, places)


def limits_of(trained: Trained, parts: int = 1) -> Limits:
    """Batches as large as the training's micro-batches, which are known to fit the device."""
    training = trained.training
    rows = training.batch // training.micro_batches
    return Limits(training.sequence, rows * training.sequence, parts)


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
    batches = _batches(rows, lengths, buckets, limits)
    most = {length: 0 for length in buckets}
    for parts, length in batches:
        most[length] = max(most[length], *(sum(rows[i][1] for i in part) for part in parts))
    scores: list[Score] = [(0.0, True)] * len(rows)
    padded, running = 0, []
    for parts, length in batches:
        tokens, places = _arrays(parts, rows, length, limits, most[length])
        padded += tokens[:, 1:].size
        running.append((parts, forward(tokens, places)))
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
    cut: list[list[int]] = []
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


def _batches(rows, lengths, buckets, limits) -> list[tuple[list[list[int]], int]]:
    """(the requests of each part, length) of every batch.

    Cut longest first, so that the rows which the last batch of a length leaves go to the next; then
    dealt out anew among the batches of one length, so that all score about as many tokens.
    """
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    cut: dict[int, list[list[int]]] = {}
    start = 0
    while start < len(order):
        length = min(bucket for bucket in buckets if bucket >= lengths[order[start]])
        stop = start + limits.rows(length)
        cut.setdefault(length, []).append(order[start:stop])
        start = stop
    batches = []
    for length, groups in cut.items():
        chosen = sorted((i for group in groups for i in group), key=lambda i: rows[i][1])
        hands = len(groups) * limits.parts
        dealt = [chosen[hand::hands] for hand in range(hands)]
        batches += [(dealt[first :: len(groups)], length) for first in range(len(groups))]
    return batches


def _arrays(parts, rows, length, limits, most):
    """(int32 [rows, length + 1] tokens, int32 [parts, scored] places) of a batch."""
    size = limits.rows(length) // limits.parts
    tokens = np.zeros((limits.parts, size, length + 1), np.int32)
    places = np.zeros((limits.parts, _rounded(most, size * length)), np.int32)
    for part, chosen in enumerate(parts):
        found = []
        for row, i in enumerate(chosen):
            request, scored = rows[i]
            tokens[part, row, : len(request)] = request
            end = row * length + len(request) - 1
            found.append(np.arange(end - scored, end))
        if found:
            joined = np.concatenate(found)
            places[part, : len(joined)] = joined
    return tokens.reshape(-1, length + 1), places


def _rounded(count, most):
    return min(-(-count // _PLACES_MULTIPLE) * _PLACES_MULTIPLE, most)


def _collect(results, rows, scores):
    parts, outputs = results
    losses, largest = jax.device_get(outputs)
    for part, chosen in enumerate(parts):
        start = 0
        for i in chosen:
            stop = start + rows[i][1]
            loss = losses[part, start:stop].sum(dtype=np.float64)
            scores[i] = (-float(loss), bool(largest[part, start:stop].all()))
            start = stop
