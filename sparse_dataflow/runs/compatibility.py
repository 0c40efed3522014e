"""One table of what goes with what in a run: it refuses, and the pages show it.

`core.executors.compatibility` has the class of its rows, and the rows about models and executors;
`evolution_rows` those about data, start and evolution.  The rows here read the settings of a
`RunConfig`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from sparse_dataflow.core.config.projections import KINDS
from sparse_dataflow.core.executors import compatibility as core
from sparse_dataflow.core.executors.compatibility import (
    RELAY,
    STAGE,
    Conflict,
    Option,
    ResolvedRun,
)
from sparse_dataflow.runs import evolution_rows
from sparse_dataflow.runs.parallel import ParallelConfig


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of an executor that is not made yet, as rows read them.

    Attributes:
      plan: settings.
      sizes: mesh axis -> devices along it.
    """

    plan: ParallelConfig
    sizes: Mapping[str, int]

    @property
    def parallelisms(self) -> tuple[str, ...]:
        """Names of parallelisms; see `Executor.parallelisms`."""
        # The relay has an axis "data" alone, which cuts no model.
        relay = (RELAY.words,) if self.plan.executor == "relay" else ()
        return (*relay, *(axis for axis, size in self.sizes.items() if size > 1))

    def describe(self) -> str:
        """Returns the flag that chooses them."""
        relay = self.plan.executor == "relay"
        return "--executor=relay" if relay else f"--mesh={self.plan.mesh}"


def _used(words: str, used: Callable[[Any], object], **example: object) -> Option:
    """Returns an option of a `RunConfig`; `part__name` in the example is the setting part.name."""
    settings = {path.replace("__", "."): value for path, value in example.items()}
    # Without a config the row is of the core's table and says nothing here.
    return Option(words, lambda run: run.config and used(run.config) and words, settings)


def _other(
    path: str, legal: Callable[[Any], object], example: object, words: str = "", **more: object
) -> Option:
    """Returns a setting with another value than the legal ones.

    Args:
      legal: (value) -> whether it is legal.
      example: a value that is not.
      words: for the pages; `path` if empty.
      more: settings that go with it, as in `_used`.
    """

    def used(run):
        value = run.config and _value(run.config, path)
        if run.config is None or legal(value):
            return ""
        # A path may be long or private; its setting says enough.
        return path if path == "run.init_from" else f"{path}={str(value)[:60]}"

    settings = {name.replace("__", "."): value for name, value in more.items()}
    return Option(words or path, used, {path: example} | settings)


def _no(path: str, empty: object) -> Option:
    """Returns the lack of a setting that other options need."""
    lacks = lambda run: run.config is not None and not _value(run.config, path)  # noqa: E731
    return Option(path, lacks, {path: empty}, needed=True)


def _one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


def _value(config, path):
    part, _, name = path.partition(".")
    return getattr(getattr(config, part), name)


def _method(name):
    return lambda config: config.evolution.method == name


DIR = {"run__init_from": "DIR"}
STORED = {"run__init_from": "DIR", "training__adapter_rank": 2}

TEACHER = _used("training.teacher", lambda c: c.training.teacher, training__teacher="DIR")


def _lacking(ability: str) -> Option:
    """Returns the option of a kind of weight that does not offer an ability."""

    def lacks(kind):
        return ability not in KINDS[kind].offers

    def used(run):
        sparsity = run.config and run.config.sparsity.projections and run.config.sparsity
        if not sparsity or not lacks(sparsity.stored_as):
            return False
        setting = "kind" if KINDS[sparsity.stored_as].stores_blocks else "pattern"
        return f"sparsity.{setting}={sparsity.stored_as}"

    patterns = [name for name, kind in KINDS.items() if kind.is_pattern and lacks(name)]
    words = f"sparsity.pattern={' or '.join(patterns)}"
    return Option(words, used, {"sparsity.pattern": patterns[0]})


