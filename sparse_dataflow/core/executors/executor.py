"""The interface of an executor: what all share, and the functions of one that is one program."""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.whole import Accumulation
from sparse_dataflow.core.model.partition import without_left_out
from sparse_dataflow.core.model.stacks import (
    fixed_layouts,
    layouts_by_place,
    split_layouts,
    weights_of,
)
from sparse_dataflow.core.optim.optimizers import TrainState, gradient_arrays
from sparse_dataflow.core.step_metrics import Metrics

if TYPE_CHECKING:
    from sparse_dataflow.core.config.depth import DepthSchedule
    from sparse_dataflow.core.config.training import TrainingConfig

T = TypeVar("T")


def abstract(leaf: Any, target: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)


@dataclasses.dataclass(frozen=True)
class Executor:
    """Where a model's sections run: on one device, if a class does not say more.

    What a step on one device does not need is imported by the method that needs it.

    Training states and their layouts are canonical, as on a single device, wherever they are
    saved, changed or inspected. `place` brings a state to where the programs need it, `canonical`
    back; `place_layouts` brings the layouts.

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
    def depth(self) -> "DepthSchedule":
        """Blocks that take part in each step."""
        from sparse_dataflow.core.config.depth import DepthSchedule

        return DepthSchedule()

    def describe(self) -> str:
        """Returns a few words for reports."""
        return "one device"

    @property
    def parallelisms(self) -> tuple[str, ...]:
        """How devices share a model: names of `compatibility.PARALLELISMS`."""
        return ()

    def check(self, model: ModelConfig, training: "TrainingConfig") -> None:
        """Raises a UserError that names the legal values if this model cannot run."""
        from sparse_dataflow.core.executors import compatibility

        compatibility.refuse_unsupported(self, model, training)

    def over_rows(self, function: Callable) -> Callable:
        """Returns (parameters, rows) -> rows of a function, on the devices that have the rows.

        Parameters are replicated.
        """
        return function

    def shardings(self, state: object, model: ModelConfig) -> Any:
        """Returns the shardings of a state without layouts, for `jax.jit`; None for the default."""
        return None

    def replicated(self) -> jax.sharding.Sharding | None:
        """Returns the sharding of results that every process reads; None for the default."""
        return None

    def place(self, state: T, model: ModelConfig) -> T:
        """Moves a canonical state to where the programs need it, except its layouts."""
        return state

    def placed_shapes(self, state: T, model: ModelConfig) -> T:
        """Returns the shapes and shardings of `place`; `state` has shapes and no layouts."""
        return state

    def canonical(self, state: T, model: ModelConfig) -> T:
        """Inverts `place`, except that arrays stay on their devices."""
        return state

    def place_layouts(self, rest: T, model: ModelConfig, changing: bool) -> T:
        """Returns what is not trained with the programs' layouts; fixed if these are specialised to
        them.

        Args:
          rest: with canonical layouts in numpy; of the other arrays shapes suffice.
          changing: whether layouts may change without recompiling.
        """
        return rest if changing else fixed_layouts(rest)

    def arrays(
        self, state: TrainState, model: ModelConfig, changing: bool, batch: Batch
    ) -> dict[str, object]:
        """Returns {group: tree of shapes, dtypes and shardings} of all resident training arrays.

        Args:
          state: shapes, with canonical layouts in numpy.
          changing: as in `place_layouts`.
          batch: shapes of a whole batch.
        """
        rest = without_left_out(state.rest)
        frozen, layouts = split_layouts(self.place_layouts(rest, model, changing))
        return {
            "parameters": state.params,
            **({"frozen parameters": frozen} if frozen else {}),
            "gradients": gradient_arrays(state.moments, state.params),
            "moments": state.moments,
            "layout tables": layouts,
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

    def put(self, batch: T, rows: int) -> T:
        """Returns a batch, or an array, of `rows` rows on the devices, from this process's rows."""
        return batch


class TracedExecutor(Executor):
    """Runs all sections in one program.

    Its functions are traced inside of the program.  They take what is trained and what is not, as
    placed: the `params` and the `rest` of a `TrainState`.
    """

    def evaluation(self, model: ModelConfig, params: dict, rest: object, batch: Batch) -> Metrics:
        """Returns `whole.evaluation` of the whole batch."""
        return whole.evaluation(model, weights_of(model, params, rest), batch)

    def loss_and_gradients(
        self, model: ModelConfig, params: dict, rest: object, batch: Batch, how: Accumulation
    ) -> tuple[Metrics, dict]:
        """Returns `whole.loss_and_gradients` of the whole batch, accumulated in float32."""
        return whole.loss_and_gradients(model, params, rest, batch, how)

    def block_gradient_norms(
        self, model: ModelConfig, params: dict, rest: object, batch: Batch
    ) -> dict[str, jax.Array]:
        """Returns `block_gradients.block_gradient_norms` in canonical order."""
        from sparse_dataflow.core.executors.block_gradients import block_gradient_norms

        return block_gradient_norms(model, weights_of(model, params, rest), batch)

    def growth_norms(
        self, model: ModelConfig, params: dict, rest: object, batch: Batch
    ) -> dict[str, jax.Array]:
        """Returns the norms of the dense gradient by which stored blocks and masks grow."""
        from sparse_dataflow.core.executors.block_gradients import mask_gradient_norms

        stores_blocks = bool(layouts_by_place(rest))
        norms = self.block_gradient_norms(model, params, rest, batch) if stores_blocks else {}
        features = self.residual_order(model)
        masks = mask_gradient_norms(self.loss_and_gradients, model, params, rest, batch, features)
        return norms | masks

    def residual_order(self, model: ModelConfig) -> np.ndarray | None:
        """Returns the order of the residual stream's features as placed, int32 [d_model]; None for
        that of the model."""
        return None


class MultiProgramExecutor(Executor, abc.ABC):
    """An executor that is not a single program, such as the relay: it compiles its own programs."""

    @abc.abstractmethod
    def initial_state(self, model: ModelConfig, training: "TrainingConfig") -> TrainState:
        """Returns a state as `training.step.initial_state`."""

    @abc.abstractmethod
    def abstract_state(self, model: ModelConfig, training: "TrainingConfig") -> TrainState:
        """Returns a state as `training.step.abstract_state`."""

    @abc.abstractmethod
    def programs(
        self, model: ModelConfig, training: "TrainingConfig", data: object, changing: bool
    ) -> dict[str, Any]:
        """Returns the fields of `training.programs.Compiled`, except `seconds`.

        `changing` is whether layouts may change without recompiling.
        """


SINGLE_DEVICE = TracedExecutor()
