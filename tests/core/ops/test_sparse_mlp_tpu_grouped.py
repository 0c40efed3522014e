"""The grouped sparse MLP's TPU kernels beyond the shared suite: tiles, and who takes them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_operands import layout_of
from marks import some
from mlp_operands import assert_close, draw_gated, draw_operands, exact, exact_gated
from simulated import simulated_tpu, targeted_tpu

from sparse_dataflow.chips.tpu import grouped_mlp as kernels
from sparse_dataflow.chips.tpu import grouped_mlp_tuning as tuning_grouped
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.layouts.layout import Groups
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.ops.block_sparse_matmul.cut_tables import cut_columns, cut_rows
from sparse_dataflow.core.ops.sparse_mlp import mlp_op as api
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import Operands
from sparse_dataflow.runs.families import FAMILIES

IN, OUT = Groups(2, in_run=1, out_run=2), Groups(2, in_run=2, out_run=1)
"""Inputs and outputs at a stride, runs of two hidden blocks."""

SMALL_TILES = tuning_grouped.GroupedMlpTuning(
    forward=tuning_grouped.MlpForwardTiles(tokens=64, rows=48),
    backward=tuning_grouped.MlpBackwardTiles(tokens=128, chunk=256),
    vmem_bytes=16 << 20,
    cores=2,
)


@pytest.mark.parametrize(
    ("tokens", "dtype", "chip", "tuning"),
    some(
        {
            "overlapping tiles": (144, "bfloat16", ("TPU v6 lite", 1), None),
            "small tiles over two cores": (200, "float32", ("TPU v5", 2), SMALL_TILES),
            "early copies": (300, "float32", ("TPU v5", 2, "eager"), SMALL_TILES),
        },
        "overlapping tiles", "small tiles over two cores",
    ),
)  # fmt: skip
@pytest.mark.parametrize("gate", some([None, "gelu", "silu"], "silu"))
def test_aligned_groups_agree_with_the_dense_mlp(gate, tokens, dtype, chip, tuning):
    layouts = layout_of(IN, 4, 8, 128), layout_of(OUT, 8, 4, 128)
    tables = [layout.tables().with_groups() for layout in layouts]
    operands, dy = (draw_gated if gate else draw_operands)(layouts, (tokens,), dtype)
    expected = exact_gated(operands, dy, layouts, gate) if gate else exact(operands, dy, layouts)

    def run(x, values_in, bias_or_gate, values_out):
        bias, gating = (None, (bias_or_gate, gate)) if gate else (bias_or_gate, ())
        mlp = Operands(x, values_in, bias, values_out, *tables, *gating)
        return kernels.run_sparse_mlp(mlp, tuning=tuning)

    def both(operands, dy):
        y, pull = jax.vjp(run, *operands)
        return y, *pull(dy)

    with simulated_tpu(*chip):
        actual = jax.jit(both)(operands, dy)
    assert_close(actual, expected, dtype)


def structs(count, tokens=2048):
    shapes = (tokens, 5120), (count, 5120 // count, 20480 // count), (20480,)
    x, first, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return x, first, bias, jax.ShapeDtypeStruct((count, *first.shape[:0:-1]), jnp.bfloat16)


@pytest.mark.parametrize("chip", [("TPU v5 lite", 1), ("TPU v5", 2), ("TPU v6 lite", 1)])
def test_13b_is_fused_where_vmem_is_large(chip):
    x, first, _, second = structs(8)
    with targeted_tpu(*chip):
        tiles = kernels.default_tuning(x, first, second)
    assert tiles.forward.tokens >= 512 and tiles.backward.tokens >= 256


def test_the_forward_pass_never_writes_the_hidden_layer(array_sizes):
    operands = structs(8, tokens=64)
    hidden = 64 * 20480
    groups = Groups(8, 1, 20), Groups(8, 20, 5)
    run = lambda *o: kernels.grouped_mlp(*o, *groups, block=128)  # noqa: E731
    with targeted_tpu():
        assert hidden not in array_sizes(run, *operands)


def test_illegal_groups_are_refused():
    def reason(first, second, groups_out=OUT):
        x, *weights = (jax.ShapeDtypeStruct(s, "f4") for s in ((8, 2 * first[1]), first, second))
        with targeted_tpu("TPU v4"):
            return kernels.groups_refusal(x, *weights, IN, groups_out, block=128)

    legal = (2, 128, 256), (2, 256, 128)
    assert reason(*legal) == ""
    other = Groups(2, in_run=1, out_run=1)
    assert "legal: as many groups, with the same hidden blocks" in reason(*legal, other)
    assert "do not fit VMEM; legal: more groups" in reason((2, 1024, 1024), (2, 1024, 1024))


@pytest.mark.parametrize("shards", some([1, 2], 2))
def test_stored_blocks_of_monarch_and_of_its_shards_take_the_fused_kernels(shards):
    sides = (512, 1024), (1024, 512)
    layouts = [make_layout("monarch", *side, 128, 1 / 2) for side in sides]
    (x, values_in, bias, values_out), dy = draw_operands(layouts, (32,), "float32")
    cut_in, cut_out = cut_columns(layouts[0], shards), cut_rows(layouts[1], shards)
    y = np.zeros_like(dy)
    for shard in range(shards):
        tables = [
            jax.tree.map(lambda table: jnp.asarray(table[shard]), cut.tables.with_groups())  # noqa: B023
            for cut in (cut_in, cut_out)
        ]
        stored = [
            np.split(values[cut.order], shards)[shard]
            for values, cut in ((values_in, cut_in), (values_out, cut_out))
        ]
        local_bias = np.split(bias, shards)[shard]
        with simulated_tpu():
            y += jax.jit(api.sparse_mlp, static_argnums=6)(
                x, stored[0], local_bias, stored[1], *tables, "pallas_tpu_grouped"
            )
    assert_close([y], [exact((x, values_in, bias, values_out), dy, layouts)[0]], "float32")


LLAMA = ModelConfig(1, 512, 2, 1024, 64, 16, **FAMILIES["llama"]).with_linears(
    LinearSpec("block_sparse", "monarch", 0.5, 128), ["mlp_gate", "mlp_in", "mlp_out"]
)


def block_of(config):
    """Return a function (weights, x) -> output of the config's block, without attention, and both.

    Tables are traced, as in a scan over layers.
    """
    params = gpt.init(config, jax.random.key(0))
    stacked = merged(params, stacks.with_groups(stacks.stored_layouts(config)))["blocks"]
    layer = jax.tree.map(lambda leaf: leaf[0], stacked)
    x = np.random.default_rng(0).normal(size=(2, 16, config.d_model)).astype(np.float32)

    def apply(layer, x):
        weights = layer_weights(config, layer)
        return gpt.block(config, weights, x, attend=lambda q, k, v, window, cap: q)[0]

    return apply, (layer, x)


def test_a_block_of_llama_takes_the_fused_kernel():
    apply, operands = block_of(LLAMA)
    expected = apply(*operands)
    with simulated_tpu():
        actual = jax.jit(apply)(*operands)
    np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "kernels_called"),
    [
        ({}, 1),
        *(
            pytest.param({"activation": name}, 1, marks=pytest.mark.slow)
            for name in ("gelu", "relu")
        ),
        ({"activation": "gelu_exact"}, 0),
        ({"biases": ("mlp_in",)}, 0),
        ({"linears": {**dict(LLAMA.linears), "mlp_gate": LinearSpec()}}, 0),
        ({"linears": {**dict(LLAMA.linears), "mlp_gate": LinearSpec("block_sparse", "dense")}}, 0),
    ],
)
def test_the_fused_kernel_is_called_for_plain_gated_mlps(changes, kernels_called):
    apply, operands = block_of(dataclasses.replace(LLAMA, **changes))
    with targeted_tpu():
        program = str(jax.make_jaxpr(apply)(*operands))
    assert program.count("name=grouped_mlp") == kernels_called


def test_shards_of_a_gated_mlp_run_as_products():
    """Their traced tables do not tell at compile time that both layouts have equal first groups."""
    layouts = [make_layout("monarch", *side, 128, 0.5) for side in ((512, 1024), (1024, 512))]
    cuts = cut_columns(layouts[0], 2), cut_columns(layouts[0], 2), cut_rows(layouts[1], 2)
    tables = [cut.tables.with_groups() for cut in cuts]
    first = [jax.tree.map(lambda table: table[0], each) for each in tables]
    values = [jnp.ones((len(cut.order) // 2, 128, 128)) for cut in cuts]
    x = jnp.ones((16, 512))
    with targeted_tpu():
        for place, chosen in ((first, True), (jax.tree.map(jnp.asarray, first), False)):
            run = lambda x, values, place=place: api.gated_sparse_mlp(x, values, place, "silu")  # noqa: E731
            assert (jax.eval_shape(run, x, values) is not None) == chosen
