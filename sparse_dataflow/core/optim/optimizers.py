"""AdamW or Muon, with warm-up, cosine decay, a decay mask and a learning-rate multiplier per
parameter."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core.config.layer_groups import group_index_of_path, layer_groups
from sparse_dataflow.core.config.model import SUPAR_WIDTH, ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model.guides import GUIDE
from sparse_dataflow.core.model.model_weights import ModelWeights
from sparse_dataflow.core.optim import muon

B1, B2, EPS = 0.9, 0.95, 1e-8
"""Adam's decay rates of the moments, from GPT-3 (arXiv 2005.14165, appendix B), and epsilon.

These decay rates also allow moments in bfloat16, as in DeepSeek-V3 (arXiv 2412.19437, section
3.3.2).  Rounding to nearest is enough: bfloat16 rounds by at most 2^-8 = 0.4%, while a step moves
the second moment by 1 - B2 = 5% of its distance from the new square, and the first by 10%.  So the
second moment stops within 8.5% of its float32 limit, the first within 4.1%, and both decay to zero
without gradients.  With B2 = 0.999 neither holds.
"""

LINEAR_MATRICES = ("kernel", "values", GUIDE, "a_kernel", "b_kernel", *muon.FACTORS, "router")
"""Leaves that multiply activations; each but the router belongs to a projection."""

SPARSE_RATE_DENSITY = 1 / 8
"""Density at which `TrainingConfig.sparse_rate` is the full learning-rate multiplier."""

TURNED_DENSE_RATE = {"adamw": 2.0, "muon": 4.0}
"""Learning-rate multiplier of a dense weight that was block-sparse in an earlier phase, by
optimizer; docs/quality.md compares others."""


@functools.cache
def learning_rate_schedule(training: TrainingConfig) -> Callable[[int], float]:
    """Returns step (from 0) -> learning rate: linear warm-up, then cosine decay."""
    warmup = min(round(training.warmup * training.steps), training.steps - 1)
    peak = training.learning_rate
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(peak / (warmup + 1), peak, warmup),
            optax.cosine_decay_schedule(peak, training.steps - warmup, training.final_rate),
        ],
        [warmup],
    )
    return lambda step: float(schedule(step))


def make_optimizer(
    model: ModelConfig, training: TrainingConfig, mesh: Mesh | AbstractMesh | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns clipping, Adam or Muon, decoupled weight decay and per-parameter multipliers.

    The caller multiplies the updates by minus the learning rate.  The learning rate is an argument
    of the train step, so a schedule never recompiles.  `update` takes the `ModelWeights` as keyword
    `weights`: Muon's matrices are the groups of layouts that have them and cannot change.

    Args:
      model: config of the model.
      training: optimizer settings.
      mesh: devices over which the updated arrays are sharded, with an axis "stage" for layers;
        None for one device.
    """

    new_rows = training.new_rows if training.new_rows_first else ()

    def init(params):
        steps = jnp.asarray(training.new_rows_steps, jnp.int32)
        return NewRowsState(steps) if new_rows else optax.EmptyState()

    def scale(updates, state, params=None, *, weights=None, **_):
        multipliers = learning_rate_multipliers(model, training, updates, weights)
        updates = jax.tree.map(lambda u, m: u * m, updates, multipliers)
        if not new_rows:
            return updates, state
        updates = _new_rows_alone(updates, new_rows, state.left > 0)
        return updates, NewRowsState(jnp.maximum(state.left - 1, 0))

    return optax.chain(
        optax.clip_by_global_norm(training.clip),
        _moments(training, mesh),
        optax.add_decayed_weights(training.weight_decay, mask=decay_mask),
        optax.GradientTransformationExtraArgs(init, scale),
    )


class NewRowsState(NamedTuple):
    """State of an optimizer that trains the rows of new tokens first.

    Attributes:
      left: int32 [], steps in which these rows alone are still to be trained. It is data, since the
        number of steps is known after programs are compiled.
    """

    left: Any


