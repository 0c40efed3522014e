"""What every executor does: it trains, evaluates, evolves and saves as one device.

A case is a model or method and executors of it, in the words of executor_runs.py. "+measured" adds
metrics of each kind to the sections, each in one line. What an executor refuses is the table of
test_support.py.
"""

import pytest
from compared import assert_like_single_device, executor_run

slow, nightly = pytest.mark.slow, pytest.mark.nightly


def cases(*once, daily=(), at_night=()):
    """Returns the cases (name, *texts) of a property as (name, texts).

    Args:
      *once: each kind of executor once, for `make test`.
      daily: each feature on the kinds of executors, for `make test-all`.
      at_night: larger versions, for `make nightly`.
    """

    def marked(case, *marks):
        return pytest.param(case[0], case[1:], marks=marks, id=" ".join(case))

    tables = ((once, ()), (daily, (slow,)), (at_night, (nightly,)))
    return [marked(case, *marks) for table, marks in tables for case in table]


ONCE = [
    ("sparse+measured", "data:2,fsdp:2,tensor:2/2/2"),
    ("sparse_depth", "halves,fsdp:2,context:2,feature:2/3/1", "relay/device/2"),
    ("sparse_deep_full+measured", "stage:2,fsdp:2,tensor:2/2/2/interleaved/2/2+1+1+1"),
    ("dense", "relay/device/1", "relay/host/2"),
    # Stages whose devices have shares of each sequence, or of the features.
    ("sparse", "halves,on:4,stage:2,context:2/0/2/1f1b/1", "on:4,stage:2,feature:2/0/2/1f1b/1"),
    ("dense+spikes_unclipped", "relay,eager/device/2"),
    # Attention in both directions, and the accuracy of evaluations.
    ("documents+hidden", "relay/device/2"),
    ("blocks", "relay/device/2"),
]
DAILY = [
    ("blocks", "on:4,context:2,tensor:2/0/1", "fsdp:2,feature:2,tensor:2/3/2"),
    ("blocks", "on:4,stage:2,context:2/0/2/1f1b/1", "on:4,stage:2,fsdp:2/2/2/zero_bubble/1"),
    ("blocks+answers", "relay/host/2"),
    # "multi_query" has fewer key/value heads than the axis tensor has devices.
    ("shared", "data:2,fsdp:2,tensor:2/3/2"),
    ("multi_query", "data:2,tensor:4/0/1"),
    ("gemma2", "data:2,fsdp:2,tensor:2/3/2"),
    # Norms over all heads with two copies of a key/value head; a bias of an odd vocabulary.
    ("olmo2", "data:2,tensor:4/0/1", "fsdp:4,feature:2/3/2"),
    ("phi", "fsdp:4,feature:2/3/2", "stage:2,fsdp:2,tensor:2/2/2/1f1b/1"),
    # Rows whose ends are padding, as data.loss=answers has them.
    ("experts_alone+answers", "data:2,fsdp:2,tensor:2/3/1"),
    ("experts+answers", "data:2,fsdp:2,tensor:2/2/2"),
    ("llama+adapters", "data:2,fsdp:2,tensor:2/3/2"),
    ("dense+int8", "fsdp:2,feature:2,tensor:2/3/1"),
    ("int8", "data:2,fsdp:2,tensor:2/3/1", "stage:2,fsdp:2,tensor:2/2/2/1f1b/1"),
    ("dense+bfloat16", "data:2,fsdp:2,tensor:2/3/2", "stage:2,fsdp:4/2/2/1f1b/1"),
    # A dense kernel and a group are one matrix on all devices; single blocks stay in place.
    ("sparse_mlp+muon", "data:2,fsdp:2,tensor:2/3/2", "stage:2,fsdp:2,tensor:2/2/2/1f1b/1"),
    ("sparse+teacher", "data:2,fsdp:4/3/2", "fsdp:2,feature:2,tensor:2/3/1", "relay/device/2"),
    ("dense_odd+teacher", "on:2,tensor:2/0/1", "fsdp:2,context:2,tensor:2/3/1"),
    ("llama+teacher", "on:4,stage:2,tensor:2/3/2/1f1b/1"),
    ("dense+new_rows", "on:2,data:2/0/1", "on:2,fsdp:2/3/1", "on:4,data:2,tensor:2/1/2"),
    ("dense_odd+new_rows", "on:2,tensor:2/0/1", "on:4,stage:2,fsdp:2/2/2/1f1b/1"),
    # State arrays with some of their weight's axes, reordered, padded and divided over stages.
    ("wide+adafactor", "on:4,feature:2,tensor:2/3/1", "on:4,stage:2,tensor:2/2/2/1f1b/1"),
    ("sparse_depth", "halves,fsdp:2,feature:2,tensor:2/3/2"),
    # Grouped queries, rotary positions and a window; documents, and soft caps.
    ("llama", "fsdp:2,context:2,tensor:2/3/2"),
    ("packed", "context:4,tensor:2/0/1"),
    ("sparse_mlp+muon", "fsdp:4,context:2/2/2"),
    # What blocks and head read of a micro-batch: documents, padding, weights of targets.
    ("documents", "on:4,stage:2,tensor:2/2/2/1f1b/1", "on:2,stage:2/0/4/zero_bubble/1"),
    ("documents", "relay/device/2", "relay/host/1"),
    ("llama+answers", "on:4,stage:2,fsdp:2/2/2/interleaved/1"),
    ("experts_alone+answers", "on:4,stage:2,fsdp:2/2/2/1f1b/1"),
    ("packed+answers", "relay/device/2"),
    ("packed+hidden", "on:4,context:2,tensor:2/0/1", "on:4,stage:2,fsdp:2/2/2/1f1b/1"),
    ("experts_alone+hidden", "on:4,data:2,fsdp:2/3/2", "relay/host/2"),
    ("sparse+hidden", "on:4,feature:2,tensor:2/0/1", "on:4,stage:2,context:2/0/2/1f1b/1"),
    ("llama+hidden", "relay,data:2/device/2"),
    ("experts+answers", "relay/device/2"),
    # Stages whose blocks are of several kinds: windows, rotary positions, remat, density.
    ("gemma3", "on:2,stage:2/0/2/1f1b/1", "on:4,stage:2,tensor:2/3/2/interleaved/1/2+1"),
    ("gemma2", "on:4,stage:2,fsdp:2/2/2/zero_bubble/1"),
    ("smollm3", "on:2,stage:2/0/2/1f1b/1"),
    ("sparse_depth", "on:4,stage:2,fsdp:2/3/2/1f1b/1", "on:2,stage:2/0/2/gpipe/1/1+2"),
    ("shared", "on:4,stage:2,tensor:2/2/2/1f1b/1"),
    ("llama+adapters", "on:4,stage:2,fsdp:2/3/2/1f1b/1"),
    ("sparse+side", "relay/device/2", "on:4,stage:2,fsdp:2/3/2/1f1b/1"),
    ("sparse_depth+side", "on:4,feature:2,tensor:2/3/1", "on:2,stage:2/0/2/zero_bubble/1"),
    ("llama+side", "data:2,fsdp:2,tensor:2/3/2", "on:4,context:2,tensor:2/0/2"),
    ("dense_odd+side_int8", "relay/host/1", "on:4,feature:2,fsdp:2/3/2"),
    ("llama+prompt", "on:4,context:2,tensor:2/0/2", "on:4,stage:2,fsdp:2/3/2/1f1b/1"),
    ("documents", "on:4,stage:2,context:2/3/2/zero_bubble/1"),
    ("llama+answers", "halves,on:4,stage:2,context:2/3/2/1f1b/1"),
    ("sparse+teacher", "on:4,stage:2,context:2/2/2/1f1b/1"),
    ("experts", "on:4,stage:2,context:2/3/2/1f1b/1"),
    ("wide+adafactor", "on:4,stage:2,feature:2/2/2/1f1b/1"),
    ("sparse_depth", "halves,stage:2,feature:2,context:2/2/2/1f1b/1"),
    ("sparse_depth+adapters", "on:2,stage:2/0/2/zero_bubble/1"),
    ("dense+int8", "on:2,stage:2/0/2/1f1b/1"),
    ("low_rank", "on:4,feature:2,tensor:2/0/1"),
    ("low_rank+muon", "on:4,feature:2,fsdp:2/3/2"),
    ("block_tensor_train+muon", "on:4,fsdp:4/3/2"),
    ("experts+answers", "on:4,fsdp:2,context:2/3/2"),
    ("experts_sparse", "on:4,context:2,tensor:2/0/1", "on:2,context:2/1/2"),
    ("experts_sparse", "relay,data:2/device/2"),
    # Masks are not trained: they are cut as kernels are, and stay.
    ("masked", "fsdp:2,feature:2,tensor:2/3/2", "stage:2,fsdp:2,tensor:2/2/2/1f1b/1"),
    ("masked+muon", "relay/device/2"),
    ("kronecker", "on:4,fsdp:2,context:2/3/2", "on:4,stage:2,fsdp:2/3/2/1f1b/1"),
    ("kronecker+muon", "relay/device/2"),
    ("rotated_depth", "relay/device/1"),
    # Pipelines: each schedule, even and uneven divisions.
    ("low_rank+muon", "stage:2,fsdp:2,tensor:2/3/2/gpipe/1"),
    ("qwen3+measured", "stage:2,data:2,tensor:2/1/2/zero_bubble/1"),
    ("experts_sparse", "fsdp:2,stage:2,tensor:2/3/1/1f1b/1"),
    ("experts", "exchange,stage:2,fsdp:2,tensor:2/3/1/1f1b/1"),
    # The relay: one block at a time.
    ("llama+adapters", "relay/device/2"),
    ("llama+prompt", "relay/device/2", "relay/host/1"),
    ("sparse_depth+adapters", "relay/host/1"),
    ("dense+int8", "relay/device/1", "relay,data:2/device/1"),
    ("dense+new_rows", "relay/device/1", "relay/host/2"),
    ("phi+new_rows_lion", "relay/device/1"),
    ("sparse+spikes", "relay/device/2", "on:2,stage:2/0/2/1f1b/1"),
    ("llama+measured", "relay/device/2", "relay/host/2", "relay,data:2/device/2"),
    ("sparse_rank+muon", "relay/device/1"),
    ("low_rank+muon", "relay/device/2"),
    ("block_tensor_train+muon", "relay/device/1"),
    ("low_rank_experts+muon", "relay/device/1"),
    ("sparse_rank+adafactor", "relay/device/1"),
    ("dense+bfloat16", "relay/device/1"),
    ("dense+bfloat16_muon", "relay/device/1"),
    ("int8", "relay/device/1"),
    ("shared", "relay/device/2"),
    ("gemma2", "relay/device/2"),
    ("gemma3", "relay/device/2"),
    *((name, "relay/device/2") for name in ("phi", "olmo2", "smollm3", "granite")),
    ("experts_sparse+measured", "relay/device/2"),
]
AT_NIGHT = [
    ("stablelm2_12b", "fsdp:2,tensor:4/3/2", "fsdp:4,feature:2/3/2"),
    ("phi+new_rows", "on:2,tensor:2/0/1"),
    ("pythia", "data:2,tensor:4/0/1", "stage:2,data:2,tensor:2/1/2/zero_bubble/1"),
    ("granite", "data:2,fsdp:2,tensor:2/3/2", "stage:2,fsdp:4/2/2/1f1b/1"),
    ("smollm3", "fsdp:2,context:2,tensor:2/3/2"),
    *((name, "fsdp:2,context:2,tensor:2/3/2") for name in ("phi", "olmo2")),
    ("experts", "data:2,tensor:4/0/2"),
    ("llama", "data:2,tensor:4/0/1"),
    ("dense", "data:2,tensor:4/0/2"),
    ("sparse_rank", "data:2,tensor:4/0/1"),
    ("sparse_depth", "data:2,fsdp:2,tensor:2/3/2"),
    ("low_rank+muon", "data:2,fsdp:2,tensor:2/3/2"),
    ("block_tensor_train", "data:2,fsdp:4/3/2", "stage:2,fsdp:4/2/2/1f1b/1"),
    ("experts", "stage:2,fsdp:2,tensor:2/3/1/1f1b/1"),
    ("llama", "data:2,fsdp:2,tensor:2/3/2", "stage:2,tensor:4/3/2/1f1b/1"),
    ("llama", "stage:2,fsdp:2,tensor:2/3/2/1f1b/1"),
    ("qwen3", "data:4,tensor:2/0/1", "stage:2,tensor:4/1/2/zero_bubble/1"),
    ("qwen3", "fsdp:2,tensor:4/3/2"),
    ("gemma3", "data:2,tensor:4/0/1"),
    ("multi_query", "data:2,fsdp:2,tensor:2/3/2"),
    ("experts_sparse", "stage:2,fsdp:4/2/1/1f1b/1", "data:2,tensor:4/0/1"),
    ("experts_sparse", "data:2,fsdp:4/3/2"),
    ("llama+adapters", "data:2,tensor:4/0/1", "fsdp:8/2/1"),
    ("dense+int8", "data:2,tensor:4/0/1", "fsdp:8/3/2"),
    ("sparse_depth+adapters", "data:2,fsdp:2,tensor:2/3/2", "fsdp:8/2/1"),
    ("fp8", "data:2,fsdp:2,tensor:2/3/1", "stage:2,fsdp:2,tensor:2/2/2/1f1b/1"),
    *(
        (f"{model}+muon", "data:2,fsdp:2,tensor:2/3/2", "stage:2,fsdp:2,tensor:2/2/2/1f1b/1")
        for model in ("sparse", "dense", "sparse_rank")
    ),
    ("dense_odd+new_rows", "on:4,fsdp:4/3/2"),
    ("wide+schedule_free", "on:4,feature:2,tensor:2/3/1"),
    ("block_a_projection+adafactor", "on:4,fsdp:4/3/1", "on:4,stage:2,fsdp:2/2/2/1f1b/1"),
    ("sparse+new_rows", "on:4,fsdp:2,tensor:2/3/1"),
    ("sparse_depth", "fsdp:2,feature:2,tensor:2/3/2"),
    ("llama", "halves,fsdp:2,feature:2,tensor:2/3/1"),
    ("dense_odd", "data:2,feature:4/0/1"),
    ("sparse_deep_full", "data:4,feature:2/0/1"),
    ("llama", "fsdp:4,feature:2/3/2"),
    ("gemma2", "data:4,feature:2/0/1"),
    ("qwen3", "data:4,feature:2/0/1"),
    ("sparse+muon", "fsdp:2,feature:2,tensor:2/3/2"),
    ("sparse_depth+adapters", "fsdp:2,feature:2,tensor:2/3/1"),
    ("dense", "data:2,context:4/1/1"),
    ("gemma2", "fsdp:2,context:4/3/1"),
    ("llama+answers", "fsdp:4,context:2/3/1"),
    ("llama+adapters", "fsdp:4,context:2/3/1"),
    ("gemma2+prompt", "data:2,fsdp:2,tensor:2/3/2", "fsdp:4,feature:2/3/1"),
    ("llama+prompt", "fsdp:4,context:2/3/1", "relay,data:2/device/1"),
    ("dense_deep", "stage:2,data:2,tensor:2/3/4/gpipe/1"),
    ("sparse_deep", "stage:4,tensor:2/3/4/zero_bubble/1"),
    (
        "dense_deep",
        "stage:4,fsdp:2/3/8/1f1b/1",
        "stage:8/3/16/1f1b/1",
        "stage:8/3/4/zero_bubble/1",
        "stage:4,fsdp:2/1/8/interleaved/2",
        "stage:1,data:8/0/2/gpipe/2/6+2",
        "stage:2,tensor:4/3/16/1f1b/1/3+5",
    ),
    (
        "sparse_deep",
        "stage:4,data:2/0/2/1f1b/1/1+1+2+1",
        "stage:2,fsdp:4/1/4/interleaved/2",
        "stage:2,data:2,fsdp:2/2/4/zero_bubble/1",
        "stage:2,fsdp:2,tensor:2/3/4/gpipe/2",
    ),
    ("sparse_deep_full", "stage:4,data:2/3/4/1f1b/1", "stage:2,tensor:4/3/4/zero_bubble/1/4+1"),
    *((model, "relay/device/2", "relay/host/2") for model in ("sparse", "qwen3", "multi_query")),
    ("fp8", "relay/device/1"),
    *((f"sparse_rank+{name}", "relay/device/1") for name in ("lion", "schedule_free")),
    *((f"{model}+muon", "relay/device/1") for model in ("sparse_depth", "shared")),
]


