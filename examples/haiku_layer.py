"""A block-sparse layer of Haiku, trained, evolved and saved.

    python examples/haiku_layer.py  # needs dm-haiku

The layout is an argument of the module.  Its hash is in the name of the parameter, so parameters of
another layout are refused.
"""

import pickle

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse_dataflow as sd

optimizer = optax.adam(1e-2)


def name_of_values(layout):
    """Returns the name of the parameter, which says whose values it has."""
    return f"values_{layout.content_hash[:8]}"


class SparseLinear(hk.Module):
    """As `hk.Linear`, with the stored blocks of a layout: [..., in] -> [..., out]."""

    def __init__(self, layout, name=None):
        super().__init__(name=name)
        self.layout = layout

    def __call__(self, x):
        """Applies the layer."""
        layout = self.layout
        shape = layout.nnz, layout.block, layout.block
        draw = lambda shape, dtype: sd.draw_blocks(hk.next_rng_key(), layout, None, dtype)  # noqa: E731
        values = hk.get_parameter(name_of_values(layout), shape, x.dtype, draw)
        bias = hk.get_parameter("bias", (layout.out_features,), x.dtype, jnp.zeros)
        return sd.block_sparse_matmul(x, values, layout) + bias


def network(layout):
    """Returns the functions `init` and `apply` of the layer."""
    return hk.without_apply_rng(hk.transform(lambda x: SparseLinear(layout, "sparse")(x)))


@jax.jit(static_argnames="layout")
def train_step(params, state, layout, x, y):
    """Returns parameters and optimizer state after one step, and the loss."""
    loss_fn = lambda params: jnp.mean((network(layout).apply(params, x) - y) ** 2)  # noqa: E731
    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def evolve(params, state, layout, seed):
    """Returns parameters, optimizer state and layout after an exchange of blocks by SET."""
    old = name_of_values(layout)
    new, move = sd.evolve_blocks(layout, params["sparse"][old], "set", share=0.2, seed=seed)

    def carry(module):
        return {name_of_values(new): move(module[old]), "bias": module["bias"]}

    is_module = lambda node: isinstance(node, dict) and old in node  # noqa: E731
    change = lambda node: carry(node) if is_module(node) else node  # noqa: E731
    params, state = jax.tree.map(change, (params, state), is_leaf=is_module)
    return params, state, new


def main(steps=60):
    """Trains, saves and restores the layer; returns the losses."""
    layout = sd.make_layout("random", 64, 128, block=16, density=0.25)
    x = jax.random.normal(jax.random.key(0), (256, 64))
    y = jnp.tanh(x @ jax.random.normal(jax.random.key(1), (64, 128)))
    params = network(layout).init(jax.random.key(2), x)
    state, losses = optimizer.init(params), []
    for step in range(steps):
        if step and step % max(1, steps // 3) == 0:
            params, state, layout = evolve(params, state, layout, seed=step)
        params, state, loss = train_step(params, state, layout, x, y)
        losses.append(float(loss))
    saved = pickle.dumps((layout.mask, jax.tree.map(np.asarray, params)))
    mask, restored = pickle.loads(saved)
    fresh = network(sd.BlockLayout.from_mask(mask, block=16))
    np.testing.assert_array_equal(fresh.apply(restored, x), network(layout).apply(params, x))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {layout!r}")
    return losses


if __name__ == "__main__":
    main()