VOCABULARY = ("tokens", "output")
"""Leaves with a row for each token."""


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
        if path[-1].key in VOCABULARY:
            row = jnp.arange(update.shape[0])[:, None]
            updated = (first <= row) & (row < first + count)
        return jnp.where(updated | ~alone, update, 0)

    return jax.tree_util.tree_map_with_path(masked, updates)


def _moments(training, mesh):
    """Returns Adam, or Muon for matrices and Adam for the rest.

    Its state is optax's of Adam.  `mu` has the first moment of every parameter, which is Muon's
    momentum; `nu` has no entry for a parameter of Muon.  Moments are stored in the state dtype and
    computed in the gradients' dtype.
    """
    dtype = jnp.dtype(training.state_dtype)
    adam = optax.scale_by_adam(b1=B1, b2=B2, eps=EPS)
    has_muon = training.optimizer == "muon"
    others = muon.without_matrices if has_muon else lambda tree: tree

    def rounded(state):
        cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)  # noqa: E731
        return state._replace(mu=cast(state.mu), nu=cast(state.nu))

    def with_matrices(function, rest, *trees):
        """Returns `function` of the matrices of trees like the params, and the leaves of `rest`."""
        if not has_muon:
            return rest
        leaves = iter(jax.tree.leaves(rest))
        return jax.tree_util.tree_map_with_path(
            lambda path, *x: function(path, *x) if muon.is_matrix(path) else next(leaves), *trees
        )

    def init(params):
        state = adam.init(others(params))
        return rounded(state._replace(mu=jax.tree.map(jnp.zeros_like, params)))

    def update(gradients, state, params=None, *, weights=None, **_):
        widen = lambda tree, like: jax.tree.map(lambda m, g: m.astype(g.dtype), tree, like)  # noqa: E731
        mu, rest = widen(state.mu, gradients), others(gradients)
        small = state._replace(mu=others(mu), nu=widen(state.nu, rest))
        updates, small = adam.update(rest, small, params)
        mu = with_matrices(lambda _, *x: muon.with_gradient(*x), small.mu, mu, gradients)

        def move(path, momentum, gradient):
            matrices = muon.matrices_of(
                gradient.shape, weights.layout_at(path) if weights else None
            )
            return _matrix_updates(momentum, gradient, small.count, mesh, matrices)

        updates = with_matrices(move, updates, mu, gradients)
        if has_muon:
            updates = muon.with_bounded_products(updates, params)
        return updates, rounded(small._replace(mu=mu))

    return optax.GradientTransformationExtraArgs(init, update)


def _matrix_updates(momentum, gradient, number, mesh, matrices):
    """Returns `muon.update` of stacked layers.

    One layer follows another, so that temporaries are those of one layer, unless stages shard the
    layers.  Blocks or groups that are themselves sharded, because no axis divides their number, are
    gathered once; the products would gather them in every Newton-Schulz step.
    """

    stacked = momentum.ndim > 3

    def whole(tree):
        if mesh is None or not stacked:
            return tree
        batch = (P.UNCONSTRAINED,) * (jax.tree.leaves(tree)[0].ndim - 2)
        return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P(*batch, None, None)))

    def update(stacks):
        layer, layer_gradient = whole(jax.tree.map(matrices.join, stacks))
        return matrices.split(whole(muon.update(layer, layer_gradient, number)))

    if mesh is not None and mesh.shape["stage"] > 1:
        return update((momentum, gradient))
    return jax.lax.map(update, (momentum, gradient))


def adam_state(moments: optax.OptState) -> Any:
    """Returns the entry of an optimizer state that has `count`, `mu` and `nu`; see `_moments`."""
    return next(entry for entry in moments if hasattr(entry, "mu"))


