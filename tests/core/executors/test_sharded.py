"""A training over a mesh equals one on a single device, and "tensor" gathers no weights."""

import random

import pytest
from mesh_training import BATCH, MODELS, SEQUENCE
from mesh_trainings import (
    assert_like_single_device,
    mesh_training,
)

from sparse_dataflow.planner import collectives

_NIGHTLY = pytest.mark.nightly
"""Of cases whose model, axes and method are each in another case that is not nightly."""

SHAPES = [
    (data, fsdp, tensor)
    for data in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    for tensor in (1, 2, 4)
    if data * fsdp * tensor == 8
]


def mesh_text(shape, zero=3, micro_batches=1):
    data, fsdp, tensor = shape
    return f"data:{data},fsdp:{fsdp},tensor:{tensor}/{zero}/{micro_batches}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ("dense", ["data:2,tensor:4/0/2"]),
        ("sparse", ["data:2,fsdp:2,tensor:2/2/2"]),
        ("shared", ["data:2,fsdp:2,tensor:2/3/2"]),
        ("low_rank+muon", ["stage:2,fsdp:2,tensor:2/3/2/gpipe/1"]),
        # Also axes longer than there are key/value heads: 2 and 1.
        ("llama", ["data:2,tensor:4/0/1"]),
        ("qwen3", ["stage:2,data:2,tensor:2/1/2/zero_bubble/1"]),
        ("multi_query", ["data:2,tensor:4/0/1"]),
        ("gemma2", ["data:2,fsdp:2,tensor:2/3/2"]),
        # Micro-batches of a mesh have other rows, and the load-balance loss is theirs.
        ("experts", ["data:2,tensor:4/0/1"]),
        ("experts_sparse", ["fsdp:2,stage:2,tensor:2/3/1/1f1b/1"]),
        # Rows whose ends are padding, as data.loss=answers has them.
        ("experts_alone+answers", ["data:2,fsdp:2,tensor:2/3/1"]),
        ("experts+answers", ["data:2,fsdp:2,tensor:2/2/1"]),
        # Each axis, schedule and model of these is in a case above or of the next tests;
        # sparse_depth is in test_feature.py.
        *(
            pytest.param(model, texts, marks=_NIGHTLY)
            for model, texts in (
                ("sparse_rank", ["data:2,tensor:4/0/1"]),
                ("sparse_depth", ["data:2,fsdp:2,tensor:2/3/2"]),
                ("low_rank+muon", ["data:2,fsdp:2,tensor:2/3/2"]),
                ("experts", ["stage:2,fsdp:2,tensor:2/3/1/1f1b/1"]),
                ("llama", ["data:2,fsdp:2,tensor:2/3/2", "stage:2,tensor:4/3/2/1f1b/1"]),
                ("llama", ["stage:2,fsdp:2,tensor:2/3/2/1f1b/1"]),
                ("qwen3", ["data:4,tensor:2/0/1", "stage:2,tensor:4/1/2/zero_bubble/1"]),
                ("qwen3", ["fsdp:2,tensor:4/3/2"]),
                ("gemma3", ["data:2,tensor:4/0/1"]),
                ("multi_query", ["data:2,fsdp:2,tensor:2/3/2"]),
                ("experts_sparse", ["stage:2,fsdp:4/2/1/1f1b/1", "data:2,tensor:4/0/1"]),
                ("experts_sparse", ["data:2,fsdp:4/3/1"]),
            )
        ),
    ],
)
def test_eight_devices_train_like_a_single_one(model, texts):
    results = mesh_training("compare", model, *texts)
    assert_like_single_device(results)
    for text, errors in results.items():
        if "fsdp" not in text and "stage" not in text:
            # "tensor" gathers activations alone: rows of 8 tokens, of width 32.
            rows = 16 // int(text[5]) // int(text[-1])
            assert set(errors["gathered"]) <= {f"{rows}x8x32"}, errors["gathered"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text"),
    [
        # The model over stages, and these axes with a capacity, are in other cases.
        pytest.param("experts", "data:2,fsdp:4/3/1", marks=_NIGHTLY),
        ("experts_sparse", "data:4,fsdp:2/3/1"),
        ("experts_capacity", "data:2,fsdp:4/3/2"),
    ],
)
def test_tokens_travel_to_experts_by_the_all_to_alls_of_the_formula(model, text):
    results = mesh_training("compare", model, f"exchange,{text}")
    assert_like_single_device(results)
    [of_text], config = results.values(), MODELS[model]
    tokens = BATCH * SEQUENCE // 8 // int(text[-1])
    size = collectives.exchange_bytes(config, tokens, int(text[12]))
    rows = config.num_layers * collectives.EXCHANGES[config.remat]
    sizes = of_text["exchanged"]
    assert sizes.count(size) == rows
    # The others tell how many rows each expert has.
    others = [other for other in sizes if other != size]
    assert others and set(others) == {4 * config.experts}
    # Weights of experts have one more dimension than the others.
    dimensions = 4 if config.linears else 3
    assert all(shape.count("x") + 1 < dimensions for shape in of_text["gathered"])


