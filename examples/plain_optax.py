"""Trains a block-sparse MLP that is a dict of arrays, with optax alone.

    python examples/plain_optax.py

The layout is an argument of the loss that jit holds static.  RigL changes it, and the optimizer's
moments follow.  The file of the trained model has the masks of the layouts beside the arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse_dataflow as sd

WIDTH, BLOCK = 128, 16
optimizer = optax.adam(1e-2)


def loss_fn(params, layout, x, y):
    """Returns the mean squared error of a residual layer."""
    hidden = jax.nn.relu(x @ params["first"])
    product = sd.block_sparse_matmul(hidden, params["values"], layout)
    return jnp.mean((hidden + product + params["bias"] - y) ** 2)


@functools.partial(jax.jit, static_argnames="layout")
def train_step(params, state, layout, x, y):
    """Returns parameters and optimizer state after one step, and the loss."""
    loss, gradients = jax.value_and_grad(loss_fn)(params, layout, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def evolve(params, state, layout, x, y, seed):
    """Returns parameters, optimizer state and layout after an exchange of blocks by RigL."""

    def dense_loss(kernel):
        hidden = jax.nn.relu(x @ params["first"])
        return jnp.mean((hidden + hidden @ kernel + params["bias"] - y) ** 2)

    gradient = jax.grad(dense_loss)(sd.join_blocks(params["values"], layout))
    layout, move = sd.evolve_blocks(
        layout, params["values"], "rigl", share=0.2, gradient=gradient, seed=seed
    )
    stay = lambda array: array  # noqa: E731
    moves = {"first": stay, "values": move, "bias": stay}
    params = jax.tree.map(lambda function, array: function(array), moves, params)
    state = optax.tree_map_params(optimizer, lambda array, function: function(array), state, moves)
    return params, state, layout


def main(steps=60, path="plain_optax.npz"):
    """Trains, saves and loads the model; returns the losses."""
    keys = jax.random.split(jax.random.key(0), 4)
    layout = sd.make_layout("random", WIDTH, WIDTH, BLOCK, density=0.25)
    params = {
        "first": jax.nn.initializers.lecun_normal()(keys[0], (32, WIDTH)),
        "values": sd.draw_blocks(keys[1], layout),
        "bias": jnp.zeros(WIDTH),
    }
    x = jax.random.normal(keys[2], (256, 32))
    y = jnp.tanh(x @ jax.random.normal(keys[3], (32, WIDTH)))
    state, losses = optimizer.init(params), []
    for step in range(steps):
        if step and step % max(1, steps // 3) == 0:
            params, state, layout = evolve(params, state, layout, x, y, seed=step)
        params, state, loss = train_step(params, state, layout, x, y)
        losses.append(float(loss))
    np.savez(path, mask=layout.mask, **params)
    with np.load(path) as saved:
        restored = sd.BlockLayout.from_mask(saved["mask"], BLOCK)
        arrays = {name: jnp.asarray(saved[name]) for name in params}
    assert loss_fn(arrays, restored, x, y) == loss_fn(params, layout, x, y)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {layout!r}")
    return losses


if __name__ == "__main__":
    main()
