"""The work of `evaluate`: loads the models, makes the tasks, scores, compares and keeps.

Needs the extra `eval`.
"""

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from experiments.contradictions import given
from lm_eval.tasks import TaskManager

from experiments import evaluation_report, gpt_run, measurement
from sparse_dataflow.data import cache
from sparse_dataflow.data.batches import EvalBatches, bits_per_byte
from sparse_dataflow.data.corpora import Corpus, load_corpus
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.evaluation import harness, scoring
from sparse_dataflow.evaluation.harness import HarnessLM
from sparse_dataflow.evaluation.ngrams import Ngrams
from sparse_dataflow.evaluation.over_mesh import forward_over
from sparse_dataflow.evaluation.significance import estimate, paired
from sparse_dataflow.evaluation.tasks import lm_eval_tasks, own
from sparse_dataflow.evaluation.tasks.items import Item, read_items
from sparse_dataflow.evaluation.trained import Trained, load, read_config
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.host_memory import keep_freed_memory
from sparse_dataflow.parallel import mesh as meshes
from sparse_dataflow.parallel.sharded import Sharded
from sparse_dataflow.training.metrics import say

BASELINES = ("unigram", "bigram")


@dataclasses.dataclass(frozen=True)
class Made:
    """A task that is ready to be asked.

    Attributes:
      task: lm-eval's.
      items: its items where they are this project's; None for lm-eval's own.
    """

    task: Any
    items: Sequence[Item] | None = None

    @property
    def zero_shot_only(self) -> bool:
        """Whether lm-eval defines it without examples in the prompt."""
        return self.items is None and self.task.OUTPUT_TYPE == "loglikelihood_rolling"

    @property
    def generates(self) -> bool:
        """Whether text is written, and not scored."""
        return self.task.OUTPUT_TYPE == "generate_until"

    def documents(self, count: int) -> list[str]:
        """Which document each of the first `count` items is from: its own where not known."""
        if self.items is None:
            return [str(number) for number in range(count)]
        return [item.document for item in self.items[:count]]

    def chance(self, count: int) -> float | None:
        """What guessing gives; an open answer is never guessed, and of lm-eval's tasks it is not
        known."""
        if self.items is None:
            return None
        each = [1 / n if n > 1 else 0.0 for n in (len(i.choices) for i in self.items[:count])]
        return float(np.mean(each))


def run(values) -> None:
    """Evaluates what the flags say; see `evaluate`.

    Raises:
      UserError: in words, before anything is scored where it can be known then.
    """
    keep_freed_memory()
    shots = shots_of(values.num_fewshot)
    given = _given_tasks(values, max(shots))  # A name that is wrong, or not reached, costs no load.
    models = _models(values)
    first = next(iter(models.values()))
    corpus = _corpus(first)
    context = min(trained.context for trained in models.values())
    tasks = _tasks(values, given, corpus, first.tokenizer, context, max(shots))
    tokens = prepare_tokens(corpus, first.tokenizer, cache.FOLDER)
    ngrams = Ngrams(tokens.train.tokens, first.tokenizer.vocab_size)
    scorers = {name: _scorer(values.mesh, trained) for name, trained in models.items()}
    lms = {name: harness.harness_lm(models[name], *scorers[name]) for name in models}
    for name in BASELINES:
        scorer = getattr(ngrams, f"score_{name}")
        lms[name] = HarnessLM(first.tokenizer, context, scorer)

    losses = {
        name: _losses(models[name], tokens.validation.tokens, *scorers[name]) for name in models
    }
    rows, notes = [_loss_row(losses, first.tokenizer)], []
    for count in shots:
        asked = {
            task: made for task, made in tasks.items() if count == 0 or not made.zero_shot_only
        }
        scores: dict[str, dict] = {task: {} for task in asked}
        for name, lm in lms.items():
            mine = {t: m.task for t, m in asked.items() if name in models or not m.generates}
            if not mine:
                continue
            say(f"{name:>8}: {count}-shot {', '.join(mine)}")
            before = lm.counts
            for task, score in harness.evaluate(lm, mine, count, values.limit or None).items():
                scores[task][name] = score
            if name in models:
                notes += _truncation(name, count, before, lm.counts, context)
        rows += [_row(t, asked[t], count, scores[t], list(models)) for t in asked]
    result = {
        **measurement.provenance(hardware.detect([first.model.compute_dtype]).name),
        "corpus": {"name": corpus.name, "hash": corpus.content_hash},
        "models": {name: _described(trained) for name, trained in models.items()},
        "context": context,
        "notes": notes,
        "rows": rows,
    }
    print(evaluation_report.text(result))
    say(f"kept in {evaluation_report.keep(first.folder, result)}")
    report = evaluation_report.add_to_report(first.folder, result)
    say(f"report: {report}" if report else "no report yet: the run has not ended")


