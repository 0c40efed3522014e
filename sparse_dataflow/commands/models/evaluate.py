"""The work of the experiment `evaluate`: loads models, makes tasks, scores, compares and reports.

Needs the extra `eval`.
"""

import dataclasses
import functools
import importlib.metadata
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.models import evaluation_report, load_model
from sparse_dataflow.commands.models import tasks as evaluation_tasks
from sparse_dataflow.commands.training_data import (
    FINAL_WINDOWS,
    corpus_of,
    corpus_tokens,
    eval_batches,
    refuse_changed,
)
from sparse_dataflow.core.config import settings
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.held_out import bits_per_byte
from sparse_dataflow.data.answers import AnswerEvalBatches
from sparse_dataflow.data.examples import as_text
from sparse_dataflow.data.masking import Masking
from sparse_dataflow.data.token_ids import with_text
from sparse_dataflow.evaluation import harness, scoring
from sparse_dataflow.evaluation.activation_sparsity import share_words, with_thresholds
from sparse_dataflow.evaluation.harness import HarnessLM
from sparse_dataflow.evaluation.ngrams import Ngrams
from sparse_dataflow.evaluation.over_mesh import mesh_forward
from sparse_dataflow.evaluation.run_files import (
    CONFIG,
    RECORD,
    TOKENIZER,
    RunRecord,
    read_config,
    read_record,
)
from sparse_dataflow.evaluation.significance import clustered_mean, is_share, paired_difference
from sparse_dataflow.evaluation.trained import NEWEST, Model
from sparse_dataflow.files import derived, manifest, output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.detect import keep_freed_memory
from sparse_dataflow.interchange.hub_models import hub_name, local_folder
from sparse_dataflow.interchange.huggingface import is_directory
from sparse_dataflow.interchange.load import load, variants
from sparse_dataflow.reporting.report_data import VARIANTS
from sparse_dataflow.runs.run_config import DataConfig

BASELINES = ("unigram", "bigram")

VERSION = 3
"""Raise it when the same models get other scores."""

WINDOW, HELD_OUT = 1024, 32_768
"""Tokens of a window, and of all windows, if no model is of a run; its context may be 8,192."""


def evaluate(options) -> None:
    """Evaluates models, prints a table and writes evaluation.json and the report.

    Args:
      options: of `experiments.evaluate`.

    Raises:
      UserError: before anything is scored where it can be known then.
    """
    result = evaluated(options)
    output.print_text(evaluation_report.text(result))
    keep(options.run, result)


def keep(place: str, result: dict) -> None:
    """Writes evaluation.json beside the first model, and its table into the report of its run.

    Args:
      place: run folder, Hugging Face directory, or its name on the hub, of the first model.
      result: of `evaluated`.

    Raises:
      UserError: a file cannot be written.
    """
    first = next(iter(result["models"].values()))
    folder = _folder_of_results(place) or Path(first["run"])
    say(f"kept in {evaluation_report.keep(folder, result)}")
    report = evaluation_report.add_to_report(folder, result)
    if report or _record(first["run"]):
        say(f"report: {report}" if report else "no report yet: the run has not ended")


