"""A block-sparse layer of Equinox, trained, evolved and saved.

    python examples/equinox_layer.py  # needs equinox

The layout is a static field, so `eqx.filter_jit` compiles once for each layout.
"""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse_dataflow as sd

optimizer = optax.adam(1e-2)


class SparseLinear(eqx.Module):
    """As `eqx.nn.Linear`, with the stored blocks of a layout: [in] -> [out]."""

    values: jax.Array
    bias: jax.Array
    layout: sd.BlockLayout = eqx.field(static=True)

    def __init__(self, layout, key):
        self.layout = layout
        self.values = sd.draw_blocks(key, layout)
        self.bias = jnp.zeros(layout.out_features)

    def __call__(self, x):
        """Applies the layer."""
        return sd.block_sparse_matmul(x, self.values, self.layout) + self.bias


def from_dense(linear, layout):
    """Returns the block-sparse layer of an `eqx.nn.Linear`, whose weight is [out, in]."""
    layer = SparseLinear(layout, jax.random.key(0))
    arrays = sd.cut_blocks(linear.weight.T, layout), linear.bias
    return eqx.tree_at(lambda layer: (layer.values, layer.bias), layer, arrays)


def loss_fn(model, x, y):
    """Returns the mean squared error."""
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@eqx.filter_jit
def train_step(model, state, x, y):
    """Returns model and optimizer state after one step, and the loss."""
    loss, gradients = eqx.filter_value_and_grad(loss_fn)(model, x, y)
    updates, state = optimizer.update(gradients, state, model)
    return eqx.apply_updates(model, updates), state, loss


def evolve(model, state, seed):
    """Returns layer and optimizer state after an exchange of blocks by SET."""
    layout, move = sd.evolve_blocks(model.layout, model.values, "set", share=0.2, seed=seed)

    def carry(layer):
        leaves = move(layer.values), layer.bias
        new = SparseLinear(layout, jax.random.key(0))
        return eqx.tree_at(lambda layer: (layer.values, layer.bias), new, leaves)

    is_layer = lambda node: isinstance(node, SparseLinear)  # noqa: E731
    state = jax.tree.map(
        lambda node: carry(node) if is_layer(node) else node, state, is_leaf=is_layer
    )
    return carry(model), state


def main(steps=60):
    """Trains, saves and restores the layer; returns the losses."""
    layout = sd.make_layout("random", 64, 128, block=16, density=0.25)
    model = from_dense(eqx.nn.Linear(64, 128, key=jax.random.key(3)), layout)
    x = jax.random.normal(jax.random.key(0), (256, 64))
    y = jnp.tanh(x @ jax.random.normal(jax.random.key(1), (64, 128)))
    state, losses = optimizer.init(eqx.filter(model, eqx.is_array)), []
    for step in range(steps):
        if step and step % max(1, steps // 3) == 0:
            model, state = evolve(model, state, seed=step)
        model, state, loss = train_step(model, state, x, y)
        losses.append(float(loss))
    file, mask = io.BytesIO(), model.layout.mask
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    fresh = SparseLinear(sd.BlockLayout.from_mask(mask, block=16), jax.random.key(0))
    restored = eqx.tree_deserialise_leaves(file, fresh)
    np.testing.assert_array_equal(jax.vmap(restored)(x), jax.vmap(model)(x))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {model.layout!r}")
    return losses


if __name__ == "__main__":
    main()
