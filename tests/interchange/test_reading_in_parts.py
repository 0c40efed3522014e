"""A directory whose weights are read in parts has the weights that are read at once."""

import pathlib

import jax
import numpy as np
import pytest
from marks import some

from sparse_dataflow.core.model import stacks
from sparse_dataflow.interchange import huggingface

FOLDERS = sorted(
    path.parent.name
    for path in pathlib.Path(__file__).parent.glob("*/config.json")
    if (path.parent / "model.safetensors").exists()
)
CHOSEN = ("llama", "gpt2", "mixtral", "gpt_neox", "phi3")


@pytest.mark.parametrize("name", some(FOLDERS, *CHOSEN))
def test_the_parts_are_the_whole(name):
    folder = pathlib.Path(__file__).parent / name
    whole, opened = huggingface.read(folder), huggingface.open_dense(folder)
    assert (opened.model, opened.tokenizer) == (whole.model, whole.tokenizer)
    assert opened.digest() == whole.digest

    def assert_equal(part, expected):
        assert jax.tree.structure(part) == jax.tree.structure(expected)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, part, expected)))

    assert_equal(opened.ends(), {n: p for n, p in whole.params.items() if n != "blocks"})
    for number, layer in enumerate(stacks.layers(whole.params["blocks"])):
        assert_equal(opened.layer(number), layer)
