"""Times the scoring of tasks against the forward pass of the training."""

import jax
import numpy as np

from experiments import measurement
from sparse_dataflow.evaluation import scoring
from sparse_dataflow.training.step import make_eval_step

ROUNDS = 5


def measure(trained, lm, tasks, name: str, shots: int) -> dict:
    """Tokens a second of the log-likelihoods just asked for, and of the training's forward pass.

    Both run in turn on the same machine. Scoring is timed from text to numbers, with programs that
    are compiled; its tokens are those that the requests hold, without padding. The forward pass is
    the evaluation step on one micro-batch.

    Args:
      trained: the model.
      lm: that `harness.evaluate` has just asked.
      tasks: name -> lm-eval task, still holding its requests.
      name: of the model.
      shots: examples in each prompt.

    Returns:
      {"model", "shots", "tokens_per_second", "forward_tokens_per_second", "share", "padding",
      "text"}; share is the median of the paired ratios.
    """
    requests = [
        r for task in tasks.values() for r in task.instances if r.request_type == "loglikelihood"
    ]
    limits = scoring.limits_of(trained)
    rows = limits.rows(limits.context)
    forward = jax.jit(make_eval_step(trained.model, trained.tables))
    rng = np.random.default_rng(0)
    shape = rows, limits.context + 1
    tokens = rng.integers(trained.model.vocab_size, size=shape, dtype=np.int32)
    weights = np.ones((rows, limits.context), np.float32)
    before = lm.counts
    lm.loglikelihood(requests)
    scored = lm.counts.tokens - before.tokens
    padded = lm.counts.padded - before.padded
    calls = max(1, round(scored / weights.size))

    def forwards():
        return [forward(trained.params, (), tokens, weights) for _ in range(calls)]

    runs = {"scoring": lambda: lm.loglikelihood(requests), "forward": forwards}
    seconds = measurement.paired_seconds(runs, ROUNDS)
    rate = scored / np.median(seconds["scoring"])
    forward_rate = calls * weights.size / np.median(seconds["forward"])
    share, low, high = measurement.paired_ratio(
        seconds["forward"] / (calls * weights.size), seconds["scoring"] / scored
    )
    return {
        "model": name,
        "shots": shots,
        "tokens_per_second": float(rate),
        "forward_tokens_per_second": float(forward_rate),
        "share": share,
        "padding": padded / scored - 1,
        "text": f"{name:>8}: {shots}-shot scoring {rate:,.0f} tokens/s, {share:.0%} of the "
        f"forward pass's {forward_rate:,.0f} (quartiles {low:.0%} to {high:.0%}; "
        f"{padded / scored - 1:.0%} padding)",
    }
