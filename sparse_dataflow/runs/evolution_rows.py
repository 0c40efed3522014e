"""Rows of the table of what goes with what, about the data, start and evolution of a run."""

from sparse_dataflow.core.config.training import BUILT_IN
from sparse_dataflow.core.executors.compatibility import (
    EXPERTS,
    TENSOR,
    WEIGHTS,
    Conflict,
    Option,
)
from sparse_dataflow.core.layouts.evolution import METHODS


def _optimizer(run):
    return not run.training.is_built_in and f"training.optimizer={run.training.optimizer}"


def _evolution(run, exchanges):
    """The method of evolution, if it exchanges blocks or not, as asked."""
    matches = run.evolution and (METHODS[run.evolution].update is not None) == exchanges
    return matches and f"--evolution={run.evolution}"


def _state_that_stays(run):
    """An optimizer with state of parts of a stored block, such as its rows."""
    if run.training.is_built_in:
        return ""
    from sparse_dataflow.core.optim.weight_state import partial_axes  # Loads jax.

    for name in run.model.partial_projections:
        spec = run.model.linear(name)
        side = spec.block
        # Stored blocks change places whole, so only state within a block matters; a mask moves
        # single weights.
        sides = (side, side) if spec.weight.stores_blocks else run.model.projection_shape(name)
        if axes := partial_axes(run.training, sides):
            along = " and ".join(axes)
            return f"{_optimizer(run)}, whose state of a block has an array along {along},"
    return ""


OTHER_OPTIMIZER = Option(
    "`training.optimizer` other than adamw and muon", _optimizer, {"training.optimizer": "lion"}
)
STATE_OF_PARTS = Option(
    "`training.optimizer` with state that is not of a block's shape",
    _state_that_stays,
    {"training.optimizer": "optax:sm3"},
)
CHANGED_MODEL = Option(
    "`evolution.method` that changes the model",
    lambda run: _evolution(run, False),
    {"evolution.method": "sparse_to_dense"},
)
EXCHANGED_BLOCKS = Option(
    "`evolution.method` set or rigl",
    lambda run: _evolution(run, True),
    {"evolution.method": "set", "evolution.every": 2},
)
GIVEN_EXPERTS = Option(
    "`model.experts` with stored blocks of `run.init_from`",
    lambda run: run.given_layouts and EXPERTS.used(run) and f"--init_from and {EXPERTS.used(run)}",
    {**EXPERTS.example, **WEIGHTS},
)

ROWS = (
    Conflict(
        OTHER_OPTIMIZER,
        (CHANGED_MODEL,),
        "whose state must say what scales as the gradient and what as its square",
        f"legal: training.optimizer={' or '.join(BUILT_IN)}, or --evolution=set or rigl",
    ),
    Conflict(
        STATE_OF_PARTS,
        (EXCHANGED_BLOCKS,),
        "which cannot divide a number for a row of blocks between the blocks",
        f"legal: another optimizer, such as {', '.join(BUILT_IN)}, or --evolution=static",
    ),
    Conflict(
        GIVEN_EXPERTS,
        (TENSOR,),
        "which needs equal groups of blocks that are known before training",
        "legal: a mesh without tensor, drawn weights, or dense weights",
    ),
)
