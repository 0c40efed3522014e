"""What trains on which devices: one table, which refuses, and which docs/devices.md shows.

A way is how devices share a model; an executor has one or more of them.  A rule names an option and
the ways that do not have it.  What is in no rule works in every way.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from sparse_dataflow.core.config.model import REMATS, ModelConfig
from sparse_dataflow.core.config.training import BUILT_IN, TrainingConfig
from sparse_dataflow.core.layouts.evolution import METHODS
from sparse_dataflow.core.optim.factories import is_built_in, unlike_the_weight
from sparse_dataflow.files.errors import UserError

ROWS = "data, fsdp"
CONTEXT = "context"
TENSOR = "tensor"
FEATURE = "feature"
STAGE = "stage"
RELAY = "relay"
RELAY_DEPTH = "relay with depth_schedule"
RELAY_DEVICES = "relay over several devices"

WAYS = ROWS, CONTEXT, TENSOR, FEATURE, STAGE, RELAY, RELAY_DEPTH, RELAY_DEVICES
"""Axes of a mesh that are longer than 1, and kinds of the relay, in the order of the table."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be trained.

    Attributes:
      model: of one phase.
      training: its settings.
      loss: `DataConfig.loss`.
      evolution: its method where layouts or model change, else "".
      given_layouts: whether the stored blocks are those of initial weights.
    """

    model: ModelConfig
    training: TrainingConfig
    loss: str = "all"
    evolution: str = ""
    given_layouts: bool = False


class Rule(NamedTuple):
    """An option that some ways do not have.

    Attributes:
      option: in the words of the table.
      used: (job) -> the option as the job has it, such as "training.adapter_rank=4"; "" without it.
      ways: in which it does not work; WAYS is also on one device.
      because: completes "OPTION with EXECUTOR, ".
      legal: completes "legal: ".
    """

    option: str
    used: Callable[[Job], Any]
    ways: tuple[str, ...]
    because: str
    legal: str


def _adapters(job):
    rank = job.training.adapter_rank
    return rank and f"training.adapter_rank={rank}"


def _by_layer(job):
    return job.model.remat not in REMATS and f"model.remat={job.model.remat[:60]}"


def _experts(job):
    return job.model.experts and f"model.experts={job.model.experts}"


def _changes(job):
    return job.evolution and f"--evolution={job.evolution}"


def _of_weights(job):
    return job.evolution and not is_built_in(job.training)


def _changes_model(job):
    if _of_weights(job) and METHODS[job.evolution].update is None:
        return f"training.optimizer={job.training.optimizer} and --evolution={job.evolution}"
    return ""


def _state_that_stays(job):
    """An optimizer whose state of a stored block is of no shape that moves with the block."""
    if not _of_weights(job) or METHODS[job.evolution].update is None:
        return ""
    for name in job.model.sparse_projections:
        block = job.model.linear(name).block
        if shape := unlike_the_weight(job.training, (block, block)):
            return (
                f"training.optimizer={job.training.optimizer}, whose state of a block has an array "
                f"{list(shape)}, and --evolution={job.evolution}"
            )
    return ""


RULES = (
    Rule(
        "`model.mask_documents`",
        lambda job: job.model.mask_documents and "model.mask_documents=yes",
        (STAGE, RELAY),
        "whose blocks do not see the tokens",
        "model.mask_documents=no, or a mesh without stages",
    ),
    Rule(
        "`data.loss=answers`",
        lambda job: job.loss == "answers" and "data.loss=answers",
        (STAGE, RELAY),
        "which counts all tokens",
        "a mesh without stages",
    ),
    Rule(
        "`training.adapter_rank`",
        _adapters,
        (STAGE, RELAY),
        "which trains all weights",
        "the axes data, fsdp, context, feature and tensor",
    ),
    Rule(
        "`training.teacher`",
        lambda job: job.training.teacher and "training.teacher",
        (CONTEXT, TENSOR, FEATURE, STAGE, RELAY),
        "which cuts the model or its sequences",
        "the axes data and fsdp",
    ),
    Rule(
        "other `evolution.method` than static",
        lambda job: not job.given_layouts and _changes(job),
        (FEATURE,),
        "whose axis feature cuts each stored block",
        "--evolution=static, or a mesh without feature",
    ),
    Rule(
        "`evolution.method=self_guided`",
        lambda job: job.model.guided and "--evolution=self_guided",
        (FEATURE, STAGE, RELAY),
        "whose steps take no share of the guides",
        "a mesh without stages",
    ),
    Rule(
        "`evolution.method=shared_to_own`",
        lambda job: job.model.shared_layers and "--evolution=shared_to_own",
        (FEATURE, STAGE, RELAY_DEPTH),
        "whose layers do not share one block",
        "a mesh without stages, and parallel.depth_schedule=constant",
    ),
    Rule(
        "`sparsity.budget=depth`",
        lambda job: job.model.density_by_depth and "--set sparsity.budget=depth",
        (STAGE,),
        "whose stages need the same density in every layer",
        "--executor=whole or relay, or another sparsity.budget",
    ),
    Rule(
        "`model.layer_types` of two kinds",
        lambda job: (
            "+" in job.model.layer_types and f"model.layer_types={job.model.layer_types[:60]}"
        ),
        (STAGE,),
        "whose blocks all run one program",
        "a mesh without stages, or --executor=relay",
    ),
    Rule(
        "`model.remat` by layer",
        _by_layer,
        (STAGE, RELAY),
        "whose blocks are all treated alike",
        ", ".join(REMATS),
    ),
    Rule(
        "`training.skip_spikes`",
        lambda job: (
            job.training.skip_spikes and f"training.skip_spikes={job.training.skip_spikes:g}"
        ),
        (RELAY,),
        "whose updates in host memory cannot be undone",
        "training.skip_spikes=0, or another executor",
    ),
    Rule(
        "`training.new_rows_first`",
        lambda job: (
            job.training.new_rows_first
            and f"training.new_rows_first={job.training.new_rows_first:g}"
        ),
        (RELAY,),
        "which updates each section by itself",
        "training.new_rows_first=0, or another executor",
    ),
    Rule(
        "`model.experts`",
        _experts,
        (RELAY_DEVICES,),
        "whose devices route their own tokens alone",
        "one device, or another executor",
    ),
    Rule(
        "`model.experts`",
        _experts,
        (FEATURE,),
        "whose axis feature cuts every weight alike",
        "a mesh without feature",
    ),
    Rule(
        "`model.experts`",
        _experts,
        (CONTEXT,),
        "whose axis context shards the tokens that experts count",
        "a mesh without context",
    ),
    Rule(
        "`sparsity.pattern=low_rank`",
        lambda job: job.model.low_rank_projections and "sparsity.pattern=low_rank",
        (FEATURE,),
        "whose axis feature cuts stored blocks or dense weights",
        "a mesh without feature, or another pattern",
    ),
    Rule(
        "`sparsity.pattern=low_rank` with `training.optimizer=muon`",
        lambda job: (
            job.model.low_rank_projections
            and job.training.optimizer == "muon"
            and "training.optimizer=muon and sparsity.pattern=low_rank"
        ),
        (RELAY,),
        "which updates one array at a time, and muon needs both factors",
        "training.optimizer=adamw, or another executor",
    ),
    Rule(
        "`training.optimizer` other than adamw and muon with an `evolution.method` that changes "
        "the model",
        _changes_model,
        WAYS,
        "which knows what becomes of the moments of adamw and muon alone",
        f"training.optimizer={' or '.join(BUILT_IN)}, or --evolution=set or rigl",
    ),
    Rule(
        "`training.optimizer` with state that is not of a block's shape, with set and rigl",
        _state_that_stays,
        WAYS,
        "which moves moments of single weights with their blocks",
        f"another optimizer, such as {', '.join(BUILT_IN)}, or --evolution=static",
    ),
    Rule(
        "`run.init_from` with stored blocks",
        lambda job: job.given_layouts and "--init_from",
        (FEATURE,),
        "whose axis feature cuts each stored block",
        "drawn weights, dense weights, or a mesh without feature",
    ),
)


def refuse(executor: Any, job: Job) -> None:
    """Refuses a job with an option that a way of its executor does not have.

    Args:
      executor: has `ways` and `describe()`.
      job: what is to be trained; what it does not say is not refused.

    Raises:
      UserError: naming the option, the reason and what is legal.
    """
    for rule in RULES:
        used = rule.used(job)
        if used and (rule.ways == WAYS or set(rule.ways) & set(executor.ways)):
            raise UserError(
                f"{used} with {executor.describe()}, {rule.because}; legal: {rule.legal}."
            )


def table() -> str:
    """Returns the table of docs/devices.md: an option in each row, with the ways that lack it."""
    lines = ["| option | does not work with |", "|---|---|"]
    for option in dict.fromkeys(rule.option for rule in RULES):
        # Two options together have the rules of the first as well.
        missing = {way for rule in RULES if option.startswith(rule.option) for way in rule.ways}
        kinds = [way for way in WAYS if way in missing and not _is_kind_of_relay(way, missing)]
        cell = "any executor" if missing == set(WAYS) else ", ".join(kinds)
        lines.append(f"| {option} | {cell} |")
    return "\n".join(lines) + "\n"


def _is_kind_of_relay(way, missing):
    return way != RELAY and way.startswith(RELAY) and RELAY in missing