def evaluated(options) -> dict:
    """Evaluates models.

    Args:
      options: of `experiments.evaluate`.

    Returns:
      What evaluation.json has: "models" (name -> what it is, the model of --run first, then those
      of --against in their order), and "rows", a dict for each task, number of examples and metric.

    Raises:
      UserError: before anything is scored where it can be known then.
    """
    keep_freed_memory()
    others = _others(options.against)
    load_model.refuse_no_model(options.run, "--run")
    for place, _ in others:
        load_model.refuse_no_model(place, "--against")
    share = options.share
    if share and jax.device_count() > 1:
        raise UserError(
            f"--activation_sparsity={options.activation_sparsity} needs one device, and this "
            f"process has {jax.device_count()}; legal here: 0."
        )
    # Of a name on the hub, everything below reads one commit.
    options = dataclasses.replace(options, run=str(local_folder(options.run)))
    others = [(str(local_folder(place)), variant) for place, variant in others]
    folders = [options.run, *(folder for folder, _ in others)]
    # A name that is wrong, or that the network does not reach, costs no load.
    corpus_name = _corpus_name(folders, options.corpus)
    named = evaluation_tasks.named(options, corpus_name)
    models = _models(options, others)
    first = next(iter(models.values()))
    data = _data_of(folders)
    corpus, answers = corpus_of(data, corpus_name), data.loss == "answers"
    hashes = [trained.record.corpus_hash for trained in models.values() if trained.record]
    for trained in models.values():
        # One of another corpus has passed `_refuse_unlike`.
        if trained.record and trained.record.corpus_hash == hashes[0]:
            refuse_changed(corpus, trained)
    context = min(trained.context for trained in models.values())
    text = (as_text if answers else with_text)(corpus, first.tokenizer)
    ready = evaluation_tasks.ready(named, options, text, first.tokenizer, context)
    for name, task in ready.items():
        if task.generates:
            first.model.refuse_bidirectional(f"The task {name}", "tasks that score text")
    train_tokens, held_out = corpus_tokens(corpus, first, answers)
    if share:
        models = {name: with_thresholds(m, train_tokens, share) for name, m in models.items()}
    ngrams = Ngrams(train_tokens, first.tokenizer.vocab_size)
    scorers = {name: _scorer(options.mesh, trained) for name, trained in models.items()}
    lms = {name: harness.harness_lm(models[name], *scorers[name]) for name in models}
    for name in BASELINES:
        lms[name] = HarnessLM(first.tokenizer, context, getattr(ngrams, f"score_{name}"))

    limit = 0 if any(trained.record for trained in models.values()) else HELD_OUT
    read = functools.partial(held_out_scores, held_out=held_out, answers=answers, limit=limit)
    scores = {name: read(models[name], *scorers[name]) for name in models}
    rows, notes = _task_rows(ready, lms, list(models), options, context)
    if limit:
        count = max(len(each.losses) for each in scores.values())
        notes.append(f"No model is of a run, so the loss is of the first {count:,} tokens.")
    if share:
        notes.insert(0, f"The smallest {share_words(share)} count as zeros.")
    return {
        **measurement.provenance(hardware.detect([first.model.compute_dtype]).name),
        "corpus": {"name": corpus.name, "hash": corpus.content_hash},
        "models": {name: _described(trained) for name, trained in models.items()},
        "context": context,
        "activation_sparsity": share,
        "notes": notes,
        "rows": [*_held_out_rows(scores, first), *rows],
    }


def origin(options) -> dict:
    """Returns all that decides the scores of `evaluated`, as data for `files.derived`."""
    others = [*_others(options.against)]
    folders = [local_folder(place) for place in (options.run, *(place for place, _ in others))]
    words = (word.strip() for word in f"{options.tasks},{options.include_path}".split(","))
    corpus = corpus_of(_data_of(folders), _corpus_name(folders, options.corpus))
    return {
        "code": VERSION,
        "flags": options,
        "corpus": corpus.content_hash,
        "models": [_model_files(folder, options) for folder in folders],
        "tasks": [_digests(Path(word)) for word in words if word and Path(word).exists()],
        "library": importlib.metadata.version("lm_eval"),
    }


def _model_files(folder: Path, options) -> dict[str, str]:
    """Returns the digests of the files that a model is read from."""
    if is_directory(folder):
        files = _digests(folder)
        return {name: files[name] for name in files if name != evaluation_report.RESULT}
    manifests = folder.glob(f"*/checkpoints/*/{manifest.NAME}")
    names = (folder / name for name in (CONFIG, RECORD, TOKENIZER))
    return {str(path.relative_to(folder)): derived.digest(path) for path in (*names, *manifests)}


