"""Training of one arm with masked dense products, which give the numbers of stored blocks.

The model, its loss, the optimizers and the FLOPs are the project's.  A mask multiplies the dense
weights, so that cut weights, their gradients and their updates are zero.  Muon orthogonalises whole
masked matrices.
"""

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.optim.optimizers import make_optimizer, map_moments
from sparse_dataflow.runs.equal_cost import stored_parameters

from . import arms, inputs, pruning
from .arms import Arm
from .text import Text

CHUNK = 10
"""Optimizer steps of one call of the compiled program."""

DECAY = 0.3
"""Last fraction of the steps in which the schedule "wsd" decays."""

SCORED_CHUNKS = 5
"""Chunks before a cut whose gradients and inputs score the blocks."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How every arm is trained.

    Attributes:
      optimizer: "muon" or "adamw".
      learning_rate: peak, of matrices.
      vector_rate: multiplier of embeddings and norms.
      schedule: "linear" to zero, "cosine" to a tenth, or "wsd": constant, then linear to zero.
      warmup: fraction of the steps.
      batch: sequences in a step.
    """

    optimizer: str
    learning_rate: float
    vector_rate: float
    schedule: str
    warmup: float
    batch: int


def train(
    narrow: ModelConfig,
    arm: Arm,
    recipe: Recipe,
    narrow_steps: float,
    seed: int,
    text: Text,
) -> tuple[dict[str, object], object]:
    """Trains one arm; returns (losses in bits a symbol and what they cost, its params).

    Args:
      narrow: the narrow dense model, whose cost all arms have.
      arm: the model and its pruning.
      recipe: the optimizer and its peak.
      narrow_steps: steps of the narrow model with the same training FLOPs.
      seed: of the weights, the order of the data and random blocks.
      text: the three splits.
    """
    began = time.perf_counter()
    model = arms.shape(narrow, arm)
    teacher = None
    course = arms.course(narrow, arm, narrow_steps, CHUNK, recipe.batch)
    cuts = {cut.step: cut.density for cut in course.cuts}
    rates = _rates(recipe, course, arm.rewarm)
    rng = np.random.default_rng(seed)
    program = _program(model, recipe.optimizer, recipe.vector_rate, model if arm.teacher else None)
    state = program.initial(seed)
    masks = jax.tree.map(lambda leaf: jnp.ones((), leaf.dtype), state[0])
    scores: list[Any] = []
    chunks: list[jax.Array] = []
    compiling = 0.0

    def steps(call, rates, tokens):
        # Without a teacher the weight is 0, so any parameters do.
        teacher_params = () if not arm.teacher else state[0] if teacher is None else teacher
        weight = jnp.float32(arm.teacher if teacher is not None else 0)
        return call(state, masks, rates, tokens, teacher_params, weight)

    for step in range(0, course.steps, CHUNK):
        if step in cuts:
            if arm.teacher and teacher is None:
                teacher = state[0]
            params = jax.tree.map(jnp.multiply, state[0], masks)
            blocks = pruning.block_scores(arm, params["blocks"], scores, rng)
            masks = pruning.with_blocks(masks, arm, blocks, cuts[step])
            state = _cut(state, masks, arm, fresh=step == 0)
            scores = []
        tokens = text.batches(rng, CHUNK, recipe.batch, narrow.max_len)
        scored = arm.keep in ("activation", "saliency") and any(
            step < at <= step + SCORED_CHUNKS * CHUNK for at in cuts
        )
        call = program.scored if scored else program.plain
        state, loss, more = steps(call, rates[step : step + CHUNK], tokens)
        if scored:
            scores.append(jax.device_get(more))
        if step == 0:
            jax.block_until_ready(loss)
            compiling = time.perf_counter() - began
        chunks.append(loss)
    params = jax.tree.map(jnp.multiply, state[0], masks)
    losses = np.concatenate(jax.device_get(chunks))
    trained = time.perf_counter() - began
    served = arms.served_model(narrow, arm)
    result = {
        "held_out": program.evaluate(params, text.windows("held_out", narrow.max_len)),
        "tuning": program.evaluate(params, text.windows("tuning", narrow.max_len)),
        "training_loss": float(losses[-200:].mean() / math.log(2)),
        "steps": course.steps,
        "cuts": [[cut.step, cut.density] for cut in course.cuts],
        "tokens": course.steps * recipe.batch * narrow.max_len,
        "flops": course.flops,
        "mean_weights": course.mean_weights,
        "served_flops": sum(arms.served_sections(served).values()),
        "stored_weights": stored_parameters(served),
        "kept": pruning.kept_shares(masks, arm),
        "seconds": trained,
        "seconds_compiling": compiling,
    }
    return result, params


