"""Rows of the table of what goes with what, about settings that a command line names.

`runs.compatibility` reads values; these rows read which settings somebody gave.  A setting that is
given and would have no effect is refused, and its default is not.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from sparse_dataflow.core.config.attention_settings import FAMILY_FIELDS, MIXTURE
from sparse_dataflow.core.config.model import GROWN
from sparse_dataflow.core.config.projections import PROJECTIONS
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.executors.compatibility import WEIGHTS, Conflict, Option, refuse
from sparse_dataflow.runs.parallel import ONLY_RELAY

EXCHANGING = tuple(
    f"evolution.{name}" for name in ("every", "share", "max_fan_out", "sequences", "row_shards")
)
"""Settings of the methods that exchange blocks."""

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


METHOD = EvolutionConfig().method
"""The method of evolution of a command line that names none."""


def _other_method(example: str, *names: str) -> Option:
    """Returns the option that the method of evolution is none of some."""
    return _while(
        f"another evolution.method than {' and '.join(names)}",
        "evolution.method",
        METHOD,
        lambda method: method not in names,
        {"evolution.method": example},
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
NO_RELAY = _while(
    "another parallel.executor than relay",
    "parallel.executor",
    "auto",
    lambda executor: executor != "relay",
    {"parallel.executor": "whole"},
)
NO_EXCHANGE = _other_method("gradual", "set", "rigl")
NO_PHASES = _other_method("rigl", "sparse_to_dense")
STATIC = _while(
    f"evolution.method={METHOD}",
    "evolution.method",
    METHOD,
    lambda method: method == METHOD,
    {"evolution.method": METHOD},
)
GIVEN_WEIGHTS = _while("run.init_from", "run.init_from", "", bool, WEIGHTS)

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
    Conflict(
        _given(
            "settings of the relay",
            [f"parallel.{name}" for name in ONLY_RELAY],
            {"parallel.stash": "host", "parallel.executor": "relay"},
        ),
        (NO_RELAY,),
        "which has no such setting",
        "legal: --executor=relay",
    ),
    Conflict(
        _given(
            "settings of an exchange",
            EXCHANGING,
            {"evolution.every": 50, "evolution.method": "rigl"},
        ),
        (NO_EXCHANGE,),
        "which exchanges no blocks",
        "legal: --evolution=set or rigl",
    ),
    Conflict(
        _given(
            "evolution.at", ["evolution.at"], {"evolution.at": 0.5, "evolution.method": "gradual"}
        ),
        (STATIC,),
        "which has no such step",
        "legal: another --evolution",
    ),
    Conflict(
        Option(
            "evolution.first",
            lambda given: given.changes.get("evolution.first") and given.words(["evolution.first"]),
            {"evolution.first": "qkv", "evolution.method": "sparse_to_dense"},
        ),
        (NO_PHASES,),
        "which turns nothing dense",
        "legal: --evolution=sparse_to_dense",
    ),
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