@pytest.mark.parametrize(("model", "texts"), cases(*ONCE, daily=DAILY, at_night=AT_NIGHT))
def test_training_is_that_of_one_device(model, texts):
    """Losses, clipped gradients, metrics, moments and parameters of three steps, an evaluation."""
    if model in ("int8", "fp8"):
        pytest.importorskip("qwix", reason="quantised products need the extra quantized")
    assert_like_single_device(executor_run("compare", model, *texts), model)


@nightly
@pytest.mark.parametrize("model", ["dense", "dense_odd", "sparse", "sparse_rank", "sparse_depth"])
@pytest.mark.parametrize("zero", range(4))
def test_every_mesh_and_zero_trains_like_a_single_device(model, zero):
    texts = [
        f"data:{data},fsdp:{fsdp},tensor:{8 // data // fsdp}/{zero}/{1 + data % 2}"
        for data in (1, 2, 4, 8)
        for fsdp in (1, 2, 4, 8)
        if data * fsdp in (2, 4, 8)
    ]
    assert_like_single_device(executor_run("compare", model, *texts))


MESH, TENSOR = "data:2,fsdp:2,tensor:2/3/1", "data:2,tensor:4/0/1"
STAGES = "stage:2,data:2,tensor:2/3/1/zero_bubble/1"


