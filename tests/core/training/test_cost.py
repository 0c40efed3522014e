"""FLOPs by section: ceilings by hand, sums, scaling and the pieces of MFU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from small_models import shapes_of, tables_of

from sparse_dataflow.core.config.depth import DepthSchedule
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts.attention_blocks import attention_layout
from sparse_dataflow.core.model import stacks as layer_stacks
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.optim import matrix_leaves, muon
from sparse_dataflow.core.optim.muon_updates import matrices_like
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.phases import Phase, phases_flops, token_flops
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import CHIPS, Chip
from sparse_dataflow.planner.parallel_plan import RECOMPUTED
from sparse_dataflow.runs.families import FAMILIES
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

MLP = ("mlp_in", "mlp_out")


@pytest.mark.parametrize("pattern", ["", "cyclic", "monarch"])
def test_flops_of_newton_schulz_are_those_of_the_program(pattern):
    linears = {"mlp_in": LinearSpec("block_sparse", pattern, 0.5, 16)} if pattern else {}
    model = ModelConfig(1, 64, 4, 256, vocab_size=48, max_len=8, linears=linears)
    params = shapes_of(model)
    tables = layer_stacks.with_groups(tables_of(model))
    stacks = [
        (leaf, each)
        for (path, leaf), each in zip(
            jax.tree_util.tree_leaves_with_path(params),
            jax.tree.leaves(matrices_like(model, params, tables)),
            strict=True,
        )
        if matrix_leaves.has_muon(model, path)
    ]
    joined = [jax.eval_shape(matrices.join, leaf) for leaf, matrices in stacks]
    program = jax.jit(lambda stacks: jax.tree.map(muon.orthogonalize, stacks)).lower(joined)
    assert cost.orthogonalization_flops(model) == pytest.approx(
        program.cost_analysis()["flops"], rel=0.05
    )


def sparse_spec(density, rank=0):
    return LinearSpec("block_sparse", density=density, rank=rank)


def sparse(config, density, projections=PROJECTIONS, rank=0):
    return config.with_linears(sparse_spec(density, rank), projections)


@st.composite
def configs(draw, ranks=(0, 32)):
    heads = draw(st.integers(1, 4))
    d_model = heads * 64 * draw(st.integers(1, 4))
    spec = st.builds(
        sparse_spec,
        st.sampled_from([1 / 16, 1 / 8, 0.3, 0.5, 1.0]),
        st.sampled_from(ranks),
    )
    return ModelConfig(
        num_layers=draw(st.integers(1, 6)),
        d_model=d_model,
        num_heads=heads,
        d_ff=d_model * draw(st.integers(1, 4)),
        vocab_size=draw(st.integers(256, 60_000)),
        max_len=4096,
        linears=draw(st.dictionaries(st.sampled_from(PROJECTIONS), spec)),
        remat=draw(st.sampled_from(["none", "keep", "full"])),
    )


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.875, 0.9375])
@pytest.mark.parametrize("projections", [PROJECTIONS, MLP])
def test_ceiling_of_13b_by_hand(sparsity, projections):
    """Width 5,120, 40 layers, 2,048 tokens, 50,257 words: 12 squares of weights, 8 in the MLP."""
    config = sparse(SIZES["13b"], 1 - sparsity, projections)
    square, attention, head = 2 * 5120**2, 2 * 2048 * 5120, 2 * 5120 * 50257
    dense = 40 * (12 * square + attention) + head
    removed = 40 * sparsity * (12 if projections == PROJECTIONS else 8) * square
    assert cost.flop_ceiling(config, 2048) == pytest.approx(dense / (dense - removed))
    if (sparsity, projections) == (0.875, PROJECTIONS):
        assert round(cost.flop_ceiling(config, 2048), 2) == 5.89


@given(configs(ranks=(0,)), st.integers(1, 4096))
def test_ceiling_lies_between_one_and_inverse_density(config, sequence):
    lowest = min(cost.stored_fractions(config).values())
    ceiling = cost.flop_ceiling(config, sequence)
    assert 1 <= ceiling + 1e-12
    assert ceiling <= 1 / lowest + 1e-12


@given(configs(), st.integers(1, 4096), st.booleans())
def test_total_is_sum_of_sections(config, sequence, training):
    flops = cost.flops_per_token(config, sequence, training=training)
    assert flops.total == pytest.approx(sum(flops.sections.values()))
    assert flops.projections == pytest.approx(sum(flops.sections[p] for p in PROJECTIONS))
    assert 0 < flops.projection_share < 1
    assert flops.sections["embed"] == 0


@given(configs(), st.integers(1, 4096))
def test_training_is_three_forwards(config, sequence):
    forward = cost.flops_per_token(config, sequence, training=False)
    train = cost.flops_per_token(config, sequence)
    for name, value in forward.sections.items():
        assert train.sections[name] == pytest.approx(3 * value)


@given(configs(), st.integers(1, 4096), st.integers(2, 5))
def test_blocks_scale_linearly_in_layers_and_the_head_not_at_all(config, sequence, times):
    deeper = dataclasses.replace(config, num_layers=times * config.num_layers)
    once, more = (cost.flops_per_token(c, sequence) for c in (config, deeper))
    for name in (*PROJECTIONS, "attention"):
        assert more.sections[name] == pytest.approx(times * once.sections[name])
    assert more.head == once.head


@given(configs(ranks=(0,)), st.integers(1, 4096))
def test_density_one_costs_what_dense_costs(config, sequence):
    dense = dataclasses.replace(config, linears={})
    assert cost.flops_per_token(sparse(config, 1.0), sequence) == cost.flops_per_token(
        dense, sequence
    )


@given(configs(), st.integers(1, 2048))
def test_attention_grows_with_the_sequence_and_is_the_causal_half(config, sequence):
    once, longer = (cost.flops_per_token(config, n) for n in (sequence, 2 * sequence))
    assert once.attention == pytest.approx(_square(config, sequence) * 3 / 2)
    assert longer.attention == pytest.approx(2 * once.attention)
    assert longer.projections == once.projections


def _square(config, sequence):
    """FLOPs per token of the whole score matrix and its product, forward, as masks compute them."""
    return 4 * config.num_layers * sequence * config.num_heads * config.head_width


@given(configs(), st.integers(1, 4096), st.floats(0.05, 1))
def test_a_depth_schedule_leaves_out_its_share_of_the_blocks(config, sequence, depth):
    whole, fewer = (cost.flops_per_token(config, sequence, depth=d) for d in (1.0, depth))
    assert fewer.head == whole.head
    assert fewer.total - fewer.head == pytest.approx(depth * (whole.total - whole.head))


@pytest.mark.parametrize("text", ["constant", "drop:0.3", "grow:0.25", "grow:0.7"])
@given(layers=st.integers(1, 40), steps=st.integers(400, 900))
@settings(max_examples=10)
def test_the_mean_share_is_that_of_the_blocks_of_every_step(text, layers, steps):
    schedule = DepthSchedule.parse(text)
    start, stop = steps // 5, steps
    counts = [len(schedule.active(layers, step, steps, 3)) for step in range(start, stop)]
    share = np.mean(counts) / layers
    tolerance = 5 * 0.5 / np.sqrt(len(counts) * layers) if "drop" in text else 1e-9
    assert schedule.mean_share(layers, start, stop, steps) == pytest.approx(share, abs=tolerance)


def test_a_dense_model_stores_every_weight():
    assert cost.stored_fractions(SIZES["nano"]) == dict.fromkeys(PROJECTIONS, 1.0)


def test_low_rank_term_adds_its_two_products():
    config, rank = sparse(SIZES["nano"], 1 / 8), 64
    with_rank = sparse(SIZES["nano"], 1 / 8, rank=rank)
    added = (
        cost.flops_per_token(with_rank, 128, training=False).sections["mlp_in"]
        - cost.flops_per_token(config, 128, training=False).sections["mlp_in"]
    )
    assert added == 2 * config.num_layers * rank * (config.d_model + config.d_ff)


def test_a_transform_adds_the_products_of_its_two_factors():
    config = sparse(SIZES["nano"], 1 / 8)
    mixed = config.with_linears(dataclasses.replace(sparse_spec(1 / 8), hadamard=128), ["mlp_out"])
    plain, with_it = (cost.flops_per_token(c, 128, training=False) for c in (config, mixed))
    assert with_it.sections["mlp_out"] - plain.sections[
        "mlp_out"
    ] == 2 * config.num_layers * config.d_ff * (8 + 16)
    assert with_it.total - plain.total == with_it.sections["mlp_out"] - plain.sections["mlp_out"]


@pytest.mark.parametrize("remat", ["none", "keep", "full"])
def test_recompute_is_what_jax_executes_for_a_rematerialised_block(remat):
    config = dataclasses.replace(SIZES["nano"], num_layers=1, d_model=64, num_heads=1, d_ff=256)
    config = dataclasses.replace(config, remat=remat)
    sequence = 32
    executed = _dot_flops_of_block_step(config, sequence) / sequence
    flops = cost.flops_per_token(config, sequence)
    forward = cost.flops_per_token(config, sequence, training=False)
    recomputed = sum(forward.sections.get(name, 0) for name in RECOMPUTED[remat])
    masked = 3 + (remat != "none")  # Passes that compute the other half as well.
    expected = flops.total - flops.head + recomputed + masked * _square(config, sequence) / 2
    assert executed == pytest.approx(expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flops_are_those_of_the_traced_program_in_every_family(family, kv_heads):
    fields = {**FAMILIES[family], "num_kv_heads": kv_heads, "head_dim": 24, "window": 5}
    config = ModelConfig(2, 64, 4, 160, 50, 32, **fields)
    params = shapes_of(config)
    tokens = jax.ShapeDtypeStruct((3, 16), jnp.int32)
    program = jax.make_jaxpr(lambda p, t: whole.logits(config, weights_of(config, p, {}), t))(
        params, tokens
    )
    flops = cost.flops_per_token(config, 16, training=False)
    masked = flops.total - flops.attention + _square(config, 16)
    assert _dot_flops(program.jaxpr) == pytest.approx(masked * tokens.size, rel=1e-12)
    assert list(flops.sections) == [
        "embed",
        *config.projections[: -2 - config.gated_mlp - 1],
        "attention",
        *config.projections[-2 - config.gated_mlp - 1 :],
        "head",
    ]


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_window_counts_the_keys_that_queries_see(window, sequence):
    config = dataclasses.replace(SIZES["pico"], window=window)
    seen = sum(min(t + 0.5, window) for t in range(sequence)) / sequence
    assert cost.visible_keys(config, sequence) == pytest.approx(seen, abs=0.5)


@given(st.integers(1, 90), st.integers(1, 9), st.integers(0, 4))
def test_blocks_count_the_keys_that_queries_see(sequence, side, random):
    text = f"window:2,global:1,block:{side}" + (f",random:{random}" if random else "")
    config = dataclasses.replace(SIZES["pico"], attention_blocks=text)
    layout = attention_layout(config.blocks, sequence)
    at = np.arange(sequence) // side
    read = np.ones((sequence, sequence)) if layout is None else layout.mask[at[None], at[:, None]]
    seen = (np.tril(read) - np.eye(sequence) / 2).sum() / sequence
    assert cost.visible_keys(config, sequence) == pytest.approx(seen)
    dense = dataclasses.replace(config, attention_blocks="")
    assert cost.visible_keys(config, sequence) <= cost.visible_keys(dense, sequence)


def _dot_flops_of_block_step(config, sequence):
    """FLOPs of the products in the gradient of a plain one-head block, as jax traces it."""
    keys = jax.random.split(jax.random.key(0), len(PROJECTIONS))
    weights = {
        name: jax.random.normal(key, config.projection_shape(name))
        for name, key in zip(PROJECTIONS, keys)
    }

    # Only products count; a sine around them keeps every product's input and output needed.
    def block(x, w):
        q, k, v = jnp.split(jnp.sin(x) @ w["qkv"], 3, axis=-1)
        scores = jnp.sin(jnp.einsum("bqd,bkd->bqk", q, k))
        attended = checkpoint_name(jnp.einsum("bqk,bkd->bqd", scores, v), "attended")
        x = x + attended @ w["attn_out"]
        return x + jnp.sin(jnp.sin(x) @ w["mlp_in"]) @ w["mlp_out"]

    kept = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("attended"),
    )
    policy = {"full": None, "keep": kept}
    if config.remat != "none":
        block = jax.checkpoint(block, policy=policy[config.remat])
    x = jnp.ones((1, sequence, config.d_model))
    step = jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(jnp.sin(block(x, w))), (0, 1)))
    return _dot_flops(step(x, weights).jaxpr)


def _dot_flops(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            width = 1
            for axis in contracted:
                width *= left[axis]
            total += 2 * equation.outvars[0].aval.size * width
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += _dot_flops(inner)
    return total


@given(configs(), configs(), st.integers(1, 4096), st.integers(1, 9), st.integers(0, 9))
def test_training_flops_sum_over_phases(first, second, sequence, tokens, more):
    training = TrainingConfig(tokens + more, 3, sequence)
    run = Phase(0, tokens, first, False), Phase(tokens, tokens + more, second, False)
    each = [cost.flops_per_token(model, sequence).total for model in (first, second)]
    expected = 3 * sequence * (tokens * each[0] + more * each[1])
    assert phases_flops(run, EvolutionConfig(), training) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["drop:0.4", "grow:0.25", "constant"])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_flops_of_a_run_are_those_of_its_steps(text, rank):
    """The report adds up what the log says of each step, whatever the depth of its steps."""
    model = dataclasses.replace(SIZES["pico"], num_layers=12)
    low_rank = {"mlp_in": LinearSpec(rank=rank)} if rank else {}
    model = dataclasses.replace(model, linears=low_rank)
    training = TrainingConfig(600, 2, 64, adapter_rank=rank)
    schedule = DepthSchedule.parse(text)
    spent = sum(
        2 * 64 * token_flops(model, training, depth=len(schedule.active(12, n, 600, 7)) / 12)
        for n in range(600)
    )
    run = Phase(0, 200, model, False), Phase(200, 600, model, False)
    planned = phases_flops(run, EvolutionConfig(), training, depth=schedule)
    assert planned == pytest.approx(spent, rel=0.02 if "drop" in text else 1e-9)
    if text != "constant":
        assert planned < 0.9 * phases_flops(run, EvolutionConfig(), training)


@given(configs(), st.integers(1, 4096))
def test_gradient_norms_cost_two_passes_and_the_dense_products(config, sequence):
    forward = cost.flops_per_token(config, sequence, training=False)
    flops = cost.gradient_norms_flops(config, 3, sequence) / 3
    dense = cost.flops_per_token(dataclasses.replace(config, linears={}), sequence, training=False)
    products = sum(dense.sections[name] for name in config.sparse_projections)
    assert flops == pytest.approx(2 * forward.total + forward.attention + products)
    assert flops <= cost.flops_per_token(config, sequence).total + products + 1


def test_mfu_is_rate_over_peak_and_none_without_a_peak():
    speed, a100 = 312e12 / 1e9 / 2, CHIPS["a100-80gb"]
    for devices in (1, 4, 64):
        mfu = cost.mfu(1e9, devices * speed, a100, "bfloat16", devices=devices)
        assert mfu == pytest.approx(0.5)
    assert cost.mfu(1e9, 1e3, Chip("unheard-of"), "bfloat16", devices=1) is None
    assert cost.mfu(1e9, 1e3, CHIPS["tpu-v4"], "float64", devices=1) is None


def test_a_sequence_without_tokens_is_refused():
    with pytest.raises(UserError, match="legal: 1 or more"):
        cost.flops_per_token(SIZES["nano"], 0)