def shots_of(text: str) -> list[int]:
    """Ascending numbers of a comma list; UserError where it is none."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
        if counts[0] < 0:
            raise ValueError
    except ValueError:
        raise UserError(
            f"--num_fewshot={text} is not legal: a comma list of whole numbers, 0 or more."
        ) from None
    return counts


def _models(values) -> dict[str, Trained]:
    """The one or two models to evaluate, by the names that they get in the table."""
    has = list(read_config(values.run)["variants"])
    asked = list(values.variant) if given(values, "variant") else has
    if not asked:
        raise UserError(f"--variant=none leaves no model; {values.run} has: {', '.join(has)}.")
    if not values.against:
        return {name: load(values.run, name, values.checkpoint) for name in asked}
    others = list(read_config(values.against)["variants"])
    twin = "dense" if "dense" in others else others[0]
    one = load(values.run, asked[0], values.checkpoint)
    other = load(values.against, twin, values.checkpoint)
    if one.config["corpus"]["hash"] != other.config["corpus"]["hash"]:
        raise UserError(
            f"{values.run} and {values.against} were trained on different corpora, so what one "
            "held out the other may have learned; give two runs on the same corpus."
        )
    if one.tokenizer.content_hash != other.tokenizer.content_hash:
        raise UserError(
            f"{values.run} and {values.against} have different tokenizers, so their losses a token "
            "cannot be compared; give two runs with the same model.vocab_size and data.tokenizer."
        )
    name = twin if twin != asked[0] else f"{twin} of {other.folder.name}"
    return {asked[0]: one, name: other}


def _corpus(trained) -> Corpus:
    corpus = load_corpus(trained.config["corpus"]["name"], cache.FOLDER)
    if corpus.content_hash != trained.config["corpus"].get("hash"):
        raise UserError(
            f"The corpus {corpus.name} has changed since {trained.folder} was trained on it, so "
            "what it held out is not known any more; put it back as it was."
        )
    return corpus


def _given_tasks(values, most_shots) -> dict[str, dict[str, Made] | None]:
    """What each name in --tasks stands for, in that order; None for an own task, to be made."""
    if not values.run:
        raise UserError("--run is needed: the run folder to evaluate.")
    corpus = read_config(values.run)["corpus"]["name"]
    mine, manager = own.own_tasks(corpus), None
    given: dict[str, dict[str, Made] | None] = {}
    names = [part.strip() for part in values.tasks.split(",") if part.strip()]
    for name in dict.fromkeys(n for part in names for n in (mine if part == "own" else [part])):
        if name in own.OWN:
            if name not in mine:
                raise UserError(
                    f"The task {name} needs Python source, and {corpus} has its own tasks: "
                    f"{', '.join(mine)}."
                )
            given[name] = None
        elif name.endswith((".jsonl", ".json")):
            items = read_items(Path(name))
            _refuse_unasked(name, items, most_shots)
            stem = Path(name).stem
            given[name] = {stem: Made(lm_eval_tasks.of_items(stem, items), items)}
        else:
            manager = manager or TaskManager()
            made = lm_eval_tasks.by_name(name, manager, mine)
            given[name] = {task: Made(it) for task, it in made.items()}
    return given


def _tasks(values, given, corpus, tokenizer, context, most_shots) -> dict[str, Made]:
    """The tasks that --tasks names, in that order, the own ones made."""
    found: dict[str, Made] = {}
    for name, made in given.items():
        if made is not None:
            found |= made
            continue
        say(f"making {values.items} items of {name}")
        wanted = corpus, tokenizer, context, values.items, values.seed
        items, examples = own.make(name, *wanted)
        if len(items) < 2 or len(examples) < most_shots:
            say(f"{name} is left out: the documents of {corpus.name} give too few items")
            continue
        found[name] = Made(lm_eval_tasks.of_items(name, items, examples), items)
    if not found:
        raise UserError(
            f"--tasks={values.tasks} leaves no task; legal: own, "
            f"{', '.join(own.own_tasks(corpus.name))}, lm-eval's tasks and files of JSON lines."
        )
    return found


def _refuse_unasked(name, items, most_shots):
    """Refuses a file whose items are not of one kind, or too few to show the others."""
    if len({len(item.choices) == 1 for item in items}) > 1:
        raise UserError(f"The task file {name} mixes items of one choice with items of several.")
    # Examples are items that differ from the one that is asked.
    often = max(collections.Counter((i.context, i.choices, i.answer) for i in items).values())
    if len(items) - often < most_shots:
        raise UserError(
            f"The task file {name} has {len(items)} items, too few for {most_shots} different ones "
            "as examples; give --num_fewshot=0, or more items."
        )


def _scorer(mesh, trained):
    """The model's forward over the devices that --mesh names, and what one call of it takes."""
    sizes = meshes.parse(mesh, jax.device_count())
    if sizes["stage"] > 1:
        raise UserError(f"--mesh={mesh} has stages; legal here: the axes data, fsdp and tensor.")
    if jax.device_count() == 1:
        return scoring.forward_of(trained), scoring.limits_of(trained)
    executor = Sharded(meshes.make(sizes))
    limits = scoring.limits_of(trained, meshes.batch_shards(executor.mesh))
    return forward_over(trained, executor), limits


