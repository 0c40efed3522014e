"""Greedy continuations are what the model itself says next, token by token."""

import dataclasses

import jax
import numpy as np
import pytest

from sparse_dataflow.evaluation.generate import continue_greedily
from sparse_dataflow.execution import whole
from sparse_dataflow.models import gpt
from sparse_dataflow.models.sizes import LinearSpec, ModelConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

DENSE = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=10)
SPARSE = DENSE.with_linears(LinearSpec("block_sparse", "monarch", density=0.5, block=8))
ROTARY = dataclasses.replace(DENSE, positions="rotary", norm="rmsnorm")


def decided(config, seed=0):
    """Parameters, and tables, of a model that is sure of its next token, so that rounding settles
    nothing, and says another one after other tokens."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if path[-1].key == "bias":  # The last norm's would name one token everywhere.
            return np.zeros(leaf.shape, np.float32)
        return rng.normal(size=leaf.shape).astype(np.float32)

    shapes = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(draw, shapes)
    return params, gpt.layout_tables(gpt.layouts(config))


def draw_prompts(config, shape, seed=1):
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape, np.int32)


@pytest.mark.parametrize("config", [DENSE, SPARSE, ROTARY], ids=["dense", "sparse", "rotary"])
def test_every_token_is_the_most_likely_one(config):
    params, tables = decided(config)
    prompts = draw_prompts(config, (3, 4))
    before = prompts.copy()
    new = continue_greedily(config, params, tables, prompts, config.max_len - 4)
    np.testing.assert_array_equal(prompts, before)
    assert new.shape == (3, 6) and new.dtype == np.int32
    # No logit sees a later token (tests/models/test_gpt.py), so one pass tells every step's.
    whole_text = np.concatenate([prompts, new], axis=1)
    logits = jax.jit(lambda params: whole.logits(config, params, tables, whole_text))(params)
    np.testing.assert_array_equal(new, np.argmax(logits, axis=-1)[:, 3:-1])
    assert len(np.unique(new)) > 2  # One token said again and again would prove little.


def test_step_by_step():
    params, tables = decided(DENSE)
    tokens = draw_prompts(DENSE, (2, 5))
    new = continue_greedily(DENSE, params, tables, tokens, 2)
    logits = jax.jit(lambda params, tokens: whole.logits(DENSE, params, tables, tokens))
    for i in range(2):
        best = np.argmax(logits(params, tokens)[:, -1], axis=-1)
        np.testing.assert_array_equal(new[:, i], best)
        tokens = np.append(tokens, new[:, i : i + 1], axis=1)


def test_a_prompt_is_continued_by_itself_whatever_its_neighbours():
    params, tables = decided(DENSE)
    prompts = draw_prompts(DENSE, (3, 5))
    together = continue_greedily(DENSE, params, tables, prompts, 3)
    alone = continue_greedily(DENSE, params, tables, prompts[1:2], 3)
    np.testing.assert_array_equal(together[1:2], alone)