@pytest.mark.parametrize(
    ("method", "texts"),
    cases(
        # Each device has a strip of every block.
        ("set", "on:2,feature:2/0/1"),
        ("shared_to_own", "on:2,stage:2/0/1/1f1b/1"),
        daily=[
            # With parts of a batch, the norms that choose blocks are those of the whole.
            ("rigl+depth", f"halves,{MESH}"),
            ("rigl", "fsdp:2,context:2,tensor:2/3/1"),
            ("rigl", "relay/device/1"),
            ("rigl", "on:4,feature:2,tensor:2/3/1"),
            (
                "rigl",
                "on:4,stage:2,feature:2/0/1/1f1b/1",
                "halves,on:4,stage:2,context:2/2/1/1f1b/1",
            ),
            ("shared_to_own", "on:2,feature:2/0/1"),
            ("omit_features", "on:2,stage:2/0/1/1f1b/1", "on:4,fsdp:2,tensor:2/3/1"),
            ("omit_features", "on:2,feature:2/0/1", "relay/device/1"),
        ],
        at_night=[
            *((method, "on:4,feature:2,fsdp:2/3/1") for method in ("gradual", "sparse_to_dense")),
            ("rigl", MESH, STAGES),
            ("set", MESH, STAGES, "relay/device/1"),
            ("sparse_to_dense", MESH, STAGES, "relay/device/1"),
            ("rigl+depth", "relay/device/1"),
            ("rigl+llama", TENSOR),
            *((method, MESH) for method in ("gradual", "sparse_to_dense+depth")),
        ],
    ),
)
def test_layouts_evolve_as_on_one_device(method, texts):
    for text, errors in executor_run("evolve", method, *texts).items():
        assert errors["layouts"] == 0, text
        assert errors["losses"] < 1e-5 and errors["params"] < 1e-2, (text, errors)


