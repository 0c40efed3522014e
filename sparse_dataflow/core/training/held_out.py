"""The losses of held-out windows, of one corpus or of each of a mixture."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.core.training.programs import Compiled, EvalBatches, HeldOut, TrainingData


def nats(programs: Compiled, weights: ModelWeights, batches: Iterable) -> float:
    """Returns the sum of weighted next-token losses over `batches`, in nats.

    The executor has put the batches, which have "tokens" and "weights".
    """
    return sum(
        float(programs.eval_step(weights, batch["tokens"], batch["weights"])) for batch in batches
    )


def losses(
    data: TrainingData,
    windows: Callable[[Any], tuple[EvalBatches, int]],
    total_nats: Callable[[EvalBatches], float],
) -> dict[str, float]:
    """Returns "loss", in nats a token, and "bits_per_byte"; of a mixture also those of each corpus,
    with "/" and its name.

    The loss of a mixture is that of text drawn with its weights.

    Args:
      data: the corpora.
      windows: `data`, or a `HeldOut` of its mixture -> the windows and their UTF-8 bytes.
      total_nats: windows -> sum of their losses.
    """

    def measured(corpus: TrainingData | HeldOut):
        """Returns (nats a token, bits per byte, part of the mixture's bytes in a token)."""
        batches, total_bytes = windows(corpus)
        total = total_nats(batches)
        share = getattr(corpus, "weight", 1.0) * total_bytes / batches.total_tokens
        return total / batches.total_tokens, bits_per_byte(total, total_bytes), share

    if not data.mixture:
        loss, bits, _ = measured(data)
        return {"loss": loss, "bits_per_byte": bits}
    values = {"loss": 0.0, "bits_per_byte": 0.0}
    token_bytes = 0.0
    for corpus in data.mixture:
        loss, bits, share = measured(corpus)
        values |= {f"loss/{corpus.name}": loss, f"bits_per_byte/{corpus.name}": bits}
        values["loss"] += corpus.weight * loss
        token_bytes += share
    values["bits_per_byte"] = bits_per_byte(values["loss"], token_bytes)
    return values


def bits_per_byte(total_nll_nats: float, total_bytes: float) -> float:
    """Returns the negative log-likelihood of a text in bits per UTF-8 byte: nll / (ln 2 * bytes).

    Unlike the loss per token, it is comparable between tokenizers. The end-of-text tokens add to
    the likelihood but have no bytes.
    """
    return total_nll_nats / (math.log(2) * total_bytes)