def recover(
    model: ModelConfig,
    pruned: object,
    masks: object,
    teacher: tuple[ModelConfig, object],
    recipe: Recipe,
    steps: int,
    seed: int,
    text: Text,
) -> dict[str, float]:
    """Trains a pruned model on what its teacher predicts; returns losses in bits a symbol by split.

    Args:
      model: of `pruned`.
      pruned: the params to begin with.
      masks: like the params, of the weights that stay; a scalar 1 for what is dense.
      teacher: model and params; the loss is the divergence from it alone.
      recipe: the optimizer and its peak.
      steps: optimizer steps.
      seed: of the order of the data.
      text: the three splits.
    """
    program = _program(model, recipe.optimizer, recipe.vector_rate, teacher[0])
    rates = _rates(recipe, arms.Course(steps, (), 0.0, 0.0), 0)
    state, rng = program.begin(pruned), np.random.default_rng(seed)
    tokens = text.batches(rng, steps, recipe.batch, model.max_len)
    state, _, _ = program.plain(state, masks, rates, tokens, teacher[1], jnp.float32(1))
    params = jax.tree.map(jnp.multiply, state[0], masks)
    splits = ("held_out", "tuning")
    return {name: program.evaluate(params, text.windows(name, model.max_len)) for name in splits}


def _rates(recipe, course, rewarm):
    """Returns float32 [steps], the learning rate of each step."""
    step = np.arange(course.steps)
    warmup = max(1, round(recipe.warmup * course.steps))
    left = np.clip((course.steps - step) / max(1, course.steps - warmup), 0, 1)
    if recipe.schedule == "cosine":
        left = 0.1 + 0.9 * (1 - np.cos(np.pi * left)) / 2
    elif recipe.schedule == "wsd":
        left = np.clip((course.steps - step) / (DECAY * course.steps), 0, 1)
    rates = recipe.learning_rate * np.where(step < warmup, (step + 1) / warmup, left)
    for cut in course.cuts:
        if rewarm and cut.step:
            after = step - cut.step
            rates = np.where((after >= 0) & (after < rewarm), rates * (after + 1) / rewarm, rates)
    return rates.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class _Program:
    """Compiled functions of a model and an optimizer."""

    initial: object
    begin: object
    plain: object
    scored: object
    evaluate: object


@functools.cache
def _program(model, optimizer, vector_rate, teacher_model):
    config = TrainingConfig(
        steps=1, batch=1, sequence=model.max_len, optimizer=optimizer, vector_rate=vector_rate
    )
    transform = make_optimizer(model, config)

    @jax.jit
    def begin(params):
        return params, transform.init(params)

    @jax.jit
    def initial(key):
        return begin(gpt.init(model, key))

    def loss_and_gradients(params, masks, batch, teacher, weight):
        masked = jax.tree.map(jnp.multiply, params, masks)
        if teacher_model:
            weights = weights_of(teacher_model, teacher)
            hidden = whole.hidden_states(teacher_model, weights, batch.tokens)
            hidden, output = gpt.output_layer(teacher["head"], teacher["embed"]["tokens"], hidden)
            batch = dataclasses.replace(batch, teacher_hidden=hidden, teacher=(output, weight))
        metrics, gradients = whole.loss_and_gradients(model, masked, (), batch)
        loss = metrics["loss"].total  # type: ignore[attr-defined]
        return loss, jax.tree.map(jnp.multiply, gradients, masks), masked

    def chunk(state, masks, rates, tokens, teacher, weight, *, scored):
        def body(state, now):
            (params, moments), (rate, windows) = state, now
            batch = Batch.from_windows(windows)
            loss, gradients, masked = loss_and_gradients(params, masks, batch, teacher, weight)
            scores: object = ()
            if scored:
                scores = {
                    "products": jax.tree.map(jnp.multiply, masked, gradients)["blocks"],
                    "inputs": inputs.mean_squares(model, masked, batch.tokens),
                }
            updates, moments = transform.update(gradients, moments, masked, learning_rate=rate)
            updates = jax.tree.map(jnp.multiply, updates, masks)
            return (optax.apply_updates(masked, updates), moments), (loss, scores)

        state, (losses, scores) = jax.lax.scan(body, state, (rates, tokens))
        return state, losses, scores

    @jax.jit
    def losses(params, windows):
        def body(total, rows):
            batch = Batch.from_windows(rows).weighted()
            return total + whole.loss(model, weights_of(model, params), batch), None

        return jax.lax.scan(body, jnp.zeros(()), windows)[0] / len(windows)

    def evaluate(params, windows):
        rows = windows[: len(windows) // 64 * 64]
        value = losses(params, rows.reshape(-1, 64, rows.shape[-1]))
        return float(value) / math.log(2)

    return _Program(
        lambda seed: initial(jax.random.key(seed)),
        begin,
        jax.jit(functools.partial(chunk, scored=False)),
        jax.jit(functools.partial(chunk, scored=True)),
        evaluate,
    )


def _cut(state, masks, arm, fresh):
    """Returns the state without the cut weights; drawn anew for their number if `fresh`."""
    params, moments = state
    params = jax.tree.map(jnp.multiply, params, masks)
    if fresh:
        # The variance of a weight follows the inputs that an output reads.
        params = jax.tree.map(lambda p, m: p * jnp.mean(m) ** -0.5, params, masks)
    gain = 0.0 if arm.momentum == "reset" else 1.0

    def masked(tree):
        def leaf(path, moment):
            mask = masks
            for key in path:
                mask = mask[key.key]
            return moment * mask * (gain if mask.ndim else 1.0)

        return jax.tree_util.tree_map_with_path(leaf, tree)

    return params, map_moments(masked, moments)
