"""Rotary positions, with Llama 3's scaling of long wavelengths."""

import jax
import jax.numpy as jnp

from sparse_dataflow.config.model import ModelConfig


def rotate(
    config: ModelConfig, x_BxTxHxK: jax.Array, positions_BxT: jax.Array | None = None
) -> jax.Array:
    """Applies rotary positions (arXiv 2104.09864, section 3.4), halves paired.

    Args:
      config: the model.
      x_BxTxHxK: queries or keys.
      positions_BxT: int32 positions of the tokens; None is 0 to T - 1.
    """
    T, width = x_BxTxHxK.shape[1], x_BxTxHxK.shape[-1]
    frequency = config.rotary_base ** (-jnp.arange(0, width, 2) / width)
    if config.rotary_factor > 1:
        # 0 where a wavelength is scaled in full, 1 where it is not (Llama 3.1's model code).
        turns = config.rotary_length * frequency / (2 * jnp.pi)
        kept = jnp.clip(
            (turns - config.rotary_low) / (config.rotary_high - config.rotary_low), 0, 1
        )
        frequency *= kept + (1 - kept) / config.rotary_factor
    positions = jnp.arange(T) if positions_BxT is None else positions_BxT
    angle = (positions[..., None] * frequency)[..., None, :]
    sin, cos = jnp.sin(angle).astype(x_BxTxHxK.dtype), jnp.cos(angle).astype(x_BxTxHxK.dtype)
    first, second = jnp.split(x_BxTxHxK, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
