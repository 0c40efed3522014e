"""Thresholds reach the share of zeros, and decoding with them agrees with the whole text."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoded import BYTES, CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from small_models import arbitrary_params, tables_of

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.ops.hadamard.transform import hadamard
from sparse_dataflow.evaluation.activation_sparsity import (
    calibration_windows,
    smallest_magnitude,
    with_thresholds,
)
from sparse_dataflow.evaluation.generate import generate
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pruning.inputs import observed_block

WIDE = dataclasses.replace(CONFIGS["dense"], d_ff=256)
"""Its mlp_in skips rows for one token."""

SHARE = 0.4
TOKENS = np.random.default_rng(1).integers(0, 40, 5000, np.int32)
smallest = jax.jit(smallest_magnitude)


def random_model(config):
    params, tables = arbitrary_params(config, scale=0.3), tables_of(config)
    training = TrainingConfig(steps=1, batch=4, sequence=config.max_len)
    folder = pathlib.Path("missing")
    return Model(folder, "dense", config, merged(params, tables), BYTES, 1, training, None, {})


@settings(max_examples=30)
@given(
    hnp.arrays(np.float32, 7, elements=st.floats(-4, 4, width=32)),
    st.sampled_from([0.01, 0.4, 0.5, 1.0]),
)
def test_the_quantile_is_that_of_numpy(x, share):
    expected = np.quantile(np.abs(x), share, method="inverted_cdf")
    # XLA on a CPU counts denormal numbers as zeros.
    level = smallest(x, math.ceil(share * x.size))
    np.testing.assert_allclose(level, expected, atol=1e-37)


@pytest.mark.parametrize("share", [SHARE, {"qkv": 0.6, "mlp_out": 0.3}], ids=["equal", "by name"])
def test_each_tensor_has_the_share_of_zeros(share):
    config = CONFIGS["by depth"]
    model = with_thresholds(random_model(config), TOKENS, share)
    tokens = calibration_windows(TOKENS, model.context)
    assert tokens.shape == (1024 // model.context, model.context)

    def zeros(name, x, linear):
        [level] = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(linear)
                   if path[-1].name == "level"]  # fmt: skip
        width = config.linear(name).hadamard
        x = hadamard(x, width) if width else x
        return jnp.mean(jnp.abs(x) <= level), linear

    @jax.jit
    def all_shares(params):
        x, shares = gpt.embed(config, params["embed"], tokens), []
        for layer in stacks.weights(config, model.params):
            x, layer_shares = observed_block(config, layer, x, zeros)
            shares.append(layer_shares)
        return shares

    shares = all_shares(model.params)
    assert [set(layer) for layer in shares] == [set(config.projections)] * config.num_layers
    for layer in shares:
        for name, zero in layer.items():
            expected = share if isinstance(share, float) else share.get(name, 0.0)
            np.testing.assert_allclose(zero, expected, atol=2e-3)


@pytest.mark.parametrize("config", [WIDE, CONFIGS["sparse"]], ids=["dense", "sparse"])
def test_generation_has_the_thresholds_of_the_whole_text(config):
    model = with_thresholds(random_model(config), TOKENS, SHARE)
    prompt = [3, 1, 4, 1, 5]
    [continuation] = generate(model, [prompt], max_new_tokens=6)
    text = np.asarray([prompt + continuation.tokens])
    run = jax.jit(lambda params: whole.logits(config, weights_of(config, params), text))
    logits = np.asarray(run(model.params))
    assert continuation.tokens == logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_projection_that_the_model_lacks_is_refused():
    with pytest.raises(UserError, match="names q, which the model does not have; legal: qkv"):
        with_thresholds(random_model(WIDE), TOKENS, {"q": SHARE})


def test_experts_are_refused():
    config = dataclasses.replace(WIDE, experts=2, top_k=1)
    with pytest.raises(UserError, match=r"experts have no thresholds; legal .* activation_spars"):
        with_thresholds(random_model(config), TOKENS, SHARE)
