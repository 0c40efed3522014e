"""The losses of held-out windows, of one corpus or of each of a mixture."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax.numpy as jnp

from sparse_dataflow.core import sums
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training.programs import Compiled, EvalBatches, HeldOut, TrainingData


class BatchSums(NamedTuple):
    """Sums over the targets of a held-out batch.

    Attributes:
      nats: weighted losses.
      weights: of the targets.
      correct: weights of the targets that are a likeliest token; 0 where it is not measured.
    """

    nats: float
    weights: float
    correct: float = 0.0


def batch_sums(programs: Compiled, state: TrainState, batches: Iterable[Batch]) -> list[BatchSums]:
    """Returns the sums of `batches`, over all processes.

    The executor has put the batches, whose targets have weights.
    """
    rest, sums_of = programs.rest(state), []
    for batch in batches:
        metrics = programs.eval_step(state.params, rest, batch)
        loss, *correct = (metrics[n].number() for n in ("loss", "correct") if n in metrics)
        sums_of.append(BatchSums(loss, float(jnp.sum(batch.token_weights)), *correct))
    return sums_of


def losses(
    data: TrainingData,
    windows: Callable[[TrainingData | HeldOut], tuple[EvalBatches, int]],
    measure: Callable[[EvalBatches], list[BatchSums]],
    masked: bool = False,
) -> dict[str, float]:
    """Returns "loss", in nats a token, and "bits_per_byte"; of a mixture also those of each corpus,
    with "/" and its name, and of one corpus "bits_per_byte_error".

    Of a masked model these are of the hidden tokens, and "accuracy" is the share of them that are
    the likeliest token.

    The error is the standard error of a mean over the batches, whose windows are of different
    documents; see `sums.mean`.

    The loss of a mixture is that of text drawn with its weights.

    Args:
      data: the corpora.
      windows: `data`, or a `HeldOut` of its mixture -> the windows and their UTF-8 bytes.
      measure: windows -> `batch_sums` of the batches.
      masked: whether the model predicts hidden tokens.
    """

    def measured(corpus: TrainingData | HeldOut):
        """Returns (nats a token, bits per byte, part of the mixture's bytes in a token)."""
        batches, total_bytes = windows(corpus)
        nats, counts, correct = zip(*measure(batches), strict=True)
        total = sum(nats)
        weight = getattr(corpus, "weight", 1.0)
        if masked:
            accuracies.append(weight * sum(correct) / batches.total_tokens)
        share = weight * total_bytes / batches.total_tokens
        error = sums.mean(nats, counts).error
        if error is not None:
            errors.append(bits_per_byte(error * batches.total_tokens, total_bytes))
        return total / batches.total_tokens, bits_per_byte(total, total_bytes), share

    errors: list[float] = []
    accuracies: list[float] = []
    if not data.mixture:
        loss, bits, _ = measured(data)
        error = {"bits_per_byte_error": errors[0]} if errors else {}
        accuracy = {"accuracy": accuracies[0]} if masked else {}
        return {"loss": loss, "bits_per_byte": bits, **error, **accuracy}
    values = {"loss": 0.0, "bits_per_byte": 0.0}
    token_bytes = 0.0
    for corpus in data.mixture:
        loss, bits, share = measured(corpus)
        values |= {f"loss/{corpus.name}": loss, f"bits_per_byte/{corpus.name}": bits}
        values["loss"] += corpus.weight * loss
        token_bytes += share
    # Of the mixture: its nats by its bytes.  A mean of the corpora's bits would count a byte by
    # its corpus.
    values["bits_per_byte"] = bits_per_byte(values["loss"], token_bytes)
    return values | ({"accuracy": sum(accuracies)} if masked else {})


def bits_per_byte(total_nll_nats: float, total_bytes: float) -> float:
    """Returns the negative log-likelihood of a text in bits per UTF-8 byte: nll / (ln 2 * bytes).

    Unlike the loss per token, it is comparable between tokenizers. The end-of-text tokens add to
    the likelihood but have no bytes.
    """
    return total_nll_nats / (math.log(2) * total_bytes)
