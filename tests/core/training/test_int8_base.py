"""Adapters on weights in int8: the product, what is trained, the plan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some
from test_adapters import BASES, BATCH, DENSE, TOKENS, TRAINING, same_bits, start

from sparse_dataflow.commands.preflight.settling import settle
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import adapters
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.step import abstract_state, make_train_step
from sparse_dataflow.core.weights.dense import Quantised
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import machines
from sparse_dataflow.planner import memory
from sparse_dataflow.planner.search import ROOMY
from sparse_dataflow.runs import adapted_model
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants

INT8 = dataclasses.replace(TRAINING, frozen_dtype="int8")
each_dense_base = pytest.mark.parametrize("name", some(["dense", "llama", "bfloat16"], "llama"))


def kernels(params):
    return {name: m["kernel"] for name, m in params["blocks"].items() if "kernel" in m}


@pytest.mark.parametrize("seed", range(3))
def test_the_numbers_are_those_of_qwix(seed):
    qwix = pytest.importorskip("qwix")
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(2, 24, 10)).astype("f4") * 10.0 ** rng.integers(-9, 9, (2, 1, 10))
    kernel[0, :, 3] = 0
    kernel = kernel.astype("f4")
    numbers, scale = Quantised.arrays_of_dense({"kernel": kernel}).values()
    expected = qwix.quantize(jnp.asarray(kernel), "int8", channelwise_axes=(0, 2))
    filled = np.asarray(np.any(kernel != 0, axis=1))
    np.testing.assert_allclose(scale[filled], expected.scale[:, 0][filled], rtol=1e-6)
    apart = np.abs(numbers.astype(int) - np.asarray(expected.qvalue).astype(int))
    assert apart.max() <= 1 and apart.mean() < 2e-2  # Ties are rounded either way.
    error = np.abs(numbers * scale[:, None] - kernel)
    assert (error <= scale[:, None] * (0.5 + 1e-5)).all() and not numbers[0, :, 3].any()
    again = Quantised.arrays_of_dense({"kernel": jnp.asarray(kernel)})
    assert same_bits(again["kernel"], numbers)


@each_dense_base
def test_logits_are_those_of_the_scaled_weights(name):
    model, state, _ = start(BASES[name], INT8)
    params = jax.tree.map(lambda p: p + 0.1, state.params)
    state = state._replace(params=params)
    assert {k.dtype for k in kernels(state.rest).values()} == {jnp.dtype("int8")}
    wide, dense = adapters.dequantised(model, state.merged)
    assert {k.dtype for k in kernels(dense).values()} == {jnp.dtype("float32")}
    logits = lambda model, params: whole.logits(model, weights_of(model, params), TOKENS)  # noqa: E731
    ours, expected = logits(model, state.merged), logits(wide, dense)
    tolerance = 0.05 if name == "bfloat16" else 1e-5
    np.testing.assert_allclose(ours, expected, atol=tolerance * np.abs(expected).max())


@each_dense_base
def test_training_changes_every_factor_and_no_bit_of_the_base(name):
    model, state, _ = start(BASES[name], INT8)
    step = jax.jit(make_train_step(model, INT8))
    before = jax.device_get(state)
    for _ in range(2):
        state, report = step(state, BATCH, np.float32(1e-2))
    assert same_bits(before.rest, state.rest) and np.isfinite(report.loss)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before.params, state.params)
    assert all(jax.tree.leaves(moved))
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    assert names == {"a_kernel", "b_kernel"}


def test_gradients_are_those_of_the_scaled_weights():
    model, state, _ = start(DENSE, INT8)
    wide, dense = adapters.dequantised(model, state.merged)
    plain = dataclasses.replace(INT8, frozen_dtype="compute")
    frozen = {**dense, "blocks": {
        name: {leaf: a for leaf, a in module.items() if leaf not in ("a_kernel", "b_kernel")}
        for name, module in dense["blocks"].items()
    }}  # fmt: skip
    after = [
        jax.jit(make_train_step(m, t))(s, BATCH, np.float32(1e-2))
        for m, t, s in ((model, INT8, state), (wide, plain, state._replace(rest=frozen)))
    ]
    for norm, expected in zip(*(jax.tree.leaves(r.gradient_norms) for _, r in after), strict=True):
        np.testing.assert_allclose(norm, expected, rtol=1e-4)
    np.testing.assert_allclose(after[0][1].loss, after[1][1].loss, rtol=1e-6)


@pytest.mark.parametrize("name", ["dense", "llama", "bfloat16"])
def test_the_plan_counts_the_bytes_of_the_arrays(name):
    model = adapted_model.with_adapters(BASES[name], INT8.adapter_rank, "int8")
    state = abstract_state(model, INT8)
    arrays = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.rest))
    assert memory.frozen_bytes(model) == arrays


LLAMA_2 = {
    "7b": {},
    "13b": {"num_layers": 40, "d_model": 5120, "num_heads": 40, "num_kv_heads": 40, "d_ff": 13824},
}
"""Size -> fields in which it differs from Llama 2 7B."""


def planned(size, frozen_dtype):
    """Returns the plan of adapters on Llama 2, whole context, on one GPU of 24 GB."""
    base = preset("llama3-8b", compute_dtype="bfloat16").dense()
    shape = {"num_kv_heads": 32, "d_ff": 11008, "vocab_size": 32000, "tied_embeddings": False}
    base = base.change(**{f"model__{n}": v for n, v in (shape | LLAMA_2[size]).items()})
    base = base.change(
        training__sequence=4096, training__batch=8, training__adapter_rank=16,
        training__frozen_dtype=frozen_dtype, run__init_from="folder", run__twin="no",
    )  # fmt: skip
    return settle(base, machines.parse("rtx-4090"))


def test_a_model_of_7b_fits_one_gpu_of_24_gb_by_plan():
    """The bytes of the base halve, and the plan has room; see docs/guide/finetuning_memory.md."""
    int8, compute = planned("7b", "int8"), planned("7b", "compute")
    [model] = variants(int8.config)
    assert 6.7e9 < cost.parameter_count(model.model) < 6.9e9
    assert int8.share <= ROOMY and not int8.tight
    sizes, wide = (result.request.memory(result.plan) for result in (int8, compute))
    assert all(float(size) >= 0 for size in sizes.categories.values())
    assert wide.parameters - sizes.parameters > 6e9
    assert int8.request.memory(compute.plan).total < wide.total - 6e9


def test_a_model_of_13b_fits_24_gb_in_int8_alone():
    int8 = planned("13b", "int8")
    assert int8.share <= ROOMY and not int8.tight
    with pytest.raises(UserError, match=r"needs \d+ GiB on one rtx-4090"):
        planned("13b", "compute")


def test_stored_blocks_are_refused():
    with pytest.raises(
        UserError,
        match=r"attn_out: .*frozen_dtype=int8 does not go with block-sparse weights; legal: c",
    ):
        adapted_model.with_adapters(BASES["sparse"], 3, "int8")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"training__adapter_rank": 0}, "stores frozen weights; legal with training.adapter_rank"),
        ({"training__frozen_dtype": "int4"}, "Legal: compute, int8"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words):
    config = preset("pico").dense().change(run__init_from="folder", training__adapter_rank=2)
    with pytest.raises(UserError, match=words):
        config.change(**{"training__frozen_dtype": "int8", **changes})