def map_moments(
    function: Callable[[dict], dict],
    moments: optax.OptState,
    second: Callable[[dict], dict] | None = None,
) -> optax.OptState:
    """Returns the optimizer state with both trees of moments replaced.

    Args:
      function: tree of first moments, with the params' structure -> new tree.
      moments: the optimizer state.
      second: the same for the second moments, which Muon's matrices lack; `function` if None.
    """
    second = second or function
    return tuple(
        entry._replace(mu=function(entry.mu), nu=second(entry.nu))
        if hasattr(entry, "mu")
        else entry
        for entry in moments
    )


def decay_mask(params: dict) -> dict:
    """Returns True for each leaf with weight decay: matrices of projections and routers, embeddings
    and output layer."""
    decayed = (*LINEAR_MATRICES, "tokens", "positions", "output")
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in decayed, params)


def learning_rate_multipliers(
    model: ModelConfig,
    training: TrainingConfig,
    params: dict,
    weights: ModelWeights | None = None,
) -> dict:
    """Returns the learning-rate multiplier of each parameter.

    Matrices of a projection, with its low-rank term, and of routers, which are dense:
    `training.sparse_rate` to the power log(density) / log(SPARSE_RATE_DENSITY), so 1 for a dense
    weight and a guide; a weight that turned dense has TURNED_DENSE_RATE as well.  Everything else
    (norms, biases, gates, embeddings): `training.vector_rate`.

    SuPar (arXiv 2405.15743, table 1) adds a factor SUPAR_WIDTH / (d_model x density): an Adam step
    moves every weight equally, so the change of an output grows with the inputs that it sums.  The
    first factor of a low-rank term reads all inputs (density 1); the second reads a constant rank
    and has no factor.  The initial variance follows the stored fan-in in both parametrizations.

    Muon's update of a matrix of m inputs changes its output by sqrt(m).  An output sums f / m
    matrices, whose changes are about as coherent as Adam's, so it changes by f / sqrt(m).  Muon's
    factor is that of Adam times sqrt(m / SUPAR_WIDTH): a dense weight's is the root of Adam's.  So
    is that of two factors, whose product moves as far (`muon.with_bounded_products`).

    Under Adam the factors of a low-rank weight have the multipliers of what they read, as in
    arXiv 2406.06248, section 3: the first all inputs, the second rank / inputs as its density.
    Under Muon both have those of a dense weight.

    Args:
      model: config of the model.
      training: optimizer settings.
      params: the parameters, or shapes or updates like them.
      weights: for their layouts, see `make_optimizer`; None without any.
    """

    def multiplier(path, leaf):
        name = path[-1].key
        if name not in LINEAR_MATRICES:
            return training.vector_rate
        projection = path[-2].key
        spec = layer_groups(model)[group_index_of_path(path)].model.linear(projection)
        density = spec.density if spec.kind == "block_sparse" and name != GUIDE else 1.0
        has_muon = training.optimizer == "muon" and muon.is_matrix(path)
        if name == "b_factor" and not has_muon:
            density = model.factor_rank(projection) / model.projection_shape(projection)[0]
        rate = training.sparse_rate ** (math.log(density) / math.log(SPARSE_RATE_DENSITY))
        if spec.turned_dense:
            rate *= TURNED_DENSE_RATE[training.optimizer]
        read = dict.fromkeys(("kernel", "values", GUIDE, *muon.FACTORS), density)
        read |= {"a_kernel": 1.0, "router": 1.0}
        if model.supar and name in read:
            rate *= SUPAR_WIDTH / (model.d_model * read[name])
            if has_muon:
                inputs = model.projection_shape(projection)[0]
                layout = weights.layout_at(path) if weights else None
                matrix = muon.matrices_of(leaf.shape, layout).shape
                share = 1.0 if name in muon.FACTORS else matrix[0] / inputs
                rate *= math.sqrt(model.d_model * share / SUPAR_WIDTH)
        return rate

    return jax.tree_util.tree_map_with_path(multiplier, params)
