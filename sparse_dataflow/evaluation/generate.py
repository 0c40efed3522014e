"""Continues prompts with a trained model."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_dataflow.execution import whole
from sparse_dataflow.models.sizes import ModelConfig


def continue_greedily(
    config: ModelConfig, params: dict, tables: dict, prompts: np.ndarray, new_tokens: int
) -> np.ndarray:
    """The most likely next token, again and again.

    Each token costs a forward pass over the whole sequence; right for a few short samples.

    Args:
      config: the model.
      params: its parameters.
      tables: its layout tables; numpy ones are specialised.
      prompts: int32 [batch, prompt_tokens], all of one length.
      new_tokens: tokens to add; prompt and addition must fit the model's positions.

    Returns:
      int32 [batch, new_tokens].
    """
    prompt_tokens = prompts.shape[1]

    @jax.jit
    def run(params, prompts):
        def extend(i, tokens):
            logits = whole.logits(config, params, tables, tokens)
            best = jnp.argmax(logits[:, i - 1], axis=-1).astype(tokens.dtype)
            return tokens.at[:, i].set(best)

        tokens = jnp.pad(prompts, ((0, 0), (0, new_tokens)))
        return lax.fori_loop(prompt_tokens, prompt_tokens + new_tokens, extend, tokens)

    return np.asarray(run(params, jnp.asarray(prompts)))[:, prompt_tokens:]