def _digests(path: Path) -> dict[str, str]:
    files = manifest.files(path) if path.is_dir() else {"": path}
    return {name: derived.digest(file) for name, file in files.items()}


def _folder_of_results(place) -> Path | None:
    """The folder for the result of a model on the hub, whose own is the library's cache; None for
    that of the model."""
    name = hub_name(place)
    if name is None:
        return None
    folder = Path("runs", re.sub(r"[^\w.-]", "--", name.name))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _others(against: str) -> list[tuple[str, str]]:
    """The members of --against, as (place, variant); "" is a place's dense or first model."""
    members = [word.strip() for word in against.split(",") if word.strip()]
    split = [member.rpartition(":") for member in members]
    return [
        (os.path.expanduser(place), variant)
        if place and variant in VARIANTS
        else (os.path.expanduser(member), "")
        for member, (place, _, variant) in zip(members, split)
    ]


def _models(options, others: Sequence[tuple[str, str]]) -> dict[str, Model]:
    """The models to evaluate, by their names in the table."""
    folder, checkpoint = options.run, options.checkpoint
    available = variants(folder)
    chosen = [name for name in options.variant if name in available]
    if not chosen:
        raise UserError(
            f"--variant={settings.text(options.variant)} leaves no model; {folder} has: "
            f"{', '.join(available)}."
        )
    if not others:
        return {name: load(folder, name, checkpoint) for name in chosen}
    first = load(folder, chosen[0], checkpoint)
    models = {chosen[0]: first}
    for place, variant in others:
        has = variants(place)
        if variant and variant not in has:
            raise UserError(f"{place} has no {variant} model; it has: {', '.join(has)}.")
        variant = variant or ("dense" if "dense" in has else has[0])
        model = load(place, variant, checkpoint if _record(place) else NEWEST)
        _refuse_unlike(folder, place, models.values(), model)
        models[_name(models, variant, model.folder, model.folder == first.folder)] = model
    return models


def _name(models, variant, folder, is_own):
    """A name that no model of the table has yet; one of another folder says which."""
    names = [variant] * is_own + [f"{variant} of {folder.name}", f"{variant} of {folder}"]
    return next((name for name in names if name not in models), f"{names[-1]}, {len(models) + 1}")


def _refuse_unlike(folder, place, models, model):
    """Refuses a model whose losses cannot be compared with those of the first."""
    corpora = {t.record.corpus_hash for t in (*models, model) if t.record}
    if len(corpora) > 1:
        # A document is held out by its text alone, in every corpus but a very small one.
        if not (_begins_with(folder, place) or _begins_with(place, folder)):
            raise UserError(
                f"{folder} and {place} were trained on different corpora, so what one held out "
                "the other may have learned; give runs on the same corpus."
            )
        say(f"{folder} and {place} were trained on different corpora; held-out text is of {folder}")
    if next(iter(models)).model.bidirectional != model.model.bidirectional:
        raise UserError(
            f"{folder} and {place} were trained with different values of training.objective, so "
            "their losses cannot be compared; give models with the same one."
        )
    if next(iter(models)).tokenizer.content_hash != model.tokenizer.content_hash:
        raise UserError(
            f"{folder} and {place} have different tokenizers, so their losses a token "
            "cannot be compared; give models with the same tokenizer."
        )


def _begins_with(folder, start):
    """Returns whether a run has the weights of another run at its beginning."""
    first = read_config(folder).run.init_from if _record(folder) else ""
    return bool(first) and Path(first).expanduser().resolve() == Path(start).expanduser().resolve()


def _record(folder) -> RunRecord | None:
    if is_directory(folder):
        return None
    return read_record(folder, read_config(folder))


def _corpus_name(folders, corpus: str) -> str:
    """The corpus of the first run; Hugging Face directories alone have that of --corpus."""
    names = [record.corpus for record in map(_record, folders) if record]
    if names and corpus not in ("", names[0]):
        raise UserError(
            f"--corpus={corpus} contradicts the run, which held out documents of {names[0]}; "
            "leave it out."
        )
    return names[0] if names else corpus or DataConfig().corpus


