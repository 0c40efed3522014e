"""The training state, and its optimizer: clipping, a schedule, weight decay, and a learning-rate
multiplier for each parameter, about AdamW, Muon or an optimizer of `factories`.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from sparse_dataflow.core.config.layer_groups import group_index_of_path, layer_groups
from sparse_dataflow.core.config.model import DENSE, SUPAR_WIDTH, ModelConfig
from sparse_dataflow.core.model.partition import ArrayTree, merged, without_left_out
from sparse_dataflow.core.model.stacks import Layouts, split_layouts, with_layouts
from sparse_dataflow.core.optim import matrix_leaves
from sparse_dataflow.core.weights.kind import is_free_matrix

if TYPE_CHECKING:
    from sparse_dataflow.core.config.training import TrainingConfig

SPARSE_RATE_DENSITY = 1 / 8
"""Density at which `TrainingConfig.sparse_rate` is the full learning-rate multiplier."""

TURNED_DENSE_RATE = {"adamw": 2.0, "muon": 4.0}
"""Learning-rate multiplier of a dense weight that was block-sparse in an earlier phase, by
optimizer; docs/evidence/quality.md compares others."""


@functools.cache
def learning_rate_schedule(training: "TrainingConfig") -> Callable[[float], float]:
    """Returns step (from 0) -> learning rate: linear warm-up, then `training.schedule`."""
    warmup = training.warmup_stop
    peak = training.learning_rate
    after = training.steps - warmup
    end = training.final_rate * peak
    plateau = max(warmup, training.plateau_stop)
    falls = {
        "cosine": lambda: [optax.cosine_decay_schedule(peak, after, training.final_rate)],
        "linear": lambda: [optax.linear_schedule(peak, end, after)],
        "constant": lambda: [optax.constant_schedule(peak)],
        "wsd": lambda: [
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, end, training.steps - plateau),
        ],
    }
    stops = [warmup, *([plateau] if training.schedule == "wsd" else [])]
    # Step i of the warm-up has (i + 1) / (warmup + 1) of the peak: the first step learns too.
    rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    schedule = optax.join_schedules([rising, *falls[training.schedule]()], stops)
    return lambda step: float(schedule(step))


def make_optimizer(
    model: ModelConfig, training: "TrainingConfig", mesh: Mesh | AbstractMesh | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns clipping, the optimizer, decoupled weight decay and per-parameter multipliers.

    `update` takes the learning rate of the step as keyword `learning_rate`, so a schedule never
    recompiles; its updates are added to the params.  It takes what is not trained as
    keyword `rest`: Muon's matrices are the groups of layouts that have them and cannot change.

    Args:
      mesh: devices over which the updated arrays are sharded, with an axis "stage" for layers;
        None for one device.
    """

    new_rows = training.new_rows if training.new_rows_first else ()

    def init(params):
        steps = jnp.asarray(training.new_rows_steps, jnp.int32)
        return NewRowsState(steps) if new_rows else optax.EmptyState()

    def scale(updates, state, params=None, *, learning_rate, rest=(), **_):
        if training.is_built_in:
            multipliers = learning_rate_multipliers(model, training, updates, rest)
            updates = jax.tree.map(lambda u, m: -learning_rate * (u * m), updates, multipliers)
        if not new_rows:
            return updates, state
        return _new_rows_alone(updates, new_rows, state.left > 0), state

    # Decay is added before the rate multiplies, and not to the moments (AdamW).
    mask = functools.partial(decay_mask, model, decayed=training.decayed)
    direction = [
        _moments(model, training, mesh),
        optax.add_decayed_weights(training.weight_decay, mask=mask),
    ]
    if not training.is_built_in:
        direction = [_by_weight(model, training)]
    return optax.chain(
        # Before the moments, in which an outlier would stay for many steps.
        optax.clip_by_global_norm(training.clip),
        *direction,
        optax.GradientTransformationExtraArgs(init, scale),
    )


def _by_weight(model, training):
    """Returns the optimizer that updates each weight by itself, with its rate and decay."""
    from sparse_dataflow.core.optim import by_weight

    def init(params):
        return by_weight.WeightStates(by_weight.init(model, training, params))

    def update(gradients, state, params=None, *, learning_rate, **_):
        rates = learning_rate_multipliers(model, training, gradients)
        rates = jax.tree.map(lambda multiplier: learning_rate * multiplier, rates)
        decays = weight_decays(model, training, gradients)
        updates, states = by_weight.update(
            model, training, gradients, state.states, params, rates, decays
        )
        return updates, by_weight.WeightStates(states)

    return optax.GradientTransformationExtraArgs(init, update)