SHARED = _used(
    "evolution.method=shared_to_own", _method("shared_to_own"), evolution__method="shared_to_own"
)
NARROW = _used("run.twin=narrow", lambda config: config.run.twin == "narrow", run__twin="narrow")
VARIANT = _used(
    "run.init_variant", lambda config: config.run.init_variant, run__init_variant="dense", **DIR
)
TO_PATTERN = _used(
    "run.prune_to=pattern",
    lambda config: config.run.prune_to == "pattern",
    run__prune_to="pattern",
    **DIR,
)
NEW_ROWS = _used(
    "training.new_rows_first",
    lambda config: config.training.new_rows_first,
    training__new_rows_first=0.5,
    data__extend_vocabulary=8,
    **DIR,
)
TOKENS = _used(
    "data.extend_vocabulary",
    lambda config: config.data.extend_vocabulary,
    data__extend_vocabulary=8,
    **DIR,
)
ANSWERS = _used(
    "data.loss=answers", lambda config: config.data.loss == "answers", data__loss="answers", **DIR
)
INT8 = _used(
    "training.frozen_dtype=int8",
    lambda config: config.training.frozen_dtype != "compute",
    training__frozen_dtype="int8",
    sparsity__projections=(),
    **STORED,
)
ADAPTERS = _used("training.adapter_rank", lambda config: config.training.adapter_rank, **STORED)
PROMPTED = {"training__prompt_vectors": 2, "training__sequence": 32, **DIR}
PROMPT = _used("training.prompt_vectors", lambda config: config.training.prompt_vectors, **PROMPTED)
SIDE = _used(
    "training.side_width",
    lambda config: config.training.side_width,
    run__init_from="DIR",
    training__side_width=8,
)


def _in_sparse_run(option: Option) -> Option:
    """Returns an option that counts only in a run with a sparse model."""
    sparse = lambda run: run.config and run.config.sparsity.projections  # noqa: E731
    return dataclasses.replace(option, used=lambda run: sparse(run) and option.used(run))


FILES = _used(
    "parallel.server_dir",
    lambda config: config.parallel.executor == "relay" and config.parallel.server_dir,
    parallel__executor="relay",
    parallel__server_dir="DIR",
)

MASKED = _used(
    "training.objective=masked",
    lambda config: config.training.hides_tokens,
    training__objective="masked",
)

NO_WEIGHTS = _no("run.init_from", "")
NO_ADAPTERS = dataclasses.replace(
    _no("training.adapter_rank", 0),
    words="training.adapter_rank or training.side_width",
    used=lambda run: (
        run.config and not (run.config.training.adapter_rank or run.config.training.side_width)
    ),
)
NO_TOKENS = _no("data.extend_vocabulary", 0)
GIVEN_WEIGHTS = _other("run.init_from", _one_of(""), "DIR")
ANY_ADAPTERS = _other("training.adapter_rank", _one_of(0), 2, **DIR)
ANY_VECTORS = _other("training.prompt_vectors", _one_of(0), 2, training__sequence=32, **DIR)
ANY_SIDE = _other("training.side_width", _one_of(0), 8, **DIR)
ANY_TEACHER = _other("training.teacher", _one_of(""), "DIR")
ANY_NEW_TOKENS = _other("data.extend_vocabulary", _one_of(0), 8, **DIR)
ONLY_IDS = _other("data.tokenizer", lambda name: name != "none", "none")
SOME_LOSS = _other("data.loss", _one_of("all"), "answers", **DIR)
RIGL = _other("evolution.method", lambda value: value != "rigl", "rigl")
GRADUAL = _other("evolution.method", lambda value: value != "gradual", "gradual")

LEGAL = "legal with it:"
EVERY_OTHER = f"{LEGAL} every other value"

