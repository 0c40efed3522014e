"""What training asks of an executor, and the executor of one device."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.optim.optimizers import adam_state
from sparse_dataflow.parallel import whole
from sparse_dataflow.parallel.block_gradients import block_gradient_norms


class Executor(Protocol):
    """Lays a model's sections out over devices.

    A training state and its layout tables are canonical wherever they are saved, changed or looked
    at: as on one device.  `place` brings them to where the programs want them, `canonical` back.
    `loss` and `loss_and_gradients` are traced inside a program; params and tables are as placed.

    An executor that is no single program is one of `OwnPrograms` instead of what is traced.
    """

    def __hash__(self) -> int:
        """Programs are kept by their executor."""

    def describe(self) -> str:
        """In a few words, for reports."""

    @property
    def devices(self) -> int:
        """How many there are."""

    def check(self, model: ModelConfig, training: Any) -> None:
        """Refuses, by a UserError that names the legal values, what cannot be laid out so."""

    def loss(
        self, model: ModelConfig, params: dict, tables: Any, tokens: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Float32 [] sum of weighted losses in nats; arguments as in `whole.loss`."""

    def loss_and_gradients(
        self,
        model: ModelConfig,
        params: dict,
        tables: Any,
        tokens: jax.Array,
        micro_batches: int,
        dtype: str = "float32",
    ) -> tuple[jax.Array, dict]:
        """As `whole.loss_and_gradients`, of the whole batch; in float32 where all are summed."""

    def block_gradient_norms(
        self, model: ModelConfig, params: dict, tables: Any, tokens: jax.Array
    ) -> dict[str, jax.Array]:
        """As `block_gradients.block_gradient_norms`, canonical."""

    def shardings(self, state: Any) -> Any:
        """Shardings of a state's arrays (its tables are ()), for `jax.jit`; None for jax's own."""

    def replicated(self) -> Any:
        """Sharding of results that every process reads; None for jax's own."""

    def place(self, state: Any) -> Any:
        """The canonical state, its arrays where the programs want them; its tables stay."""

    def placed_shapes(self, state: Any) -> Any:
        """Shapes and shardings of `place`, of those of a canonical state without tables."""

    def canonical(self, state: Any, model: ModelConfig) -> Any:
        """The inverse of `place`, but that arrays stay on their devices."""

    def tables(self, tables: dict, changing: bool) -> Any:
        """Canonical tables -> what programs are given; () where they are specialised to them.

        Args:
          tables: numpy, see `gpt.layout_tables`.
          changing: whether layouts may change without another program.
        """

    def arrays(self, state: Any, tables: dict, changing: bool, batch: dict) -> dict[str, Any]:
        """{group: tree of shapes, dtypes and shardings} of all that a training keeps on devices.

        Args:
          state: shapes, without tables.
          tables: as for `tables`.
          changing: likewise.
          batch: shapes of a whole batch by name.
        """

    def rounds(self, model: ModelConfig, micro_batches: int) -> dict[str, float]:
        """Name of a `jax.named_scope` in the step's program -> how often the busiest device goes
        through the loop or branch in it, where the program alone does not tell."""

    def rows(self, batch: int) -> tuple[int, ...] | None:
        """Rows of a batch that this process loads; all where None."""

    def put(self, batch: dict[str, np.ndarray], rows: int) -> dict[str, Any]:
        """This process's rows -> the batch of `rows` rows as programs want it."""


@runtime_checkable
class OwnPrograms(Protocol):
    """What an executor has besides that is no single program, as the relay."""

    def initial_state(self, model: ModelConfig, training: Any) -> Any:
        """As `training.step.initial_state`."""

    def abstract_state(self, model: ModelConfig, training: Any) -> Any:
        """As `training.step.abstract_state`."""

    def programs(self, model: ModelConfig, training: Any, data: Any) -> dict[str, Any]:
        """The fields of `training.programs.Compiled`, but for `seconds`."""


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """All sections in one program on one device."""

    devices = 1

    def describe(self):
        """See `Executor`."""
        return "one device"

    def check(self, model, training):
        """See `Executor`."""

    def loss(self, model, params, tables, tokens, weights):
        """See `Executor`."""
        return whole.loss(model, params, tables, tokens, weights)

    def loss_and_gradients(self, model, params, tables, tokens, micro_batches, dtype="float32"):
        """See `Executor`."""
        return whole.loss_and_gradients(model, params, tables, tokens, micro_batches, dtype=dtype)

    def block_gradient_norms(self, model, params, tables, tokens):
        """See `Executor`."""
        return block_gradient_norms(model, params, tables, tokens)

    def shardings(self, state):
        """See `Executor`."""
        return None

    def replicated(self):
        """See `Executor`."""
        return None

    def place(self, state):
        """See `Executor`."""
        return state

    def placed_shapes(self, state):
        """See `Executor`."""
        return state

    def canonical(self, state, model):
        """See `Executor`."""
        return state

    def tables(self, tables, changing):
        """See `Executor`."""
        return tables if changing else ()

    def arrays(self, state, tables, changing, batch):
        """See `Executor`."""
        return {
            "parameters": state.params,
            "gradients": adam_state(state.moments).mu,
            "moments": state.moments,
            "layout tables": tables if changing else {},
            "batch": batch,
        }

    def rounds(self, model, micro_batches):
        """See `Executor`."""
        return {}

    def rows(self, batch):
        """See `Executor`."""
        return None

    def put(self, batch, rows):
        """See `Executor`."""
        return batch


ONE_DEVICE = OneDevice()