class NewRowsState(NamedTuple):
    """State of an optimizer that trains the rows of new tokens first.

    Attributes:
      left: int32 [], steps of the run in which these rows alone are still to be trained; `at_step`
        counts them.  It is data, since the number of steps is known after programs are compiled.
    """

    left: Any


def with_steps_left(training: "TrainingConfig", moments: tuple, step: int = 0) -> tuple:
    """Returns an optimizer state whose `NewRowsState` is the one after `step` steps of the run."""
    left = np.asarray(max(0, training.new_rows_steps - step), np.int32)
    return tuple(NewRowsState(left) if isinstance(e, NewRowsState) else e for e in moments)


def rows_left_alone(training: "TrainingConfig", moments: optax.OptState) -> tuple[int, ...] | None:
    """Returns (first row, number of rows) of the only rows that the next step updates; None if it
    updates all.

    Args:
      training: names the rows of new tokens.
      moments: the optimizer state before the step, on the host.
    """
    left = next((int(entry.left) for entry in moments if isinstance(entry, NewRowsState)), 0)
    return training.new_rows if left > 0 else None


def _new_rows_alone(updates, rows, alone):
    """Returns the updates; those of the rows of new tokens alone where `alone`, bool [], is true.

    Args:
      updates: like the params.
      rows: first row and number of rows, see `TrainingConfig.new_rows`.
      alone: whether nothing else is updated.
    """
    first, count = rows

    def masked(path, update):
        updated = jnp.zeros((), bool)
        if path[-1].key in matrix_leaves.VOCABULARY:
            # [rows, 1, ...], which broadcasts over all features of a row.
            row = jnp.arange(update.shape[0]).reshape(-1, *[1] * (update.ndim - 1))
            updated = (first <= row) & (row < first + count)
        return jnp.where(updated | ~alone, update, 0)

    return jax.tree_util.tree_map_with_path(masked, updates)


def _moments(model, training, mesh):
    """Returns Adam, or Muon for matrices and Adam for the rest.

    Its state is optax's of Adam.  `mu` has the first moment of every parameter, which is Muon's
    momentum; `nu` has no entry for a parameter of Muon.  Moments are stored in the state dtype and
    computed in the gradients' dtype.
    """
    dtype = jnp.dtype(training.state_dtype)
    adam = optax.scale_by_adam(b1=training.b1, b2=training.b2, eps=training.epsilon)
    has_muon = training.optimizer == "muon"
    others = functools.partial(matrix_leaves.without_muon, model) if has_muon else lambda tree: tree
    if has_muon:
        from sparse_dataflow.core.optim import muon, muon_updates

    # Moments are stored in `state_dtype` and computed in the gradients' dtype: narrow sums would
    # lose small gradients.
    def rounded(state):
        cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)  # noqa: E731
        return state._replace(mu=cast(state.mu), nu=cast(state.nu))

    def with_matrices(function, rest, *trees):
        """Returns `function` of the matrices of trees like the params, and the leaves of `rest`."""
        if not has_muon:
            return rest
        # Adam's trees have no entry for Muon's matrices, so both are joined by their order: `rest`
        # has the leaves between the matrices, in the order of the params.
        leaves = iter(jax.tree.leaves(rest))
        return jax.tree_util.tree_map_with_path(
            lambda path, *x: function(*x) if matrix_leaves.has_muon(model, path) else next(leaves),
            *trees,
        )

    def init(params):
        state = adam.init(others(params))
        # Muon's momentum takes the place of Adam's first moment.
        return rounded(state._replace(mu=jax.tree.map(jnp.zeros_like, params)))

    def update(gradients, state, params=None, *, rest=(), **_):
        widen = lambda tree, like: jax.tree.map(lambda m, g: m.astype(g.dtype), tree, like)  # noqa: E731
        mu, small_gradients = widen(state.mu, gradients), others(gradients)
        small = state._replace(mu=others(mu), nu=widen(state.nu, small_gradients))
        # Adam counts the updates for Muon too.
        updates, small = adam.update(small_gradients, small, params)
        mu = with_matrices(lambda *x: muon.with_gradient(*x), small.mu, mu, gradients)

        def move(momentum, gradient, matrices):
            return muon_updates.matrix_updates(momentum, gradient, small.count, mesh, matrices)

        if has_muon:
            matrices = muon_updates.matrices_like(model, gradients, rest)
            updates = with_matrices(move, updates, mu, gradients, matrices)
            scales = matrix_leaves.update_scales(model, params)
            updates = matrix_leaves.scaled(updates, scales)
        return updates, rounded(small._replace(mu=mu))

    return optax.GradientTransformationExtraArgs(init, update)


