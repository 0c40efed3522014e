"""The work of `scoring_bench`: makes models and requests, times both, prints and keeps.

Needs the extra `eval`.
"""

from pathlib import Path

import jax
import numpy as np

from experiments import measurement, study
from experiments.evaluation_runs import shots_of
from sparse_dataflow.evaluation import harness
from sparse_dataflow.evaluation.harness import HarnessLM
from sparse_dataflow.evaluation.scoring import Counts, Limits, limits_of
from sparse_dataflow.evaluation.tasks import lm_eval_tasks, own
from sparse_dataflow.evaluation.trained import Trained
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.training.step import initial_state, make_eval_step


def run(values, groups) -> None:
    """Times what the flags say; see `experiments.scoring_bench`.

    Raises:
      UserError: in words, before anything is timed.
    """
    shots = shots_of(values.num_fewshot)
    found = study.begin(values, groups)
    models = {name: _random(found, name) for name in ("dense", "sparse")}
    context = models["dense"].context
    tasks = {}
    for name in own.own_tasks(found.corpus.name):
        wanted = found.corpus, found.tokenizer, context, values.items, values.seed
        items, examples = own.make(name, *wanted)
        if len(items) > 1 and len(examples) >= max(shots):
            tasks[name] = lm_eval_tasks.of_items(name, items, examples)
    if not tasks:
        raise UserError(
            f"The documents of {found.corpus.name} give too few items for {max(shots)} examples; "
            "legal: a larger --corpus, or fewer in --num_fewshot."
        )
    print(
        f"{found.chip.name}: scale {found.asked['scale']}, micro-batches of "
        f"{limits_of(models['dense']).tokens:,} tokens, {', '.join(tasks)}"
    )
    rows = [row for count in shots for row in _rows(models, tasks, count, values.rounds)]
    result = {
        "inputs": "random weights; items of the held-out documents",
        "tokens": "of the requests, context and continuation, without padding",
        "scale": found.asked["scale"],
        "dtype": found.asked["dtype"],
        "density": values.density,
        "pattern": values.pattern,
        "block": values.block,
        "corpus": found.corpus.name,
        "tasks": list(tasks),
        "rows": rows,
    }
    name = f"scoring_bench_{found.chip.name}_{found.asked['scale']}"
    measurement.keep(values.keep, name, found.chip.name, result)


def _random(found, name) -> Trained:
    """A variant with the weights that its training would begin with."""
    variant = found.variant(name, learning_rate=0.0)
    state = initial_state(variant.model, variant.training)
    return Trained(
        Path(),
        name,
        variant.model,
        state.params,
        state.tables,
        found.tokenizer,
        0,
        variant.training,
        {},
        {},
    )


def _rows(models, tasks, shots, rounds):
    """The measured rows of all models with so many examples in the prompt; prints each."""
    requests = _requests(models["dense"], tasks, shots)
    runs, about = {}, {}
    for name, trained in models.items():
        lm, limits = harness.harness_lm(trained), limits_of(trained)
        lm.loglikelihood(requests)
        calls = max(1, round(lm.counts.tokens / limits.tokens))
        runs[name, "scoring"] = lambda lm=lm: lm.loglikelihood(requests)
        runs[name, "forward"] = _forward(trained, limits, calls)
        about[name] = lm.counts, calls * limits.rows(limits.context) * limits.context
    seconds = measurement.paired_seconds(runs, rounds)
    rows = []
    for name, (counts, forward_tokens) in about.items():
        scoring, forward = (seconds[name, what] for what in ("scoring", "forward"))
        share, low, high = measurement.paired_ratio(
            forward / forward_tokens, scoring / counts.tokens
        )
        rows.append(
            {
                "model": name,
                "shots": shots,
                "requests": counts.requests,
                "tokens": counts.tokens,
                "padding": counts.padded / counts.tokens - 1,
                "programs": len(counts.lengths),
                "tokens_per_second": counts.tokens / float(np.median(scoring)),
                "forward_tokens_per_second": forward_tokens / float(np.median(forward)),
                "share": share,
                "share_low": low,
                "share_high": high,
            }
        )
        print(
            f"{name:>6}: {shots}-shot scoring {rows[-1]['tokens_per_second']:7,.0f} tokens/s, "
            f"{share:.0%} of the forward pass's {rows[-1]['forward_tokens_per_second']:,.0f} "
            f"(quartiles {low:.0%} to {high:.0%}; {rows[-1]['padding']:.0%} padding, "
            f"{rows[-1]['programs']} programs)"
        )
    return rows


def _requests(trained, tasks, shots):
    """What lm-eval asks of a model in these tasks."""
    asked = []

    def scorer(requests):
        return [(0.0, False)] * len(requests), Counts()

    harness.evaluate(HarnessLM(trained.tokenizer, trained.context, scorer), tasks, shots)
    for task in tasks.values():
        asked += [r for r in task.instances if r.request_type == "loglikelihood"]
    return asked


def _forward(trained, limits: Limits, calls):
    """() -> that many evaluation steps of the training, on one micro-batch each."""
    program = jax.jit(make_eval_step(trained.model, trained.tables))
    rng = np.random.default_rng(0)
    rows = limits.rows(limits.context)
    shape = rows, limits.context + 1
    tokens = rng.integers(trained.model.vocab_size, size=shape, dtype=np.int32)
    weights = np.ones((rows, limits.context), np.float32)
    return lambda: [program(trained.params, (), tokens, weights) for _ in range(calls)]
