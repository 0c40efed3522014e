"""The sparse form of masked weights: the entries under the mask, and one bit a block."""

import dataclasses

import jax
import numpy as np
import numpy_reader
import pytest
from marks import some
from safetensors.numpy import load_file, save_file

import sparse_dataflow as sd
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.interchange.load import variants

SINGLE = LinearSpec("masked", "masked", density=0.5, block=1)
SPECS = {
    "single": SINGLE,
    "a quarter": dataclasses.replace(SINGLE, density=0.25),
    "2 of 4": dataclasses.replace(SINGLE, span=4),
    "rows of 16": dataclasses.replace(SINGLE, block_outputs=16),
    "columns of 8": dataclasses.replace(SINGLE, block=8, block_outputs=1),
    "rectangles, 3 of 4": dataclasses.replace(
        SINGLE, block=2, block_outputs=8, span=4, density=0.75
    ),
    "transformed": dataclasses.replace(SINGLE, hadamard=8),
}
CONFIG = sd.preset("pico").dense().change(model__num_layers=2, model__d_model=128,
    model__num_heads=4, model__d_ff=256)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 512, (2, 12))


def drawn(spec, names=("qkv", "mlp_in", "mlp_out"), seed=0):
    """A model of drawn masked weights; those of other projections are dense."""
    dense = sd.init(CONFIG, jax.random.key(seed))
    model = dense.model.with_linears(spec, names)
    params = jax.tree.map(np.array, dense.params)
    rng = np.random.default_rng(seed)
    for name in names:
        module = params["blocks"][name]
        scores = rng.random((2, *spec.weight.grid(spec, model.projection_shape(name))))
        mask = np.asarray(spec.weight.best(scores, spec))
        params["blocks"][name] = {**module, "kernel": module["kernel"] * mask, "mask": mask}
    return dataclasses.replace(dense, model=model, variant="sparse", params=params)


@pytest.mark.parametrize("name", some([*SPECS], "single", "rows of 16", "2 of 4", "transformed"))
def test_it_is_read_back_at_the_same_bits(name, tmp_path):
    model = drawn(SPECS[name])
    folder = sd.save(model, tmp_path / "model")
    again = sd.load(folder)
    assert variants(folder) == ("sparse",)
    assert again.model == model.model
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), again.params, model.params)
    assert all(jax.tree.leaves(same))
    logits = numpy_reader.logits(*numpy_reader.load(folder), TOKENS[0])
    np.testing.assert_allclose(logits, sd.logits(model, TOKENS)[0], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "share"), [("single", 9 / 16), ("a quarter", 5 / 16), ("rows of 16", 1 / 2 + 1 / 256)]
)
def test_bytes_are_those_of_the_values_and_a_bit_a_block(name, share, tmp_path):
    """In bfloat16, over the bytes of the dense weights."""
    model = drawn(SPECS[name], ("mlp_in", "mlp_out"))
    stored = load_file(sd.save(model, tmp_path / "model", dtype="bfloat16") / "model.safetensors")
    for projection in ("mlp_in", "mlp_out"):
        sides = model.model.projection_shape(projection)
        arrays = [stored[f"blocks.1.{projection}.{leaf}"] for leaf in ("kernel", "mask")]
        assert sum(array.nbytes for array in arrays) == share * 2 * np.prod(sides)


@pytest.mark.parametrize("form", some(["sparse", "dense"], "sparse"))
@pytest.mark.parametrize("name", some(["single", "rows of 16", "2 of 4"], "rows of 16"))
def test_bfloat16_rounds_each_number_and_nothing_else(name, form, tmp_path):
    model = drawn(SPECS[name])
    again = sd.load(sd.save(model, tmp_path / "model", form=form, dtype="bfloat16"))
    rounded = jax.tree.map(
        lambda leaf: leaf.astype(jax.numpy.bfloat16).astype(np.float32), model.params["embed"]
    )
    assert np.array_equal(again.params["embed"]["tokens"], rounded["tokens"])
    np.testing.assert_allclose(sd.logits(again, TOKENS), sd.logits(model, TOKENS), atol=0.05)
    with pytest.raises(sd.UserError, match=r"dtype='float16' .*legal: float32, bfloat16"):
        sd.save(model, tmp_path / "other", form=form, dtype="float16")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda mask: mask[:, :-1], "has shape"),
        (lambda mask: mask.astype(np.int32), "is int32; legal: uint8"),
        (lambda mask: np.concatenate([mask[:1] | 255, mask[1:]]), "store 64 inputs of each output"),
    ],
    ids=["shape", "dtype", "unequal"],
)
def test_damaged_masks_are_one_sentence(damage, words, tmp_path):
    folder = sd.save(drawn(SINGLE), tmp_path / "model")
    arrays = load_file(folder / "model.safetensors")
    name = "blocks.1.mlp_in.mask"
    arrays[name] = np.ascontiguousarray(damage(arrays[name]))
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(sd.UserError, match=words):
        sd.load(folder)
