"""Parameter counts against GPT-3's, bytes by category, and which scale fits."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import some

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import SparsityConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.training import cost
from sparse_dataflow.planner import memory, plan_memory, scales
from sparse_dataflow.runs.families import FAMILIES
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

EIGHTH = dict.fromkeys(PROJECTIONS, LinearSpec("block_sparse", density=1 / 8))
GIB = 2**30


def training_bytes(config, rows, sequence, accumulation=1, fused_attention=False):
    training = TrainingConfig(
        batch=rows * accumulation, sequence=sequence, micro_batches=accumulation
    )
    return plan_memory.training_bytes(config, training, fused_attention)


@st.composite
def configs(draw):
    heads = draw(st.integers(1, 4))
    d_model = heads * 64 * draw(st.integers(1, 4))
    spec = st.builds(
        LinearSpec,
        st.just("block_sparse"),
        density=st.sampled_from([1 / 16, 1 / 8, 0.5, 1.0]),
        rank=st.sampled_from([0, 32]),
    )
    return ModelConfig(
        num_layers=draw(st.integers(1, 6)),
        d_model=d_model,
        num_heads=heads,
        d_ff=d_model * draw(st.integers(1, 4)),
        vocab_size=draw(st.integers(256, 60_000)),
        max_len=draw(st.integers(1, 4096)),
        linears=draw(st.dictionaries(st.sampled_from(PROJECTIONS), spec)),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        positions=draw(st.sampled_from(["learned", "rotary"])),
        remat=draw(st.sampled_from(["none", "keep", "full"])),
        compute_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


@pytest.mark.parametrize(
    ("scale", "published", "tolerance"),
    [
        ("125m", 125e6, 0.01),
        ("350m", 356e6, 0.01),
        ("1.3b", 1.3e9, 0.02),
        ("6.7b", 6.7e9, 0.01),
        ("13b", 12.925e9, 0.0058),  # 12.85 to 13.0
        ("22b", 22e9, 0.02),
        ("175b", 175e9, 0.01),
        ("1t", 1e12, 0.03),
    ],
)
def test_parameters_of_gpt3s_and_frontiers_sizes(scale, published, tolerance):
    assert cost.parameter_count(SIZES[scale]) == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize(
    ("scale", "published"),
    [
        ("llama3-1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_parameters_of_published_checkpoints_to_the_last_one(scale, published):
    assert cost.parameter_count(SIZES[scale]) == published


@pytest.mark.parametrize("scale", ["llama3-1b", "llama3-8b", "qwen3-0.6b", "qwen3-8b"])
def test_blocks_of_the_preset_divide_published_widths(scale):
    model = dataclasses.replace(SIZES[scale], num_layers=1)
    model_layouts.layouts(dataclasses.replace(model, linears=SparsityConfig().linears(model)))


def test_parameters_of_a_small_model_counted_by_hand():
    config = ModelConfig(
        num_layers=2, d_model=128, num_heads=2, d_ff=512, vocab_size=1000, max_len=64
    )
    block = 4 * 128 + (128 * 384 + 384) + (128 * 128 + 128) + (128 * 512 + 512) + (512 * 128 + 128)
    dense = 1064 * 128 + 2 * block + 256
    assert cost.parameter_count(config) == dense
    rms = dataclasses.replace(config, norm="rmsnorm", positions="rotary")
    assert cost.parameter_count(rms) == dense - 64 * 128 - 5 * 128
    spec = LinearSpec("block_sparse", density=0.5, rank=8)
    low_rank = config.with_linears(spec, ("mlp_in",))
    added = 8 * (128 + 512) + 1 - 128 * 512 // 2
    assert cost.parameter_count(low_rank) == dense + 2 * added


@pytest.mark.parametrize(
    ("norm", "positions", "rank", "density"),
    [("layernorm", "learned", 0, 1 / 4), ("rmsnorm", "rotary", 16, 1 / 2)],
)
def test_the_parameter_count_equals_the_models(norm, positions, rank, density):
    config = ModelConfig(3, 512, 8, 2048, 300, 64, norm=norm, positions=positions)
    spec = LinearSpec("block_sparse", density=density, rank=rank)
    config = config.with_linears(spec, ("qkv", "mlp_in", "mlp_out"))
    drawn = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    expected = sum(leaf.size for leaf in jax.tree.leaves(drawn))
    assert cost.parameter_count(config) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused_qkv", [True, False])
def test_the_parameter_count_equals_the_models_in_every_family(family, fused_qkv):
    fields = {**FAMILIES[family], "num_kv_heads": 2, "head_dim": 48, "fused_qkv": fused_qkv}
    biases = {"biases": ("attn_out",)} if family == "qwen3" else {}
    config = ModelConfig(3, 512, 8, 2048, 300, 64, **{**fields, "biases": (), **biases})
    config = config.with_linears(LinearSpec("block_sparse", density=1 / 2, block=16, rank=3))
    drawn = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    expected = sum(leaf.size for leaf in jax.tree.leaves(drawn))
    assert cost.parameter_count(config) == expected


@given(configs(), st.integers(2, 5))
def test_parameters_scale_linearly_in_layers(config, times):
    def count(layers):
        return cost.parameter_count(dataclasses.replace(config, num_layers=layers))

    n = config.num_layers
    assert count(times * n) - count(n) == (times - 1) * (count(2 * n) - count(n))
    assert count(2 * n) > count(n)


@given(configs())
def test_density_one_stores_what_dense_stores(config):
    full = config.with_linears(LinearSpec("block_sparse", density=1.0))
    dense = dataclasses.replace(config, linears={})
    assert cost.parameter_count(full) == cost.parameter_count(dense)
    full_bytes, dense_bytes = (training_bytes(c, 1, 64) for c in (full, dense))
    assert dataclasses.replace(full_bytes, layout_tables=0) == dense_bytes
    assert full_bytes.layout_tables > 0


@given(configs(), st.integers(1, 8), st.integers(1, 512), st.integers(1, 4))
def test_totals_are_sums_of_categories(config, batch, sequence, accumulation):
    plan = training_bytes(config, batch, sequence, accumulation=accumulation)
    sizes = [getattr(plan, f.name) for f in dataclasses.fields(plan)]
    assert plan.total == sum(sizes)
    working = plan.activations + plan.working_set + plan.logits
    assert plan.state + plan.layout_tables + working == plan.total
    count = cost.parameter_count(config)
    assert plan.state - plan.working_copy == count * 4 * (4 + (accumulation > 1))


@given(configs(), st.integers(2, 6))
def test_working_copy_is_whole_without_remat_and_of_one_block_with_it(config, layers):
    def copy(**changes):
        changed = dataclasses.replace(config, **changes)
        return training_bytes(changed, 1, 16).working_copy

    deep = dataclasses.replace(config, num_layers=layers)
    assert copy(compute_dtype="float32") == 0
    whole_copy = copy(compute_dtype="bfloat16", remat="none", num_layers=layers)
    assert whole_copy == 2 * cost.parameter_count(deep)
    for remat in ("keep", "full"):
        partial = copy(compute_dtype="bfloat16", remat=remat, num_layers=layers)
        assert partial == copy(compute_dtype="bfloat16", remat="none", num_layers=1) < whole_copy


@given(configs(), st.integers(1, 8), st.integers(1, 512))
def test_activations_are_linear_in_the_batch_and_fall_with_remat(config, batch, sequence):
    config = dataclasses.replace(config, num_layers=4)
    once, twice = (training_bytes(config, b, sequence) for b in (batch, 2 * batch))
    assert twice.activations == 2 * once.activations
    assert twice.state == once.state
    none, keep, full = (
        training_bytes(dataclasses.replace(config, remat=r), batch, sequence).activations
        for r in ("none", "keep", "full")
    )
    assert none > keep > full
    fused = training_bytes(config, batch, sequence, fused_attention=True)
    total = lambda plan: plan.activations + plan.working_set  # noqa: E731
    # Statistics of a softmax are more than the scores of a few tokens.
    assert total(fused) < total(once) or sequence < 16


@pytest.mark.parametrize("remat", some(["none", "keep", "full"], "keep"))
@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({**FAMILIES["qwen3"], "num_kv_heads": 2}, marks=pytest.mark.slow)],
    ids=["gpt3", "qwen3"],
)
def test_activations_and_logits_agree_with_xla(remat, fields):
    layers = whole.UNROLL_LAYERS + 1  # scanned, as on an accelerator
    config = ModelConfig(layers, 256, 4, 1024, 512, 128, remat=remat, **fields)
    batch = 4
    params = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, config.max_len + 1), jnp.int32)
    step = jax.jit(
        lambda params, tokens: whole.loss_and_gradients(
            config, params, (), Batch.from_windows(tokens)
        )
    )
    compiled = step.lower(params, tokens).compile().memory_analysis()
    plan = training_bytes(config, batch, config.max_len)
    assert plan.parameters == pytest.approx(compiled.argument_size_in_bytes, rel=0.01)
    assert plan.gradients == pytest.approx(compiled.output_size_in_bytes, rel=0.01)
    planned = plan.activations + plan.working_set + plan.logits
    assert planned == pytest.approx(compiled.temp_size_in_bytes, rel=0.2)


def test_logits_take_the_memory_of_one_chunk():
    config = SIZES["125m"]
    large = training_bytes(config, 8, 2048)
    assert large.logits == 2048 * config.vocab_size * 4
    plan = training_bytes(config, 1, 16)
    assert plan.logits == 16 * config.vocab_size * 4


def test_table_shows_every_category_and_the_total():
    plan = scales.scale_estimate("13b", {})
    lines = plan.table().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        *(name.replace("_", " ") for name in plan.categories),
        "total",
    ]
    assert lines[-1].endswith("100.0%")
    assert f"{plan.total / GIB:.3f} GiB" in lines[-1]


def test_13b_needs_its_state_and_much_less_at_density_one_eighth():
    dense = scales.scale_estimate("13b", {})
    assert dense.state - dense.working_copy == 16 * cost.parameter_count(SIZES["13b"])
    assert dense.state < dense.total < 1.05 * dense.state
    assert scales.scale_estimate("13b", EIGHTH).total < dense.total / 5


@given(st.integers(0, 2**42), st.booleans())
def test_the_largest_fitting_scale_fits_and_the_next_does_not(memory_bytes, sparse):
    linears = EIGHTH if sparse else {}
    scale = scales.choose_scale(memory_bytes, "tpu", linears)
    capacity, candidates = memory_bytes * memory.USABLE, scales.LARGE_SCALES
    position = -1 if scale == "nano" else candidates.index(scale)
    if position >= 0:
        assert scales.scale_estimate(scale, linears).total <= capacity
    if position + 1 < len(candidates):
        assert scales.scale_estimate(candidates[position + 1], linears).total > capacity - 1


def test_large_scales_are_sizes_in_growing_order():
    counts = [cost.parameter_count(SIZES[scale]) for scale in scales.LARGE_SCALES]
    assert counts == sorted(counts)
    assert scales.LAPTOP_SCALE in SIZES


def test_auto_scale_uses_nine_tenths_of_the_memory_and_is_nano_on_a_cpu():
    need = scales.scale_estimate("1.3b", {}).total
    assert scales.choose_scale(math.ceil(need / 0.9) + 1, "gpu", {}) == "1.3b"
    assert scales.choose_scale(need, "gpu", {}) == "350m"
    assert scales.choose_scale(2**50, "cpu", {}) == "nano"
    assert scales.choose_scale(None, "tpu", {}) == "nano"
    assert scales.choose_scale(2**50, "tpu", {}) == "13b"


def test_scale_message_is_one_line_with_both_numbers():
    need = math.ceil(scales.scale_estimate("13b", {}).total / GIB)
    assert scales.scale_message(24 * GIB, "nano", {}) == (
        f"13B in training needs {need} GiB; this machine has 24: running the 'nano' scale; "
        "on a pod pass --scale=13b"
    )
    need = math.ceil(scales.scale_estimate("13b", EIGHTH).total / GIB)
    assert scales.scale_message(int(7.56 * GIB), "nano", EIGHTH) == (
        f"13B in training needs {need} GiB; this machine has 7.56: running the 'nano' scale; "
        "on a pod pass --scale=13b"
    )


def test_scale_message_names_speed_as_the_reason_on_a_cpu_with_enough_memory():
    assert "too slow" in scales.scale_message(512 * GIB, "nano", {})
    assert "pod" not in scales.scale_message(512 * GIB, "13b", {})


@pytest.mark.parametrize(
    ("gib", "needed", "usable"),
    [(1.5 / 0.9 * 0.9, "1.50", "1.50"), (1.536, "1.54", "1.53"), (33.4, "34", "33")],
)
def test_a_limit_keeps_its_digits_and_a_need_is_never_rounded_down(gib, needed, usable):
    assert scales.in_gib(gib * GIB, math.ceil) == needed
    assert scales.in_gib(gib * GIB, math.floor) == usable
