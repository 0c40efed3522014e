"""Log-likelihoods of many continuations of different lengths, in batches of few shapes.

A request is (context tokens, continuation tokens). Requests are sorted by length and split into
batches of about the same number of tokens. Lengths are rounded up to at most `BUCKETS` values,
chosen to minimise padding, so a pass compiles few programs. Padding follows the request, where a
causal model does not see it. Logits are computed for continuation tokens only; batches of the same
length have about the same number of them, and therefore one shape.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.stacks import split_layouts, weights_of
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

Request = tuple[Sequence[int], Sequence[int]]
Score = tuple[float, bool]
"""Log-likelihood of the continuation in nats, and whether greedy decoding generates it."""

Forward = Callable[[Batch, np.ndarray], tuple[jax.Array, jax.Array]]
"""(tokens and targets, int32 [shards, S] places) -> float32 [shards, S] losses, bool [shards, S]
whether the target is the most likely token. Shard i has rows i * B / shards to (i + 1) * B /
shards. Its places index the flattened targets of its rows."""

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

    def all_positions(self, length: int) -> np.ndarray:
        """Returns all positions of a batch of this length, int32 [shards, S]."""
        positions = np.arange(self.rows(length) // self.shards * length, dtype=np.int32)
        return np.tile(positions, (self.shards, 1))


@dataclasses.dataclass(frozen=True)
class Counts:
    """Statistics of scoring passes.

    Attributes:
      truncated: number of requests truncated on the left to fit the context.
      tokens: tokens of the requests after truncation.
      padded: tokens processed, including padding.
      lengths: sequence lengths of the batches.
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


def single_device_forward(trained: Model) -> Forward:
    """Returns a forward pass on the default device, specialised to the model's layouts."""

    params, layouts = split_layouts(trained.params)

    @jax.jit
    def program(params, batch, places):
        weights = weights_of(params, layouts)
        outputs = whole.token_scores(trained.model, weights, batch, places.reshape(-1))
        return tuple(output[None] for output in outputs)

    return functools.partial(program, params)


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
    rows = [_truncate(request, limits.context) for request in requests]
    lengths = [len(tokens) - 1 for tokens, _ in rows]
    buckets = bucket_lengths(lengths, limits.context)
    batches = _batches(rows, lengths, buckets, limits)
    max_positions = dict.fromkeys(buckets, 0)
    for shards, length in batches:
        counts = (sum(rows[i][1] for i in shard) for shard in shards)
        max_positions[length] = max(max_positions[length], *counts)
    scores: list[Score] = [(0.0, True)] * len(rows)
    padded, in_flight = 0, []
    for shards, length in batches:
        batch, positions = _arrays(shards, rows, length, limits, max_positions[length])
        padded += batch.targets.size
        in_flight.append((shards, forward(batch, positions)))
        if len(in_flight) > 2:  # Keeps the device busy while bounding the outputs in its memory.
            _collect(in_flight.pop(0), rows, scores)
    for results in in_flight:
        _collect(results, rows, scores)
    truncated = sum(len(a) + len(b) > limits.context + 1 for a, b in requests)
    return scores, Counts(len(rows), truncated, sum(lengths), padded, frozenset(buckets))


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


def _batches(rows, lengths, buckets, limits) -> list[tuple[list[list[int]], int]]:
    """Returns (request indices of each shard, length) of every batch.

    First splits the requests longest first, so the rows left over in the last batch of a length are
    filled with shorter requests. Then distributes the requests of each length over its shards by
    their number of scored tokens, so that all shards score about the same number.
    """
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    requests: dict[int, list[int]] = {}
    batch_counts: dict[int, int] = {}
    start = 0
    while start < len(order):
        length = min(bucket for bucket in buckets if bucket >= lengths[order[start]])
        stop = start + limits.rows(length)
        requests.setdefault(length, []).extend(order[start:stop])
        batch_counts[length] = batch_counts.get(length, 0) + 1
        start = stop
    batches = []
    for length, count in batch_counts.items():
        by_scored = sorted(requests[length], key=lambda i: rows[i][1])
        shard_count = count * limits.shards
        shards = [by_scored[shard::shard_count] for shard in range(shard_count)]
        batches += [(shards[first::count], length) for first in range(count)]
    return batches


def _arrays(shards, rows, length, limits, max_positions):
    """Returns (tokens and targets, int32 [shards, S] positions) of a batch."""
    shard_rows = limits.rows(length) // limits.shards
    tokens = np.zeros((limits.shards, shard_rows, length + 1), np.int32)
    size = min(_round_up(max_positions, _POSITIONS_MULTIPLE), shard_rows * length)
    positions = np.zeros((limits.shards, size), np.int32)
    for shard, indices in enumerate(shards):
        start = 0
        for row, i in enumerate(indices):
            request, scored = rows[i]
            tokens[shard, row, : len(request)] = request
            end = row * length + len(request) - 1
            positions[shard, start : start + scored] = np.arange(end - scored, end)
            start += scored
    return Batch.from_windows(tokens.reshape(-1, length + 1)), positions


def _round_up(count, multiple):
    return -(-count // multiple) * multiple


def _collect(results, rows, scores):
    shards, outputs = results
    losses, is_largest = jax.device_get(outputs)
    for shard, indices in enumerate(shards):
        start = 0
        for i in indices:
            stop = start + rows[i][1]
            loss = losses[shard, start:stop].sum(dtype=np.float64)
            scores[i] = (-float(loss), bool(is_largest[shard, start:stop].all()))
            start = stop
