"""The coordinate check: exponents are fitted, and SuPar is flat over width and density."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies.activation_changes import (
    ACTIVATIONS,
    activation_changes,
    fit_exponents,
    with_width,
)
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError

MODEL = ModelConfig(1, 64, 2, 256, vocab_size=64, max_len=16)
TRAINING = TrainingConfig(steps=3, batch=8, sequence=16, learning_rate=2e-3)


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.01, 10))
def test_exponents_are_fitted(width, density, scale):
    sizes = {(w, d): scale * w**width * d**density for w in (64, 128, 512) for d in (1, 0.25)}
    assert fit_exponents(sizes) == pytest.approx((width, density), abs=1e-6)


def test_a_width_without_a_layout_is_refused():
    sparse = MODEL.with_linears(LinearSpec("block_sparse", "cyclic", 1 / 8, 8), ["qkv"])
    assert with_width(sparse, 128).d_model == 128
    with pytest.raises(UserError, match="no balanced layout"):
        with_width(dataclasses.replace(sparse, num_heads=1), 32)


def test_heads_keep_their_width():
    wide = with_width(MODEL, 256)
    assert (wide.num_heads, wide.d_ff) == (8, 1024)


@pytest.mark.slow
def test_supar_is_flat_over_width_and_density():
    """The change of activations after three steps: powers of width and density near 0."""
    rng = np.random.default_rng(0)
    # A few frequent tokens, as in text, so that gradients agree and differences show early.
    windows = [np.minimum(63, rng.zipf(1.5, (8, 17))).astype(np.int32) for _ in range(3)]
    batches = list(map(Batch.from_windows, windows))
    exponents = {}
    # Three corners determine both exponents of the standard parametrization, the contrast. SuPar
    # has to be flat between all four.
    corners = [(64, 1.0), (256, 1.0), (256, 0.25), (64, 0.25)]
    for parametrization, measured in (("standard", corners[:3]), ("supar", corners)):
        sizes = {name: {} for name in ACTIVATIONS}
        for width, density in measured:
            model = with_width(dataclasses.replace(MODEL, parametrization=parametrization), width)
            model = model.with_linears(LinearSpec("block_sparse", "random", density, width // 4))
            for name, changes in activation_changes(model, TRAINING, batches).items():
                sizes[name][width, density] = changes[-1]
        exponents[parametrization] = {
            name: fit_exponents(name_sizes) for name, name_sizes in sizes.items()
        }
    for name in ("attention branch", "MLP branch", "logits"):
        width, density = exponents["standard"][name]
        flat_width, flat_density = exponents["supar"][name]
        assert abs(flat_width) < 0.2 and abs(flat_density) < 0.2, (name, exponents)
        assert width > abs(flat_width) + 0.2, (name, exponents)
        # Logits follow the embedding, which stays dense.
        assert name == "logits" or density > abs(flat_density) + 0.1, (name, exponents)
