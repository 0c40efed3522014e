"""Mixtures of experts against a loop over tokens and experts in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_experts import apply, choose
from small_models import arbitrary_params

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import experts, gpt, stacks
from sparse_dataflow.core.model.experts import Experts, auxiliary_loss
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.model.shard import UNSHARDED
from sparse_dataflow.files.errors import UserError

LOSSES = "balance_loss", "router_z_loss"

TINY = ModelConfig(2, 16, 2, 32, vocab_size=40, max_len=16, experts=4, top_k=2)
MONARCH = LinearSpec("block_sparse", "monarch", density=0.5, block=4)


@st.composite
def configs(draw):
    """Draws models with experts, dense or block-sparse."""
    prototypes, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shared = draw(st.integers(0, 2))
    config = dataclasses.replace(
        TINY,
        experts=prototypes * group,
        prototypes=prototypes,
        top_k=draw(st.integers(1, group)),
        shared_expert=shared,
        shared_gate=bool(shared) and draw(st.booleans()),
        raw_gates=draw(st.booleans()),
        expert_capacity=draw(st.sampled_from([0.0, 0.5, 1.0, 1.5])),
        gated_mlp=draw(st.booleans()),
        activation=draw(st.sampled_from(["gelu", "silu"])),
        biases=draw(st.sampled_from([(), ("mlp_in", "mlp_out")])),
    )
    sparse = shared < 2 and draw(st.booleans())
    return config.with_linears(MONARCH, ["mlp_in", "mlp_out"]) if sparse else config


def arbitrary(config, seed):
    """Returns float64 (params of the experts, x [1, T, D], dy)."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: gpt.init_section(config, "block", jax.random.key(0)))
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) / 3, shapes["experts"])
    tokens = int(rng.integers(1, 14))
    return params, *rng.normal(size=(2, 1, tokens, config.d_model))


def bound(config, params):
    weights = layer_weights(config, merged({"experts": params}, tables_of(config)))["experts"]
    return Experts(config, weights)


def tables_of(config):
    tables = stacks.stored_layouts(config)
    if not tables:
        return {}
    layer = stacks.with_groups(jax.tree.map(lambda table: table[0], tables["blocks"]))
    return {"experts": layer["experts"]} if "experts" in layer else {}


@settings(max_examples=5)
@example(dataclasses.replace(TINY, experts=4, top_k=2, raw_gates=True), 0)
@given(configs(), st.integers(0, 99))
def test_outputs_and_losses_are_those_of_the_loop_and_gradients_its_differences(config, seed):
    params, x, dy = arbitrary(config, seed)
    choices = choose(config, params["router"], x[0])

    def loop(params, x):
        y, balance, z = apply(config, params, x[0], choices)
        auxiliary = config.balance_loss * balance + config.router_z_loss * z
        return np.sum(y * dy[0]) + auxiliary, (y, balance, z)

    def ours(params, x):
        y, metrics = bound(config, params)(x, UNSHARDED)
        return jnp.sum(y * dy) + auxiliary_loss(config, metrics) / x.shape[1], (y[0], metrics)

    with jax.enable_x64(True):
        gradient = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))
        (_, (y, metrics)), gradients = jax.device_get(gradient(params, x))
    expected, balance, z = loop(params, x)[1]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    numbers = {name: metric.number() for name, metric in metrics.items()}
    np.testing.assert_allclose([numbers[name] for name in LOSSES], (balance, z), rtol=1e-4)
    counts = np.bincount([e for token in choices for e, _ in token], minlength=config.experts)
    np.testing.assert_allclose(metrics["busiest_expert"].shares(), counts / counts.sum(), rtol=1e-6)
    assert numbers["busiest_expert"] == pytest.approx(counts.max() / counts.mean())
    dropped = np.mean([not kept for token in choices for _, kept in token])
    np.testing.assert_allclose(numbers["dropped"], dropped, rtol=1e-6)

    leaves, structure = jax.tree.flatten((params, x))
    rng = np.random.default_rng(seed)
    for i, (leaf, leaf_gradient) in enumerate(zip(leaves, jax.tree.leaves(gradients))):
        direction = 1e-4 * rng.normal(size=leaf.shape)
        moved = [[*leaves[:i], leaf + sign * direction, *leaves[i + 1 :]] for sign in (1, -1)]
        up, down = (loop(*jax.tree.unflatten(structure, each))[0] for each in moved)
        np.testing.assert_allclose(
            np.sum(leaf_gradient * direction), (up - down) / 2, rtol=1e-3, atol=1e-8
        )


def apply_block(config, params, x):
    return gpt.block(config, layer_weights(config, params), x)[0]


def test_one_expert_is_the_mlp():
    """Its router has nothing to choose, so its factor is 1."""
    config = dataclasses.replace(TINY, experts=1, top_k=1)
    params = arbitrary_params(config)
    dense_params = dict(params["blocks"])
    module = dense_params.pop("experts")
    dense_params |= {name: jax.tree.map(lambda a: a[:, 0], module[name]) for name in
                     ("mlp_in", "mlp_out")}  # fmt: skip
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    first = lambda tree: jax.tree.map(lambda a: a[0], tree)  # noqa: E731
    block = jax.jit(apply_block, static_argnums=0)
    mixture = block(config, first(params["blocks"]), x)
    dense = block(dataclasses.replace(config, experts=0), first(dense_params), x)
    np.testing.assert_allclose(mixture, dense, rtol=1e-5, atol=1e-6)


