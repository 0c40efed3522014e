"""The interface of an executor, and one table of what trains on which devices.

The defaults of `Executor` are the executor of a single device.

A way is how devices share a model; an executor has one or more of them.  A rule names an option and
the ways that do not have it.  What is in no rule works in every way.  The table refuses, and
docs/devices.md shows it.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from sparse_dataflow.core.config.depth import DepthSchedule
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import BUILT_IN, TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.block_gradients import block_gradient_norms
from sparse_dataflow.core.executors.whole import Accumulation, Batch
from sparse_dataflow.core.layouts.evolution import METHODS
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.core.optim.optimizers import gradient_arrays
from sparse_dataflow.core.optim.weight_state import partial_axes
from sparse_dataflow.files.errors import UserError

ROWS = "data, fsdp"
CONTEXT = "context"
TENSOR = "tensor"
FEATURE = "feature"
STAGE = "stage"
RELAY = "relay"
RELAY_DEPTH = "relay with depth_schedule"
RELAY_DEVICES = "relay over several devices"
RELAY_EAGER = "relay with clipping=eager"

WAYS = ROWS, CONTEXT, TENSOR, FEATURE, STAGE, RELAY, RELAY_DEPTH, RELAY_DEVICES, RELAY_EAGER
"""Axes of a mesh that are longer than 1, and kinds of the relay, in the order of the table."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be trained.

    Attributes:
      model: of one phase.
      training: its settings.
      evolution: its method where layouts or model change in training, else "".
    """

    model: ModelConfig
    training: TrainingConfig
    evolution: str = ""


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


def _experts(job):
    return job.model.experts and f"model.experts={job.model.experts}"


def _of_weights(job):
    return job.evolution and not job.training.is_built_in


def _changes_model(job):
    if _of_weights(job) and METHODS[job.evolution].update is None:
        return f"training.optimizer={job.training.optimizer} and --evolution={job.evolution}"
    return ""


def _state_that_stays(job):
    """An optimizer with state of parts of a stored block, such as its rows."""
    if not _of_weights(job) or METHODS[job.evolution].update is None:
        return ""
    for name in job.model.sparse_projections:
        block = job.model.linear(name).block
        if axes := partial_axes(job.training, (block, block)):
            return (
                f"training.optimizer={job.training.optimizer}, whose state of a block has an array "
                f"along {' and '.join(axes)}, and --evolution={job.evolution}"
            )
    return ""


OPTIMIZERS = "`training.optimizer` other than adamw and muon with an `evolution.method`"

RULES = (
    Rule(
        "`model.experts`",
        _experts,
        (FEATURE,),
        "whose axis feature gives a router parts of its inputs, and a choice needs all",
        "a mesh without feature",
    ),
    Rule(
        "`evolution.method=shared_to_own`",
        lambda job: job.model.shared_layers and "--evolution=shared_to_own",
        (RELAY_DEPTH,),
        "whose new layers start as the identity, which a block that all share is not",
        "parallel.depth_schedule=constant",
    ),
    Rule(
        "`training.skip_spikes`",
        lambda job: (
            job.training.skip_spikes and f"training.skip_spikes={job.training.skip_spikes:g}"
        ),
        (RELAY_EAGER,),
        "which overwrites a section before the gradients of all are known",
        "training.skip_spikes=0, or parallel.clipping=exact",
    ),
    Rule(
        OPTIMIZERS,
        _changes_model,
        WAYS,
        "whose state does not say what scales as the gradient and what as its square",
        f"training.optimizer={' or '.join(BUILT_IN)}, or --evolution=set or rigl",
    ),
    Rule(
        OPTIMIZERS,
        _state_that_stays,
        WAYS,
        "whose number for a row of blocks cannot be divided between the blocks",
        f"another optimizer, such as {', '.join(BUILT_IN)}, or --evolution=static",
    ),
)


def refuse_unsupported(executor: Any, job: Job) -> None:
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


def support_table() -> str:
    """Returns the table of docs/devices.md: each option, the ways that lack it, and why."""
    lines = ["| option | does not work with | reason |", "|---|---|---|"]
    for option in dict.fromkeys(rule.option for rule in RULES):
        rules = [rule for rule in RULES if rule.option == option]
        missing = {way for rule in rules for way in rule.ways}
        kinds = [way for way in WAYS if way in missing and not _is_kind_of_relay(way, missing)]
        cell = "any executor" if missing == set(WAYS) else ", ".join(kinds)
        reasons = "; ".join(dict.fromkeys(rule.because for rule in rules))
        lines.append(f"| {option} | {cell} | {reasons} |")
    return "\n".join(lines) + "\n"


def _is_kind_of_relay(way, missing):
    return way != RELAY and way.startswith(RELAY) and RELAY in missing


@dataclasses.dataclass(frozen=True)
class Executor:
    """Runs a model's sections on devices; the defaults run all of them in one program on one.

    Training states and their layouts are canonical, as on a single device, wherever they are
    saved, changed or inspected. `place` brings a state to where the programs need it, `canonical`
    back; `place_layouts` brings the layouts. `loss`, `loss_and_gradients` and
    `block_gradient_norms` are traced inside a program; their weights are as placed.

    Executors are hashable and compare by value: compiled programs are cached by executor.
    """

    @property
    def devices(self) -> int:
        """Number of devices."""
        return 1

    @property
    def tensor_shards(self) -> int:
        """Number of shards of a tensor-parallel weight."""
        return 1

    @property
    def depth(self) -> DepthSchedule:
        """Blocks that take part in each step."""
        return DepthSchedule()

    def describe(self) -> str:
        """Returns a few words for reports."""
        return "one device"

    @property
    def ways(self) -> tuple[str, ...]:
        """How devices share a model: some of `WAYS`."""
        return ()

    def check(self, model: ModelConfig, training: Any) -> None:
        """Raises a UserError that names the legal values if this model cannot run."""
        refuse_unsupported(self, Job(model, training))

    def loss(self, model: ModelConfig, weights: ModelWeights, batch: Batch) -> jax.Array:
        """Returns the float32 [] sum of weighted losses in nats; arguments as in `whole.loss`."""
        return whole.loss(model, weights, batch)

    def loss_and_gradients(
        self, model: ModelConfig, weights: ModelWeights, batch: Batch, how: Accumulation
    ) -> tuple[jax.Array, dict]:
        """Returns `whole.loss_and_gradients` of the whole batch, accumulated in float32."""
        return whole.loss_and_gradients(model, weights, batch, how)

    def over_rows(self, function: Callable) -> Callable:
        """Returns (parameters, rows) -> rows of a function, on the devices that have the rows.

        Parameters are replicated.
        """
        return function

    def block_gradient_norms(
        self, model: ModelConfig, weights: ModelWeights, tokens: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns `block_gradients.block_gradient_norms` in canonical order."""
        return block_gradient_norms(model, weights, tokens)

    def shardings(self, state: Any, model: ModelConfig) -> Any:
        """Returns the shardings of a state without layouts, for `jax.jit`; None for the default."""
        return None

    def replicated(self) -> Any:
        """Returns the sharding of results that every process reads; None for the default."""
        return None

    def place(self, state: Any, model: ModelConfig) -> Any:
        """Moves a canonical state to where the programs need it, except its layouts."""
        return state

    def placed_shapes(self, state: Any, model: ModelConfig) -> Any:
        """Returns the shapes and shardings of `place`; `state` has shapes and no layouts."""
        return state

    def canonical(self, state: Any, model: ModelConfig) -> Any:
        """Inverts `place`, except that arrays stay on their devices."""
        return state

    def place_layouts(
        self, weights: ModelWeights, model: ModelConfig, changing: bool
    ) -> ModelWeights:
        """Returns the weights with the programs' layouts; `Fixed` if these are specialised to them.

        Args:
          weights: with canonical layouts in numpy; of the other arrays shapes suffice.
          changing: whether layouts may change without recompiling.
        """
        return weights if changing else weights.with_fixed_layouts()

    def arrays(self, state: Any, model: ModelConfig, changing: bool, batch: dict) -> dict[str, Any]:
        """Returns {group: tree of shapes, dtypes and shardings} of all resident training arrays.

        Args:
          state: shapes, with canonical layouts in numpy.
          changing: as in `place_layouts`.
          batch: shapes of a whole batch by name.
        """
        return {
            "parameters": state.params,
            **({"frozen parameters": state.frozen} if state.frozen else {}),
            "gradients": gradient_arrays(state.moments, state.params),
            "moments": state.moments,
            "layout tables": self.place_layouts(state.weights, model, changing).layouts,
            "batch": batch,
        }

    def trip_counts(self, model: ModelConfig, micro_batches: int) -> dict[str, float]:
        """Returns {`jax.named_scope`: trip count of its loop or branch in a step}.

        Covers loops whose trip count depends on data; counts are those of the busiest device.
        """
        return {}

    def local_rows(self, batch: int) -> tuple[int, ...] | None:
        """Returns the rows of a batch that this process loads; None for all."""
        return None

    def put(self, batch: dict[str, np.ndarray], rows: int) -> dict[str, Any]:
        """Returns the batch of `rows` rows on the devices, from this process's rows."""
        return batch


class MultiProgramExecutor(Executor, abc.ABC):
    """An executor that is not a single program, such as the relay: it compiles its own programs.

    Nothing calls its traced functions.
    """

    @abc.abstractmethod
    def initial_state(self, model: ModelConfig, training: Any) -> Any:
        """Returns a state as `training.step.initial_state`."""

    @abc.abstractmethod
    def abstract_state(self, model: ModelConfig, training: Any) -> Any:
        """Returns a state as `training.step.abstract_state`."""

    @abc.abstractmethod
    def programs(
        self, model: ModelConfig, training: Any, data: Any, changing: bool
    ) -> dict[str, Any]:
        """Returns the fields of `training.programs.Compiled`, except `seconds`.

        `changing` is whether layouts may change without recompiling.
        """


SINGLE_DEVICE = Executor()
