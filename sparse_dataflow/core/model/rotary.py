"""Rotary positions, and the scaling of their wavelengths for long contexts."""

import math

import jax
import jax.numpy as jnp

from sparse_dataflow.core.config.attention_settings import READ_BY_SCALING as USED
from sparse_dataflow.core.config.model import ModelConfig


def rotate(
    config: ModelConfig, x_BxTxHxK: jax.Array, positions_BxT: jax.Array | None = None
) -> jax.Array:
    """Applies rotary positions (arXiv 2104.09864, section 3.4), halves paired.

    Args:
      x_BxTxHxK: queries or keys.
      positions_BxT: int32 positions of the tokens; None is 0 to T - 1.
    """
    T, width = x_BxTxHxK.shape[1], config.rotated(x_BxTxHxK.shape[-1])
    frequency, scale = frequencies(config, int(x_BxTxHxK.shape[-1] * config.rotary_share))
    positions = jnp.arange(T) if positions_BxT is None else positions_BxT
    # [T, 1, width / 2] or [B, T, 1, width / 2], the same for all heads.  In float32: bfloat16 has
    # no odd positions above 256.
    angle = (positions[..., None] * frequency)[..., None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    if scale != 1:
        sin, cos = scale * sin, scale * cos
    sin, cos = sin.astype(x_BxTxHxK.dtype), cos.astype(x_BxTxHxK.dtype)
    first, second = x_BxTxHxK[..., : width // 2], x_BxTxHxK[..., width // 2 : width]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if width < x_BxTxHxK.shape[-1]:
        parts.append(x_BxTxHxK[..., width:])
    return jnp.concatenate(parts, axis=-1)


def frequencies(config: ModelConfig, width: int) -> tuple[jax.Array, float]:
    """Returns the angles between positions, float32 [width / 2, rounded up], and the scale of the
    rotations.

    Args:
      width: share of a head's features, before it is rounded up.
    """
    # base ** (-2 i / width) for the i-th pair of features.
    frequency = config.rotary_base ** (-jnp.arange(0, width, 2) / width)
    kind, factor = config.rotary_scaling, config.rotary_factor
    scale = _attention_scale(config) if "rotary_attention" in USED[kind] else 1.0
    if kind == "longrope":
        return frequency / jnp.array(config.rotary_factors), scale
    if factor == 1 or kind == "dynamic":
        return frequency, scale
    if kind == "linear":
        return frequency / factor, scale
    # 0 where a wavelength is scaled in full, 1 where it is not.
    if kind == "llama3":  # Llama 3.1's model code.
        turns = config.rotary_length * frequency / (2 * jnp.pi)
        kept = jnp.clip(
            (turns - config.rotary_low) / (config.rotary_high - config.rotary_low), 0, 1
        )
    else:
        # YaRN (arXiv 2309.00071, section 3.2): frequencies that turn often over the trained length
        # stay, slow ones are divided by the factor, and a ramp lies between.
        first = max(math.floor(_index(config, width, config.rotary_high)), 0)
        last = min(math.ceil(_index(config, width, config.rotary_low)), width - 1)
        kept = 1 - jnp.clip((jnp.arange(width // 2) - first) / (last - first or 1e-3), 0, 1)
    return frequency * (kept + (1 - kept) / factor), scale


def _index(config, width, turns):
    """Returns the index of the frequency that turns so often over rotary_length tokens."""
    # Solves length * base ** (-2 i / width) = 2 pi turns for i.
    wavelengths = config.rotary_length / (2 * math.pi * turns)
    return width * math.log(wavelengths) / (2 * math.log(config.rotary_base))


def _attention_scale(config):
    """Returns the scale of the rotations: the setting, or what the paper of the scaling says."""
    if config.rotary_attention or config.rotary_factor == 1:
        return config.rotary_attention or 1.0
    if config.rotary_scaling == "yarn":
        # YaRN, section 3.4: queries and keys both have this factor, so scores have its square.
        return 0.1 * math.log(config.rotary_factor) + 1
    # LongRoPE (arXiv 2402.13753).
    return math.sqrt(1 + math.log(config.rotary_factor) / math.log(config.rotary_length))