@pytest.mark.slow
def test_tokens_travel_to_experts_in_a_pipeline_of_tensor_parallel_stages():
    text = "exchange,stage:2,fsdp:2,tensor:2/3/1/1f1b/1"
    assert_like_single_device(mesh_training("compare", "experts", text))


@pytest.mark.slow
def test_a_checkpoint_moves_between_meshes_with_and_without_travelling_tokens():
    whole, staged = "exchange,data:2,fsdp:4/3/1", "exchange,stage:2,data:2,fsdp:2/3/1/1f1b/1"
    results = mesh_training("move", "experts_sparse", whole, "fsdp:8/1/1", staged)
    assert all(results.values()), results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ("llama+adapters", ["data:2,fsdp:2,tensor:2/3/2"]),
        ("dense+int8", ["fsdp:2,feature:2,tensor:2/3/1"]),
        pytest.param("llama+adapters", ["data:2,tensor:4/0/1", "fsdp:8/2/1"], marks=_NIGHTLY),
        pytest.param("dense+int8", ["data:2,tensor:4/0/1", "fsdp:8/3/2"], marks=_NIGHTLY),
        pytest.param(
            "sparse_depth+adapters",
            ["data:2,fsdp:2,tensor:2/3/2", "fsdp:8/2/1"],
            marks=_NIGHTLY,
        ),
    ],
)
def test_adapters_train_over_a_mesh_as_on_a_single_device(model, texts):
    assert_like_single_device(mesh_training("compare", model, *texts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ("dense", ["on:2,data:2/0/1", "on:2,fsdp:2/3/1", "on:4,data:2,tensor:2/1/2"]),
        ("dense_odd", ["on:2,tensor:2/0/1", "on:4,fsdp:4/3/2", "on:4,stage:2,fsdp:2/2/2/1f1b/1"]),
        ("sparse", ["on:4,fsdp:2,tensor:2/3/1"]),
    ],
)
def test_rows_of_new_tokens_alone_are_trained_first_over_a_mesh_as_on_one_device(model, texts):
    assert_like_single_device(mesh_training("compare", f"{model}+new_rows", *texts))


GROUP_SHAPES = {"16x48", "16x16", "16x32", "32x16"}
"""Of the model "sparse": groups of qkv, attn_out, mlp_in and mlp_out."""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", pytest.param("fp8", marks=_NIGHTLY)])
def test_quantised_products_over_a_mesh_equal_one_device_to_the_rounding_of_8_bits(precision):
    """A shard scales what it holds, so it rounds otherwise."""
    pytest.importorskip("qwix", reason="quantised products need the extra quantized")
    texts = ["data:2,fsdp:2,tensor:2/3/1", "stage:2,fsdp:2,tensor:2/2/2/1f1b/1"]
    for text, errors in mesh_training("compare", precision, *texts).items():
        assert 0 < max(errors["losses"], errors["eval"]) < 2e-3, (text, errors)
        assert errors["norms"] < 0.05, (text, errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    ["sparse_mlp", *(pytest.param(m, marks=_NIGHTLY) for m in ("sparse", "dense", "sparse_rank"))],
)
def test_muon_trains_over_a_mesh_as_on_a_single_device(model):
    """A dense kernel and a group are one matrix on all devices; single blocks stay in place."""
    texts = ["data:2,fsdp:2,tensor:2/3/2", "stage:2,fsdp:2,tensor:2/2/2/1f1b/1"]
    results = mesh_training("compare", f"{model}+muon", *texts)
    assert_like_single_device(results)
    if model != "dense":
        adamw = mesh_training("gathers", model, *texts)
        for text in texts:
            more = set(results[text]["gathered"]) - set(adamw[text])
            matrices = {"x".join(shape.split("x")[-2:]) for shape in more}
            if (
                model == "sparse_mlp"
            ):  # The compiler chooses which parts of dense kernels it gathers.
                assert "8x8" not in matrices
            else:
                assert matrices <= (GROUP_SHAPES if model == "sparse" else set()), more


