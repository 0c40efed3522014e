"""What goes with what in a resolved run, and the rows about models and executors.

A row names an option and the options that it does not go with.  What is in no row goes together.
`runs.compatibility` adds the rows about the settings of a run, so that one table refuses, and
docs/guide/devices.md and the page of settings show it.  A size that another does not divide is
arithmetic and no row: the code that cuts refuses it.

A parallelism, how devices share a model, is an option too.  An executor has one or more of them.
Importing this module loads no jax.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """A run as rows read it; a row that reads an absent part does not apply.

    Attributes:
      model: of one phase.
      training: its settings.
      executor: has `parallelisms` and `describe()`; None before it is known.
      loss: `DataConfig.loss`.
      evolution: its method where layouts or model change, else "".
      given_layouts: whether the stored blocks are those of initial weights.
      config: the `RunConfig`; None for an executor that is used without one.
    """

    model: ModelConfig
    training: TrainingConfig
    executor: Any = None
    loss: str = "all"
    evolution: str = ""
    given_layouts: bool = False
    config: Any = None


@dataclasses.dataclass(frozen=True)
class Option:
    """Something that a run may use.

    Attributes:
      words: in the tables of the pages.
      used: (`ResolvedRun`, or another view of a run) -> the option as the run has it, such as
        "training.adapter_rank=4"; falsy without.
      example: settings that a small run uses it with, by path: those that `used` reads, and those
        that go with them.
      needed: whether this is the lack of a setting that other options need.
    """

    words: str
    used: Callable[[Any], Any]
    example: Mapping[str, object]
    needed: bool = False


class Conflict(NamedTuple):
    """A row: an option and those that it does not go with.

    Attributes:
      option: cannot be used with any of `others`.
      others: options or parallelisms.
      because: about the others; completes "OPTION with OTHER, ".
      legal: completes "legal: ", or "legal with it: " of a setting.
    """

    option: Option
    others: tuple[Option, ...]
    because: str
    legal: str

    def sentence(self, run: object) -> str:
        """Returns why a run has both; "" if it does not."""
        other = next((words for each in self.others if (words := each.used(run))), "")
        option = other and self.option.used(run)
        if not option:
            return ""
        if self.option.needed:
            return f"{other} {self.because.removeprefix('which ')}; legal with {self.option.words}."
        return f"{option} with {other}, {self.because}; {self.legal}."


def violations(run: object, rows: Iterable[Conflict]) -> Iterator[tuple[Conflict, str]]:
    """Yields each row that a run violates, and its sentence."""
    for row in rows:
        if sentence := row.sentence(run):
            yield row, sentence


def refuse(runs: Iterable[object], rows: Iterable[Conflict]) -> None:
    """Refuses runs that violate rows.

    Raises:
      UserError: naming of every violated row both options, the reason and what is legal.
    """
    rows = tuple(rows)
    sentences = dict.fromkeys(words for run in runs for _, words in violations(run, rows))
    if sentences:
        raise UserError(" ".join(sentences))


def _parallelism(name: str, **example: str) -> Option:
    """Returns a parallelism by its name in `Executor.parallelisms`; `example` uses it."""

    def used(run):
        return (
            run.executor is not None
            and name in run.executor.parallelisms
            and run.executor.describe()
        )

    return Option(name, used, {f"parallel.{setting}": value for setting, value in example.items()})


ROWS = _parallelism("data, fsdp", mesh="data:2,fsdp:2")
CONTEXT = _parallelism("context", mesh="context:2")
TENSOR = _parallelism("tensor", mesh="tensor:2")
FEATURE = _parallelism("feature", mesh="feature:2")
STAGE = _parallelism("stage", mesh="stage:2")
RELAY = _parallelism("relay", executor="relay")
RELAY_DEPTH = _parallelism("relay with depth_schedule", executor="relay", depth_schedule="grow:0.5")
RELAY_DEVICES = _parallelism("relay over several devices", executor="relay", mesh="data:2")

PARALLELISMS = ROWS, CONTEXT, TENSOR, FEATURE, STAGE, RELAY, RELAY_DEPTH, RELAY_DEVICES
"""Axes of a mesh that are longer than 1, and kinds of the relay, in the order of the page."""

NOTHING: Mapping[str, object] = {}
WEIGHTS = {"run.init_from": "DIR"}
"""A setting of examples; the weights are not read."""


def setting(path: str, example: object, more: Mapping[str, object] = NOTHING) -> Option:
    """Returns the option of a model or a training whose setting is not empty.

    Args:
      path: such as "training.adapter_rank".
      more: settings that go with the example.
    """
    part, _, name = path.partition(".")

    def used(run):
        value = getattr(getattr(run, part), name)
        return value and f"{path}={'yes' if value is True else str(value)[:60]}"

    return Option(f"`{path}`", used, {path: example, **more})


SHARED = Option(
    "`evolution.method=shared_to_own`",
    lambda run: run.model.shared_layers and "--evolution=shared_to_own",
    {"evolution.method": "shared_to_own"},
)
EXPERTS = setting("model.experts", 4)

SUB_BATCHES = Option(
    "`parallel.sub_batches`",
    lambda run: (n := getattr(run.executor, "sub_batches", 1)) > 1 and f"parallel.sub_batches={n}",
    {"parallel.sub_batches": 2, "parallel.mesh": "fsdp:2"},
)
WHOLE_EXPERTS = Option(
    "`parallel.zero` below 3",
    lambda run: getattr(run.executor, "zero", 3) < 3 and f"parallel.zero={run.executor.zero}",
    {"parallel.zero": 1, "parallel.mesh": "fsdp:2"},
)
EXCHANGED_TOKENS = Option(
    "`parallel.experts=exchange`",
    lambda run: getattr(run.executor, "exchange", False) and "parallel.experts=exchange",
    {"parallel.experts": "exchange", "parallel.mesh": "fsdp:2", **EXPERTS.example},
)

SEVERAL_DEVICES = Option(
    "`parallel.mesh` of several devices, or the relay",
    lambda run: run.executor is not None and run.executor.parallelisms and run.executor.describe(),
    {"parallel.mesh": "data:2"},
)
FEATURES = Option(
    "`training.stored_features`",
    lambda run: (
        (dtype := run.training.stored_features) != "no" and f"training.stored_features={dtype}"
    ),
    {"training.stored_features": "int8", "training.side_width": 8, **WEIGHTS},
)

TABLE = (
    Conflict(
        SEVERAL_DEVICES,
        (FEATURES,),
        "which are of whole rows on one device",
        "legal: one device, or training.stored_features=no",
    ),
    Conflict(
        EXPERTS,
        (FEATURE,),
        "where a router would see only a part of its inputs",
        "legal: a mesh without feature",
    ),
    Conflict(
        SHARED,
        (RELAY_DEPTH,),
        "where new layers start as the identity, and a shared layer does not",
        "legal: parallel.depth_schedule=constant",
    ),
    Conflict(
        EXPERTS,
        (SUB_BATCHES,),
        "which would route the tokens of each part by themselves",
        "legal: parallel.sub_batches=1",
    ),
    Conflict(
        WHOLE_EXPERTS,
        (EXCHANGED_TOKENS,),
        "which needs the experts of a layer to be cut over fsdp",
        "legal: parallel.zero=3, or parallel.experts=gather",
    ),
)
"""The rows about model, training and executor; `runs.compatibility` has those about a run."""


def refuse_unsupported(executor: object, model: ModelConfig, training: TrainingConfig) -> None:
    """Refuses a model or a training that an executor does not have; see `refuse`."""
    refuse([ResolvedRun(model, training, executor)], TABLE)
