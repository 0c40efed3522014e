"""Compiled steps of a tiny model: bytes, FLOPs and collectives agree with counts by hand."""

import dataclasses

import pytest
from compiled_steps import BATCH, MODEL, SEQUENCE, SPARSE
from eight_devices import on_eight_devices

from sparse_dataflow.planning import cost, memory

TOKENS = BATCH * SEQUENCE
LAYERS, WIDTH = MODEL.num_layers, MODEL.d_model


@pytest.fixture(scope="module")
def compiled():
    """Case of `compiled_steps` -> its result."""
    return on_eight_devices(
        "aot/compiled_steps.py",
        "/1/full/dense",
        "data:8/1/none/dense",
        "fsdp:4,tensor:2/2/full/sparse",
        "stage:4,tensor:2/4/full/dense",
    )


def parameters(config):
    return 4 * memory.parameter_count(config)


@pytest.mark.slow
def test_categories_add_up_to_all_allocations(compiled):
    for text, result in compiled.items():
        sizes, allocated = result["bytes"], result["allocated"]
        outputs = allocated["output"] - allocated["alias"]
        total = allocated["argument"] + outputs + allocated["temp"] + allocated["generated_code"]
        assert sum(sizes.values()) == total, text
        assert min(sizes.values()) >= 0, (text, sizes)
        assert sizes["moments"] == pytest.approx(2 * sizes["parameters"], rel=1e-3)


@pytest.mark.slow
def test_categories_by_hand(compiled):
    single, data = (compiled[text]["bytes"] for text in ("/1/full/dense", "data:8/1/none/dense"))
    weights = parameters(MODEL)
    assert single["parameters"] == single["gradients"] == weights
    assert data["parameters"] == data["gradients"] == weights
    # Full remat saves a block's input; 20 layers are scanned, also on a CPU.
    assert single["activations"] == 4 * TOKENS * LAYERS * WIDTH
    assert data["activations"] > single["activations"] / 8
    sharded = compiled["fsdp:4,tensor:2/2/full/sparse"]["bytes"]
    # The gradients of a micro-batch and their sum.
    assert sharded["gradients"] == pytest.approx(2 * sharded["parameters"], rel=0.01)
    # Biases and norms are not sharded.
    assert parameters(SPARSE) / 8 < sharded["parameters"] < parameters(SPARSE) / 5
    stage = compiled["stage:4,tensor:2/4/full/dense"]["bytes"]
    blocks = weights - 4 * (MODEL.vocab_size + MODEL.max_len) * WIDTH
    assert blocks / 8 < stage["gradients"] == pytest.approx(stage["parameters"], rel=0.01)


@pytest.mark.slow
def test_flops_agree_with_the_planner_and_its_recomputation(compiled):
    def expected(config, remat):
        config = dataclasses.replace(config, remat=remat)
        # XLA's attention computes the masked half as well.
        return cost.flops_per_token(config, SEQUENCE, causal_half=False).hardware_total * TOKENS

    assert compiled["/1/full/dense"]["flops"] == pytest.approx(expected(MODEL, "full"))
    assert compiled["data:8/1/none/dense"]["flops"] == pytest.approx(expected(MODEL, "none") / 8)
    sparse = compiled["fsdp:4,tensor:2/2/full/sparse"]["flops"]
    # With layout tables as arguments, some products compute more than the stored blocks.
    assert 1 <= sparse / (expected(SPARSE, "full") / 8) < 1.3
    # The busiest chip of a pipeline computes the whole head.
    head = cost.flops_per_token(MODEL, SEQUENCE).head * TOKENS / 2
    pipeline = compiled["stage:4,tensor:2/4/full/dense"]["flops"]
    assert pipeline == pytest.approx(expected(MODEL, "full") / 8 + head * 3 / 4, rel=0.02)


@pytest.mark.slow
def test_collectives_follow_from_the_mesh(compiled):
    assert compiled["/1/full/dense"]["collectives"] == {}
    copies = compiled["data:8/1/none/dense"]["collectives"]
    assert set(copies) == {"all-reduce"}
    assert copies["all-reduce"]["bytes"] == pytest.approx(parameters(MODEL), rel=1e-3)
    stage = compiled["stage:4,tensor:2/4/full/dense"]["collectives"]
    # A boundary is [4 rows, 32 tokens, 64], sent in both directions at most once a tick.
    boundary = 4 * BATCH // 4 * SEQUENCE // 2 * WIDTH
    sends = stage["collective-permute"]
    assert sends["bytes"] == sends["times"] * boundary
    assert 2 * 4 <= sends["times"] <= 2 * (4 + 3) * 4
    # Two gathers a layer over tensor, again in the recomputation, and two in the backward pass.
    rows = 5 * 4
    assert stage["all-gather"]["times"] >= rows * 6
