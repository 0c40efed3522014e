"""AdamW with warm-up and cosine decay, decay masks, learning rates by kind of parameter."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparse_dataflow.config.model import SUPAR_WIDTH, ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.models.groups import group_index_of_path, layer_groups

B1, B2, EPS = 0.9, 0.95, 1e-8
"""Adam's decay of the moments, as GPT-3 (arXiv 2005.14165, appendix B), and its epsilon.

Moments kept in bfloat16 are those of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), which was
trained with the same decays "without incurring observable performance degradation".  Rounding to
the nearest is enough for these: bfloat16 rounds by at most 2^-8 = 0.4%, and a step moves the second
moment by 1 - B2 = 5% of its distance from the new square, the first by 10%.  So both keep moving
until they are within 8.5% and 4.1% of where float32 would rest, and decay to nothing where no
gradient comes; with B2 = 0.999 neither would.
"""

SPARSE_RATE_DENSITY = 1 / 8
"""The density that `TrainingConfig.sparse_rate` is told for."""

TURNED_DENSE_RATE = 2.0
"""How many times a dense weight's rate one learns at that was block-sparse before.

Bits per byte, one seed, at 1, 2 and 4 times: 4000 steps of pico, dense from half on, 1.736, 1.727
and 1.762, from 70% on 1.789, 1.780 and 1.795; 2000 steps of 3m, dense from 64% on, 1.609, 1.588
and 1.585.
"""


@functools.cache
def learning_rate_schedule(training: TrainingConfig) -> Callable[[int], float]:
    """Step (from 0) -> learning rate: linear warm-up, then cosine to its end."""
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


def make_optimizer(model: ModelConfig, training: TrainingConfig) -> optax.GradientTransformation:
    """Clipping, Adam, decoupled decay, per-parameter scale.

    Its updates are to be multiplied by minus the learning rate, which a train step takes as an
    argument, so that a schedule is data.
    """
    multipliers = lambda params: learning_rate_multipliers(model, training, params)  # noqa: E731

    def scale(updates, state, params=None):
        return jax.tree.map(lambda u, m: u * m, updates, multipliers(updates)), state

    return optax.chain(
        optax.clip_by_global_norm(training.clip),
        _adam(jnp.dtype(training.state_dtype)),
        optax.add_decayed_weights(training.weight_decay, mask=decay_mask),
        optax.GradientTransformation(lambda params: optax.EmptyState(), scale),
    )


def _adam(dtype):
    """Adam whose moments are kept in a dtype and computed in the parameters'."""
    wide = optax.scale_by_adam(b1=B1, b2=B2, eps=EPS)

    def kept(state):
        narrow = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)  # noqa: E731
        return state._replace(mu=narrow(state.mu), nu=narrow(state.nu))

    def update(gradients, state, params=None):
        like = lambda tree: jax.tree.map(lambda m, g: m.astype(g.dtype), tree, gradients)  # noqa: E731
        updates, after = wide.update(
            gradients, state._replace(mu=like(state.mu), nu=like(state.nu)), params
        )
        return updates, kept(after)

    return optax.GradientTransformation(lambda params: kept(wide.init(params)), update)


def adam(moments: optax.OptState) -> Any:
    """The part of an optimizer's state that holds `count`, `mu` and `nu`."""
    return next(part for part in moments if hasattr(part, "mu"))


def map_moments(
    function: Callable[[dict], dict],
    moments: optax.OptState,
    second: Callable[[dict], dict] | None = None,
) -> optax.OptState:
    """The optimizer's state with `function` of both trees of moments, shaped like the params; with
    `second` of the second moments, where that is another."""
    second = second or function
    return tuple(
        part._replace(mu=function(part.mu), nu=second(part.nu)) if hasattr(part, "mu") else part
        for part in moments
    )


def decay_mask(params: dict) -> dict:
    """True where weight decay applies: matrices of projections and embeddings."""
    decayed = ("kernel", "values", "a_kernel", "b_kernel", "tokens", "positions")
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in decayed, params)


def learning_rate_multipliers(model: ModelConfig, training: TrainingConfig, params: dict) -> dict:
    """Learning rate of each parameter relative to the schedule's, by what kind of parameter it is.

    The matrices of a projection, its low-rank term among them, have `training.sparse_rate`, to a
    power that is 1 at SPARSE_RATE_DENSITY and 0 at density 1; one that turned dense
    TURNED_DENSE_RATE; what is no matrix between features `training.vector_rate`.

    With SuPar (arXiv 2405.15743, table 1) a weight learns at SUPAR_WIDTH / (d_model x density)
    besides: a step of Adam moves every weight alike, and an output then changes as much as at
    SUPAR_WIDTH, for a sum over more, or fewer, inputs.  A low-rank term reads all of them, and its
    second factor a constant rank.  The initial variance follows the stored fan-in under either
    parametrization.
    """

    def multiplier(path, _):
        name = path[-1].key
        if name not in ("kernel", "values", "a_kernel", "b_kernel"):
            return training.vector_rate
        spec = layer_groups(model)[group_index_of_path(path)].model.linear(path[-2].key)
        density = spec.density if spec.kind == "block_sparse" else 1.0
        rate = training.sparse_rate ** (math.log(density) / math.log(SPARSE_RATE_DENSITY))
        if spec.turned_dense:
            rate *= TURNED_DENSE_RATE
        read = {"kernel": density, "values": density, "a_kernel": 1.0}
        if model.supar and name in read:
            rate *= SUPAR_WIDTH / (model.d_model * read[name])
        return rate

    return jax.tree_util.tree_map_with_path(multiplier, params)
