"""Log-likelihoods of many continuations of different lengths, in batches of few shapes.

A request is (context tokens, continuation tokens), all of which but the last are read. What another
request begins with is read there, so a question whose choices are tokens is read once. Rows are
sorted by length and split into batches of about as many tokens. Lengths are rounded up to at most
`BUCKETS` values, which minimise padding, so a pass compiles few programs. Padding follows a row,
where a causal model does not see it. Only continuation tokens have logits; batches of one length
have about as many, and so one shape.

A bidirectional model scores a continuation by its pseudo-log-likelihood (arXiv 1910.14659): a row
for each of its tokens, which is hidden there.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

Request = tuple[Sequence[int], Sequence[int]]
Score = tuple[float, bool]
"""Log-likelihood of the continuation in nats, and whether greedy decoding generates it."""

Forward = Callable[[np.ndarray, np.ndarray, np.ndarray], Sequence[jax.Array]]
"""(int32 [B, T] tokens, int32 [shards, S] places and next tokens) -> float32 [shards, S] losses,
bool [shards, S] whether the next token is the most likely one. Shard i has rows i * B / shards to
(i + 1) * B / shards. Its places index the flattened tokens of its rows. Tokens may be PADDING for a
bidirectional model."""

PADDING = -1
"""Follows the tokens of a row that a bidirectional model reads."""

TOKENS = 2**13
"""Of a batch of a model that is of no run, whose context may be as long."""

BUCKETS = 6
"""Maximum number of sequence lengths in a pass."""

_PADDING = 0.1  # share of padding tokens that is cheaper than one more program
_LENGTH_MULTIPLE = 2
_POSITIONS_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class Limits:
    """Batch limits of a `Forward`.

    Attributes:
      context: context length in tokens.
      tokens: approximate tokens of a batch.
      shards: number of batch shards, e.g. of a mesh; divides the rows of every batch.
    """

    context: int
    tokens: int
    shards: int = 1

    def rows(self, length: int) -> int:
        """Returns the rows of a batch of sequences of this length."""
        fit = max(1, self.tokens // length)
        return max(1, fit // self.shards) * self.shards


@dataclasses.dataclass(frozen=True)
class Counts:
    """Statistics of scoring passes.

    Attributes:
      truncated: number of requests truncated on the left to fit the context.
      tokens: tokens of the rows that were read.
      padded: tokens processed, including padding.
      lengths: sequence lengths of the batches.
    """

    requests: int = 0
    truncated: int = 0
    tokens: int = 0
    padded: int = 0
    lengths: frozenset[int] = frozenset()

    def __add__(self, other: "Counts") -> "Counts":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Counts(*(a | b if isinstance(a, frozenset) else a + b for a, b in pairs))


def single_device_forward(trained: Model) -> Forward:
    """Returns a forward pass on the default device, specialised to the model's layouts."""

    @jax.jit
    def program(weights, tokens, *selected):
        ours = (array.reshape(-1) for array in selected)
        outputs = whole.token_scores(trained.model, weights, Batch(tokens), *ours)
        return tuple(output[None] for output in outputs)

    return functools.partial(program, weights_of(trained.model, trained.params))


def batch_limits(trained: Model, shards: int = 1) -> Limits:
    """Returns limits equal to the training's micro-batches, which fit the device; of a model that
    is of no run, a sequence or TOKENS."""
    training = trained.training
    tokens = training.batch // training.micro_batches * training.sequence
    if trained.record is None:
        tokens = max(training.sequence, min(tokens, TOKENS))
    return Limits(training.sequence, tokens, shards)