SETTINGS = (
    Conflict(
        _other("model.attention_blocks", _one_of(""), "window:1,global:1,block:8"),
        (MASKED,),
        "which attends to later blocks too",
        f"{LEGAL} empty",
    ),
    Conflict(
        _other("model.logit_cap", _one_of(0), 30.0),
        (TEACHER,),
        "whose logits are compared as they are",
        f"{LEGAL} 0",
    ),
    Conflict(
        _other("evolution.method", _one_of("static", "shared_to_own", "omit_features"), "rigl"),
        (_lacking("evolution"),),
        "which is no part of a dense weight",
        f"{LEGAL} static, shared_to_own, omit_features",
    ),
    Conflict(
        _other("sparsity.budget", _one_of("uniform"), "mlp_in:0.25"),
        (_lacking("budget"),),
        "which has one density",
        f"{LEGAL} uniform",
    ),
    Conflict(GIVEN_WEIGHTS, (_lacking("given"),), "which begins drawn", f"{LEGAL} none"),
    Conflict(GIVEN_WEIGHTS, (SHARED,), "which begins with one layer", f"{LEGAL} none"),
    Conflict(GIVEN_WEIGHTS, (NARROW,), "which has another width", f"{LEGAL} none"),
    Conflict(NO_WEIGHTS, (VARIANT,), "which names a model of a run", "a folder or name"),
    Conflict(NO_WEIGHTS, (TO_PATTERN,), "which prunes weights", "a folder or name"),
    Conflict(
        GRADUAL,
        (TO_PATTERN,),
        "which prunes weights at the start, and gradual prunes them later, to their best blocks",
        EVERY_OTHER,
    ),
    Conflict(NO_TOKENS, (NEW_ROWS,), "which trains the rows of new tokens", "1 or more"),
    Conflict(NO_WEIGHTS, (TOKENS,), "which adds tokens to those of given weights", "a folder"),
    Conflict(SOME_LOSS, (TOKENS,), "whose new tokens are learned from all text", f"{LEGAL} all"),
    Conflict(ANY_ADAPTERS, (TOKENS,), "whose new rows adapters would freeze", f"{LEGAL} 0"),
    Conflict(ANY_VECTORS, (TOKENS,), "whose new rows would be frozen", f"{LEGAL} 0"),
    Conflict(ANY_SIDE, (TOKENS,), "whose new rows would be frozen", f"{LEGAL} 0"),
    Conflict(ANY_TEACHER, (TOKENS,), "which has another tokenizer", f"{LEGAL} none"),
    Conflict(NO_WEIGHTS, (ANSWERS,), "which trains given weights to answer", "a folder or name"),
    Conflict(RIGL, (ANSWERS,), "which rigl's gradients do not count", EVERY_OTHER),
    Conflict(NO_ADAPTERS, (INT8,), "which stores frozen weights", "1 or more"),
    Conflict(
        NO_WEIGHTS, (ADAPTERS, PROMPT, SIDE), "which adapts given weights", "a folder or name"
    ),
    Conflict(
        _other("evolution.method", _one_of("static"), "rigl"),
        (ADAPTERS, PROMPT, SIDE),
        "which freezes the weights",
        f"{LEGAL} static",
    ),
    Conflict(
        _other("run.twin", _one_of("no"), "yes"),
        tuple(map(_in_sparse_run, (ADAPTERS, PROMPT, SIDE))),
        "which adapts one model",
        f"{LEGAL} no",
    ),
    Conflict(SOME_LOSS, (TEACHER,), "which trains another loss", f"{LEGAL} all"),
    Conflict(ANY_ADAPTERS, (TEACHER,), "which trains all weights", f"{LEGAL} 0"),
    Conflict(ANY_SIDE, (TEACHER,), "which trains all weights", f"{LEGAL} 0"),
    Conflict(ANY_VECTORS, (TEACHER,), "which trains all weights", f"{LEGAL} 0"),
    # Only the first document of a row would have the vectors in front.
    Conflict(
        _other("model.mask_documents", _one_of(False), True),
        (PROMPT,),
        "which are in front of a row, not of each of its documents",
        f"{LEGAL} no",
    ),
    # The forward passes of the teacher would be in the FLOPs that a narrow model gets.
    Conflict(
        _other("run.twin", _one_of("no", "yes"), "narrow"),
        (TEACHER,),
        "whose own FLOPs a narrow twin would get",
        f"{LEGAL} no, yes",
    ),
    Conflict(SOME_LOSS, (MASKED,), "which hides tokens of all text", f"{LEGAL} all"),
    Conflict(
        _other("training.stored_features", _one_of("no"), "int8", training__side_width=8, **DIR),
        (MASKED,),
        "which hides other tokens in each epoch",
        f"{LEGAL} no",
    ),
    Conflict(ANY_VECTORS, (MASKED,), "which reads rows from both ends", f"{LEGAL} 0"),
    Conflict(ANY_TEACHER, (MASKED,), "which predicts no next token", f"{LEGAL} none"),
    Conflict(ANY_NEW_TOKENS, (MASKED,), "whose mask token would get another id", f"{LEGAL} 0"),
    Conflict(ONLY_IDS, (MASKED,), "which has no id to spare for a mask token", f"{LEGAL} a name"),
    Conflict(RIGL, (MASKED,), "which rigl's gradients do not count", EVERY_OTHER),
    Conflict(RIGL, (TEACHER,), "which rigl's gradients do not count", EVERY_OTHER),
    Conflict(
        _other("evolution.method", _one_of("static", "set", "rigl"), "gradual"),
        (FILES,),
        "whose arrays keep their shapes",
        f"{LEGAL} static, set, rigl",
    ),
)
"""Rows of two settings, or of a setting and a parallelism."""


