"""A study as data: arms, the space that each is searched in, budgets, trials and seeds."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path

from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.settings import ABOVE_ZERO, AT_LEAST_ONE, AT_LEAST_ZERO, setting
from sparse_dataflow.core.config.training import BUILT_IN
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import SIZES, RunConfig

D_FF_RATIO, HEAD_WIDTH, RATE = "d_ff_ratio", "head_width", "rate"
RELATIVE = (D_FF_RATIO, HEAD_WIDTH, RATE)
"""Values of a space that are no settings: d_ff / d_model, d_model / num_heads, and the learning
rate."""

WIDTH = "model.d_model"

_MOST_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Arm:
    """A kind of model that is searched.

    Attributes:
      settings: path -> value of all its models.
      space: path, or name of RELATIVE -> the values that a trial draws from; they replace those of
        the study's space.
    """

    settings: Mapping[str, object]
    space: Mapping[str, tuple]


@dataclasses.dataclass(frozen=True)
class Design:
    """What a study file says.

    Attributes:
      settings: path -> value of all models.
      space: see `Arm`; what arms do not say themselves.
      budgets: name -> training FLOPs of a model.
      arms: name -> arm.
    """

    scale: str = setting("pico", "Preset that the settings change.", choices=tuple(SIZES))
    rival: str = setting("dense", "Arm that the others are compared with.")
    optimizers: tuple[str, ...] = setting(
        BUILT_IN, "Optimizers, each searched by itself.", choices=BUILT_IN
    )
    trials: tuple[int, ...] = setting(
        (12, 4), "Trials of each arm in each rung; the best of a rung go on.", legal=AT_LEAST_ONE
    )
    shares: tuple[float, ...] = setting(
        (0.25, 1.0), "Share of the budget that a trial of each rung trains for.", legal=ABOVE_ZERO
    )
    rate_trials: int = setting(
        2, "More trials of the rate of each arm's best model, at the budget.", legal=AT_LEAST_ZERO
    )
    seeds: int = setting(3, "Measured seeds of each arm's best model.", legal=AT_LEAST_ONE)
    tokens_per_weight: tuple[float, ...] = setting(
        (20.0, 200.0), "Least and most tokens for each stored weight.", legal=ABOVE_ZERO
    )
    draw_seed: int = setting(0, "Draws the trials of the first rung.", legal=AT_LEAST_ZERO)
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    space: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    budgets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    arms: Mapping[str, Arm] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        settings.validate(self)
        rungs = len(self.trials)
        if rungs != len(self.shares) or not rungs or self.shares[-1] != 1:
            raise UserError(
                f"trials has {rungs} numbers and shares {', '.join(map(str, self.shares))}; legal: "
                "equally many, and a last share of 1."
            )
        if sorted(self.trials, reverse=True) != [*self.trials]:
            raise UserError(f"trials={self.trials} grow; legal: fewer in each rung.")
        if len(self.tokens_per_weight) != 2:
            raise UserError("tokens_per_weight is not two numbers; legal: the least and the most.")
        if self.rival not in self.arms:
            raise UserError(f"No arm is named {self.rival}; legal: a table [arms.{self.rival}].")
        if not self.budgets or not self.optimizers:
            raise UserError("The study has no budget or no optimizer; legal: one or more of each.")

    def space_of(self, arm: str) -> dict[str, tuple]:
        """Returns what the trials of an arm draw from."""
        return {**self.space, **self.arms[arm].space}

    def settings_of(self, arm: str) -> dict[str, object]:
        """Returns path -> value of all models of an arm, beside `settings`."""
        return dict(self.arms[arm].settings)


def read(path: str | Path) -> Design:
    """Reads a study file, TOML whose keys are the fields of `Design` and `Arm`.

    Raises:
      UserError: it does not exist, is not TOML, or a key or value is not legal.
    """
    try:
        content = tomllib.loads(json_files.read_bytes(path, _MOST_BYTES).decode())
    except OSError:
        raise UserError(f"--study={path} does not exist.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--study={path} is not TOML: {error}.") from None
    try:
        return _design(content)
    except UserError as error:
        raise UserError(f"--study={path}: {error}") from None


def _design(content):
    legal = {field.name for field in dataclasses.fields(Design)}
    _refuse_unknown(content, legal, "")
    tables = {name: _table(content, name) for name in ("settings", "space", "budgets", "arms")}
    numbers = {name: _plain(value) for name, value in content.items() if name not in tables}
    arms = {}
    for name, arm in tables["arms"].items():
        if not isinstance(arm, dict) or not name.isidentifier():
            raise UserError(f"arms.{name} is no table with a plain name; legal: [arms.NAME].")
        _refuse_unknown(arm, ("settings", "space"), f"arms.{name}.")
        arms[name] = Arm(_settings(_table(arm, "settings")), _space(_table(arm, "space")))
    for name, flops in tables["budgets"].items():
        if type(flops) not in (int, float) or not flops > 0 or not name.isidentifier():
            raise UserError(f"budgets.{name}={flops!r} is not legal; legal: FLOPs above 0.")
    fixed, space = _settings(tables["settings"]), _space(tables["space"])
    return Design(**numbers, settings=fixed, space=space, budgets=tables["budgets"], arms=arms)


def _refuse_unknown(content, legal, prefix):
    for name in content:
        if name not in legal:
            raise UserError(f"{prefix}{name} is unknown; legal: {', '.join(sorted(legal))}.")


def _table(content, name):
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise UserError(f"{name} is no table; legal: [{name}].")
    return table


def _plain(value):
    """Returns a value of TOML with tuples for arrays."""
    return tuple(_plain(each) for each in value) if isinstance(value, list) else value


def _settings(table):
    legal = settings.by_path(RunConfig)
    _refuse_unknown(table, legal, "")
    return {path: _plain(value) for path, value in table.items()}


def _space(table):
    _refuse_unknown(table, {*settings.by_path(RunConfig), *RELATIVE}, "")
    for name, values in table.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"space.{name} is no list of values; legal: one value or more.")
        if name in RELATIVE and not all(type(v) in (int, float) and v > 0 for v in values):
            raise UserError(f"space.{name} has a value that is no number above 0.")
    return {name: _plain(values) for name, values in table.items()}
