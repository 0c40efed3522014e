"""A side network: a narrow network that reads the layers of a frozen model (arXiv 2402.02887).

It has a state of S features for each token.  Layer l reads x_l, the input of layer l of the model,
and the head reads x_L, the output of the last one:

    u = norm(x_l) down,    s' = s + u + gelu(norm(s + u) in) out,    x_L + norm(s') up

The norms have no parameters, s_0 is zero, and `up` begins as zeros, so before the first step the
model computes what it did.  No gradient reaches x: the backward pass has the side network and the
head alone, and nothing else of a layer is saved for it.  The state of a token depends on this token
alone, so a key-value cache needs no more than without it.

The residual stream of such a model is x and s side by side, [B, T, D + S].  So every executor moves
the state as it moves x.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model.projection import normal
from sparse_dataflow.core.model.shard import Shard

EPSILON = 1e-6
"""Added to the mean square in the norms."""


def draw(config: ModelConfig, section: str, key: jax.Array) -> dict[str, jax.Array]:
    """Returns the arrays of the side network in a "block" or the "head", float32."""
    rngs, last = nnx.Rngs(params=key), ("up",)
    shapes = config.side_shapes(section)
    return {
        name: jnp.zeros(shape) if name in last else normal(rngs, shape, shape[0] ** -0.5)
        for name, shape in shapes.items()
    }


def with_state(config: ModelConfig, x_BxTxD: jax.Array) -> jax.Array:
    """Returns the residual stream with the first state of the side network."""
    return jnp.pad(x_BxTxD, [(0, 0)] * (x_BxTxD.ndim - 1) + [(0, config.side_width)])


def split(config: ModelConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the residual stream of the frozen model, without a gradient, and the state."""
    return lax.stop_gradient(x[..., : -config.side_width]), x[..., -config.side_width :]


def state_after(params: dict, x: jax.Array, state: jax.Array, shard: Shard) -> jax.Array:
    """Returns the state after a layer.

    Args:
      params: of the side network in the section.
      x: input of the section, with this device's features.
      state: before it, with all features.
      shard: of the section.
    """
    # A device of "feature" has a part of x, and of the rows of `down`.
    read = shard.sum_features(_product(_normed(x, shard.feature_axis), params["down"]))
    state += read
    hidden = jax.nn.gelu(_product(_normed(state), params["in"]))
    return state + _product(hidden, params["out"])


def head_input(config: ModelConfig, params: dict, x: jax.Array, shard: Shard) -> jax.Array:
    """Returns the residual stream that the final norm reads, without the state."""
    x, state = split(config, x)
    state = state_after(params, x, state, shard)
    return x + _product(_normed(state), params["up"])


def packed(x: jax.Array, dtype: str) -> jax.Array:
    """Returns float [..., D] in the stored form of a dtype: int8 [..., D + 4], whose last 4 bytes
    are the float32 scale of the numbers, or uint16 [..., D], the bits of bfloat16."""
    if dtype == "bfloat16":
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest / 127, 1)
    numbers = jnp.round(wide / scale).astype(jnp.int8)
    return jnp.concatenate([numbers, lax.bitcast_convert_type(scale, jnp.int8)[..., 0, :]], axis=-1)


def unpacked(features: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the floats of `packed`."""
    if features.dtype == jnp.uint16:
        return lax.bitcast_convert_type(features, jnp.bfloat16).astype(dtype)
    scale = lax.bitcast_convert_type(features[..., -4:], jnp.float32)
    return (features[..., :-4] * scale[..., None]).astype(dtype)


def _product(x, weights):
    return x @ weights.astype(x.dtype)


def _normed(x, axis=None):
    wide = x.astype(jnp.float32)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    if axis is not None:
        square = lax.pmean(square, axis)
    return (wide * lax.rsqrt(square + EPSILON)).astype(x.dtype)