def score(
    forward: Forward, limits: Limits, requests: Sequence[Request]
) -> tuple[list[Score], Counts]:
    """Scores each continuation given its context, in the order of the requests.

    Requests longer than the context are truncated on the left.

    Raises:
      UserError: a continuation is longer than the context, or it or a context is empty.
    """
    texts = [_truncate(request, limits.context) for request in requests]
    rows = _rows(texts)
    lengths = [len(texts[row[-1]][0]) - 1 for row in rows]
    places = [sum(texts[i][1] for i in row) for row in rows]
    buckets = bucket_lengths(lengths, limits.context)
    batches = _batches(rows, lengths, places, buckets, limits)
    # One number of places for each length, so that batches of a length share a program.
    max_places = dict.fromkeys(buckets, 0)
    for shards, length in batches:
        counts = (sum(texts[i][1] for row in shard for i in row) for shard in shards)
        max_places[length] = max(max_places[length], *counts)
    scores: list[Score] = [(0.0, True)] * len(texts)
    padded, in_flight = 0, []
    for shards, length in batches:
        tokens, *selected, slices = _arrays(shards, texts, length, limits, max_places[length])
        padded += tokens.size
        in_flight.append((slices, forward(tokens, *selected)))
        if len(in_flight) > 2:  # Keeps the device busy while bounding the outputs in its memory.
            _collect(*in_flight.pop(0), scores)
    for results in in_flight:
        _collect(*results, scores)
    truncated = sum(len(a) + len(b) > limits.context + 1 for a, b in requests)
    return scores, Counts(len(texts), truncated, sum(lengths), padded, frozenset(buckets))


def pseudo_score(
    mask_id: int | None, forward: Forward, limits: Limits, requests: Sequence[Request]
) -> tuple[list[Score], Counts]:
    """Scores each continuation by the sum of the log-likelihoods of its tokens, each given all
    other tokens of context and continuation; see `score` for the rest.

    Args:
      mask_id: id that hides a token.
    """
    texts = [_truncate(request, limits.context) for request in requests]
    texts = [(tokens[-limits.context :], scored) for tokens, scored in texts]
    hidden = [
        (i, place)
        for i, (tokens, scored) in enumerate(texts)
        for place in range(len(tokens) - scored, len(tokens))
    ]
    # Longest first, so that the rows of a batch are of about one length.
    hidden.sort(key=lambda row: -len(texts[row[0]][0]))
    lengths = [len(texts[i][0]) for i, _ in hidden]
    buckets = bucket_lengths(lengths, limits.context)
    scores: list[Score] = [(0.0, True)] * len(texts)
    start = padded = 0
    while start < len(hidden):
        length = min(bucket for bucket in buckets if bucket >= lengths[start])
        rows = hidden[start : start + limits.rows(length)]
        tokens = np.full((limits.rows(length), length), PADDING, np.int32)
        each = len(tokens) // limits.shards
        shape = limits.shards, _round_up(each, _POSITIONS_MULTIPLE)
        places, targets = np.zeros((2, *shape), np.int32)
        # (shard, place in it) of each row.
        cuts = [divmod(number, each) for number in range(len(rows))]
        for number, ((i, place), cut) in enumerate(zip(rows, cuts)):
            text, _ = texts[i]
            tokens[number, : len(text)] = text
            tokens[number, place] = mask_id
            places[cut], targets[cut] = cut[1] * length + place, text[place]
        losses, is_largest = jax.device_get(forward(tokens, places, targets))
        for (i, _), cut in zip(rows, cuts):
            total, greedy = scores[i]
            scores[i] = total - float(losses[cut]), greedy and bool(is_largest[cut])
        start, padded = start + len(rows), padded + tokens.size
    truncated = sum(len(a) + len(b) > limits.context for a, b in requests)
    return scores, Counts(len(texts), truncated, sum(lengths), padded, frozenset(buckets))


def bucket_lengths(lengths: Sequence[int], context: int, buckets: int = BUCKETS) -> list[int]:
    """Returns the fewest sequence lengths, ascending, that pad `lengths` by at most a tenth.

    Returns at most `buckets` lengths, which are even or equal to `context`. They minimise the
    padding among all choices of as many lengths (dynamic programming).
    """
    rounded = [min(_round_up(length, _LENGTH_MULTIPLE), context) for length in lengths]
    values, counts = np.unique(rounded, return_counts=True)
    # best[k][j]: padded tokens of the first j values in k buckets, each as long as its last value.
    best = [np.array([0.0, *[np.inf] * len(values)])]
    # splits[k][j]: number of values in the first k of these k + 1 buckets.
    splits: list[list[int]] = []
    total = np.concatenate([[0], np.cumsum(counts)])
    max_tokens = (1 + _PADDING) * sum(lengths)
    while len(splits) < min(buckets, len(values)) and best[-1][-1] > max_tokens:
        row, split = [np.inf], [0]
        for j in range(1, len(values) + 1):
            # The last bucket has the values from i to j, each padded to the length of value j.
            costs = best[-1][:j] + values[j - 1] * (total[j] - total[:j])
            split.append(int(np.argmin(costs)))
            row.append(costs[split[-1]])
        best.append(np.array(row))
        splits.append(split)
    bucket_ends, end = [], len(values)
    for split in reversed(splits):
        bucket_ends.append(int(values[end - 1]))
        end = split[end]
    return sorted(bucket_ends)


