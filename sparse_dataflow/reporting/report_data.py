"""A run's results as data, kept as report.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparse_dataflow.files.errors import UserError

VARIANTS = ("dense", "sparse")


@dataclasses.dataclass(frozen=True)
class VariantData:
    """One trained model: its quality, its cost and its history.

    Attributes:
      name: "dense" or "sparse".
      loss: held-out loss, nats per token.
      bits_per_byte: held-out loss in bits per byte of text, comparable between tokenizers.
      stored_parameters: parameters that exist (the stored blocks of a sparse weight alone).
      training_bytes: memory of a training step, bytes.
      tokens_per_second: training throughput.
      step_seconds: median wall-clock of an optimizer step, seconds.
      flops_per_token: floating-point operations of a training step, per token.
      steps: optimizer steps made.
      tokens: tokens trained on.
      train_seconds: wall-clock of the steps, seconds.
      mfu: model FLOPs utilisation, a fraction of one; None where the peak is unknown.
      history: rows of metrics.jsonl, kinds "train" and "eval".
      section_seconds: where a step's time goes, section -> seconds, in order of execution.
      memory: category -> bytes.
      timeline: (kind, section, start, stop in seconds) of the last step's work, where the executor
        notes it.
      hidden: fraction of the transfer during which the device computed.
    A measurement that was not made is None and prints as a dash.
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
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    section_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    timeline: list[list[Any]] = dataclasses.field(default_factory=list)
    hidden: float | None = None


@dataclasses.dataclass(frozen=True)
class LayoutData:
    """Which blocks of one projection's weight exist.

    Attributes:
      projection: "qkv", "attn_out", "mlp_in" or "mlp_out".
      layer: index of the transformer block; None where all layers share the layout.
      in_blocks: input blocks (rows of the picture).
      out_blocks: output blocks (columns of the picture).
      block: side of a block, in features.
      mask: the stored blocks, pairs [input block, output block].
      fan_in: stored blocks that an output block reads (the most, where they differ).
      fan_out: stored blocks that an input block feeds (the most, where they differ).
      balanced: whether all output blocks share one fan-in and all input blocks one fan-out.

    Raises:
      UserError: on construction, where a stored block lies outside the grid.
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
    """A held-out prompt, how it really goes on, and what each variant wrote after it.

    Attributes:
      prompt: held-out text that every variant was given.
      truth: the text that follows the prompt in the document.
      by_variant: variant name -> generated text, without the prompt.
    """

    prompt: str
    truth: str
    by_variant: dict[str, str]


@dataclasses.dataclass(frozen=True)
class EvaluationRow:
    """What the models of a run scored in one task with one number of examples in the prompt.

    Attributes:
      task: its name.
      shots: examples in the prompt; None where the question has none, as for a loss.
      metric: what is counted.
      lower_is_better: whether a smaller value is the better one.
      items: how many were asked.
      documents: how many they are from.
      chance: what guessing gives; None where that is not known.
      unigram: what a unigram model of the training documents gives; None where it was not asked.
      bigram: the same of a bigram model.
      values: model name -> value.
      errors: model name -> standard error; None where there is none.
      difference: the first model's value less the second's, on the same items.
      low: lower end of its 95% interval.
      high: upper end.
      p: probability of such a difference where there is none.
    """

    task: str
    shots: int | None
    metric: str
    lower_is_better: bool
    items: int
    documents: int
    chance: float | None
    unigram: float | None
    bigram: float | None
    values: dict[str, float]
    errors: dict[str, float | None]
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None


@dataclasses.dataclass(frozen=True)
class EvaluationData:
    """An evaluation of a run's models.

    Attributes:
      models: their names, in the order that differences are taken.
      rows: what they scored.
      method: how differences were judged, in words.
      notes: plain sentences shown under the table.
      command: that made it.
    """

    models: list[str]
    rows: list[EvaluationRow]
    method: str
    notes: list[str]
    command: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "EvaluationData":
        """The evaluation of parsed JSON; UserError where a key is missing or unknown."""
        rows = data.get("rows", ()) if isinstance(data, Mapping) else ()
        return _construct(cls, data, {"rows": [_construct(EvaluationRow, row) for row in rows]})


@dataclasses.dataclass(frozen=True)
class ReportData:
    """All that a report shows; kept as RUN/report.json.

    Attributes:
      title: heading of the page.
      command: the exact command that made the run.
      date: when, as text.
      machine: chip, cores and memory.
      versions: package -> version.
      corpus: what the model was trained on.
      tokenizer: how text became tokens.
      notes: plain sentences shown under the headline.
      variants: one or two, of different names.
      layouts: the sparse weights' layouts; empty for a dense run.
      flop_ceiling: dense FLOPs over sparse FLOPs of a step: the speed-up that no kernel can exceed.
      projection_share: share of a dense step's FLOPs in the projections, a fraction of one.
      continuations: generated text, side by side.
      evaluation: tasks that the models were asked, where `experiments.evaluate` has run.
      goodput: seconds of the whole run, all its starts together, by what they were spent on;
        "productive" are those of steps that count.

    Raises:
      UserError: on construction, where there is no variant, one twice, or one of unknown name.
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

    def __post_init__(self):
        names = [v.name for v in self.variants]
        if not names or len(set(names)) < len(names) or not set(names) <= set(VARIANTS):
            raise UserError(
                f"A report needs each variant once, of {', '.join(VARIANTS)}; got {names}."
            )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ReportData":
        """The report of a parsed report.json.

        Raises:
          UserError: where a key is missing or unknown.
        """
        parts = {"variants": VariantData, "layouts": LayoutData, "continuations": Continuation}
        nested: dict[str, Any] = {
            key: [_construct(part, item) for item in data[key]]
            for key, part in parts.items()
            if isinstance(data, Mapping) and key in data
        }
        if isinstance(data, Mapping) and data.get("evaluation") is not None:
            nested["evaluation"] = EvaluationData.from_json(data["evaluation"])
        return _construct(cls, data, nested)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values alone: numpy values become Python's, non-finite numbers None."""
        return _plain(self)


def _construct(cls: type, data: Any, replaced: Mapping[str, Any] | None = None) -> Any:
    if not isinstance(data, Mapping):
        raise UserError(f"{cls.__name__} must be a JSON object, not {type(data).__name__}.")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    missing = [
        name
        for name, field in fields.items()
        if name not in data
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if unknown or missing:
        raise UserError(
            f"{cls.__name__} has unknown keys {unknown} and lacks {missing}; "
            f"legal: {', '.join(fields)}."
        )
    return cls(**{**data, **(replaced or {})})


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