def _losses(trained, tokens, forward, limits):
    """Of each held-out token that the run's last evaluation counts: float [tokens] loss in nats,
    int [tokens] its document; and their UTF-8 bytes."""
    sequence = trained.training.sequence
    batches = EvalBatches(tokens, limits.rows(sequence), sequence, gpt_run.FINAL_WINDOWS)
    places = limits.every_place(sequence)
    losses = []
    for batch in batches:
        found = np.asarray(forward(batch["tokens"], places)[0], np.float64)
        losses.append(found.reshape(-1)[batch["weights"].reshape(-1) > 0])
    ends = np.asarray(tokens[: batches.total_tokens]) == trained.tokenizer.eot_id
    # A target at place i belongs to the document after as many ends as stand before it.
    size = batches.total_bytes(trained.tokenizer.token_bytes)
    return np.concatenate(losses), np.cumsum(ends), size


def _loss_row(losses, tokenizer):
    names = list(losses)
    # Runs of other sequence lengths end their evaluation at other tokens.
    common = min(len(values) for values, _, _ in losses.values())
    documents = losses[names[0]][1][:common]
    estimates = {name: estimate(losses[name][0][:common], documents) for name in names}
    first = estimates[names[0]]
    return {
        "task": "held-out text",
        "shots": None,
        "metric": "loss, nats a token",
        "lower_is_better": True,
        "items": first.items,
        "documents": first.documents,
        "chance": float(np.log(tokenizer.vocab_size)),
        "baselines": {},
        "models": {
            name: {
                "value": estimates[name].mean,
                "error": estimates[name].error,
                "bits_per_byte": bits_per_byte(values.sum(), size),
            }
            for name, (values, _, size) in losses.items()
        },
        "paired": _paired([losses[name][0][:common] for name in names], documents),
    }


def _row(task, made, shots, scores, models):
    first = scores[models[0]]
    documents = made.documents(first.items)
    told = {}
    for name in models:
        values, error = scores[name].values, None
        if values is not None:
            error = estimate(values, documents).error
        told[name] = {
            "value": scores[name].value,
            "error": error,
            "values": None if values is None else values.tolist(),
        }
    both = [scores[name].values for name in models]
    return {
        "task": task,
        "shots": shots,
        "metric": first.metric,
        "lower_is_better": "perplexity" in first.metric or first.metric == "bits_per_byte",
        "items": first.items,
        "documents": len(set(documents)),
        "chance": made.chance(first.items) if first.metric == "acc" else None,
        "baselines": {name: scores[name].value for name in BASELINES if name in scores},
        "models": told,
        "paired": None if any(v is None for v in both) else _paired(both, documents),
    }


def _paired(values, documents):
    """First against second model as JSON; None where there is but one."""
    if len(values) != 2:
        return None
    first, second = values
    return dataclasses.asdict(paired(first, second, documents))


def _truncation(name, shots, before, after, context) -> list[str]:
    cut = after.truncated - before.truncated
    if not cut:
        return []
    return [
        f"{name}, {shots}-shot: {cut} of {after.requests - before.requests} requests were longer "
        f"than the context of {context} tokens and lost their beginning, as lm-eval does it."
    ]


def _described(trained) -> dict:
    return {
        "run": str(trained.folder),
        "variant": trained.variant,
        "step": trained.step,
        "tokens": trained.step * trained.training.batch * trained.training.sequence,
        "model": trained.model.to_json(),
    }
