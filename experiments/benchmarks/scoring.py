"""Log-likelihoods of a corpus's own tasks, dense and sparse, for `scoring_bench`.

Needs the extra `eval`.
"""

from pathlib import Path

import jax
import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.request import Request
from sparse_dataflow.commands.training_data import corpus_of, tokenizer_of
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.model.stacks import fixed_layouts, split_layouts
from sparse_dataflow.core.training.step import initial_state, make_eval_step
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation import harness
from sparse_dataflow.evaluation.harness import HarnessLM
from sparse_dataflow.evaluation.scoring import Counts, Limits, batch_limits
from sparse_dataflow.evaluation.tasks import builtin, lm_eval_tasks
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

from . import benchmark, paired
from .benchmark import Models


def measure_scoring(request: Request, options) -> None:
    """Measures, prints and writes; see `experiments.scoring_bench`.

    Raises:
      UserError: before anything is timed.
    """
    shots = sorted(options.num_fewshot)
    models = benchmark.models_of(request)
    corpus = corpus_of(models.config.data)
    tokenizer = tokenizer_of(models.config, corpus)
    trained = {name: _random(models, name, tokenizer) for name in models.by_name}
    item_options = trained["dense"].context, options.items, models.training.seed
    tasks = _tasks(shots, corpus, tokenizer, *item_options)
    print(
        f"{models.chip.name}: scale {models.scale}, micro-batches of "
        f"{batch_limits(trained['dense']).tokens:,} tokens, {', '.join(tasks)}",
        flush=True,
    )
    facts = models.facts(
        inputs="random weights; items of the held-out documents",
        tokens="of the requests, context and continuation, without padding",
        corpus=corpus.name,
        tasks=list(tasks),
    )

    def results():
        rows: list[dict] = []
        for count in shots:
            rows += _rows(trained, tasks, count, options.rounds)
            yield facts | {"rows": rows}

    name = f"scoring_bench_{models.chip.name}_{models.scale}"
    measurement.keep(options.keep, name, models.chip.name, results())


def _random(models: Models, name: str, tokenizer: Tokenizer) -> Model:
    """A model with the weights that its training would start with."""
    model = models.by_name[name]
    state = initial_state(model, models.training)
    params = state.merged
    return Model(Path(), name, model, params, tokenizer, 0, models.training, None, {})


def _tasks(shots, corpus, *item_options):
    """Name -> task, of the corpus's own tasks with enough items and examples."""
    tasks = {}
    for name in builtin.task_names(corpus.name):
        task_items, examples = builtin.make_items(name, corpus, *item_options)
        if len(task_items) > 1 and len(examples) >= max(shots):
            tasks[name] = lm_eval_tasks.make_task(name, task_items, examples)
    if not tasks:
        raise UserError(
            f"The documents of {corpus.name} give too few items for {max(shots)} examples; "
            "legal: a larger --corpus, or fewer in --num_fewshot."
        )
    return tasks


def _rows(models, tasks, shots, rounds):
    """Measures all models with `shots` examples in the prompt; prints and returns a row each."""
    requests = _requests(models["dense"], tasks, shots)
    runs, about = {}, {}
    for name, trained in models.items():
        lm, limits = harness.harness_lm(trained), batch_limits(trained)
        lm.loglikelihood(requests)
        calls = max(1, round(lm.counts.tokens / limits.tokens))
        runs[name, "scoring"] = lambda lm=lm: lm.loglikelihood(requests)
        runs[name, "forward"] = _forward(trained, limits, calls)
        about[name] = lm.counts, calls * limits.rows(limits.context) * limits.context
    seconds = paired.paired_seconds(runs, rounds)
    rows = []
    for name, (counts, forward_tokens) in about.items():
        scoring, forward = (seconds[name, kind] for kind in ("scoring", "forward"))
        row = {
            "model": name,
            "shots": shots,
            "requests": counts.requests,
            "tokens": counts.tokens,
            "padding": counts.padded / counts.tokens - 1,
            "programs": len(counts.lengths),
            "tokens_per_second": counts.tokens / float(np.median(scoring)),
            "forward_tokens_per_second": forward_tokens / float(np.median(forward)),
            **paired.paired_ratio(forward / forward_tokens, scoring / counts.tokens, "share"),
        }
        rows.append(row)
        print(
            f"{name:>6}: {shots}-shot scoring {row['tokens_per_second']:7,.0f} tokens/s, "
            f"{row['share']:.0%} of the forward pass's {row['forward_tokens_per_second']:,.0f} "
            f"(quartiles {row['share_low']:.0%} to {row['share_high']:.0%}; "
            f"{row['padding']:.0%} padding, {row['programs']} programs)"
        )
    return rows


def _requests(trained, tasks, shots):
    """The log-likelihood requests of lm-eval in these tasks."""
    requests = []

    def scorer(pairs):
        return [(0.0, False)] * len(pairs), Counts()

    harness.evaluate(HarnessLM(trained.tokenizer, trained.context, scorer), tasks, shots)
    for task in tasks.values():
        requests += [r for r in task.instances if r.request_type == "loglikelihood"]
    return requests


def _forward(trained, limits: Limits, calls):
    """A function that runs `calls` evaluation steps of the training, on one micro-batch each."""
    program = jax.jit(make_eval_step(trained.model))
    params, layouts = split_layouts(trained.params)
    layouts = fixed_layouts(layouts)
    rng = np.random.default_rng(0)
    rows = limits.rows(limits.context)
    shape = rows, limits.context + 1
    tokens = rng.integers(trained.model.vocab_size, size=shape, dtype=np.int32)
    batch = Batch.from_windows(tokens, np.ones((rows, limits.context), np.float32))
    return lambda: [program(params, layouts, batch) for _ in range(calls)]