def _data_of(folders) -> DataConfig:
    """What a corpus is read with: the settings of the first run."""
    runs = [folder for folder in folders if _record(folder)]
    return read_config(runs[0]).data if runs else DataConfig()


def _scorer(mesh, trained):
    """The model's forward over the devices that --mesh names, and the limits of one call."""
    sizes = meshes.parse(mesh, jax.device_count())
    if sizes["stage"] > 1:
        raise UserError(f"--mesh={mesh} has stages; legal: data, fsdp, feature, tensor.")
    if jax.device_count() == 1:
        return scoring.single_device_forward(trained), scoring.batch_limits(trained)
    executor = Sharded(meshes.make(sizes))
    limits = scoring.batch_limits(trained, meshes.batch_shards(executor.mesh))
    return mesh_forward(trained, executor), limits


class HeldOutScores(NamedTuple):
    """Scores of held-out tokens.

    Attributes:
      losses: float [tokens] in nats.
      is_largest: float [tokens], 1 for a token that is the likeliest one.
      documents: int [tokens], number of the document of each.
      text_bytes: UTF-8 bytes of all.
    """

    losses: np.ndarray
    is_largest: np.ndarray
    documents: np.ndarray
    text_bytes: int


def held_out_scores(
    trained: Model, forward: scoring.Forward, limits: scoring.Limits, held_out, answers, limit=0
) -> HeldOutScores:
    """The scores of each held-out token of FINAL_WINDOWS, or of `limit` tokens if that is not 0; of
    a masked model those of hidden tokens."""
    sequence = min(trained.context, WINDOW) if limit else trained.context
    windows = limit // sequence or FINAL_WINDOWS
    masking = Masking.of(trained.training, trained.tokenizer)
    kind = AnswerEvalBatches if answers else eval_batches(masking)
    batches = kind(held_out, limits.rows(sequence), sequence, windows)
    lists: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    counted_places, first = [], 0
    for batch in batches:
        counted = batch.token_weights.reshape(-1) > 0
        targets = batch.targets.reshape(limits.shards, -1)
        places = np.tile(np.arange(targets.shape[1], dtype=np.int32), (limits.shards, 1))
        batch_scores = forward(batch.tokens, places, targets)
        for values, scores in zip(lists, batch_scores, strict=True):
            values.append(np.asarray(scores, np.float64).reshape(-1)[counted])
        counted_places.append(first + np.flatnonzero(counted))
        first += counted.size
    losses, is_largest = map(np.concatenate, lists)
    size = batches.total_bytes(trained.tokenizer.token_bytes)
    if isinstance(batches, AnswerEvalBatches):
        return HeldOutScores(losses, is_largest, batches.examples, size)
    # A target at place i belongs to the document after as many ends as stand before it.
    places = np.concatenate(counted_places)
    ends = np.asarray(held_out[: places.max() + 1]) == trained.tokenizer.eot_id
    return HeldOutScores(losses, is_largest, np.cumsum(ends)[places], size)


def _held_out_rows(scores, first):
    """The rows of the losses, and of a masked model of the accuracies."""
    size, masked = first.tokenizer.vocab_size, first.model.bidirectional
    losses = {name: each.losses for name, each in scores.items()}
    metric = "loss, nats a hidden token" if masked else "loss, nats a token"
    loss = _held_out_row(scores, losses, metric, float(np.log(size)))
    for name, each in scores.items():
        total = bits_per_byte(each.losses.sum(), each.text_bytes)
        loss["models"][name]["bits_per_byte"] = total
    if not masked:
        return [loss]
    hits = {name: each.is_largest for name, each in scores.items()}
    return [loss, _held_out_row(scores, hits, "accuracy of hidden tokens", 1 / size, False)]


