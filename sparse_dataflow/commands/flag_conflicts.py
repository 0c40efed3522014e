"""Rows of the table of what goes with what, about settings that a command line names.

`runs.compatibility` reads values; these rows read which settings somebody gave.  A setting that is
given and would have no effect is refused, and its default is not.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.attention_settings import FAMILY_FIELDS, MIXTURE
from sparse_dataflow.core.config.model import GROWN
from sparse_dataflow.core.config.projections import PROJECTIONS
from sparse_dataflow.core.config.training import SCHEDULES
from sparse_dataflow.core.executors.compatibility import WEIGHTS, Conflict, Option, refuse
from sparse_dataflow.runs.parallel import ONLY_RELAY
from sparse_dataflow.runs.run_config import RunConfig

FROM_WEIGHTS = ("scale", "model.vocab_size", "model.max_len", "model.norm", "model.positions",
                "model.activation", "model.parametrization", "data.tokenizer",
                *(f"model.{name}" for name in FAMILY_FIELDS
                  if name not in (*MIXTURE, *GROWN)))  # fmt: skip
"""Settings that the weights of --init_from determine."""


@dataclasses.dataclass(frozen=True)
class GivenSettings:
    """The settings of a command line, as rows read them.

    Attributes:
      changes: path -> value.
      spelled: path -> the flag that gave it.
      resumed: whether the other settings are those of a run.
    """

    changes: Mapping[str, object]
    spelled: Mapping[str, str]
    resumed: bool

    def words(self, paths: Iterable[str]) -> str:
        """Returns the flags that gave some of these settings; "" without."""
        return ", ".join(self.spelled[path] for path in paths if path in self.changes)


def _given(words: str, paths: Iterable[str], example: Mapping[str, object]) -> Option:
    """Returns the option that a command line names one of some settings."""
    paths = tuple(paths)
    return Option(words, lambda given: given.words(paths), example)


def _while(
    words: str,
    path: str,
    default: object,
    fits: Callable[[object], object],
    example: Mapping[str, object],
) -> Option:
    """Returns the option that a setting, or its default, has some value; none of a resumed run."""

    def used(given):
        value = given.changes.get(path, default)
        if given.resumed or not fits(value):
            return ""
        return f"{given.spelled.get(path, path)}={str(value)[:60]}"

    return Option(words, used, example)


SUCH_AS = {"evolution.method": "gradual", "training.adapter_rank": 4}
"""Examples of other values than the default; of places it is a folder."""


def _only(
    names: str,
    by: str,
    values: Sequence[object],
    because: str,
    example: object,
    other: object = "",
    words: str = "",
) -> Conflict:
    """Returns the row of settings that are read only where another setting has some values.

    Args:
      names: of the settings, of one config.
      by: path of the other setting.
      values: of it; empty is every value but its default.
      because: completes "SETTING with OTHER=VALUE, ".
      example: a value of the first setting.
      other: a value of the other setting that does not read them; empty is its default.
      words: names the settings; empty is their paths.
    """
    part, _, several = names.partition(".")
    paths = [f"{part}.{name}" for name in several.split()]
    default = settings.by_path(RunConfig)[by].default
    read = values[0] if values else SUCH_AS.get(by, "FOLDER")
    # A scale may bring another shape than the default, so only a shape that is given counts.
    unnamed = read if by.startswith("model.") else default
    unread = other or default

    def used(command):
        # An empty list or text is what a command line writes for "none of it".
        return command.words(path for path in paths if command.changes.get(path) not in ((), ""))

    def fits(value):
        return value not in values if values else value == default

    return Conflict(
        Option(words or ", ".join(paths), used, {paths[0]: example, by: read}),
        (_while(f"{by}={unread}", by, unnamed, fits, {by: unread}),),
        because,
        f"legal: {by}={' or '.join(map(str, values))}"
        if values
        else f"legal: another {by}, such as {read}",
    )


def _stored(given):
    """The settings of stored blocks and of a twin."""
    paths = [p for p in given.changes if p.startswith(("sparsity.", "evolution."))]
    paths += ["run.twin"] if given.changes.get("run.twin", "no") != "no" else []
    return given.words(p for p in paths if p != "sparsity.projections")


NO_BLOCKS = Option(
    "sparsity.projections=none",
    lambda given: (
        given.changes.get("sparsity.projections", True) == () and "sparsity.projections=none"
    ),
    {"sparsity.projections": "none"},
)
DENSE_PATTERN = _while(
    "sparsity.pattern=dense",
    "sparsity.pattern",
    "",
    lambda pattern: pattern == "dense",
    {"sparsity.pattern": "dense"},
)
GIVEN_WEIGHTS = _while("run.init_from", "run.init_from", "", bool, WEIGHTS)

ADAM = ("adamw", "muon", "schedule_free")
"""Optimizers that read the settings of Adam."""

READ_WITH: tuple[tuple, ...] = (
    (f"parallel.{' '.join(ONLY_RELAY)}", "parallel.executor", ["relay"],
     "which has no such setting", "host", "whole", "settings of the relay"),
    ("evolution.every share max_fan_out row_shards", "evolution.method", ["set", "rigl"],
     "which exchanges no blocks", 50, "", "settings of an exchange"),
    ("evolution.sequences", "evolution.method", ["rigl", "omit_features"],
     "which measures nothing", 8),
    ("evolution.first", "evolution.method", ["sparse_to_dense"], "which turns nothing dense",
     "qkv"),
    ("evolution.omitted features", "evolution.method", ["omit_features"],
     "which leaves out no features", 0.25),
    ("evolution.at", "evolution.method", [], "which has no such step", 0.5),
    ("training.decay", "training.schedule", ["wsd"], "which has no part of that length", 0.5),
    ("training.final_rate", "training.schedule", [s for s in SCHEDULES if s != "constant"],
     "which ends at its peak", 0.5, "constant"),
    ("training.b1 b2", "training.optimizer", [*ADAM, "lion"], "which does not read it", 0.5,
     "adafactor"),
    ("training.epsilon", "training.optimizer", ADAM, "which does not read it", 1e-6, "lion"),
    ("training.mask_share mask_replaced mask_random", "training.objective", ["masked"],
     "which hides no tokens", 0.25, "", "settings of hidden tokens"),
    ("training.adapter_alpha", "training.adapter_rank", [], "which adds no adapters", 8.0),
    ("training.teacher_weight teacher_first", "training.teacher", [], "which is empty", 0.25, "",
     "settings of a teacher"),
    ("data.column", "data.corpus", [], "which has no columns", "text"),
    (f"model.{' '.join(name for name in FAMILY_FIELDS if name.startswith('rotary_'))}",
     "model.positions", ["rotary"], "which rotates nothing", 0.5, "none",
     "settings of rotary positions"),
    ("sparsity.span", "sparsity.pattern", ["masked"], "which spans no inputs", 4),
)  # fmt: skip
"""Arguments of `_only`: a row for settings that something reads only beside some others."""

ROWS = (
    Conflict(
        _given("run.minutes", ["run.minutes"], {"run.minutes": 2.0}),
        (
            Option(
                "training.steps",
                lambda given: (
                    given.changes.get("training.steps") and given.words(["training.steps"])
                ),
                {"training.steps": 20},
            ),
        ),
        "which sets the length too",
        "legal: one of them",
    ),
    Conflict(
        Option("settings of sparsity, evolution and a twin", _stored, {"sparsity.block": 16}),
        (NO_BLOCKS,),
        "which stores no blocks",
        f"legal: sparsity.projections=all or any of {','.join(PROJECTIONS)}",
    ),
    Conflict(
        Option(
            "sparsity.density below 1",
            lambda given: (
                given.changes.get("sparsity.density", 1.0) != 1
                and f"{given.words(['sparsity.density'])}={given.changes['sparsity.density']}"
            ),
            {"sparsity.density": 0.5},
        ),
        (DENSE_PATTERN,),
        "which stores every block",
        "legal: no density, or another pattern",
    ),
    *(_only(*row) for row in READ_WITH),
    Conflict(
        _given("settings that weights bring", FROM_WEIGHTS, {"model.norm": "rmsnorm"}),
        (GIVEN_WEIGHTS,),
        "whose weights bring these settings",
        "legal: one of them",
    ),
)


def refuse_flags(changes: Mapping[str, object], spelled: Mapping[str, str], resumed: bool) -> None:
    """Refuses settings of a command line that do not go together.

    Args:
      changes: path -> value.
      spelled: path -> the flag that gave it.
      resumed: whether the command line resumes a run.

    Raises:
      UserError: naming of every violated row both settings, the reason and what is legal.
    """
    refuse([GivenSettings(changes, spelled, resumed)], ROWS)
