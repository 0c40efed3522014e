"""Optimizers of optax and of users: one transformation of one matrix or vector.

`by_weight` applies it to each weight by itself.  So a factory gets the learning rate of the step
times the weight's multiplier, and the weight's decay, and needs no mask.
"""

import contextlib
import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError, first_line

CLIPPED_RMS = 1.0
"""Largest root mean square of Adafactor's update, in units of the learning rate (arXiv 1804.04235,
section 6)."""

LEGAL = "legal: a function with the argument learning_rate that returns an optax optimizer"

_TRIED_STEPS = 20


def transformation(training: TrainingConfig, rate: Any, decay: float) -> Any:
    """Returns the optax transformation of one matrix or vector, whose updates are added to it.

    Args:
      training: names the optimizer, and has its betas and epsilon.
      rate: learning rate of the weight in this step, a number or float32 [].
      decay: decoupled weight decay of the weight; 0 for none.

    Its functions raise UserError for a weight that they cannot update.

    Raises:
      UserError: the factory cannot be imported, or is none that `factory` takes.
    """
    decayed = optax.add_decayed_weights(decay), optax.scale(-rate)
    match training.optimizer:
        case "lion":
            chain = optax.chain(optax.scale_by_lion(training.b1, training.b2), *decayed)
        case "adafactor":
            chain = optax.chain(
                optax.scale_by_factored_rms(), optax.clip_by_block_rms(CLIPPED_RMS), *decayed
            )
        case "schedule_free":
            second = optax.scale_by_rms(
                training.b2, training.epsilon, eps_in_sqrt=False, bias_correction=True
            )
            # The step's rate weighs the average, as in optax.
            chain = optax.contrib.schedule_free(
                optax.chain(second, *decayed), jnp.asarray(rate, jnp.float32), b1=training.b1
            )
        case name:
            chain = _user_optimizer(name, factory(name), rate, decay)
    return optax.with_extra_args_support(chain)


def averaged(training: TrainingConfig, state: optax.OptState, weight: jax.Array) -> jax.Array:
    """Returns the weight that schedule-free learning evaluates; other optimizers keep the weight.

    Args:
      training: names the optimizer.
      state: of `transformation`.
      weight: the trained matrix or vector.
    """
    if training.optimizer != "schedule_free":
        return weight
    return optax.contrib.schedule_free_eval_params(state, weight)


def _user_optimizer(name, make, rate, decay):
    decays = "weight_decay" in inspect.signature(make).parameters
    own_decay = {"weight_decay": decay} if decays else {}

    def init(params):
        with _in_a_sentence(name):
            return jax.tree.map(_key_data, inner.init(params))

    def update(updates, state, params=None, **extra):
        with _in_a_sentence(name):
            # A new state says which leaves are random keys, and of which kind.
            state = jax.tree.map(_with_key, state, inner.init(params))
            updates, state = inner.update(updates, state, params, **extra)
            jax.tree.map(_refuse_broadcast, updates, params)
            state = jax.tree.map(_key_data, state)
        if not decays:
            # Decoupled decay, as `optax.add_decayed_weights` before the rate scales it.
            updates = jax.tree.map(lambda u, p: u - rate * decay * p, updates, params)
        return updates, state

    with _in_a_sentence(name):
        inner = optax.with_extra_args_support(make(learning_rate=rate, **own_decay))
    return optax.GradientTransformationExtraArgs(init, update)


def _key_data(leaf):
    """Returns a leaf of a state, a random key as its data: files and hosts store numbers alone."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _with_key(leaf, like):
    """Returns a leaf of a state, as a random key where the one of a new state is a key."""
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like)) if _is_key(like) else leaf


def _is_key(leaf):
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def _refuse_broadcast(update, weight):
    if jnp.shape(update) != weight.shape:
        raise _Unfit(
            f"returns an update of shape {list(jnp.shape(update))} for a weight of shape "
            f"{list(weight.shape)}; legal: one of the weight's shape."
        )


@contextlib.contextmanager
def _in_a_sentence(name) -> Iterator[None]:
    """Turns whatever the code of others raises into a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error)) from error  # Without the notes that jax adds to an error.
    except _Unfit as reason:
        raise UserError(f"training.optimizer={name} {reason}") from None
    except (Exception, SystemExit) as error:
        raise UserError(
            f"training.optimizer={name} cannot update a weight from its gradient "
            f"({first_line(error)}); {LEGAL}."
        ) from error


