"""Results of a run as data, stored in report.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparse_dataflow.evaluation.significance import is_share, share_interval
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.reporting.quantities import MISSING

VARIANTS = ("dense", "narrow", "sparse")
"""Names of the models; "narrow" has no sparse weights and the sparse model's FLOPs per token, and
as many experts."""


@dataclasses.dataclass(frozen=True)
class VariantData:
    """Quality, cost and history of one trained model.

    Measurements that were not made are None and print as a dash.

    Attributes:
      name: a name in VARIANTS.
      loss: held-out loss, nats per token.
      bits_per_byte: held-out loss in bits per byte of text, comparable between tokenizers.
      stored_parameters: number of stored parameters (only the stored blocks of sparse weights).
      training_bytes: planned memory of a training step on the fullest device, bytes.
      tokens_per_second: training throughput.
      step_seconds: median wall-clock of an optimizer step, seconds.
      flops_per_token: floating-point operations of a training step, per token.
      steps: number of optimizer steps.
      train_seconds: wall-clock time of the steps, seconds.
      mfu: model FLOPs utilisation, a fraction of one; None where the peak is unknown.
      weight_bytes: bytes of the saved weights and layouts, without the optimizer's state.
      token_seconds: median seconds of a step of generation, which writes a token of every
        continuation at once.
      history: rows of metrics.jsonl, kinds "train" and "eval".
      section_seconds: section -> seconds of a step, in order of execution; of a `timeline`.
      memory: category -> bytes.
      timeline: (kind, section, start, stop in seconds) of the last step's spans, for executors that
        record them.
      hidden: fraction of the transfer time that overlaps with compute.
    """

    name: str
    loss: float | None
    bits_per_byte: float | None
    stored_parameters: int | None
    training_bytes: int | None
    tokens_per_second: float | None
    step_seconds: float | None
    flops_per_token: float | None
    steps: int
    tokens: int
    train_seconds: float
    mfu: float | None = None
    weight_bytes: int | None = None
    token_seconds: float | None = None
    history: list[JsonObject] = dataclasses.field(default_factory=list)
    section_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    timeline: list[list[Any]] = dataclasses.field(default_factory=list)
    hidden: float | None = None


@dataclasses.dataclass(frozen=True)
class LayoutData:
    """Stored blocks of one projection's weight.

    Attributes:
      projection: "qkv", "attn_out", "mlp_in" or "mlp_out".
      layer: index of the transformer block; None where all layers share the layout.
      in_blocks: number of input blocks (rows of the picture).
      out_blocks: number of output blocks (columns of the picture).
      block: side of a block, in features.
      mask: stored blocks as pairs [input block, output block].
      fan_in: maximum stored blocks per output block.
      fan_out: maximum stored blocks per input block.
      balanced: whether fan-in and fan-out are each the same for all blocks.

    Raises:
      UserError: a stored block is outside the grid.
    """

    projection: str
    layer: int | None
    in_blocks: int
    out_blocks: int
    block: int
    mask: list[list[int]]
    fan_in: int
    fan_out: int
    balanced: bool

    def __post_init__(self):
        for row, column in self.mask:
            if not (0 <= row < self.in_blocks and 0 <= column < self.out_blocks):
                raise UserError(
                    f"Block [{row}, {column}] of {self.projection} is outside its grid of "
                    f"{self.in_blocks} × {self.out_blocks} blocks."
                )


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A held-out prompt with its true and generated continuations.

    Attributes:
      prompt: held-out text.
      truth: text that follows the prompt in the document.
      by_variant: variant name -> generated text without the prompt.
    """

    prompt: str
    truth: str
    by_variant: dict[str, str]


@dataclasses.dataclass(frozen=True)
class EvaluationData:
    """Evaluation of a run's models.

    Attributes:
      models: model names; differences are the first minus each other one.
      rows: rows of evaluation.json, without the values of single items; `paired` has a comparison
        by name of each other model, where earlier releases had that of the second alone.
      method: description of the statistical test.
      notes: sentences under the table.
    """

    models: list[str]
    rows: list[JsonObject]
    method: str
    notes: list[str]
    command: str

    def __post_init__(self):
        rows = [
            {**row, "paired": dict.fromkeys(self.models[1:], row["paired"])}
            if not row["paired"] or "difference" in row["paired"]
            else row
            for row in self.rows
        ]
        object.__setattr__(self, "rows", rows)


@dataclasses.dataclass(frozen=True)
class ProfileData:
    """A trace of some steps.

    Attributes:
      kernels: [name, seconds, executions] of the longest operations; empty if unreadable.
      seconds: sum over all operations and devices.
    """

    kernels: list[list]
    seconds: float


