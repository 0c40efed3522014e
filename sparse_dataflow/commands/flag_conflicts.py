"""Rows of the table of what goes with what, about settings that a command line names.

`runs.compatibility` reads values; these rows read which settings somebody gave.  A setting that is
given and would have no effect is refused, and its default is not.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from sparse_dataflow.core.config.attention_settings import FAMILY_FIELDS, MIXTURE
from sparse_dataflow.core.config.model import GROWN
from sparse_dataflow.core.config.projections import PROJECTIONS
from sparse_dataflow.core.config.sparsity import EvolutionConfig, SparsityConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.compatibility import WEIGHTS, Conflict, Option, refuse
from sparse_dataflow.runs.parallel import ONLY_RELAY
from sparse_dataflow.runs.run_config import DataConfig

EXCHANGING = tuple(f"evolution.{name}" for name in ("every", "share", "max_fan_out", "row_shards"))
"""Settings of the methods that exchange blocks."""
EXCHANGES = ("set", "rigl")
ADAM = ("adamw", "muon", "schedule_free")
"""Optimizers that read the settings of Adam."""

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


def _unread(
    paths: Iterable[str],
    by: str,
    default: object,
    unread: Callable[[object], object],
    because: str,
    legal: str,
    read: Mapping[str, object],
    other: object,
    words: str = "",
) -> Conflict:
    """Returns the row of settings that nothing reads while another setting has some values.

    Args:
      paths: of the settings.
      by: path of the other setting.
      default: its value in a command line that does not name it.
      unread: (value of it) -> whether nothing reads the settings.
      because: completes "SETTING with OTHER=VALUE, ".
      legal: with what the settings are read.
      read: an example of a setting, with what reads it.
      other: a value of the other setting that does not.
      words: names the settings; empty is their paths.
    """
    paths = tuple(paths)

    def used(given):
        return given.words(path for path in paths if given.changes.get(path) not in ((), ""))

    return Conflict(
        Option(words or ", ".join(paths), used, read),
        (_while(f"{by}={other}", by, default, unread, {by: other}),),
        because,
        f"legal: {legal}",
    )


def _read_by_methods(
    paths: Iterable[str],
    methods: tuple[str, ...],
    because: str,
    read: Mapping[str, object],
    words: str = "",
) -> Conflict:
    """Returns the row of settings that only some methods of evolution read."""
    return _unread(
        paths,
        "evolution.method",
        METHOD,
        lambda method: method not in methods,
        because,
        f"--evolution={' or '.join(methods)}",
        read,
        METHOD,
        words,
    )


def _read_by_optimizers(path: str, optimizers: tuple[str, ...], value: object) -> Conflict:
    """Returns the row of a setting that only some optimizers read."""
    return _unread(
        [path],
        "training.optimizer",
        TrainingConfig.optimizer,
        lambda optimizer: optimizer not in optimizers,
        "which does not read it",
        f"training.optimizer={', '.join(optimizers)}",
        {path: value},
        "adafactor",
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
    _unread(
        [f"parallel.{name}" for name in ONLY_RELAY],
        "parallel.executor",
        "auto",
        lambda executor: executor != "relay",
        "which has no such setting",
        "--executor=relay",
        {"parallel.stash": "host", "parallel.executor": "relay"},
        "whole",
        words="settings of the relay",
    ),
    _read_by_methods(
        EXCHANGING,
        EXCHANGES,
        "which exchanges no blocks",
        {"evolution.every": 50, "evolution.method": "rigl"},
        words="settings of an exchange",
    ),
    _read_by_methods(
        ["evolution.sequences"],
        ("rigl", "omit_features"),
        "which measures nothing",
        {"evolution.sequences": 8, "evolution.method": "omit_features"},
    ),
    _read_by_methods(
        ["evolution.first"],
        ("sparse_to_dense",),
        "which turns nothing dense",
        {"evolution.first": "qkv", "evolution.method": "sparse_to_dense"},
    ),
    _read_by_methods(
        ["evolution.omitted", "evolution.features"],
        ("omit_features",),
        "which leaves out no features",
        {"evolution.omitted": 0.25, "evolution.method": "omit_features"},
    ),
    _unread(
        ["evolution.at"],
        "evolution.method",
        METHOD,
        lambda method: method == METHOD,
        "which has no such step",
        "another --evolution",
        {"evolution.at": 0.5, "evolution.method": "gradual"},
        METHOD,
    ),
    _unread(
        ["training.decay"],
        "training.schedule",
        TrainingConfig.schedule,
        lambda schedule: schedule != "wsd",
        "which has no part of that length",
        "training.schedule=wsd",
        {"training.decay": 0.5, "training.schedule": "wsd"},
        "linear",
    ),
    _unread(
        ["training.final_rate"],
        "training.schedule",
        TrainingConfig.schedule,
        lambda schedule: schedule == "constant",
        "which ends at its peak",
        "another training.schedule",
        {"training.final_rate": 0.5},
        "constant",
    ),
    _read_by_optimizers("training.b1", (*ADAM, "lion"), 0.5),
    _read_by_optimizers("training.b2", (*ADAM, "lion"), 0.5),
    _read_by_optimizers("training.epsilon", ADAM, 1e-6),
    _unread(
        [f"training.{name}" for name in ("mask_share", "mask_replaced", "mask_random")],
        "training.objective",
        TrainingConfig.objective,
        lambda objective: objective != "masked",
        "which hides no tokens",
        "training.objective=masked",
        {"training.mask_share": 0.25, "training.objective": "masked"},
        "causal",
        words="settings of hidden tokens",
    ),
    _unread(
        ["training.adapter_alpha"],
        "training.adapter_rank",
        0,
        lambda rank: not rank,
        "which adds no adapters",
        "training.adapter_rank of 1 or more",
        {"training.adapter_alpha": 8.0, "training.adapter_rank": 4},
        0,
    ),
    _unread(
        ["training.teacher_weight", "training.teacher_first"],
        "training.teacher",
        "",
        lambda teacher: not teacher,
        "which is empty",
        "training.teacher=FOLDER",
        {"training.teacher_weight": 0.25, "training.teacher": "runs/teacher"},
        "",
        words="settings of a teacher",
    ),
    _unread(
        ["data.column"],
        "data.corpus",
        DataConfig.corpus,
        lambda corpus: corpus == DataConfig.corpus,
        "which has no columns",
        "a corpus of records",
        {"data.column": "text", "data.corpus": "hf:OWNER/NAME"},
        DataConfig.corpus,
    ),
    _unread(
        ["sparsity.span"],
        "sparsity.pattern",
        SparsityConfig.pattern,
        lambda pattern: pattern != "masked",
        "which spans no inputs",
        "--pattern=masked",
        {"sparsity.span": 4, "sparsity.pattern": "masked"},
        "monarch",
    ),
    _unread(
        [f"model.{name}" for name in FAMILY_FIELDS if name.startswith("rotary_")],
        "model.positions",
        "rotary",
        lambda positions: positions != "rotary",
        "which rotates nothing",
        "model.positions=rotary",
        {"model.rotary_base": 500.0, "model.positions": "rotary"},
        "none",
        words="settings of rotary positions",
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