def adam_state(moments: optax.OptState) -> Any:
    """Returns the entry of a state of AdamW or Muon with `count`, `mu` and `nu`; see `_moments`."""
    return next(entry for entry in moments if hasattr(entry, "mu"))


def gradient_arrays(moments: optax.OptState, params: dict) -> dict:
    """Returns a tree of arrays, or shapes, like the gradients of a micro-batch."""
    return next((entry.mu for entry in moments if hasattr(entry, "mu")), params)


def map_moments(
    function: Callable[[dict], dict],
    moments: optax.OptState,
    second: Callable[[dict], dict] | None = None,
) -> optax.OptState:
    """Returns the optimizer state with its trees like the params replaced.

    Args:
      function: tree of first moments, with the params' structure -> new tree; or tree of the states
        of each weight, a tuple of arrays for each leaf.
      second: the same for the second moments, which Muon's matrices lack; `function` if None.
    """
    from sparse_dataflow.core.optim import by_weight

    second = second or function

    def mapped(entry):
        if isinstance(entry, by_weight.WeightStates):
            return by_weight.WeightStates(function(entry.states))
        if hasattr(entry, "mu"):
            return entry._replace(mu=function(entry.mu), nu=second(entry.nu))
        return entry

    return tuple(map(mapped, moments))


def decay_mask(model: ModelConfig, params: dict, decayed: str = "matrices") -> dict:
    """Returns True for each leaf with weight decay; see `TrainingConfig.decayed`."""
    tests = {"matrices": matrix_leaves.is_matrix, "projections": matrix_leaves.is_linear_matrix}
    decays = tests.get(decayed, lambda model, path: True)
    return jax.tree_util.tree_map_with_path(lambda path, _: decays(model, path), params)


def weight_decays(model: ModelConfig, training: "TrainingConfig", params: dict) -> dict:
    """Returns the decoupled weight decay of each leaf; 0 for none."""
    mask = decay_mask(model, params, training.decayed)
    return jax.tree.map(lambda decays: training.weight_decay if decays else 0.0, mask)


