"""A trained model as an `lm-eval` model, and lm-eval results per item.

Importing this module requires lm-eval (the extra `eval`) and takes seconds.
"""

import contextlib
import dataclasses
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import evaluator
from lm_eval.api.group import Group
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation import scoring
from sparse_dataflow.evaluation.generate import generate
from sparse_dataflow.evaluation.scoring import Counts, Forward, Limits, Request, Score
from sparse_dataflow.evaluation.tasks import task_border
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

Scorer = Callable[[Sequence[Request]], tuple[list[Score], Counts]]
Generator = Callable[[Sequence[Sequence[int]], int, Mapping[str, Any]], list[str]]
"""(prompts as tokens, maximum new tokens, lm-eval generation arguments) -> generated texts."""

FEWSHOT_SEED = 1234
"""Default of lm-eval."""

PRIMARY_METRICS = ("acc", "exact_match", "word_perplexity", "bits_per_byte", "perplexity")
"""Metrics that are reported first, in this order."""

NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Generation arguments that limit the new tokens, as lm-eval ranks them."""

_DEFAULT_NEW_TOKENS = 256  # of lm-eval


class HarnessLM(TemplateLM):
    """A scorer of token sequences as an lm-eval language model.

    Text is encoded by the run's tokenizer, with what it puts in front of a text. An empty context
    becomes the begin of text, or else the end of text, which precedes every training document.
    `counts` accumulates the `Counts` of all requests.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: int,
        scorer: Scorer,
        generator: Generator | None = None,
    ):
        """Wraps a scorer and a generator.

        Args:
          context: context length in tokens.
          scorer: returns the log-likelihoods of requests.
          generator: continues prompts; needed only by tasks that generate.
        """
        super().__init__()
        self._tokenizer, self._context = tokenizer, context
        self._scorer, self._generator = scorer, generator
        self.counts = Counts()

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-text token."""
        return self._tokenizer.eot_id

    @property
    def prefix_token_id(self) -> int:
        """Id in front of a text that has no context."""
        return self._tokenizer.start_id

    def tok_encode(self, string: str, add_special_tokens=None, **kwargs) -> list[int]:
        """Encodes a text; without what the tokenizer puts in front if not `add_special_tokens`."""
        prefix = [] if add_special_tokens is False else list(self._tokenizer.identity.prefix)
        return prefix + self._tokenizer.encode(string).tolist()

    def loglikelihood(self, requests, disable_tqdm: bool = True):
        """Returns (log-likelihood in nats, whether greedy) of each continuation.

        Tokenises as `TemplateLM.loglikelihood` does, but all requests in one batch. There, a
        continuation that merges into the last token of its context has no tokens. Here it is
        encoded by itself, so it is scored given the same context as the other choices.
        """
        pairs = [_move_trailing_spaces(*_texts(request, 2)) for request in requests]
        texts = list(dict.fromkeys(text for a, b in pairs for text in (a, a + b)))
        tokens = dict(zip(texts, (ids.tolist() for ids in self._tokenizer.encode_batch(texts))))
        prefix = list(self._tokenizer.identity.prefix)
        encoded = [
            (
                (a, b),
                prefix + tokens[a],
                tokens[a + b][len(tokens[a]) :] or self.tok_encode(b, add_special_tokens=False),
            )
            for a, b in pairs
        ]
        return self._loglikelihood_tokens(encoded)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = True, **kwargs):
        start = [self.prefix_token_id]
        scores, counts = self._scorer([(before or start, after) for _, before, after in requests])
        self.counts += counts
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        """Returns the log-likelihood in nats of each text; each token is predicted once."""
        windows: list[tuple[list[int], list[int]]] = []
        request_indices: list[int] = []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(_texts(request, 1)[0], add_special_tokens=False)
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self._context, 1)
            windows += map(make_disjoint_window, rolling)
            # A long text has several windows.
            request_indices += [index] * (len(windows) - len(request_indices))
        scores = self._loglikelihood_tokens([(None, *window) for window in windows])
        values = [value for value, _ in scores]
        return np.bincount(request_indices, values, minlength=len(requests)).tolist()

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        """Returns the generated text of each prompt, without the stop string."""
        if self._generator is None:
            raise NotImplementedError("this model scores text but cannot generate")
        indices_by_arguments: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            # One batch has one set of arguments; requests with equal ones are continued together.
            key = repr(sorted(request.args[1].items()))
            indices_by_arguments.setdefault(key, []).append(index)
        texts = [""] * len(requests)
        for indices in indices_by_arguments.values():
            arguments = requests[indices[0]].args[1]
            given = (arguments[name] for name in NEW_TOKENS if arguments.get(name) is not None)
            # At least half of the context is for the prompt.
            with _arguments_checked():
                new_tokens = min(int(next(given, _DEFAULT_NEW_TOKENS)), self._context // 2)
            room = self._context - new_tokens
            prompts = [self.tok_encode(_texts(requests[i], 1)[0]) for i in indices]
            # The end of a prompt has the question.
            truncated = [prompt[-room:] or [self.prefix_token_id] for prompt in prompts]
            for i, text in zip(indices, self._generator(truncated, new_tokens, arguments)):
                texts[i] = text
            count = sum(len(prompt) > room for prompt in prompts)
            self.counts += Counts(requests=len(prompts), truncated=count)
        return texts


def _texts(request, count: int) -> tuple[str, ...]:
    """Returns the first arguments of a request; raises UserError where a task made no text."""
    texts = request.args[:count]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(
            "A task asks for what is no text; doc_to_text, doc_to_choice and doc_to_target must "
            "give text."
        )
    return texts


@contextlib.contextmanager
def _arguments_checked() -> Iterator[None]:
    """Makes errors of the values of generation_kwargs a UserError."""
    try:
        yield
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UserError(f"The generation_kwargs of a task are not legal: {error}.") from error


def _move_trailing_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Moves trailing spaces to the continuation, since tokens start with their space."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def harness_lm(
    trained: Model, forward: Forward | None = None, limits: Limits | None = None
) -> HarnessLM:
    """Wraps a trained model for lm-eval.

    Args:
      trained: model to evaluate.
      forward: scores batches, e.g. over a mesh; one program on the default device where None.
      limits: batch limits of `forward`; the training's micro-batches where None.
    """
    return HarnessLM(*functions(trained, forward, limits))


def functions(
    trained: Model, forward: Forward | None = None, limits: Limits | None = None
) -> tuple[Tokenizer, int, Scorer, Generator]:
    """Returns the arguments of `HarnessLM`; takes those of `harness_lm`."""
    score_batch = forward or scoring.single_device_forward(trained)
    limits = limits or scoring.batch_limits(trained)
    score: Callable = scoring.score
    if trained.model.bidirectional:
        score = functools.partial(scoring.pseudo_score, trained.tokenizer.mask_id)
    return (
        trained.tokenizer,
        limits.context,
        functools.partial(score, score_batch, limits),
        functools.partial(_generate, trained, limits.rows(limits.context)),
    )


def _generate(trained, rows, prompts, new_tokens, arguments) -> list[str]:
    until = arguments.get("until") or []
    temperature = arguments.get("temperature")
    stochastic = arguments.get("do_sample")
    if stochastic is None:
        stochastic = bool(temperature)
    with _arguments_checked():
        sampling: dict[str, Any] = {
            "temperature": float(1.0 if temperature is None else temperature)
            if stochastic
            else 0.0,
            "top_k": max(0, int(arguments.get("top_k") or 0)),  # vLLM writes -1 for all.
            "top_p": float(arguments.get("top_p") or 1.0),
            "stop": [str(s) for s in ([until] if isinstance(until, str) else until) if s],
        }
    texts: list[str] = []
    for start in range(0, len(prompts), rows):
        continuations = generate(
            trained,
            prompts[start : start + rows],
            max_new_tokens=new_tokens,
            **sampling,
            # A seed for each prompt, so that its text does not depend on the batches.
            seed=range(start, start + len(prompts[start : start + rows])),
        )
        texts += [continuation.text for continuation in continuations]
    return texts


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """One metric of one model in one task with one number of examples in the prompt.

    Attributes:
      value: metric over all items, aggregated as the task defines it.
      lower_is_better: whether a smaller value is better.
      values: metric of each item, float [items]; None where `value` is not their mean.
    """

    value: float
    lower_is_better: bool
    items: int
    values: np.ndarray | None


def evaluate(
    lm: HarnessLM, tasks: Mapping[str, Any], shots: int | None, limit: int | None = None
) -> dict[str, dict[str, TaskScore]]:
    """Runs lm-eval tasks on a model.

    Args:
      tasks: name -> lm-eval task, or a group of tasks that are there too.
      shots: number of examples in each prompt, sampled with `FEWSHOT_SEED`; None for the number
        that each task has.
      limit: number of items per task; all items where None.

    Returns:
      Task name -> metric -> score; `PRIMARY_METRICS` first. The name of a filter of the outputs, if
      there is one, follows its metric.

    Raises:
      UserError: a task has no rows, or too few for the examples, or its templates do not fit them.
    """
    groups = {name: each for name, each in tasks.items() if isinstance(each, Group)}
    singles = {name: task for name, task in tasks.items() if name not in groups}
    for task in singles.values():
        if shots is not None:
            task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        with task_border.failures(f"The task {task.config.task} cannot be used"):
            _refuse_few_rows(task)
    with task_border.failures(f"The tasks {', '.join(singles)} cannot be scored"), quiet():
        results = evaluator.evaluate(
            lm,
            {"tasks": singles, "groups": groups},
            limit=limit,
            # Errors come from the samples, clustered by document, which the bootstrap is not.
            bootstrap_iters=0,
            log_samples=True,
        )
    children = {
        name: [t.task_name for t in group.get_all_tasks()] for name, group in groups.items()
    }
    return {name: _task_scores(name, children.get(name, [name]), results) for name in tasks}


def _refuse_few_rows(task):
    """Raises UserError where a task has no rows, or too few for the examples of a prompt."""
    name, shots = task.config.task, task.get_config("num_fewshot") or 0
    with quiet():
        questions = len(list(task.eval_docs))
        examples = len(list(task.fewshot_docs() or ())) if shots else 0
    if not questions:
        raise UserError(f"The task {name} has no rows; add some, or leave it out.")
    # The question itself is no example of its prompt.
    most = examples - (task.get_config("fewshot_split") == task.get_config("test_split"))
    if shots and shots > most:
        raise UserError(
            f"The task {name} has rows for {max(0, most)} examples in a prompt, and {shots} are "
            "asked for; give fewer in --num_fewshot, or add rows."
        )


def _task_scores(name, tasks, results) -> dict[str, TaskScore]:
    scores = {}
    samples = [
        sample
        for task in tasks
        for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    ]
    for key, value in results["results"][name].items():
        metric, comma, output_filter = key.partition(",")
        if not isinstance(value, int | float) or not comma or metric.endswith("_stderr"):
            continue
        values = [s.get(metric) for s in samples if s.get("filter", "none") == output_filter]
        numeric = all(isinstance(v, int | float | np.number) for v in values)
        # Values of items have an error only where the metric is their mean, which a perplexity is
        # not.
        is_mean = numeric and np.isclose(np.mean(values), value)
        higher = results["higher_is_better"].get(name, {}).get(metric)
        scores[metric if output_filter == "none" else f"{metric}, {output_filter}"] = TaskScore(
            float(value),
            metric.endswith(("perplexity", "bits_per_byte")) if higher is None else not higher,
            len(values),
            np.asarray(values, np.float64) if is_mean else None,
        )
    return dict(sorted(scores.items(), key=lambda item: _rank(item[0])))


def _rank(metric):
    name = metric.partition(",")[0]
    return PRIMARY_METRICS.index(name) if name in PRIMARY_METRICS else len(PRIMARY_METRICS)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the progress output of lm-eval and datasets; exceptions still propagate."""
    import datasets

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        datasets.enable_progress_bars()