def _truncate(request, context) -> tuple[np.ndarray, int]:
    """Returns (at most context + 1 tokens, number of scored tokens at their end)."""
    before, after = request
    if len(after) > context:
        raise UserError(
            f"A continuation of {len(after)} tokens does not fit the model's context of {context}. "
            "Shorten the answers of the task, or evaluate a model of a longer training.sequence."
        )
    if not len(before) or not len(after):
        raise UserError("A continuation and its context cannot be scored without tokens.")
    return np.asarray([*before, *after], np.int32)[-(context + 1) :], len(after)


def _rows(texts) -> list[list[int]]:
    """Returns the requests of each row, of the fewest rows; what the last one reads has all."""
    read = [tuple(tokens[:-1].tolist()) for tokens, _ in texts]
    rows: list[list[int]] = []
    # What a sequence begins with is sorted before it, so in this order it follows it.
    for i in sorted(range(len(read)), key=read.__getitem__, reverse=True):
        if not rows or read[rows[-1][0]][: len(read[i])] != read[i]:
            rows.append([])
        rows[-1].append(i)
    return [row[::-1] for row in rows]


def _batches(rows, lengths, places, buckets, limits) -> list[tuple[list[list[list[int]]], int]]:
    """Returns (rows of each shard, length) of every batch.

    Rows are split longest first, so the last batch of a length is filled with shorter ones.  Those
    of a length go to its shards by their scored tokens, so that all shards score about as many.
    """
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    by_length: dict[int, list[int]] = {}
    start = 0
    while start < len(order):
        length = min(bucket for bucket in buckets if bucket >= lengths[order[start]])
        stop = start + limits.rows(length)
        by_length.setdefault(length, []).extend(order[start:stop])
        start = stop
    batches = []
    for length, numbers in by_length.items():
        by_places = sorted(numbers, key=places.__getitem__)
        count = -(-len(numbers) // limits.rows(length))
        step = count * limits.shards
        # Every `step`-th row in the order of scored tokens, so that all shards score about as many.
        shards = [[rows[i] for i in by_places[shard::step]] for shard in range(step)]
        batches += [(shards[first::count], length) for first in range(count)]
    return batches


def _arrays(shards, texts, length, limits, max_places):
    """Returns (tokens, places, next tokens, where each request's of these are) of a batch."""
    shard_rows = limits.rows(length) // limits.shards
    tokens = np.zeros((limits.shards, shard_rows, length), np.int32)
    size = _round_up(max_places, _POSITIONS_MULTIPLE)
    (places, targets), slices = np.zeros((2, limits.shards, size), np.int32), []
    for shard, rows in enumerate(shards):
        start = 0
        for number, row in enumerate(rows):
            for i in row:  # The last one is the longest.
                text, scored = texts[i]
                cut, end = (shard, slice(start, start + scored)), len(text) - 1
                tokens[shard, number, :end] = text[:-1]
                places[cut] = np.arange(end - scored, end) + number * length
                targets[cut] = text[-scored:]
                slices.append((i, cut))
                start += scored
    return tokens.reshape(-1, length), places, targets, slices


def _round_up(count, multiple):
    return -(-count // multiple) * multiple


def _collect(slices, outputs, scores):
    losses, is_largest = jax.device_get(outputs)
    for i, cut in slices:
        loss = losses[cut].sum(dtype=np.float64)
        scores[i] = (-float(loss), bool(is_largest[cut].all()))
