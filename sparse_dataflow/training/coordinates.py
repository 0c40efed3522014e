"""The coordinate check: how large activations become in the first steps of a training.

A parametrization is right where their size does not depend on width and density (arXiv 2203.03466,
appendix D.1; for sparse models arXiv 2405.15743, section 4.1).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.models import gpt
from sparse_dataflow.training.step import initial_state, make_train_step

ACTIVATIONS = ("embed", "attention branch", "MLP branch", "logits")


def activation_changes(
    model: ModelConfig, training: TrainingConfig, batches: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Root mean square change of activations since the start, after each step.

    Args:
      model: what is trained, at the constant learning rate of `training`.
      training: as in a run; no schedule.
      batches: int32 [batch, sequence + 1] tokens of each step; the first is also what activations
        are looked at with.

    Returns:
      {name in ACTIVATIONS: float [steps]}; a branch is what a half of a block adds to the residual
      stream, the mean over layers.
    """
    state = initial_state(model, training)
    tables, state = state.tables, state._replace(tables=())
    step = jax.jit(make_train_step(model, training, tables))
    look = jax.jit(functools.partial(_activations, model, tables=tables))
    before = look(state.params, tokens=batches[0][:, :-1])
    changes = []
    for tokens in batches:
        state, _ = step(state, tokens, np.float32(training.learning_rate))
        after = look(state.params, tokens=batches[0][:, :-1])
        changes.append({name: _size(after[name] - before[name]) for name in ACTIVATIONS})
    return {name: np.array([float(c[name]) for c in changes]) for name in ACTIVATIONS}


def _size(x):
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _activations(model, params, tables, tokens):
    x = gpt.embed(model, params["embed"], tokens)
    found = {"embed": x}
    branches = []
    for own in gpt.layers(params["blocks"], tables):
        block = gpt.bind_block(model)(own[0])
        middle, x_after = block.residuals(x, own[1])
        branches.append((middle - x, x_after - middle))
        x = x_after
    found["attention branch"], found["MLP branch"] = map(jnp.stack, zip(*branches))
    found["logits"] = gpt.logits(model, params, x)
    return found


def slopes(sizes: Mapping[tuple[int, float], float]) -> tuple[float, float]:
    """Exponents (of width, of density) that fit size = c width^w density^d best, in logarithms.

    Args:
      sizes: {(d_model, density): size}; two widths and two densities at least.
    """
    points = np.log([(*key, size) for key, size in sizes.items()])
    columns = np.column_stack([points[:, 0], points[:, 1], np.ones(len(points))])
    (width, density, _), *_ = np.linalg.lstsq(columns, points[:, 2], rcond=None)
    return float(width), float(density)


def widened(model: ModelConfig, d_model: int) -> ModelConfig:
    """`model` at another width, the width of its heads and the ratio of its MLP kept.

    Raises:
      UserError: the width is no multiple of a head's, or its projections have no balanced layout.
    """
    heads = max(1, d_model * model.num_heads // model.d_model)
    d_ff = d_model * model.d_ff // model.d_model
    wide = dataclasses.replace(model, d_model=d_model, num_heads=heads, d_ff=d_ff)
    gpt.check_layouts(wide)
    return wide