@settings(max_examples=6)
@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0]))
def test_every_kept_choice_has_a_row_of_its_expert(tokens, count, k, capacity):
    config = dataclasses.replace(TINY, experts=count, top_k=min(k, count), expert_capacity=capacity)
    rng = np.random.default_rng(tokens)
    chosen = np.stack([rng.permutation(count)[: config.top_k] for _ in range(tokens)])
    plan, tiles_T = jax.device_get(
        jax.jit(experts.dispatch, static_argnums=0)(config, jnp.asarray(chosen, jnp.int32))
    )
    rows, tile = len(plan.choices_S), len(plan.choices_S) // len(tiles_T)
    flat = plan.rows_NxK.reshape(-1)
    placed = np.flatnonzero(flat < rows)
    np.testing.assert_array_equal(plan.choices_S[flat[placed]], placed)
    np.testing.assert_array_equal(tiles_T[flat[placed] // tile], chosen.reshape(-1)[placed])
    assert np.sum(plan.choices_S < chosen.size) == len(placed)
    assert np.all(np.diff(tiles_T) >= 0)
    if not capacity:
        assert len(placed) == chosen.size


def test_router_is_float32_in_a_bfloat16_model():
    """Logits that bfloat16 cannot tell apart choose different experts."""
    config = dataclasses.replace(TINY, top_k=1, compute_dtype="bfloat16")
    params, *_ = arbitrary(config, 0)
    router = np.zeros((16, 4), np.float32)
    router[0] = [1, 1 + 2**-12, 1 - 2**-12, 0]
    module = bound(config, jax.tree.map(np.float32, {**params, "router": router}))
    x = jnp.zeros((1, 16), jnp.bfloat16).at[0, 0].set(1)
    gates, chosen, metrics = module.route(x)
    assert chosen.tolist() == [[1]]
    assert gates.dtype == metrics["router_z_loss"].total.dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": 6, "prototypes": 4}, "does not divide model.experts=6; legal: 1, 2, 3, 6"),
        ({"experts": 4, "top_k": 5}, "above the 4 experts of a group; legal: 1 to 4"),
        ({"experts": 4, "prototypes": 2, "top_k": 3}, "above the 2 experts of a group"),
        ({"experts": 0, "top_k": 2}, "model.top_k=2 needs experts"),
        ({"experts": 0, "top_k": 1, "prototypes": 2}, "model.prototypes=2 needs experts"),
        ({"experts": 0, "top_k": 1, "shared_expert": True}, "model.shared_expert=1 needs"),
        ({"experts": -1}, "from 0 to 4,096"),
        ({"expert_capacity": -1.0}, "from 0 to 4,096"),
        ({"precision": "int8"}, "legal with experts: compute_dtype"),
    ],
)
def test_illegal_mixture_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("spec", "depth", "words"),
    [
        (dataclasses.replace(MONARCH, rank=2), (), "sparsity.rank=0"),
        (MONARCH, (0.5, 1.0), "legal for experts: one density"),
    ],
)
def test_illegal_storage_of_experts_is_refused(spec, depth, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(TINY, linears={"mlp_in": spec}, density_by_depth=depth)


def test_layouts_without_equal_groups_are_refused():
    spec = LinearSpec("block_sparse", "random", density=0.25, block=2)
    with pytest.raises(UserError, match=r"legal for experts: sparsity\.pattern=monarch or shuffle"):
        model_layouts.check_layouts(TINY.with_linears(spec, ["mlp_in"]))


@settings(deadline=None, max_examples=5)
@given(configs(), st.integers(0, 99), st.data())
def test_padding_fills_no_expert_and_is_in_no_mean(config, seed, data):
    """Outputs, metrics and gradients are those of the other tokens alone, whatever is between."""
    params, x, dy = arbitrary(config, seed)
    count = x.shape[1]
    real = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    real[data.draw(st.integers(0, count - 1))] = True

    def run(params, x, dy, real=None):
        def value(params, x):
            y, metrics = bound(config, params)(x, UNSHARDED, real)
            output = y if real is None else jnp.where(real[..., None], y, 0)
            means = sum(m.total / m.count for m in map(metrics.get, LOSSES))
            return (output * dy).sum() + means, (output, metrics)

        return jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))(params, x)

    f32 = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)  # noqa: E731
    params, x, dy = f32((params, x, dy))
    (d_params, dx), (y, metrics) = run(params, x, dy, jnp.asarray(real)[None])
    (e_params, ex), (alone, expected) = run(params, x[:, real], dy[:, real])
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)  # noqa: E731
    near(y[:, real], alone)
    jax.tree.map(near, metrics, expected)
    jax.tree.map(near, d_params, e_params)
    near(dx[:, real], ex)