def _held_out_row(scores, values, metric, chance, lower_is_better=True):
    # Runs of other sequence lengths end their evaluation at other tokens.
    common = min(map(len, values.values()))
    values = {name: each[:common] for name, each in values.items()}
    documents = next(iter(scores.values())).documents[:common]
    estimates = {name: clustered_mean(each, documents) for name, each in values.items()}
    first = next(iter(estimates.values()))
    return {
        "task": "held-out text",
        "shots": None,
        "metric": metric,
        "lower_is_better": lower_is_better,
        "items": first.items,
        "documents": first.documents,
        "chance": chance,
        "baselines": {},
        "models": {n: {"value": each.mean, "error": each.error} for n, each in estimates.items()},
        "paired": _paired(values, documents, not lower_is_better),
    }


def _task_rows(tasks, lms, models, options, context) -> tuple[list[dict], list[str]]:
    """Scores the tasks with each number of examples; returns (rows of the table, notes)."""
    rows, notes = [], []
    by_task = {n: task.shots(options.num_fewshot) for n, task in tasks.items()}
    numbers = {number for numbers in by_task.values() for number in numbers}
    for shots in sorted(numbers, key=lambda number: -1 if number is None else number):
        scored = {n: task for n, task in tasks.items() if shots in by_task[n]}
        words = "the tasks' own examples" if shots is None else f"{shots}-shot"
        scores: dict[str, dict] = {n: {} for n in scored}
        for name, lm in lms.items():
            # Baselines score texts and generate none.
            chosen = {n: t.task for n, t in scored.items() if name in models or not t.generates}
            if not chosen:
                continue
            say(f"{name:>8}: {words}: {', '.join(chosen)}")
            before = lm.counts
            for n, score in harness.evaluate(lm, chosen, shots, options.limit or None).items():
                scores[n][name] = score
            if name in models:
                notes += _truncation(name, words, before, lm.counts, context)
        for n, task in scored.items():
            for metric in scores[n][models[0]]:
                metric_scores = {name: s[metric] for name, s in scores[n].items() if metric in s}
                number = task.own_shots if shots is None else shots
                rows.append(_row(n, task, number, metric, metric_scores, models))
    return rows, notes


def _row(name, task, shots, metric, scores, models):
    first = scores[models[0]]
    documents = task.documents(first.items)
    by_model = {}
    for model in models:
        values, error = scores[model].values, None
        if values is not None:
            error = clustered_mean(values, documents).error
        by_model[model] = {
            "value": scores[model].value,
            "error": error,
            "values": None if values is None else values.tolist(),
        }
    return {
        "task": name,
        "shots": shots,
        "metric": metric,
        "lower_is_better": first.lower_is_better,
        "items": first.items,
        "documents": len(set(documents)),
        "item_documents": np.unique(documents, return_inverse=True)[1].tolist(),
        "chance": task.chance(first.items),
        "baselines": {name: scores[name].value for name in BASELINES if name in scores},
        "models": by_model,
        "paired": _paired({m: scores[m].values for m in models}, documents, is_share(metric)),
    }


def _paired(values, documents, bounded=False):
    """The comparison of the first model with each other one, by its name; None without values."""
    (_, first), *others = values.items()
    if any(v is None for v in values.values()):
        return dict.fromkeys(name for name, _ in others)
    return {
        name: dataclasses.asdict(paired_difference(first, second, documents, bounded))
        for name, second in others
    }


def _truncation(name, words, before, after, context) -> list[str]:
    cut = after.truncated - before.truncated
    if not cut:
        return []
    return [
        f"{name}, {words}: {cut} of {after.requests - before.requests} requests were longer "
        f"than the context of {context} tokens and lost their beginning, as lm-eval does it."
    ]


def _described(trained) -> dict:
    return {
        "run": str(trained.folder),
        "id": trained.record.identity if trained.record else "",
        "variant": trained.variant,
        "step": trained.step,
        "tokens": trained.step * trained.training.batch * trained.training.sequence,
        "model": trained.model.to_json(),
    }
