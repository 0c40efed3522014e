"""The models of task_table: trained or given, evaluated seed by seed, and put into one table."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.models import evaluate, load_model
from sparse_dataflow.commands.request import Request, saved_config
from sparse_dataflow.commands.train import detect_chip, train
from sparse_dataflow.core import sums
from sparse_dataflow.core.messages import say
from sparse_dataflow.evaluation.significance import (
    CONFIDENCE,
    clustered_mean,
    is_share,
    share_interval,
)
from sparse_dataflow.files import derived, folders, storage
from sparse_dataflow.files.errors import UserError, redact_json
from sparse_dataflow.files.folders import FolderLock
from sparse_dataflow.files.output import markdown
from sparse_dataflow.interchange import load
from sparse_dataflow.runs.run_config import VARIANTS, RunConfig

from .. import evaluate as evaluate_flags
from . import study

OWNER = "task_table"
BASELINE = "dense"
TWINS = "twins"
SET = (
    *("training.steps", "training.seed", "run.twin", "run.out"),
    *("evolution.", "model.experts", "model.top_k"),
)
"""What the study sets itself, as `study.refuse_set` takes it."""

METHOD = (
    "Differences are paired by item with the dense model of the same seed, on average over seeds. "
    "The interval (95%) adds the variance over documents and the variance over seeds, with "
    "Satterthwaite's degrees of freedom."
)

Place = tuple[str, str]
"""Run folder or Hugging Face directory, and the variant in it; "" where it has one model, or where
--models names none."""


def fill_task_table(request: Request, options) -> int:
    """Trains or takes the models, evaluates every seed that has no result; returns the exit status.

    Args:
      request: the config of the trainings.
      options: of `experiments.task_table`.

    Raises:
      UserError: before the first step where it can be known then.
    """
    folder = Path(options.out)
    seeds = given(options.models)
    folders.refuse_foreign(folder, OWNER)
    for place, _ in (place for seed in seeds or () for place in seed.values()):
        load_model.refuse_no_model(place, "--models")
    if seeds is None:
        study.refuse_set(request, SET)
        config = request.config(jax.default_backend(), detect_chip(request).memory_bytes)
        config = config.change(training__steps=options.steps, run__twin="narrow")
        study.keep_settings(folder, config, OWNER)
    else:
        _refuse_unread(request, options)
        seeds = [{name: _resolved(name, place) for name, place in each.items()} for each in seeds]
        folders.claim(folder, OWNER)
    with FolderLock(folder):
        if seeds is None:
            seeds, status = _trained(config, options, folder)
            if status:
                say("stopped; the same command goes on")
                return status
        corpus = "" if options.models == "" else request.changes.get("data.corpus", "")
        results = [_evaluated(places, options, corpus, folder, k) for k, places in enumerate(seeds)]
    table = summary(results)
    kept = {"command": measurement.provenance("")["command"], **table}
    storage.replace_text(folder / "task_table.json", json.dumps(kept, indent=1) + "\n")
    text = as_text(table)
    storage.replace_text(folder / "task_table.md", text + "\n")
    say(text)
    return 0


def given(models: str) -> list[dict[str, Place]] | None:
    """The models of --models, a dict name -> place for each seed; None where it is empty.

    Raises:
      UserError: a member has no name, no name is dense, or names have unequal numbers of seeds.
    """
    by_name: dict[str, list[Place]] = {}
    for word in filter(None, (word.strip() for word in models.split(","))):
        name, equals, place = word.partition("=")
        if not (equals and name and place):
            raise UserError(f"--models has {word!r}; legal: NAME=RUN, NAME=RUN:VARIANT.")
        start, colon, variant = place.rpartition(":")
        split = (start, variant) if colon and variant in VARIANTS else (place, "")
        by_name.setdefault(name, []).append(split)
    if not by_name:
        return None
    if BASELINE not in by_name:
        raise UserError(
            f"--models names {', '.join(by_name)}; one of them must be {BASELINE}, with which "
            "the others are compared."
        )
    counts = {name: len(places) for name, places in by_name.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise UserError(f"--models has {shown}; give each name as many seeds as {BASELINE}.")
    return [{name: by_name[name][k] for name in by_name} for k in range(counts[BASELINE])]


def _refuse_unread(request: Request, options) -> None:
    """Refuses flags of trainings where the models are given.

    Raises:
      UserError: naming them.
    """
    defaults = type(options)()
    unread = [path for path in request.changes if path != "data.corpus"]
    unread += ["run.scale"] * (request.scale != "auto")
    unread += [n for n in ("steps", "seeds", "arms") if getattr(options, n) != getattr(defaults, n)]
    if unread:
        raise UserError(
            f"--models takes models that are there, so it reads no {', '.join(unread)}; legal "
            "beside it: --corpus, --tasks, --num_fewshot, --items, --out."
        )


def _resolved(name: str, place: Place) -> Place:
    """The place with its variant: that of the name, where the run has several and none is given.

    Raises:
      UserError: the run has several models, and none of the name.
    """
    folder, variant = place
    has = load.variants(folder)
    if variant or len(has) == 1:
        return place
    if name not in has:
        legal = ", ".join(f"{name}={folder}:{each}" for each in has)
        raise UserError(f"--models={name}={folder} does not say which model; legal: {legal}.")
    return folder, name


def _trained(config: RunConfig, options, folder: Path) -> tuple[list[dict[str, Place]], int]:
    """Trains what is not trained yet; returns the models of each seed, and the exit status."""
    seeds = []
    for seed in range(options.seeds):
        places: dict[str, Place] = {}
        for name in (TWINS, *options.arms):
            where = folder / f"seed_{seed}" / name
            changed = _arm(config, name).change(training__seed=seed, run__out=str(where))
            status = _train(changed, where)
            if status:
                return [], status
            variants = changed.variants if name == TWINS else ("sparse",)
            for variant in variants:
                places[variant if name == TWINS else name] = (str(where), variant)
        dense = places.pop(BASELINE)
        seeds.append({BASELINE: dense, **places})
    return seeds, 0


def _arm(config: RunConfig, name: str) -> RunConfig:
    """The config of one run of a seed."""
    if name == TWINS:
        return config
    alone = config.change(run__twin="no")
    if name == "sparse_to_dense":
        return alone.change(evolution__method="sparse_to_dense")
    # Two of eight experts are active, so a token costs what it costs in the sparse model.
    return alone.change(model__experts=8, model__top_k=2, model__d_ff=config.model.d_ff // 2)


def _train(config: RunConfig, where: Path) -> int:
    if (where / "report.html").exists():
        return 0
    resume = (where / "config.json").exists()
    say(f"{where}: training" + " goes on" * resume)
    return train(saved_config(where) if resume else config, resume=resume, experiment=OWNER).status


def _evaluated(
    places: Mapping[str, Place], options, corpus: str, folder: Path, seed: int
) -> Mapping:
    """The evaluation of one seed's models, under their names; kept in the folder."""
    (place, variant), *others = places.values()
    flags = evaluate_flags.Options(
        run=place,
        against=",".join(":".join(filter(None, other)) for other in others),
        variant=(variant,) if variant else VARIANTS,
        tasks=options.tasks,
        num_fewshot=tuple(options.num_fewshot),
        items=options.items,
        corpus=corpus,
    )

    def scores():
        result = evaluate.evaluated(flags)
        evaluate.keep(place, result)
        names = dict(zip(result["models"], places))
        rows = []
        for row in result["rows"]:
            models = {names[name]: told for name, told in row["models"].items()}
            rows.append({**row, "models": models, "paired": None})
        return redact_json({**result, "rows": rows})

    origin = {"names": list(places), **evaluate.origin(flags)}
    return derived.value(folder, f"evaluation_{seed}", origin, scores)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A mean difference to the dense model, with the variances of its two sources.

    Attributes:
      mean: over items and seeds.
      seeds: the mean of each seed, float [seeds].
      items: variance of `mean` over documents.
      documents: number of documents.
    """

    mean: float
    seeds: np.ndarray
    items: float
    documents: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval; None where neither source has a variance that can be told."""
        count = len(self.seeds)
        by_seed = (sums.mean(self.seeds).error or 0.0) ** 2
        variance = by_seed + self.items
        if not variance:
            return None
        from scipy import stats  # slow to import

        # Welch and Satterthwaite: Biometrics Bulletin 2 (1946), pages 110 to 114.
        parts = [(by_seed, count - 1), (self.items, self.documents - 1)]
        freedom = variance**2 / sum(part**2 / n for part, n in parts if part and n)
        margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(variance)
        return self.mean - margin, self.mean + margin