@pytest.mark.slow
def test_a_student_learns_over_a_mesh_as_on_a_single_device():
    assert_like_single_device(mesh_training("compare", "sparse+teacher", "data:2,fsdp:4/3/2"))


@pytest.mark.slow
def test_a_state_in_bfloat16_trains_over_a_mesh_as_on_a_single_device():
    texts = ["data:2,fsdp:2,tensor:2/3/2", "stage:2,fsdp:4/2/2/1f1b/1"]
    for text, errors in mesh_training("compare", "dense+bfloat16", *texts).items():
        # Each device's share is rounded by up to 2^-8 and may exceed the sum; a second moment has
        # twice that error, and is rounded too.
        assert max(errors["losses"], errors["eval"]) < 1e-3, (text, errors)
        assert errors["norms"] < 2.0**-6 and errors["first moments"] < 2.0**-4, (text, errors)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["dense", "dense_odd", "sparse", "sparse_rank", "sparse_depth"])
@pytest.mark.parametrize("zero", range(4))
def test_every_mesh_and_zero_trains_like_a_single_device(model, zero):
    draw = random.Random(f"{model}{zero}")
    texts = [mesh_text(shape, zero, draw.choice((1, 2))) for shape in SHAPES]
    assert_like_single_device(mesh_training("compare", model, *texts))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "rigl+depth",
        *(
            pytest.param(method, marks=_NIGHTLY)
            for method in (
                "rigl+llama",
                "self_guided+llama",
                "rigl",
                "set",
                "gradual",
                "sparse_to_dense",
                "sparse_to_dense+depth",
                "low_rank_tail",
                "self_guided",
            )
        ),
    ],
)
def test_layouts_evolve_over_a_mesh_as_on_a_single_device(method):
    # With parts of a batch, the norms that choose blocks are those of the whole.
    halves = "halves," if method == "rigl+depth" else ""
    mesh = "data:2,tensor:4/0/1" if method.endswith("llama") else "data:2,fsdp:2,tensor:2/3/1"
    [errors] = mesh_training("evolve", method, halves + mesh).values()
    assert errors["layouts"] == 0
    assert errors["losses"] < 1e-5 and errors["params"] < 1e-2, errors


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param("sparse", marks=_NIGHTLY), "sparse_depth"])
def test_a_checkpoint_moves_between_any_two_meshes(model):
    draw = random.Random(0)
    shapes = draw.sample(SHAPES, 3)
    results = mesh_training(
        "move",
        model,
        *(mesh_text(shape, draw.randrange(4)) for shape in shapes),
    )
    assert results.pop("None devices") == 1
    assert all(results.values()), results
    assert [n for name, n in results.items() if name.endswith("devices")] == [8] * 3


@pytest.mark.slow
def test_a_checkpoint_has_one_copy_of_each_key_value_head():
    texts = [f"{axes}/3/1" for axes in ("data:8", "fsdp:2,tensor:4", "fsdp:4,tensor:2")]
    results = mesh_training("move", "llama", *texts, "stage:2,tensor:4/2/1/1f1b/1")
    assert all(results.values()), results


@pytest.mark.slow
def test_a_checkpoint_has_no_vocabulary_padding():
    # No tensor axis divides its 45 tokens.
    texts = ["data:2,fsdp:2,tensor:2/3/1", "stage:2,tensor:4/2/1/1f1b/1"]
    results = mesh_training("move", "dense_odd", *texts)
    assert all(results[text] for text in (*texts, "None")), results
