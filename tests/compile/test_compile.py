"""A tiny model's step, compiled: categories, FLOPs and collectives against counts by hand."""

import pytest
from compiled_steps import BATCH, MODEL, SEQUENCE, SPARSE
from eight_devices import on_eight_devices

from sparse_dataflow.core.training import cost
from sparse_dataflow.planner.parallel_plan import RECOMPUTED

TOKENS = BATCH * SEQUENCE
LAYERS, WIDTH = MODEL.num_layers, MODEL.d_model


@pytest.fixture(scope="module")
def compiled():
    """Text of `compiled_steps` -> the compiled step."""
    return on_eight_devices(
        "compile/compiled_steps.py",
        "/1/full/dense",
        "data:8/1/none/dense",
        "fsdp:4,tensor:2/2/full/sparse",
        "stage:4,tensor:2/4/full/dense",
    )


def parameters(config):
    return 4 * cost.parameter_count(config)


@pytest.mark.slow
def test_categories_sum_to_the_compilers_allocations(compiled):
    for text, step in compiled.items():
        sizes, allocated = step["bytes"], step["allocated"]
        results = allocated["output"] - allocated["alias"]
        whole = allocated["argument"] + results + allocated["temp"] + allocated["generated_code"]
        assert sum(sizes.values()) == whole, text
        assert min(sizes.values()) >= 0, (text, sizes)
        assert sizes["moments"] == pytest.approx(2 * sizes["parameters"], rel=1e-3)


@pytest.mark.slow
def test_categories_by_hand(compiled):
    single, data = (compiled[text]["bytes"] for text in ("/1/full/dense", "data:8/1/none/dense"))
    weights = parameters(MODEL)
    assert single["parameters"] == single["gradients"] == weights
    assert data["parameters"] == data["gradients"] == weights
    # Full remat saves a block's input; 20 layers are scanned on a CPU too.
    assert single["activations"] == 4 * TOKENS * LAYERS * WIDTH
    assert data["activations"] > single["activations"] / 8
    sharded = compiled["fsdp:4,tensor:2/2/full/sparse"]["bytes"]
    # Gradients of a micro-batch, and their sum.
    assert sharded["gradients"] == pytest.approx(2 * sharded["parameters"], rel=0.01)
    # Biases and norms are replicated.
    assert parameters(SPARSE) / 8 < sharded["parameters"] < parameters(SPARSE) / 5
    stage = compiled["stage:4,tensor:2/4/full/dense"]["bytes"]
    blocks = weights - 4 * (MODEL.vocab_size + MODEL.max_len) * WIDTH
    assert blocks / 8 < stage["gradients"] == pytest.approx(stage["parameters"], rel=0.01)


@pytest.mark.slow
def test_flops_equal_the_planners_with_recomputation(compiled):
    def expected(config, remat):
        # XLA's attention also computes the masked half.
        forward, step = (
            {**each.sections, "attention": 2 * each.attention}
            for each in (
                cost.flops_per_token(config, SEQUENCE, training=training)
                for training in (False, True)
            )
        )
        recomputed = sum(forward.get(name, 0.0) for name in RECOMPUTED[remat])
        return (sum(step.values()) + recomputed) * TOKENS

    assert compiled["/1/full/dense"]["flops"] == pytest.approx(expected(MODEL, "full"))
    assert compiled["data:8/1/none/dense"]["flops"] == pytest.approx(expected(MODEL, "none") / 8)
    sparse = compiled["fsdp:4,tensor:2/2/full/sparse"]["flops"]
    # With runtime tables, some products compute more than the stored blocks.
    assert 1 <= sparse / (expected(SPARSE, "full") / 8) < 1.3
    # The busiest chip of a pipeline computes the head.
    head = cost.flops_per_token(MODEL, SEQUENCE).head * TOKENS / 2
    pipeline = compiled["stage:4,tensor:2/4/full/dense"]["flops"]
    assert pipeline == pytest.approx(expected(MODEL, "full") / 8 + head * 3 / 4, rel=0.02)


@pytest.mark.slow
def test_collectives_follow_the_parallel_plan(compiled):
    assert compiled["/1/full/dense"]["collectives"] == {}
    replicas = compiled["data:8/1/none/dense"]["collectives"]
    assert set(replicas) == {"all-reduce"}
    assert replicas["all-reduce"]["bytes"] == pytest.approx(parameters(MODEL), rel=1e-3)
    stage = compiled["stage:4,tensor:2/4/full/dense"]["collectives"]
    # A boundary is [4 rows, 32 tokens, 64], sent in both directions at most once a tick.
    boundary = 4 * BATCH // 4 * SEQUENCE // 2 * WIDTH
    sends = stage["collective-permute"]
    assert sends["bytes"] == sends["times"] * boundary
    assert 2 * 4 <= sends["times"] <= 2 * (4 + 3) * 4
    # Two gathers per layer over tensor in each of forward pass, recomputation and backward pass.
    rows = 5 * 4
    assert stage["all-gather"]["times"] >= rows * 6
