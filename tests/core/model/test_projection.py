"""The linear layer: its parameters, its product, its initial scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from flax import nnx
from marks import some

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.layouts.model_layouts import projection_layout
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.model.projection import draw, linear, with_threshold
from sparse_dataflow.core.ops.hadamard.transform import hadamard
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

WIDE = ModelConfig(num_layers=2, d_model=256, num_heads=4, d_ff=1024, vocab_size=40, max_len=12)


def sparse(density, rank=0, hadamard=0, pattern="butterfly"):
    return LinearSpec("block_sparse", pattern, density, block=16, rank=rank, hadamard=hadamard)


def initial(spec, projection, gain=1.0):
    """Returns a function that draws the arrays of a layer."""
    config = WIDE.with_linears(spec)
    return lambda: draw(config, projection, gain=gain, rngs=nnx.Rngs(0))


def abstract(spec, projection="mlp_in"):
    """Returns {name: ShapeDtypeStruct} of the arrays of a layer."""
    return jax.eval_shape(initial(spec, projection))


def layer(params, spec, projection="mlp_in"):
    """Returns a layer of these arrays."""
    layout = {"layout": tables_of(spec, projection)} if spec.weight.stores_blocks else {}
    return linear(WIDE.with_linears(spec), projection, {**params, **layout})


def arbitrary(params, seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=v.shape).astype(np.float32) for k, v in params.items()}


def tables_of(spec, projection="mlp_in"):
    if spec.kind == "dense":
        return None
    return projection_layout(WIDE.with_linears(spec), projection, layer=0).tables()


def shapes(spec, projection):
    return {name: param.shape for name, param in abstract(spec, projection).items()}


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
    params = arbitrary(abstract(spec, projection))
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
    y = jax.jit(layer(params, spec, projection))(x)
    np.testing.assert_allclose(y, x @ weight + params["bias"], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("spec", [LinearSpec(), sparse(1 / 4, 3, hadamard=64)])
@pytest.mark.parametrize("tokens", some([1, 5], 1))
def test_a_threshold_lets_small_inputs_of_the_weight_count_as_zeros(spec, tokens):
    params = {**arbitrary(abstract(spec)), "bias": np.zeros(1024, np.float32)}
    plain = layer(params, spec)
    x = np.random.default_rng(1).normal(size=(1, tokens, 256)).astype(np.float32)
    y = jax.jit(with_threshold(plain, np.float32(0.5)))(x)
    if spec.hadamard:  # Its own inverse.
        expected = hadamard(x, spec.hadamard)
        expected = hadamard(np.where(np.abs(expected) <= 0.5, 0, expected), spec.hadamard)
        low_rank = params["gate"] * params["a_kernel"] @ params["b_kernel"]
        expected = plain(expected) + (x - expected) @ low_rank
    else:
        expected = np.where(np.abs(x) <= 0.5, 0, x) @ params["kernel"]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)


def test_the_low_rank_term_starts_at_zero_with_a_gradient():
    """b_kernel starts at 0, so the output does not change, but its gradient is not 0."""
    spec = sparse(1 / 4, rank=3)
    params = jax.jit(initial(spec, "mlp_in"))()
    x = np.random.default_rng(1).normal(size=(7, 256)).astype(np.float32)
    apply = jax.jit(lambda params: layer(params, spec)(x))
    gated = apply(params)
    np.testing.assert_array_equal(gated, apply({**params, "gate": np.float32(0)}))
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(jnp.square(apply(params)))))(params)
    assert np.abs(gradient["b_kernel"]).max() > 0


@pytest.mark.parametrize(("projection", "gain"), some([("qkv", 1.0), ("mlp_out", 0.25)], "qkv"))
def test_the_initial_scale_does_not_depend_on_density(projection, gain):
    x = np.random.default_rng(0).normal(size=(200, WIDE.projection_shape(projection)[0]))
    for spec in (LinearSpec(), sparse(1 / 16), sparse(1 / 4), sparse(1.0)):
        weight = jax.jit(initial(spec, projection, gain))()
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
        y = jax.eval_shape(lambda p, x, spec=spec: layer(p, spec)(x), abstract(spec), x)
        assert y.shape == (3, 1024) and y.dtype == jnp.bfloat16


def test_an_impossible_spec_is_refused():
    with pytest.raises(UserError, match="legal: multiples of 1/16"):
        abstract(sparse(0.3))
    with pytest.raises(UserError, match="Block 48 does not divide a 256 x 1024 weight"):
        abstract(LinearSpec("block_sparse", "cyclic", 0.5, block=48))
    with pytest.raises(UserError, match="Pattern 'woven' is unknown"):
        abstract(LinearSpec("block_sparse", "woven", 0.5, block=16))