def difference(values: Sequence, baseline: Sequence, documents: Sequence) -> Difference:
    """The difference of two models that several seeds trained.

    Args:
      values: of a model, float [seeds, items].
      baseline: of the dense model, float [seeds, items].
      documents: document of each item, [items].
    """
    paired = np.asarray(values, np.float64) - np.asarray(baseline, np.float64)
    over_items = clustered_mean(paired.mean(0), documents)
    return Difference(
        over_items.mean, paired.mean(1), (over_items.error or 0.0) ** 2, over_items.documents
    )


def average(differences: Sequence[Difference]) -> Difference:
    """The average over tasks, whose items are independent and whose seeds are the same."""
    count = len(differences)
    return Difference(
        float(np.mean([d.mean for d in differences])),
        np.mean([d.seeds for d in differences], 0),
        sum(d.items for d in differences) / count**2,
        min(d.documents for d in differences),
    )


def summary(results: Sequence[Mapping[str, Any]]) -> dict:
    """The table of several seeds.

    Args:
      results: of `_evaluated`, one for each seed.

    Returns:
      "seeds", "names", "rows" (a task, number of examples and metric, with the mean of each model
      and its difference to the dense one), "averages" (over the tasks that the dense model can do,
      by number of examples), "losses" (name -> nats a token, and difference to dense).
    """
    first = results[0]
    names = list(first["rows"][0]["models"])
    others = [name for name in names if name != BASELINE]
    loss, *asked = first["rows"]
    by_name = {n: [r["rows"][0]["models"][n]["value"] for r in results] for n in names}
    losses = {}
    for name in names:
        seeds = np.asarray(by_name[name]) - np.asarray(by_name[BASELINE])
        over_seeds = Difference(float(seeds.mean()), seeds, 0.0, loss["documents"])
        losses[name] = {"loss": float(np.mean(by_name[name])), **_told(over_seeds)}
    rows: list[dict[str, object]] = []
    able: dict[int, list[dict[str, Difference]]] = {}
    for number, row in enumerate(asked, start=1):
        each = [result["rows"][number]["models"] for result in results]
        if any(told["values"] is None for models in each for told in models.values()):
            continue
        values = {name: [models[name]["values"] for models in each] for name in names}
        apart = {n: difference(values[n], values[BASELINE], row["item_documents"]) for n in others}
        scores = {name: float(np.mean(values[name])) for name in names}
        can = _is_above_chance(row, values[BASELINE])
        rows.append(
            {
                **{key: row[key] for key in ("task", "shots", "metric", "items", "documents")},
                "chance": row["chance"],
                "baselines": row["baselines"],
                "dense_above_chance": can,
                "scores": scores,
                "differences": {name: _told(d) for name, d in apart.items()},
            }
        )
        if can:
            able.setdefault(row["shots"], []).append(apart)
    averages = [
        {
            "shots": shots,
            "tasks": len(tasks),
            "differences": {n: _told(average([task[n] for task in tasks])) for n in others},
        }
        for shots, tasks in able.items()
    ]
    table = {"seeds": len(results), "names": names, "losses": losses}
    keys = ("corpus", "date", "machine", "versions", "context")
    table |= {key: first[key] for key in keys if key in first}
    return {**table, "rows": rows, "averages": averages, "notes": _notes(table, averages)}