@dataclasses.dataclass(frozen=True)
class ReportData:
    """Content of a report, stored in RUN/report.json.

    Attributes:
      title: heading of the page.
      date: date of the run as text.
      machine: chip, cores and memory.
      versions: package -> version.
      corpus: description of the training corpus.
      tokenizer: description of the tokenizer.
      notes: sentences under the headline.
      variants: one to three variants with different names.
      layouts: layouts of the sparse weights; empty for a dense run.
      flop_ceiling: dense FLOPs over sparse FLOPs of a step, the means over the steps of the run,
        the upper bound of the speed-up.
      projection_share: share of a dense step's FLOPs in the projections, a fraction of one.
      continuations: generated texts.
      evaluation: evaluation on tasks, if `experiments.evaluate` has run.
      goodput: category -> seconds of the run, including restarts; "productive" counts the steps
        that the final model includes.
      profile: trace of some steps, if the run has one.
      code: commit of the code and whether files differed from it; "" if unknown.
      host: name of the host; "" if unknown.
      seed: seed of the run; None if unknown.

    Raises:
      UserError: there is no variant, a duplicate or an unknown one.
    """

    title: str
    command: str
    date: str
    machine: str
    versions: dict[str, str]
    corpus: str
    tokenizer: str
    notes: list[str]
    variants: list[VariantData]
    layouts: list[LayoutData] = dataclasses.field(default_factory=list)
    flop_ceiling: float | None = None
    projection_share: float | None = None
    continuations: list[Continuation] = dataclasses.field(default_factory=list)
    evaluation: EvaluationData | None = None
    goodput: dict[str, float] = dataclasses.field(default_factory=dict)
    profile: ProfileData | None = None
    code: str = ""
    host: str = ""
    seed: int | None = None

    def __post_init__(self):
        names = [v.name for v in self.variants]
        if not names or len(set(names)) < len(names) or not set(names) <= set(VARIANTS):
            raise UserError(
                f"A report needs one to three different variants; legal: {', '.join(VARIANTS)}; "
                f"got {names}."
            )

    @classmethod
    def from_json(cls, data: JsonObject) -> "ReportData":
        """Creates the report from a parsed report.json.

        Raises:
          TypeError: a key is missing or unknown, or a value has another structure; also for the
            other errors of `json_files.MALFORMED`.
        """
        kinds = {"variants": VariantData, "layouts": LayoutData, "continuations": Continuation}
        nested: JsonObject = {
            key: [kind(**item) for item in data[key]] for key, kind in kinds.items() if key in data
        }
        if data.get("evaluation") is not None:
            nested["evaluation"] = EvaluationData(**data["evaluation"])
        if data.get("profile") is not None:
            nested["profile"] = ProfileData(**data["profile"])
        return cls(**{**data, **nested})

    def to_json(self) -> JsonObject:
        """Returns JSON values: numpy values as Python values, non-finite numbers as None."""
        return _plain(self)


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def evaluation_table(evaluation: EvaluationData) -> list[JsonObject]:
    """Returns the rows of the evaluation table.

    A difference is better or worse for the first model only where its 95% interval excludes zero.
    """
    rows = []
    for row in evaluation.rows:
        unit = ".1%" if is_share(row["metric"]) else ".3f"
        text = lambda value, unit=unit: MISSING if value is None else f"{value:{unit}}"  # noqa: E731
        models = [row["models"].get(name, {}) for name in evaluation.models]

        def error(model, row=row, text=text):
            if model.get("error") is None:
                return ""
            if not is_share(row["metric"]):
                return f"± {text(model['error'])}"
            sizes = row["items"], row["documents"]
            return " to ".join(map(text, share_interval(model["value"], model["error"], *sizes)))

        rows.append({
            "task": row["task"],
            "shots": "" if row["shots"] is None else f"{row['shots']}-shot",
            "metric": row["metric"],
            "items": f"{row['items']:,}",
            "documents": f"{row['documents']:,}",
            "cells": [(text(model.get("value")), error(model)) for model in models],
            "baselines": [
                text(v) for v in (row["chance"], *map(row["baselines"].get, ("unigram", "bigram")))
            ],
            "differences": [
                _difference(row["paired"].get(name), unit, row["lower_is_better"])
                for name in evaluation.models[1:]
            ],
        })  # fmt: skip
    return rows


def _difference(paired: JsonObject | None, unit: str, lower_is_better: bool) -> dict:
    """The texts of one comparison with the first model; empty where there is none."""
    if paired is None:
        return {"difference": "", "interval": "", "p": "", "better": None}
    low, high, p = (paired[name] for name in ("low", "high", "p"))
    is_sure = low is not None and low * high > 0
    return {
        "difference": f"{paired['difference']:+{unit}}",
        "interval": "" if low is None else f"{low:{unit}} to {high:{unit}}",
        "p": "" if p is None else f"p = {p:.2g}" if p >= 1e-4 else "p < 0.0001",
        "better": (low < 0) == lower_is_better if is_sure else None,
    }
