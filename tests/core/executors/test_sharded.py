"""What a mesh gathers and exchanges, by the program of a step."""

import pytest
from compared import assert_like_single_device, executor_run
from executor_runs import BATCH, MODELS, SEQUENCE

from sparse_dataflow.planner import collectives
from sparse_dataflow.planner.parallel_plan import ParallelPlan

nightly = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    ["multi_query", *(pytest.param(m, marks=nightly) for m in ("dense", "llama", "experts"))],
)
def test_the_axis_tensor_gathers_activations_alone(model):
    [shapes] = executor_run("gathers", model, "data:2,tensor:4/0/2").values()
    # Rows of 8 tokens, of width 32.
    assert set(shapes) <= {f"{BATCH // 2 // 2}x{SEQUENCE}x32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text"),
    [
        # The model over stages, and these axes with a capacity, are in other cases.
        pytest.param("experts", "data:2,fsdp:4/3/1", marks=nightly),
        ("experts_sparse", "data:4,fsdp:2/3/1"),
        ("experts_capacity", "data:2,fsdp:4/3/2"),
    ],
)
def test_tokens_travel_to_experts_by_the_all_to_alls_of_the_formula(model, text):
    results = executor_run("compare", model, f"exchange,{text}")
    assert_like_single_device(results)
    [result], config = results.values(), MODELS[model]
    tokens = BATCH * SEQUENCE // 8 // int(text[-1])
    plan = ParallelPlan(fsdp=int(text[12]), experts="exchange")
    size = collectives.exchange_bytes(config, tokens, plan)
    rows = config.num_layers * collectives.EXCHANGES[config.remat]
    sizes = result["exchanged"]
    assert sizes.count(size) == rows
    # The others tell how many rows each expert has.
    others = [other for other in sizes if other != size]
    assert others and set(others) == {4 * config.experts}
    # Weights of experts have one more dimension than the others.
    dimensions = 4 if config.linears else 3
    assert all(shape.count("x") + 1 < dimensions for shape in result["gathered"])


GROUP_SHAPES = {"16x48", "16x16", "16x32", "32x16"}
"""Of the model "sparse": groups of qkv, attn_out, mlp_in and mlp_out."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "sparse_mlp",
        *(pytest.param(m, marks=nightly) for m in ("sparse", "sparse_rank")),
    ],
)
def test_muon_gathers_matrices_of_groups_and_no_single_blocks(model):
    texts = ["data:2,fsdp:2,tensor:2/3/2", "stage:2,fsdp:2,tensor:2/2/2/1f1b/1"]
    muon, adamw = (executor_run("gathers", name, *texts) for name in (f"{model}+muon", model))
    for text in texts:
        more = set(muon[text]) - set(adamw[text])
        matrices = {"x".join(shape.split("x")[-2:]) for shape in more}
        if model == "sparse_mlp":  # The compiler chooses which parts of dense kernels it gathers.
            assert matrices and "8x8" not in matrices
        else:
            assert matrices <= (GROUP_SHAPES if model == "sparse" else set()), more


def test_sub_batches_of_a_stage_have_products_of_their_own():
    one, two = (f"{halves}on:2,stage:2/0/2/1f1b/1" for halves in ("", "halves,"))
    counts = executor_run("products", "dense", one, two)
    assert counts[two] > 1.5 * counts[one]