NO_STAGE = Option(
    "stage:2 or more in `parallel.mesh`",
    lambda run: (
        run.executor is not None and not {STAGE.words, RELAY.words} & set(run.executor.parallelisms)
    ),
    {"parallel.mesh": "fsdp:2"},
    needed=True,
)
STAGED = {"parallel__mesh": "stage:2"}
OTHER_AXES = Option(
    "an axis other than `data`",
    lambda run: (
        isinstance(run.executor, Devices)
        and any(size > 1 for axis, size in run.executor.sizes.items() if axis != "data")
        and f"--mesh={run.executor.plan.mesh}"
    ),
    {"parallel.mesh": "tensor:2"},
)
EXCHANGE = _other(
    "parallel.experts",
    _one_of("gather"),
    "exchange",
    "parallel.experts=exchange",
    model__experts=4,
    parallel__mesh="fsdp:2",
)
PIPELINE = _other(
    "parallel.executor",
    lambda name: name != "pipeline",
    "pipeline",
    "parallel.executor=pipeline",
    **STAGED,
)
WHOLE = _other(
    "parallel.executor", lambda name: name != "whole", "whole", "parallel.executor=whole"
)

PARALLEL = (
    Conflict(
        _no("model.experts", 0),
        (EXCHANGE,),
        "which sends tokens to the devices of their experts",
        "1 or more",
    ),
    Conflict(
        EXCHANGE,
        (RELAY,),
        "which keeps all experts of a layer on every device",
        "legal: parallel.experts=gather, or another executor",
    ),
    Conflict(
        NO_STAGE,
        (PIPELINE,),
        "which streams micro-batches through stages",
        "such as --mesh=stage:2,fsdp",
    ),
    Conflict(
        WHOLE,
        (STAGE,),
        "which cuts the model by layers",
        "legal: --executor=pipeline, or the axes data, fsdp, context, feature, tensor",
    ),
    Conflict(
        NO_STAGE,
        (_other("parallel.schedule", _one_of(ParallelConfig().schedule), "gpipe", **STAGED),),
        "which is the order of a pipeline",
        "such as --mesh=stage:2,fsdp",
    ),
    Conflict(
        OTHER_AXES,
        (RELAY,),
        "which keeps each layer whole on every device",
        "legal: --mesh=data:N",
    ),
)
"""Rows that say whether an executor can be made."""

TABLE = (*SETTINGS, *PARALLEL, *evolution_rows.ROWS, *core.TABLE)


def refuse(config: Any) -> None:
    """Refuses a `RunConfig` whose settings do not go together, whatever its devices.

    Raises:
      UserError: naming of every violated row both settings, the reason and what is legal.
    """
    core.refuse([ResolvedRun(config.model, config.training, config=config)], TABLE)


def refuse_devices(config: Any, sizes: Mapping[str, int]) -> None:
    """Refuses a `RunConfig` whose executor cannot be made on a mesh; see `refuse`."""
    devices = Devices(config.parallel, sizes)
    core.refuse([ResolvedRun(config.model, config.training, devices, config=config)], PARALLEL)
