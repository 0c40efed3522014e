"""Which settings go together: one table, which refuses, and which the page of settings shows.

A rule names a setting in use, another one, and the values that the other may then have.  What is in
no rule goes together.  `executors.executor` has the rules of settings and devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from sparse_dataflow.core.config.projections import KINDS
from sparse_dataflow.files.errors import UserError


class Legal(NamedTuple):
    """Legal values: a description, and whether a value is one."""

    words: str
    fits: Callable[[Any], bool]


def only(*values: Any) -> Legal:
    """Some values are legal; 0 and the empty text are named as they are written."""
    return Legal(", ".join(str(v) or "none" for v in values), lambda value: value in values)


def all_but(*values: Any) -> Legal:
    """All values but some are legal."""
    return Legal("every other value", lambda value: value not in values)


GIVEN = Legal("any value but the empty one", bool)


class Rule(NamedTuple):
    """What a setting in use asks of another.

    Attributes:
      option: the setting in use, in the words of the table.
      used: whether a `RunConfig` uses it.
      path: the other setting.
      legal: its legal values.
      because: completes "OPTION, ".
    """

    option: str
    used: Callable[[Any], Any]
    path: str
    legal: Legal
    because: str


def _method(name):
    return lambda config: config.evolution.method == name


def _lacking(ability: str) -> tuple[str, Callable[[Any], Any]]:
    """Returns option and test of the patterns whose kind of weight does not offer an ability."""
    lacking = [n for n, k in KINDS.items() if k.is_pattern and ability not in k.offers]
    option = f"sparsity.pattern={' or '.join(lacking)}"

    def used(config):
        kind = KINDS.get(config.sparsity.pattern)
        return kind and ability not in kind.offers and config.sparsity.projections

    return option, used


def _rank(config):
    return config.training.adapter_rank


def _int8(config):
    return config.training.frozen_dtype != "compute"


def _tokens(config):
    return config.data.extend_vocabulary


def _new_rows(config):
    return config.training.new_rows_first


def _answers(config):
    return config.data.loss == "answers"


def _teacher(config):
    return config.training.teacher


def _variant(config):
    return bool(config.run.init_variant)


def _narrow(config):
    return config.run.twin == "narrow"


def _activations(config):
    return config.run.prune_by == "activations"


def _to_pattern(config):
    return config.run.prune_to == "pattern"


def _like_blocks(config):
    return config.parallel.executor in ("relay", "pipeline")


def _files(config):
    return config.parallel.executor == "relay" and config.parallel.server_dir


def _adapted_twin(config):
    return config.training.adapter_rank and config.sparsity.projections


ADAPTERS, BASE = "training.adapter_rank", "training.frozen_dtype=int8"
TAIL = "evolution.method=low_rank_tail"
SHARED = "evolution.method=shared_to_own"
TEACHER, ANSWERS = "training.teacher", "data.loss=answers"
TOKENS, NEW_ROWS = "data.extend_vocabulary", "training.new_rows_first"
ALIKE, FILES = "parallel.executor=relay or pipeline", "parallel.server_dir"
NONE, ZERO = only(""), only(0)
NO_RIGL = all_but("rigl")

RULES = (
    Rule(ALIKE, _like_blocks, "parallel.memory_limit", NONE, "whose blocks are all treated alike"),
    Rule(TEACHER, _teacher, "model.logit_cap", ZERO, "whose logits are compared as they are"),
    Rule(
        *_lacking("evolution"),
        "evolution.method",
        only("static", "shared_to_own"),
        "which is no part of a dense weight",
    ),
    Rule(*_lacking("budget"), "sparsity.budget", only("uniform"), "which has one density"),
    Rule(*_lacking("given"), "run.init_from", NONE, "whose weights begin drawn"),
    Rule(TAIL, _method("low_rank_tail"), "sparsity.rank", GIVEN, "which adds a term of that rank"),
    Rule(SHARED, _method("shared_to_own"), "run.init_from", NONE, "which begins with one block"),
    Rule("run.twin=narrow", _narrow, "run.init_from", NONE, "which has another width"),
    Rule("run.init_variant", _variant, "run.init_from", GIVEN, "which names a model of a run"),
    Rule("run.prune_by=activations", _activations, "run.init_from", GIVEN, "which prunes weights"),
    Rule("run.prune_to=pattern", _to_pattern, "run.init_from", GIVEN, "which prunes weights"),
    Rule(
        "run.prune_to=pattern",
        _to_pattern,
        "evolution.method",
        all_but("gradual"),
        "which prunes weights at the start, and gradual prunes them later, to their best blocks",
    ),
    Rule(NEW_ROWS, _new_rows, TOKENS, GIVEN, "which trains the rows of new tokens"),
    Rule(TOKENS, _tokens, "run.init_from", GIVEN, "which adds tokens to those of given weights"),
    Rule(TOKENS, _tokens, "data.loss", only("all"), "whose new tokens are learned from all text"),
    Rule(TOKENS, _tokens, ADAPTERS, ZERO, "whose new rows adapters would freeze"),
    Rule(TOKENS, _tokens, TEACHER, NONE, "which has another tokenizer"),
    Rule(ANSWERS, _answers, "run.init_from", GIVEN, "which trains given weights to answer"),
    Rule(ANSWERS, _answers, "evolution.method", NO_RIGL, "which rigl's gradients do not count"),
    Rule(BASE, _int8, ADAPTERS, GIVEN, "which stores the weights under adapters"),
    Rule(ADAPTERS, _rank, "run.init_from", GIVEN, "which adapts given weights"),
    Rule(ADAPTERS, _rank, "evolution.method", only("static"), "which freezes the weights"),
    Rule(ADAPTERS, _adapted_twin, "run.twin", only("no"), "which adapts one model"),
    Rule(TEACHER, _teacher, "data.loss", only("all"), "which trains another loss"),
    Rule(TEACHER, _teacher, ADAPTERS, ZERO, "which trains all weights"),
    # The forward passes of the teacher would be in the FLOPs that a narrow model gets.
    Rule(
        TEACHER, _teacher, "run.twin", only("no", "yes"), "whose own FLOPs a narrow twin would get"
    ),
    Rule(TEACHER, _teacher, "evolution.method", NO_RIGL, "which rigl's gradients do not count"),
    Rule(
        FILES,
        _files,
        "evolution.method",
        only("static", "set", "rigl"),
        "whose arrays keep their shapes",
    ),
)


def refuse(config: Any) -> None:
    """Refuses a `RunConfig` with settings that do not go together.

    Raises:
      UserError: naming both settings, the reason and what is legal.
    """
    for rule in RULES:
        value = _value(config, rule.path)
        if rule.legal.fits(value) or not rule.used(config):
            continue
        if rule.legal is GIVEN:
            does = rule.because.removeprefix("which ")
            raise UserError(f"{rule.option} {does}; legal with {rule.path}.")
        shown = rule.path if rule.path == "run.init_from" else f"{rule.path}={str(value)[:60]}"
        raise UserError(
            f"{shown} with {rule.option}, {rule.because}; legal with it: {rule.legal.words}."
        )


def table() -> str:
    """Returns the table of the page of settings: a rule in each row."""
    lines = ["| with | this setting | legal | because |", "|---|---|---|---|"]
    for rule in RULES:
        cells = f"`{rule.option}`", f"`{rule.path}`", rule.legal.words, rule.because
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _value(config, path):
    part, _, name = path.partition(".")
    return getattr(getattr(config, part), name)
