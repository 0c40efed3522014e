"""A model of this project as an `lm-eval` model, and lm-eval's results item by item.

Importing this module needs the package lm-eval, the extra `eval`.
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
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation import scoring
from sparse_dataflow.evaluation.generate import generate
from sparse_dataflow.evaluation.scoring import Counts, Forward, Limits, Request, Score
from sparse_dataflow.evaluation.trained import Trained

Scorer = Callable[[Sequence[Request]], tuple[list[Score], Counts]]
Writer = Callable[[Sequence[Sequence[int]], int, Mapping[str, Any]], list[str]]
"""(prompts as tokens, the most new tokens, lm-eval's generation arguments) -> the texts written."""

FEWSHOT_SEED = 1234
"""lm-eval's own."""

PRIMARY = ("acc", "exact_match", "word_perplexity", "bits_per_byte", "perplexity")
"""The metric shown of a task: the first of these that it has, else its first."""

_NEW_TOKENS = 256  # where a task does not say; lm-eval's own


class HarnessLM(TemplateLM):
    """Anything that scores token sequences, as lm-eval sees a language model.

    What lm-eval asks for as text is encoded by the run's tokenizer; an empty context becomes the
    end of a text, which every document was trained to begin after. `counts` adds up what was done.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: int,
        scorer: Scorer,
        writer: Writer | None = None,
    ):
        """Scores with `scorer`, and continues prompts with `writer` where there is one.

        Args:
          tokenizer: of the model.
          context: the most tokens that it sees at once.
          scorer: log-likelihoods of requests.
          writer: continuations of prompts; asked only by tasks that generate.
        """
        super().__init__()
        self._tokenizer, self._context = tokenizer, context
        self._scorer, self._writer = scorer, writer
        self.counts = Counts()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.eot_id

    def tok_encode(self, string: str, add_special_tokens=None, **kwargs) -> list[int]:
        """Tokens of a text; no special tokens are ever added."""
        return self._tokenizer.encode(string).tolist()

    def loglikelihood(self, requests, disable_tqdm: bool = True):
        """As lm-eval defines it: (log-likelihood in nats, whether greedy) of each continuation.

        Text is cut into tokens as `TemplateLM` does it, but for all requests at once.
        """
        pairs = [_spaces_moved(*request.args) for request in requests]
        texts = list(dict.fromkeys(text for a, b in pairs for text in (a, a + b)))
        tokens = dict(zip(texts, self._tokenizer.encode_batch(texts)))
        encoded = [
            ((a, b), tokens[a].tolist(), tokens[a + b][len(tokens[a]) :].tolist()) for a, b in pairs
        ]
        return self._loglikelihood_tokens(encoded)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = True, **kwargs):
        start = [self.prefix_token_id]
        scores, counts = self._scorer([(before or start, after) for _, before, after in requests])
        self.counts += counts
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood in nats of whole texts, each token predicted once, in full windows."""
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            found = get_rolling_token_windows(tokens, self.prefix_token_id, self._context, 1)
            windows += map(make_disjoint_window, found)
            owners += [number] * (len(windows) - len(owners))
        scores = self._loglikelihood_tokens([(None, *window) for window in windows])
        values = [value for value, _ in scores]
        return np.bincount(owners, values, minlength=len(requests)).tolist()

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        """The text written after each prompt, up to a stop string, which is left out."""
        if self._writer is None:
            raise NotImplementedError("this model scores text and writes none")
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        written = [""] * len(requests)
        for numbers in groups.values():
            arguments = requests[numbers[0]].args[1]
            # Half of the context stays for the prompt, however much a task lets be written.
            new_tokens = min(int(arguments.get("max_gen_toks", _NEW_TOKENS)), self._context // 2)
            room = self._context - new_tokens
            prompts = [self.tok_encode(requests[i].args[0]) for i in numbers]
            cut = [prompt[-room:] or [self.prefix_token_id] for prompt in prompts]
            for i, text in zip(numbers, self._writer(cut, new_tokens, arguments)):
                written[i] = text
            truncated = sum(len(prompt) > room for prompt in prompts)
            self.counts += Counts(requests=len(prompts), truncated=truncated)
        return written


def _spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    """The context's last spaces belong to the continuation, whose tokens begin with them."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def harness_lm(
    trained: Trained, forward: Forward | None = None, limits: Limits | None = None
) -> HarnessLM:
    """A trained model for lm-eval.

    Args:
      trained: the model.
      forward: scores batches; one program on the default device where None. Another executor or
        mesh comes in here.
      limits: what a call of `forward` takes; the training's micro-batches where None.
    """
    forward, limits = forward or scoring.forward_of(trained), limits or scoring.limits_of(trained)
    return HarnessLM(
        trained.tokenizer,
        limits.context,
        lambda requests: scoring.score(forward, limits, requests),
        functools.partial(_write, trained, limits.rows(limits.context)),
    )


def _write(trained, rows, prompts, new_tokens, arguments) -> list[str]:
    until = arguments.get("until") or []
    sampled = arguments.get("do_sample", arguments.get("temperature", 0) > 0)
    texts = []
    for start in range(0, len(prompts), rows):
        done = generate(
            trained,
            prompts[start : start + rows],
            max_new_tokens=new_tokens,
            temperature=float(arguments.get("temperature", 1.0)) if sampled else 0.0,
            top_k=int(arguments.get("top_k", 0)),
            top_p=float(arguments.get("top_p", 1.0)),
            stop=[s for s in ([until] if isinstance(until, str) else until) if s],
        )
        texts += [continuation.text for continuation in done]
    return texts


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """What one model scored in one task with one number of examples in the prompt.

    Attributes:
      metric: its name in lm-eval.
      value: over all items, aggregated as the task says.
      items: number of items.
      values: float [items], one an item; None where the metric is no mean over items.
    """

    metric: str
    value: float
    items: int
    values: np.ndarray | None


def evaluate(lm: HarnessLM, tasks: Mapping[str, Any], shots: int, limit: int | None = None):
    """Runs lm-eval tasks on a model.

    Args:
      lm: the model.
      tasks: name -> lm-eval task.
      shots: examples in each prompt, drawn by `FEWSHOT_SEED`.
      limit: the first items of each task only.

    Returns:
      {task name: TaskScore}.
    """
    for task in tasks.values():
        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    with quiet():
        results = evaluator.evaluate(
            lm, dict(tasks), limit=limit, bootstrap_iters=0, log_samples=True
        )
    return {name: _task_score(name, results) for name in tasks}


def _task_score(name, results) -> TaskScore:
    found = {
        key.partition(",")[0]: value
        for key, value in results["results"][name].items()
        if isinstance(value, int | float) and "," in key and "_stderr" not in key
    }
    metric = next((m for m in PRIMARY if m in found), next(iter(found)))
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    values = [sample.get(metric) for sample in samples]
    plain = all(isinstance(v, int | float | np.number) for v in values)
    plain = plain and np.isclose(np.mean(values), found[metric])
    array = np.asarray(values, np.float64) if plain else None
    return TaskScore(metric, float(found[metric]), len(samples), array)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps lm-eval and datasets from writing progress to the terminal; errors still come."""
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
