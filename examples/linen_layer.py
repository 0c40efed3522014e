"""A block-sparse layer of flax linen, trained, evolved and saved.

    python examples/linen_layer.py

The layout is a field of the module.  Its hash is in the name of the parameter, so parameters of
another layout are refused.
"""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse_dataflow as sd

optimizer = optax.adam(1e-2)


class SparseDense(nn.Module):
    """As `nn.Dense`, with the stored blocks of a layout: [..., in] -> [..., out]."""

    layout: sd.BlockLayout

    @property
    def name_of_values(self):
        """The name of the parameter, which says whose values it has."""
        return f"values_{self.layout.content_hash[:8]}"

    @nn.compact
    def __call__(self, x):
        """Applies the layer."""
        values = self.param(self.name_of_values, sd.draw_blocks, self.layout)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.layout.out_features,))
        return sd.block_sparse_matmul(x, values, self.layout) + bias


def loss_fn(params, layer, x, y):
    """Returns the mean squared error."""
    return jnp.mean((layer.apply({"params": params}, x) - y) ** 2)


@jax.jit(static_argnames="layer")
def train_step(params, state, layer, x, y):
    """Returns parameters and optimizer state after one step, and the loss."""
    loss, gradients = jax.value_and_grad(loss_fn)(params, layer, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def evolve(params, state, layer, seed):
    """Returns parameters, optimizer state and layer after an exchange of blocks by SET."""
    old = layer.name_of_values
    layout, move = sd.evolve_blocks(layer.layout, params[old], "set", share=0.2, seed=seed)
    new = SparseDense(layout)

    def carry(params):
        return {new.name_of_values: move(params[old]), "bias": params["bias"]}

    is_params = lambda node: isinstance(node, dict) and old in node  # noqa: E731
    state = jax.tree.map(
        lambda node: carry(node) if is_params(node) else node, state, is_leaf=is_params
    )
    return carry(params), state, new


def main(steps=60):
    """Trains, saves and restores the layer; returns the losses."""
    layer = SparseDense(sd.make_layout("random", 64, 128, block=16, density=0.25))
    x = jax.random.normal(jax.random.key(0), (256, 64))
    y = jnp.tanh(x @ jax.random.normal(jax.random.key(1), (64, 128)))
    params = layer.init(jax.random.key(2), x)["params"]
    state, losses = optimizer.init(params), []
    for step in range(steps):
        if step and step % max(1, steps // 3) == 0:
            params, state, layer = evolve(params, state, layer, seed=step)
        params, state, loss = train_step(params, state, layer, x, y)
        losses.append(float(loss))
    saved, mask = flax.serialization.to_bytes(params), layer.layout.mask
    fresh = SparseDense(sd.BlockLayout.from_mask(mask, block=16))
    abstract = jax.eval_shape(fresh.init, jax.random.key(0), x)["params"]
    restored = flax.serialization.from_bytes(abstract, saved)
    np.testing.assert_array_equal(
        fresh.apply({"params": restored}, x), layer.apply({"params": params}, x)
    )
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {layer.layout!r}")
    return losses


if __name__ == "__main__":
    main()