def _told(apart: Difference) -> dict:
    low, high = apart.interval or (None, None)
    return {"difference": apart.mean, "low": low, "high": high}


def _is_above_chance(row, values) -> bool:
    """Whether the dense model is right more often than a guess, by the 95% interval."""
    if not is_share(row["metric"]) or row["chance"] is None:
        return False
    mean = np.mean(np.asarray(values, np.float64), 0)
    told = clustered_mean(mean, row["item_documents"])
    low, _ = share_interval(told.mean, told.error, told.items, told.documents)
    return low > row["chance"]


def _notes(table, averages) -> list[str]:
    """At which difference in loss the scores begin to differ, in words."""
    points = [
        (table["losses"][name]["difference"], told, name, average)
        for average in averages
        for name, told in average["differences"].items()
        if told["low"] is not None
    ]
    if not points:
        return ["The dense model is above chance in no task, so scores say nothing here."]
    apart = [p for p in points if p[1]["low"] > 0 or p[1]["high"] < 0]
    same = [p for p in points if p not in apart]
    notes = []
    if apart:
        nats, told, name, at = min(apart, key=_size)
        notes.append(
            f"Scores differ from a loss difference of {nats:+.3f} nats a token: {name}, "
            f"{at['shots']}-shot, {_points(told)} on average over {at['tasks']} tasks."
        )
    if same:
        nats, told, name, at = max(same, key=_size)
        notes.append(
            f"The largest loss difference without a difference in scores is {nats:+.3f} nats a "
            f"token: {name}, {at['shots']}-shot, {_points(told)}."
        )
    return notes


