"""Sentences of the pages block_sparse_linear.md and layers.md on other libraries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import some

import sparse_dataflow as sd


@pytest.mark.parametrize("evolving", some([False, True], True))
def test_qwix_passes_over_the_layers_and_nnx_lora_does_not(evolving):
    qwix = pytest.importorskip("qwix")
    model = nnx.Sequential(
        nnx.Linear(32, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 16, rngs=nnx.Rngs(1))
    )
    sparse = sd.sparsify(model, density=0.5, block=8, evolving=evolving)
    x = jnp.ones((2, 32))
    provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0)
    adapted = qwix.apply_lora_to_model(sparse, provider, x, rngs=nnx.Rngs(3))
    adapters = lambda m: [  # noqa: E731
        v for _, v in nnx.iter_graph(m) if isinstance(v, nnx.LoRAParam)
    ]
    assert not adapters(adapted)
    layer = sd.sparsify(model, density=0.5, block=8, evolving=evolving).layers[0]
    lora = nnx.LoRA(32, 4, 32, base_module=layer, rngs=nnx.Rngs(0))
    assert len(adapters(lora)) == 2 and lora(x).shape == (2, 32)


@pytest.mark.parametrize("evolving", some([False, True], True))
def test_every_mode_of_differentiation_has_the_values_of_the_dense_layer(evolving):
    layer = sd.BlockSparseLinear(24, 40, density=1.0, block=8, evolving=evolving, rngs=nnx.Rngs(0))
    dense, x, t = sd.densify(layer), jnp.linspace(-1, 1, 24), jnp.linspace(0, 2, 24)
    function = lambda m: lambda x: jnp.sum(jnp.tanh(m(x[None])) ** 2)  # noqa: E731
    for transform in (jax.jacfwd, jax.jacrev, jax.hessian):
        a, b = (transform(function(m))(x) for m in (layer, dense))
        assert jnp.allclose(a, b, atol=1e-5)
    (_, a), (_, b) = (jax.jvp(function(m), (x,), (t,)) for m in (layer, dense))
    assert jnp.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("pattern", ["random", "monarch", "shuffle"])
def test_the_leaves_of_a_language_model_are_floats_and_its_params_hold_layouts_too(pattern):
    sparsity = dict(sparsity__block=16, sparsity__pattern=pattern)
    model = sd.init(sd.preset("pico").change(**sparsity), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("float32")}
    assert {leaf.dtype.kind for leaf in jax.tree.leaves(model.params)} >= {"f", "i"}
    halved = jax.tree.map(lambda parameter: parameter / 2, model)
    assert np.isfinite(sd.loss(halved, np.arange(65)[None]))