@functools.cache
def factory(name: str) -> Callable[..., optax.GradientTransformation]:
    """Imports the factory MODULE:ATTRIBUTE, and tries it on a small weight.

    A factory takes `learning_rate` by name and returns a `optax.GradientTransformation`.  One that
    takes `weight_decay` by name gets the weight's; else the decay is decoupled.

    Raises:
      UserError: it cannot be imported or takes no learning rate, or its transformation needs more
        than gradients and weights, does not follow the learning rate, goes up the gradient, or
        couples the weights of a model.
    """
    words = f"training.optimizer={name}"
    try:
        make = pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # The code of others raises any error.
        raise UserError(f"{words} cannot be imported ({first_line(error)}).") from error
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    if "learning_rate" not in parameters:
        has = f"a function of ({', '.join(parameters)})" if callable(make) else type(make).__name__
        raise UserError(f"{words} is {has[:80]}, without learning_rate; {LEGAL}.")
    # A program may be the first that needs it.
    with _in_a_sentence(name), jax.ensure_compile_time_eval():
        _try(name, make)
    return make


class _Unfit(Exception):
    """What a factory does that a training cannot use; completes its name."""


def _try(name, make):
    """Updates two small weights, and raises `_Unfit`, or what the factory raises."""
    rng = np.random.default_rng(0)
    weights, gradients = (
        {name: jnp.asarray(rng.standard_normal((4, 6)), jnp.float32) for name in "ab"}
        for _ in range(2)
    )

    @jax.jit
    def updates(rate, weights, gradients):
        """Returns the sum of some steps: the first of some optimizers are tiny."""

        def step(carried, _):
            moved, state = carried
            update, state = _user_optimizer(name, make, rate, 0.0).update(gradients, state, moved)
            return (optax.apply_updates(moved, update), state), None

        begun = (
            weights,
            jax.tree.map(jnp.asarray, _user_optimizer(name, make, 1e-3, 0.0).init(weights)),
        )
        # A scan, so that the steps are one small program.
        (moved, _), _ = jax.lax.scan(step, begun, length=_TRIED_STEPS)
        return jax.tree.map(jnp.subtract, moved, weights)

    jax.eval_shape(updates, 1e-3, weights["a"], gradients["a"])  # As in a training.
    step = updates(1e-3, weights, gradients)
    if not all(np.all(np.isfinite(step[key])) for key in step):
        raise _Unfit("returns updates that are not finite; legal: finite ones.")
    if any(np.any(step[key]) for key in step):
        twice = updates(2e-3, weights, gradients)
        if all(np.array_equal(step[key], twice[key]) for key in step):
            raise _Unfit(
                "does not follow learning_rate; legal: a factory that hands learning_rate on, and "
                "optax.inject_hyperparams left out."
            )
        # A step down has a negative product with the gradient.
        if sum(float(jnp.vdot(step[key], gradients[key])) for key in step) > 0:
            raise _Unfit("goes up the gradient; legal: optax.scale_by_learning_rate at its end.")
    # Larger gradients of one weight must leave the step of another.
    scaled = updates(1e-3, weights, gradients | {"a": 1000 * gradients["a"]})
    if not np.allclose(step["b"], scaled["b"], rtol=1e-3, atol=1e-30):
        raise _Unfit(
            "couples the weights of a model, and each is updated by itself; legal: training.clip "
            "for clipping by the global norm, and a factory without it."
        )


def state_shapes(training: TrainingConfig, shape: tuple[int, ...]) -> optax.OptState:
    """Returns shapes and dtypes of the state of one float32 matrix or vector of this shape."""
    return jax.eval_shape(
        lambda weight: transformation(training, 0.0, 0.0).init(weight),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