def _size(point) -> float:
    return abs(point[0])


def _points(told) -> str:
    """A difference of shares in percentage points, with its interval."""
    text = f"{100 * told['difference']:+.1f}"
    if told["low"] is None:
        return text
    # The interval of few documents is wider than any difference of shares.
    low, high = max(told["low"], -1.0), min(told["high"], 1.0)
    return f"{text} ({100 * low:+.1f} to {100 * high:+.1f})"


def _nats(told) -> str:
    text = f"{told['difference']:+.3f}"
    return text if told["low"] is None else f"{text} ({told['low']:+.3f} to {told['high']:+.3f})"


def as_text(table: Mapping[str, Any]) -> str:
    """The table as Markdown: losses, averages, tasks, notes."""
    names = table["names"]
    others = [name for name in names if name != BASELINE]
    head = ["", "shots", "chance", BASELINE, *(f"{name} - {BASELINE}" for name in others)]
    losses = table["losses"]
    lines = [
        [
            "held-out loss, nats a token",
            *("", "", f"{losses[BASELINE]['loss']:.3f}"),
            *(_nats(losses[name]) for name in others),
        ]
    ]
    for each in table["averages"]:
        told = [_points(each["differences"][name]) for name in others]
        lines.append([f"average of {each['tasks']} tasks, points", each["shots"], "", "", *told])
    for row in table["rows"]:
        chance = "" if row["chance"] is None else f"{100 * row['chance']:.0f}%"
        score = f"{100 * row['scores'][BASELINE]:.1f}%"
        told = [_points(row["differences"][name]) for name in others]
        lines.append([row["task"], row["shots"], chance, score, *told])
    seeds = f"{table['seeds']} seed{'s' if table['seeds'] > 1 else ''}"
    note = f"{seeds}. {METHOD} Averages are over tasks in which the dense model is "
    note += "right more often than a guess."
    return "\n\n".join([markdown(head, lines), note, *table["notes"]])