def learning_rate_multipliers(
    model: ModelConfig,
    training: "TrainingConfig",
    params: dict,
    rest: object = (),
) -> dict:
    """Returns the learning-rate multiplier of each parameter.

    Matrices of a projection, with its low-rank term, and `is_free_matrix`, which are dense:
    `training.sparse_rate` to the power log(density) / log(SPARSE_RATE_DENSITY), so 1 for a dense
    weight; a weight that turned dense has TURNED_DENSE_RATE as well.  Everything else
    (norms, biases, gates, embeddings): `training.vector_rate`.

    SuPar (arXiv 2405.15743, table 1) adds a factor SUPAR_WIDTH / (d_model x density): an Adam step
    moves every weight equally, so the change of an output grows with the inputs that it sums.  The
    first factor of a low-rank term reads all inputs (density 1); the second reads a constant rank
    and has no factor.  The initial variance follows the stored fan-in in both parametrizations.

    Muon's update of a matrix of m inputs changes its output by sqrt(m).  An output sums f / m
    matrices, whose changes are about as coherent as Adam's, so it changes by f / sqrt(m).  Muon's
    factor is that of Adam times sqrt(m / SUPAR_WIDTH): a dense weight's is the root of Adam's.  So
    is that of two factors, whose product moves as far (see `Weight.update_scales`).

    Under Adam the factors of a low-rank weight have the multipliers of what they read, as in
    arXiv 2406.06248, section 3: the first all inputs, the second rank / inputs as its density.
    Under Muon both have those of a dense weight.

    Args:
      training: optimizer settings.
      params: the parameters, or shapes or updates like them.
      rest: has the layouts, see `make_optimizer`.
    """

    def multiplier(path, leaf):
        name = path[-1].key
        if not matrix_leaves.is_linear_matrix(model, path):
            return training.vector_rate
        projection = path[-2].key
        spec, sides = DENSE, (model.d_model, 0)
        if not is_free_matrix(path):
            spec = layer_groups(model)[group_index_of_path(path)].model.linear(projection)
            sides = model.projection_shape(projection)
        has_muon = training.optimizer == "muon" and matrix_leaves.has_muon(model, path)
        is_term = name in spec.term_leaves
        form = spec.term if is_term else spec.weight
        share = form.read_share(name, spec, sides, has_muon)
        density = spec.density if is_term else share
        # A power of the density that is 1 for dense weights and `sparse_rate` at
        # SPARSE_RATE_DENSITY.
        rate = training.sparse_rate ** (math.log(density) / math.log(SPARSE_RATE_DENSITY))
        if spec.turned_dense:
            rate *= TURNED_DENSE_RATE.get(training.optimizer, TURNED_DENSE_RATE["adamw"])
        if model.supar and share is not None:
            rate *= SUPAR_WIDTH / (model.d_model * share)
            if has_muon:
                # Muon's leaves are the matrices.
                share = form.muon_inputs(leaf.shape, sides) / sides[0]
                rate *= math.sqrt(model.d_model * share / SUPAR_WIDTH)
        return rate

    if training.optimizer == "muon":
        from sparse_dataflow.core.optim.muon_updates import matrices_like

        params = matrices_like(model, params, rest)
    return jax.tree_util.tree_map_with_path(multiplier, params)


class TrainState(NamedTuple):
    """All arrays of a training, and of its checkpoints, except that those leave out an adapters'
    base.

    Attributes:
      step: int32 [], number of optimizer steps done; also the data position.
      params: float32 master parameters that are trained; see `gpt`.
      moments: the optimizer state.
      key: random key of every draw during training.
      rest: what is not trained, see `model.partition`: layouts in numpy, masks, the base of
        `adapters`, what the phase leaves out; () for nothing.
    """

    step: Any
    params: dict
    moments: optax.OptState
    key: Any
    rest: ArrayTree = ()

    @property
    def merged(self) -> dict:
        """All parameters that take part, trained and not, in one tree."""
        return merged(self.params, without_left_out(self.rest))

    def without_layouts(self) -> "TrainState":
        """Returns the state without layouts, which stay on the host."""
        return self._replace(rest=split_layouts(self.rest)[0])

    def with_layouts(self, model: ModelConfig, layouts: Layouts | None = None) -> "TrainState":
        """Returns the state with `stacks.stored_layouts` in place of the layouts that it has."""
        return self._replace(rest=with_layouts(model, self.rest, layouts))

    def with_layouts_of(self, other: "TrainState") -> "TrainState":
        """Returns the state with the layouts of another one; it has none itself."""
        return self._replace(rest=merged(self.rest, split_layouts(other.rest)[1]))


def at_step(state: TrainState, step: object) -> TrainState:
    """Returns a state as the one after `step` steps of the run, int32 [].

    What is promised in steps of the run goes on by these steps, also where one was skipped or
    parameters and moments are those of an earlier step.
    """

    def counted(entry):
        if isinstance(entry, NewRowsState):
            return NewRowsState(jnp.maximum(entry.left - (step - state.step), 0))
        return entry

    return state._replace(step=step, moments=tuple(map(counted, state.moments)))


def group_of(path: tuple) -> str:
    """Returns the parameter group of a leaf of the parameters or moments, such as "embed" or
    "blocks.qkv"; "" for a leaf that belongs to none."""
    names = [key.key for key in path if hasattr(key, "key")]
    return ".".join(names[:2]) if names[:1] == ["blocks"] else (names or [""])[0]


def group_squares(tree: dict) -> dict[str, jax.Array]:
    """Returns the sum of squares of each parameter group: "embed", "head", "blocks.<module>"."""
    squares: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        group = group_of(path)
        squares[group] = squares.get(group, 0.0) + jnp.sum(jnp.square(leaf))
    return squares