@pytest.mark.parametrize(
    ("model", "texts"),
    cases(
        ("documents", "relay/device/1"),
        daily=[
            ("sparse_deep", "stage:2,data:2,tensor:2/3/1/1f1b/1", "relay/device/1"),
            ("llama", "stage:2,tensor:4/3/1/1f1b/1", "data:2,tensor:4/0/1"),
            ("sparse_depth", "relay/device/1"),
            # Masks, whose kernels are reordered where "feature" cuts runs of the residual stream.
            ("masked", "relay/device/1"),
            ("masked", "on:4,feature:2,tensor:2/3/1", "stage:2,fsdp:2,tensor:2/2/2/1f1b/1"),
            ("masked_and_stored", "on:4,feature:2,fsdp:2/3/1", "on:2,stage:2/0/1/1f1b/1"),
            ("masked_and_stored", "on:4,stage:2,feature:2/0/1/1f1b/1"),
            ("sparse_deep", "halves,on:4,stage:2,context:2/0/1/1f1b/1"),
        ],
    ),
)
def test_block_gradient_norms_are_those_of_one_device(model, texts):
    """Methods that grow blocks by gradient use them."""
    errors = executor_run("norms", model, *texts)
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize(
    ("model", "texts"),
    cases(
        # No padding of the vocabulary: no tensor axis divides its 45 tokens.
        ("dense_odd", "data:2,fsdp:2,tensor:2/3/1", "relay/host/1", "stage:2,tensor:4/2/1/1f1b/1"),
        daily=[
            # Tokens that travel to experts, or do not.
            (
                "experts_sparse",
                "exchange,data:2,fsdp:4/3/1",
                "fsdp:8/1/1",
                "exchange,stage:2,data:2,fsdp:2/3/1/1f1b/1",
            ),
            # A density by depth.
            (
                "sparse_depth",
                "data:2,feature:2,tensor:2/3/1",
                "relay/device/1",
                "data:2,fsdp:2,tensor:2/2/1",
                "fsdp:2,context:4/3/1",
                "feature:4,fsdp:2/2/1",
            ),
            # One copy of each key/value head.
            ("llama", "data:8/3/1", "fsdp:2,tensor:4/3/1", "stage:2,tensor:4/2/1/1f1b/1"),
            (
                "sparse_deep",
                "stage:4,tensor:2/3/4/1f1b/1",
                "data:2,fsdp:4/3/1",
                "stage:2,fsdp:4/3/4/interleaved/2",
            ),
        ],
        at_night=[("sparse", "data:4,tensor:2/1/1", "fsdp:2,tensor:4/3/1", "data:2,fsdp:4/2/1")],
    ),
)
def test_a_checkpoint_moves_between_executors_at_the_same_bits(model, texts):
    """Saved by each and read by the next, the last of which is one device."""
    results = executor_run("move", model, *texts)
    assert all(results.values()), results
