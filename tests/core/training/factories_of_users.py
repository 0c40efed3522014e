"""Optimizers that a user may write in a file, by what is right or wrong with each."""

import math

import jax
import optax


def own_chain(learning_rate):
    return optax.chain(
        optax.clip(1.0), optax.scale_by_adam(), optax.scale_by_learning_rate(learning_rate)
    )


def with_schedule(learning_rate):
    schedule = optax.linear_schedule(0.5, 1.0, 10)
    return optax.chain(own_chain(learning_rate), optax.scale_by_schedule(schedule))


with_lambda = lambda learning_rate: optax.adam(learning_rate)  # noqa: E731


def without_rate():
    return optax.adamw(1e-3)


def clips_globally(learning_rate):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate))


injected = optax.inject_hyperparams(optax.adamw)
made = optax.adam(1e-3)


def goes_up(learning_rate):
    return optax.chain(optax.scale_by_adam(), optax.scale(learning_rate))


def returns_none(learning_rate):
    return None


def masks_by_name(learning_rate):
    return optax.masked(optax.adam(learning_rate), lambda tree: dict.fromkeys(tree, True))


def raises(learning_rate):
    raise RuntimeError("out of\nluck")


def needs_the_loss(learning_rate):
    del learning_rate
    return optax.polyak_sgd()


def is_not_finite(learning_rate):
    return optax.chain(optax.scale(float("nan")), optax.scale_by_learning_rate(learning_rate))


def broadcasts(learning_rate):
    return optax.stateless(
        lambda updates, _: jax.tree.map(lambda g: -learning_rate * g.sum(), updates)
    )


def ends_python(learning_rate):
    raise SystemExit(3)


def only_for_matrices(learning_rate):
    return optax.stateless_with_tree_map(lambda g, _: -learning_rate * (g @ g.T @ g))


def adds_noise(learning_rate):
    return optax.noisy_sgd(learning_rate, key=7)


def _with_state(learning_rate, arrays):
    """Returns gradient descent that keeps arrays of zeros of the shapes `arrays(shape)`."""

    def init(params):
        return jax.tree.map(lambda p: tuple(map(jax.numpy.zeros, arrays(p.shape))), params)

    def update(gradients, state, params=None):
        return jax.tree.map(lambda g: -learning_rate * g, gradients), state

    return optax.GradientTransformation(init, update)


def kronecker(learning_rate):
    return _with_state(learning_rate, lambda shape: [(size, size) for size in shape])


def flat_state(learning_rate):
    return _with_state(learning_rate, lambda shape: [(math.prod(shape),)])
