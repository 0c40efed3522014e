"""A block whose passes are kernels has the values and gradients of XLA's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.ops import dispatch

SMALL = ModelConfig(
    num_layers=1, d_model=128, num_heads=4, d_ff=256, vocab_size=32, max_len=32
)  # fmt: skip


def attend(q, k, v, window, cap):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm": "rmsnorm"}, {"residual": "parallel"}, {"gated_mlp": True, "activation": "silu"}],
)
def test_values_and_gradients_are_those_without_kernels(monkeypatch, changes):
    config = dataclasses.replace(SMALL, **changes)
    params = gpt.init(config, jax.random.key(0))["blocks"]
    params = jax.tree.map(
        lambda leaf: leaf[0] + 0.02 * jnp.sin(jnp.arange(leaf[0].size)).reshape(leaf[0].shape),
        params,
    )
    x = jax.random.normal(jax.random.key(1), (2, 16, 128))
    calls, call = [], functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(pl, "pallas_call", lambda *a, **k: calls.append(0) or call(*a, **k))

    def loss(params, x):
        y = gpt.block(config, layer_weights(config, params, {}), x, attend=attend)[0]
        return jnp.sum(jnp.sin(y))

    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("d",), axis_types=auto, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        fused = jax.value_and_grad(loss, (0, 1))(params, x)
        assert len(calls) >= 2
        with dispatch.without("residual_norm", "bias_activation"):
            plain = jax.value_and_grad(loss, (0, 1))(params, x)
    for one, other in zip(*map(jax.tree.leaves, (fused, plain)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
