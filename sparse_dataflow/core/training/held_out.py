"""The losses of held-out windows, of one corpus or of each of a mixture."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from sparse_dataflow.core import sums
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training.programs import Compiled, EvalBatches, HeldOut, TrainingData

Nats = list[tuple[float, float]]
"""Of each batch, the sum of its weighted losses in nats, and the sum of the weights."""


def nats(programs: Compiled, state: TrainState, batches: Iterable[Batch]) -> Nats:
    """Returns the losses of `batches`, over all processes.

    The executor has put the batches, whose targets have weights.
    """
    rest = programs.rest(state)
    return [
        (
            float(programs.eval_step(state.params, rest, batch)),
            float(jnp.sum(batch.token_weights)),
        )
        for batch in batches
    ]


def losses(
    data: TrainingData,
    windows: Callable[[Any], tuple[EvalBatches, int]],
    batch_nats: Callable[[EvalBatches], Nats],
) -> dict[str, float]:
    """Returns "loss", in nats a token, and "bits_per_byte"; of a mixture also those of each corpus,
    with "/" and its name, and of one corpus "bits_per_byte_error".

    The error is the standard error of a mean over the batches, whose windows are of different
    documents; see `sums.mean`.

    The loss of a mixture is that of text drawn with its weights.

    Args:
      data: the corpora.
      windows: `data`, or a `HeldOut` of its mixture -> the windows and their UTF-8 bytes.
      batch_nats: windows -> `nats` of the batches.
    """

    def measured(corpus: TrainingData | HeldOut):
        """Returns (nats a token, bits per byte, part of the mixture's bytes in a token)."""
        batches, total_bytes = windows(corpus)
        batch_sums, counts = zip(*batch_nats(batches), strict=True)
        total = sum(batch_sums)
        share = getattr(corpus, "weight", 1.0) * total_bytes / batches.total_tokens
        error = sums.mean(batch_sums, counts).error
        if error is not None:
            errors.append(bits_per_byte(error * batches.total_tokens, total_bytes))
        return total / batches.total_tokens, bits_per_byte(total, total_bytes), share

    errors: list[float] = []
    if not data.mixture:
        loss, bits, _ = measured(data)
        error = {"bits_per_byte_error": errors[0]} if errors else {}
        return {"loss": loss, "bits_per_byte": bits, **error}
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
    return values


def bits_per_byte(total_nll_nats: float, total_bytes: float) -> float:
    """Returns the negative log-likelihood of a text in bits per UTF-8 byte: nll / (ln 2 * bytes).

    Unlike the loss per token, it is comparable between tokenizers. The end-of-text tokens add to
    the likelihood but have no bytes.
    """
    return total_nll_nats / (math.log(2) * total_bytes)
