"""What one does next with a pruned model: train it on, exchange weights, save and export it."""

import jax
import numpy as np
import pytest

import sparse_dataflow as sd

TEXTS = ["def main():\n    return 1\n" * 400, "import os\n" * 800]
LLAMA = {
    "model__norm": "rmsnorm",
    "model__positions": "rotary",
    "model__activation": "silu",
    "model__gated_mlp": True,
    "model__fused_qkv": False,
    "model__biases": (),
    "model__tied_embeddings": False,
    "model__num_kv_heads": 2,
    "model__d_ff": 128,
    "model__d_model": 64,
    "model__num_layers": 1,
}


def masks(model):
    blocks = model.params["blocks"]
    return {name: np.asarray(blocks[name]["mask"]) for name in model.model.masked_projections}


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, "1x16", "2:4", "16x1"])
def test_every_shape_is_trained_on_and_saved_again(block, tmp_path):
    dense = sd.init(sd.preset("pico").dense().change(**LLAMA), jax.random.key(0))
    tokens = [np.random.default_rng(n).integers(0, 512, (8, 32)) for n in range(3)]
    pruned = sd.prune(dense, tokens, block=block).model
    folder = sd.save(pruned, tmp_path / "pruned")
    small = {"run__twin": "no", "training__batch": 4, "training__sequence": 32}

    def trained(name, **change):
        config = sd.preset(folder).change(**small, **change, run__out=str(tmp_path / name))
        return sd.train(config, texts=TEXTS).model()

    before, tuned = masks(pruned), trained("tuned", training__steps=2)
    assert before
    for name, mask in masks(tuned).items():
        assert np.array_equal(mask, before[name])
        assert not np.asarray(tuned.params["blocks"][name]["kernel"])[~mask].any()
    evolved = trained(
        "evolved", training__steps=4, evolution__method="set", evolution__every=1
    )  # fmt: skip
    for name, mask in masks(evolved).items():
        assert np.array_equal(mask.sum(1), before[name].sum(1))
    assert any((mask != before[name]).any() for name, mask in masks(evolved).items())
    again = sd.load(sd.save(tuned, tmp_path / "again"))
    np.testing.assert_array_equal(sd.logits(again, tokens[0]), sd.logits(tuned, tokens[0]))
    export = sd.load(sd.save(tuned, tmp_path / "dense", form="dense", architecture="llama"))
    np.testing.assert_allclose(sd.logits(export, tokens[0]), sd.logits(tuned, tokens[0]), atol=1e-4)
    assert len(sd.generate(again, [[]], max_new_tokens=3)) == 1
    # Another shape than that of the mask has no meaning for it.
    with pytest.raises(sd.UserError, match=r"sparsity.block.* in the initial weights and 8x8 in"):
        trained("other", training__steps=2, sparsity__block=8)
