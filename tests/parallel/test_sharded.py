"""A training over a mesh is the one of a single device, and no weight travels over tensor."""

import random

import pytest
from mesh_trainings import (
    assert_like_one_device,
    mesh_training,
)

SHAPES = [
    (data, fsdp, tensor)
    for data in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    for tensor in (1, 2, 4)
    if data * fsdp * tensor == 8
]


def written(shape, zero=3, micro_batches=1):
    data, fsdp, tensor = shape
    return f"data:{data},fsdp:{fsdp},tensor:{tensor}/{zero}/{micro_batches}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ("dense", ["data:2,tensor:4/0/2"]),
        ("sparse", ["data:2,fsdp:2,tensor:2/2/2"]),
        ("sparse_rank", ["data:2,tensor:4/0/1"]),
        ("sparse_depth", ["data:2,fsdp:2,tensor:2/3/2"]),
    ],
)
def test_eight_devices_train_like_one(model, texts):
    found = mesh_training("compare", model, *texts)
    assert_like_one_device(found)
    for text, errors in found.items():
        if "fsdp" not in text:
            # Over tensor only activations are gathered: 16 / 2 rows of 8 tokens, of width 32.
            rows = 8 // int(text[-1])
            assert set(errors["gathered"]) <= {f"{rows}x8x32"}, errors["gathered"]


@pytest.mark.slow
def test_a_state_in_bfloat16_trains_over_a_mesh_as_on_one_device():
    texts = ["data:2,fsdp:2,tensor:2/3/2", "stage:2,fsdp:4/2/2/1f1b/1"]
    for text, errors in mesh_training("compare", "dense+bfloat16", *texts).items():
        # Each device's share is rounded by up to 2^-8 and may be larger than their sum; a second
        # moment has twice its error, and is rounded itself.
        assert max(errors["losses"], errors["eval"]) < 1e-3, (text, errors)
        assert errors["norms"] < 2.0**-6 and errors["first moments"] < 2.0**-4, (text, errors)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["dense", "dense_odd", "sparse", "sparse_rank", "sparse_depth"])
@pytest.mark.parametrize("zero", range(4))
def test_every_mesh_and_zero_trains_like_one_device(model, zero):
    draw = random.Random(f"{model}{zero}")
    texts = [written(shape, zero, draw.choice((1, 2))) for shape in SHAPES]
    assert_like_one_device(mesh_training("compare", model, *texts))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "rigl+depth",
        *(
            pytest.param(method, marks=pytest.mark.nightly)
            for method in (
                "rigl",
                "set",
                "gradual",
                "sparse_to_dense",
                "sparse_to_dense+depth",
                "low_rank_tail",
            )
        ),
    ],
)
def test_layouts_evolve_over_a_mesh_as_on_one_device(method):
    [errors] = mesh_training("evolve", method, "data:2,fsdp:2,tensor:2/3/1").values()
    assert errors["layouts"] == 0
    assert errors["losses"] < 1e-5 and errors["params"] < 1e-2, errors


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sparse", "sparse_depth"])
def test_a_checkpoint_moves_between_any_two_meshes(model):
    draw = random.Random(0)
    shapes = draw.sample(SHAPES, 3)
    found = mesh_training(
        "move",
        model,
        *(written(shape, draw.randrange(4)) for shape in shapes),
    )
    assert found.pop("None devices") == 1
    assert all(found.values()), found
    assert [n for name, n in found.items() if name.endswith("devices")] == [8] * 3


@pytest.mark.slow
def test_a_checkpoint_has_no_trace_of_a_filled_vocabulary():
    # Of 45 tokens, which no tensor axis divides.
    texts = ["data:2,fsdp:2,tensor:2/3/1", "stage:2,tensor:4/2/1/1f1b/1"]
    found = mesh_training("move", "dense_odd", *texts)
    assert all(found[text] for text in (*texts, "None")), found
