"""The linear layer: its parameters, its product, its initial scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from flax import nnx

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.presets import SIZES
from sparse_dataflow.config.projections import LinearSpec
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.hadamard.api import hadamard
from sparse_dataflow.models.linear import InputThreshold, Linear, projection_layout
from sparse_dataflow.sparsity.patterns import make_layout

PROJECTIONS = SIZES["nano"].projections

WIDE = ModelConfig(num_layers=2, d_model=256, num_heads=4, d_ff=1024, vocab_size=40, max_len=12)


def sparse(density, rank=0, hadamard=0, pattern="butterfly"):
    return LinearSpec("block_sparse", pattern, density, block=16, rank=rank, hadamard=hadamard)


def split(spec, projection="mlp_in", gain=1.0):
    """Returns (graph, {name: ShapeDtypeStruct} of the parameters) of an abstract layer."""
    config = WIDE.with_linears(spec)
    layer = nnx.eval_shape(lambda: Linear(config, projection, gain=gain, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer, nnx.Param)
    return graph, nnx.to_pure_dict(state)


def draw(spec, projection, gain):
    """Returns the initial parameters of a layer."""
    config = WIDE.with_linears(spec)

    def initial():
        layer = Linear(config, projection, gain=gain, rngs=nnx.Rngs(0))
        return nnx.to_pure_dict(nnx.state(layer, nnx.Param))

    return jax.jit(initial)()


def arbitrary(params, seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=v.shape).astype(np.float32) for k, v in params.items()}


def tables_of(spec, projection="mlp_in"):
    if spec.kind == "dense":
        return None
    return projection_layout(WIDE.with_linears(spec), projection, layer=0).tables()


def shapes(spec, projection):
    return {name: param.shape for name, param in split(spec, projection)[1].items()}


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_only_stored_blocks_are_parameters(projection):
    in_features, out_features = WIDE.projection_shape(projection)
    stored = (in_features // 16) * (out_features // 16) // 8
    assert shapes(sparse(1 / 8), projection) == {
        "values": (stored, 16, 16),
        "bias": (out_features,),
    }
    assert shapes(LinearSpec(rank=4), projection) == {
        "kernel": (in_features, out_features),
        "bias": (out_features,),
        "a_kernel": (in_features, 4),
        "b_kernel": (4, out_features),
        "gate": (),
    }


@pytest.mark.parametrize(
    "spec", [LinearSpec(rank=3), sparse(1 / 4), sparse(1 / 4, 3), sparse(1 / 4, 3, hadamard=64)]
)
@pytest.mark.parametrize("projection", ["qkv", "mlp_out"])
def test_a_layer_equals_its_dense_formula(spec, projection):
    graph, params = split(spec, projection)
    params = arbitrary(params)
    weight = params.get("kernel")
    if weight is None:
        layout = projection_layout(WIDE.with_linears(spec), projection, layer=0)
        weight = layout.to_dense(params["values"])
    if spec.hadamard:
        transform = scipy.linalg.hadamard(spec.hadamard) / spec.hadamard**0.5
        weight = np.kron(np.eye(len(weight) // len(transform)), transform) @ weight
    if spec.rank:
        weight = weight + params["gate"] * params["a_kernel"] @ params["b_kernel"]
    x = np.random.default_rng(1).normal(size=(2, 5, weight.shape[0])).astype(np.float32)
    y = jax.jit(nnx.merge(graph, params))(x, tables_of(spec, projection))
    np.testing.assert_allclose(y, x @ weight + params["bias"], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("spec", [LinearSpec(), sparse(1 / 4, 3, hadamard=64)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_threshold_lets_small_inputs_of_the_weight_count_as_zeros(spec, tokens):
    graph, params = split(spec)
    params = {**arbitrary(params), "bias": np.zeros(1024, np.float32)}
    layer, tables = nnx.merge(graph, params), tables_of(spec)
    x = np.random.default_rng(1).normal(size=(1, tokens, 256)).astype(np.float32)
    y = jax.jit(layer)(x, InputThreshold(tables, np.float32(0.5)))
    if spec.hadamard:  # Its own inverse.
        expected = hadamard(x, spec.hadamard)
        expected = hadamard(np.where(np.abs(expected) <= 0.5, 0, expected), spec.hadamard)
        low_rank = params["gate"] * params["a_kernel"] @ params["b_kernel"]
        expected = layer(expected, tables) + (x - expected) @ low_rank
    else:
        expected = np.where(np.abs(x) <= 0.5, 0, x) @ params["kernel"]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)


def test_the_low_rank_term_starts_at_zero_with_a_gradient():
    """b_kernel starts at 0, so the output does not change, but its gradient is not 0."""
    spec = sparse(1 / 4, rank=3)
    graph, _ = split(spec)
    params = draw(spec, "mlp_in", gain=1.0)
    x = np.random.default_rng(1).normal(size=(7, 256)).astype(np.float32)
    apply = jax.jit(lambda params: nnx.merge(graph, params)(x, tables_of(spec)))
    gated = apply(params)
    np.testing.assert_array_equal(gated, apply({**params, "gate": np.float32(0)}))
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(jnp.square(apply(params)))))(params)
    assert np.abs(gradient["b_kernel"]).max() > 0


@pytest.mark.parametrize(("projection", "gain"), [("qkv", 1.0), ("mlp_out", 0.25)])
def test_the_initial_scale_does_not_depend_on_density(projection, gain):
    x = np.random.default_rng(0).normal(size=(200, WIDE.projection_shape(projection)[0]))
    for spec in (LinearSpec(), sparse(1 / 16), sparse(1 / 4), sparse(1.0)):
        weight = draw(spec, projection, gain)
        if spec.kind == "dense":
            weight = weight["kernel"]
        else:
            layout = projection_layout(WIDE.with_linears(spec), projection, layer=0)
            weight = layout.to_dense(weight["values"])
        assert np.std(x @ weight) == pytest.approx(gain, rel=0.05)


def test_patterns_differ_between_layers_and_projections():
    config = WIDE.with_linears(sparse(1 / 8, pattern="random"))
    layouts = [projection_layout(config, p, i) for p in ("mlp_in", "qkv") for i in range(2)]
    assert len(set(layouts)) == 4
    reseeded = dataclasses.replace(config, seed=1000)
    assert projection_layout(reseeded, "mlp_in", 0) != layouts[0]
    assert layouts[0] == projection_layout(config, "mlp_in", 0)
    assert layouts[0].density == make_layout("random", 256, 1024, 16, 1 / 8).density


def test_the_output_has_the_input_dtype():
    x = jax.ShapeDtypeStruct((3, 256), jnp.bfloat16)
    for spec in (LinearSpec(rank=2), sparse(1 / 4, rank=2), sparse(1 / 4, hadamard=32)):
        tables = tables_of(spec)
        graph, params = split(spec)
        y = jax.eval_shape(lambda p, x, g=graph, t=tables: nnx.merge(g, p)(x, t), params, x)
        assert y.shape == (3, 1024) and y.dtype == jnp.bfloat16


def test_an_impossible_spec_is_refused():
    with pytest.raises(UserError, match="legal: multiples of 1/16"):
        split(sparse(0.3))
    with pytest.raises(UserError, match="Block 48 does not divide a 256 x 1024 weight"):
        split(LinearSpec("block_sparse", "cyclic", 0.5, block=48))
    with pytest.raises(UserError, match="Pattern 'woven' is unknown"):
        split(LinearSpec("block_sparse", "woven", 0.5, block=16))
