"""The coordinate check: how much activations change in the first training steps.

A parametrization is right if the change does not depend on width and density (arXiv 2203.03466,
appendix D.1; for sparse models arXiv 2405.15743, section 4.1).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.layer_groups import layer_model
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.training.step import initial_state, make_train_step

ACTIVATIONS = ("embed", "attention branch", "MLP branch", "logits")


def activation_changes(
    model: ModelConfig, training: TrainingConfig, batches: Sequence[Batch]
) -> dict[str, np.ndarray]:
    """Returns the root mean square change of activations since the start, after each step.

    Args:
      model: config of the model.
      training: optimizer settings; the learning rate stays constant.
      batches: of each step; activations are computed on the first one.

    Returns:
      {name in ACTIVATIONS: float [steps]}; a branch is what half a block adds to the residual
      stream, averaged over layers.
    """
    state = initial_state(model, training)
    state = state._replace(rest=stacks.fixed_layouts(state.rest))
    step = jax.jit(make_train_step(model, training))
    activations = jax.jit(functools.partial(_activations, model))
    before = activations(state.merged, batches[0].tokens)
    changes = []
    for batch in batches:
        state, _ = step(state, batch, np.float32(training.learning_rate))
        after = activations(state.merged, batches[0].tokens)
        changes.append({name: _rms(after[name] - before[name]) for name in ACTIVATIONS})
    return {name: np.array([float(c[name]) for c in changes]) for name in ACTIVATIONS}


def _rms(x):
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _activations(model, params, tokens):
    x = gpt.embed(model, params["embed"], tokens)
    activations = {"embed": x}
    branches = []
    for i, weights in enumerate(stacks.weights(model, params)):
        middle, x_after, _ = gpt.bind_block(layer_model(model, i), weights).residuals(x)
        branches.append((middle - x, x_after - middle))
        x = x_after
    activations["attention branch"], activations["MLP branch"] = map(jnp.stack, zip(*branches))
    activations["logits"] = gpt.logits(model, params, x)
    return activations


def fit_exponents(sizes: Mapping[tuple[int, float], float]) -> tuple[float, float]:
    """Fits size = c width^w density^d by least squares of the logarithms.

    Args:
      sizes: {(d_model, density): size}, with two widths and two densities or more.

    Returns:
      (w, d).
    """
    points = np.log([(*key, size) for key, size in sizes.items()])
    columns = np.column_stack([points[:, 0], points[:, 1], np.ones(len(points))])
    (width, density, _), *_ = np.linalg.lstsq(columns, points[:, 2], rcond=None)
    return float(width), float(density)


def with_width(model: ModelConfig, d_model: int) -> ModelConfig:
    """Returns the model at another width, with the same head width and the same d_ff / d_model.

    Raises:
      UserError: the width is not a multiple of the head width, or a projection has no balanced
        layout.
    """
    heads = max(1, d_model * model.num_heads // model.d_model)
    d_ff = d_model * model.d_ff // model.d_model
    kv_heads = model.num_kv_heads and max(1, heads * model.kv_heads // model.num_heads)
    wide = dataclasses.replace(
        model, d_model=d_model, num_heads=heads, num_kv_heads=kv_heads, d_ff=d_ff
    )
    model_layouts.check_layouts(wide)
    return wide
