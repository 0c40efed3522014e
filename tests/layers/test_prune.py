"""Pruning the linears of any nnx model keeps its outputs better than keeping the largest blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.layers import registered


class Net(nnx.Module):
    """Linears of three classes, one after the other, with inputs that are correlated."""

    def __init__(self, rngs, use_bias=True):
        self.first = nnx.Linear(32, 64, rngs=rngs, use_bias=use_bias)
        self.attention = nnx.MultiHeadAttention(4, 64, rngs=rngs, decode=False)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Einsum("bti,io->bto", (64, 32), (32,) if use_bias else None, rngs=rngs)
        self.mixing = nnx.Param(jnp.asarray(np.random.default_rng(0).normal(size=(8, 32))))

    def __call__(self, x):
        x = nnx.relu(self.first(x @ self.mixing[...]) + 0.5)
        return self.last(self.dropout(x + self.attention(x)))


def drawn(seed):
    return jax.random.normal(jax.random.key(seed), (4, 16, 8))


BATCHES = [drawn(seed) for seed in range(8)]


def error(model, other):
    model, other = nnx.clone(model), nnx.clone(other)
    model.eval(), other.eval()
    x = drawn(99)
    return float(jnp.linalg.norm(other(x) - model(x)) / jnp.linalg.norm(model(x)))


@pytest.mark.parametrize("use_bias", some([True, False], True))
@pytest.mark.parametrize("block", some([16, "1x8", 1, "2:4", "4x8"], 16, "2:4"))
def test_outputs_stay_nearer_than_with_the_largest_blocks(block, use_bias):
    model = Net(nnx.Rngs(0), use_bias)
    before = jax.tree.map(jnp.copy, nnx.state(model))
    pruned = sd.prune(model, BATCHES, block=block, density=0.5)
    largest = sd.sparsify(model, "magnitude", density=0.5, block=16)
    assert error(model, pruned.model) < 0.5 * error(model, largest)
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, nnx.state(model), before)))
    assert set(pruned.masks) == set(pruned.errors)
    assert len(pruned.masks) == 6
    dense = sd.densify(pruned.model) if block == 16 else pruned.model
    assert jax.tree.structure(nnx.state(dense)) == jax.tree.structure(nnx.state(model))
    for path, mask in pruned.masks.items():
        assert mask.mean() == 0.5
        module = dense
        for name in path.split("."):
            module = getattr(module, name)
        kernel = np.asarray(module.kernel[...])
        assert kernel.shape == mask.shape
        assert not kernel[~mask].any()
        assert (kernel[mask] != 0).mean() > 0.9


def test_sides_are_filled_up_as_those_of_sparsify():
    model = nnx.Sequential(
        nnx.Linear(30, 60, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(60, 20, rngs=nnx.Rngs(1))
    )
    x = jax.random.normal(jax.random.key(0), (128, 30))
    pruned = sd.prune(model, [x], density=0.5, block=8)
    largest = sd.sparsify(model, "magnitude", density=0.5, block=8)
    for number in (0, 2):
        shapes = {m.layers[number].layout.mask.shape for m in (pruned.model, largest)}
        assert len(shapes) == 1
        dense = sd.densify(pruned.model).layers[number].kernel[...]
        assert dense.shape == pruned.masks[f"layers.{number}"].shape
    errors = [float(jnp.linalg.norm(m(x) - model(x))) for m in (pruned.model, largest)]
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("density", [0.25, 0.5, 0.75])
def test_one_linear_alone_is_least_squares(density):
    """Against numpy, with deviations from the means for the bias."""
    model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
    x = jax.random.normal(jax.random.key(0), (400, 8)) @ jax.random.normal(
        jax.random.key(1), (8, 8)
    )
    pruned = sd.prune(model, [x], block=1, density=density)
    kernel, mask = pruned.model.layers[0].kernel[...], pruned.masks["layers.0"]
    rows, wanted = (np.asarray(each, np.float64) for each in (x, model(x)))
    rows, wanted = rows - rows.mean(0), wanted - wanted.mean(0)
    for column in range(4):
        best, *_ = np.linalg.lstsq(rows[:, mask[:, column]], wanted[:, column], rcond=None)
        np.testing.assert_allclose(kernel[mask[:, column], column], best, atol=1e-2)
    np.testing.assert_allclose(pruned.model(x).mean(0), model(x).mean(0), atol=1e-4)


def test_registered_classes_and_repeated_calls_are_pruned(monkeypatch):
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (32, 4, 8)))

        def __call__(self, x):
            return jnp.einsum("bi,ihk->bhk", x, self.w[...])

    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.own = Own(rngs)

        def __call__(self, x):
            for _ in range(2):
                x = self.own(x).reshape(len(x), -1)
            return x

    monkeypatch.setattr(registered, "_registered", dict(registered._registered))
    sd.register_linear(Own, read=lambda m: ("bi,ihk->bhk", m.w, None))
    x = jax.random.normal(jax.random.key(0), (200, 32))
    model = Twice(nnx.Rngs(0))
    pruned = sd.prune(model, [x], block="2:4")
    assert type(pruned.model.own) is Own
    assert pruned.masks["own"].shape == (32, 4, 8)
    assert (np.asarray(pruned.model.own.w[...]) != 0).mean() == 0.5
    blocks = sd.prune(model, [x], block=8)
    assert blocks.model.own.linear.layout.density == 0.5


def test_where_and_call_choose_what_is_pruned_and_how_it_runs():
    model = Net(nnx.Rngs(0))
    pruned = sd.prune(
        model,
        [{"inputs": batch} for batch in BATCHES],
        where=lambda path, linear: path == "first",
        call=lambda module, batch: module(batch["inputs"]),
    )
    assert list(pruned.masks) == ["first"]
    assert type(pruned.model.first) is sd.BlockSparseLinear
    assert type(pruned.model.last) is nnx.Einsum


@pytest.mark.parametrize(("tokens", "fits"), [(10, 8), (39, 32), (40, 32), (41, 33)])
def test_too_few_tokens_are_a_warning(tokens, fits, capfd, caplog):
    model = nnx.Sequential(nnx.Linear(33, 4, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).standard_normal((tokens, 33), np.float32)
    sd.prune(model, [x], block="3x1", density=1 / 11)
    words = f"layers.0 has 33 inputs and {fits} tokens to fit its weights to, so a damping of"
    assert (words in capfd.readouterr().err + caplog.text) == (fits < 33)


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.b.kernel = self.a.kernel

    def __call__(self, x):
        return self.b(self.a(x))


class Unused(Shared):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.b = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.a(x)


class Jitted(Unused):
    def __call__(self, x):
        return nnx.jit(lambda linear, x: linear(x))(self.a, x)


X = np.random.default_rng(0).standard_normal((64, 16), np.float32)
NOT_FINITE = np.where(np.arange(64)[:, None] == 3, np.nan, X)


@pytest.mark.parametrize(
    ("kind", "batches", "options", "words"),
    [
        (Shared, [X], {}, r"a: Its kernel is a parameter of a and b too"),
        (Unused, [X], {}, r"does not call b on the first batch"),
        (Jitted, [X], {}, r"a is called inside a transform such as nnx.scan"),
        (Unused, [NOT_FINITE], {"where": lambda p, _: p == "a"}, r"^a reads .* not finite"),
        (Unused, [X], {"density": 0.3}, r"a: Density 0.3 has no .* legal"),
        (Unused, [X], {"density": 0.3, "block": 1}, r"a: Density 0.3 has no .* 1/16"),
        (Unused, [X], {"block": "1x5"}, r"a: Groups of 1x5 do not divide a 16 x 16"),
        (Unused, [X], {"block": "narrow"}, r"is for language models"),
        (Unused, [X], {"block": "fish"}, r"^block='fish' is not legal; legal: 16 or"),
        (Unused, [X], {"block": 0}, r"^block=0 is not legal; legal: 16 or 16x16 \(squares\), "),
        (Unused, [X], {"block": -3}, r"^block=-3 is not legal; legal: 16 or"),
        (Unused, [X], {"block": "4x0"}, r"^block='4x0' is not legal; legal: 16 or"),
        (Unused, [X], {"density": 1.0}, r"^density=1; legal: above 0 and below 1"),
        (Unused, [X], {"rounds": 0}, r"rounds=0; legal: 1 or more"),
        (Unused, [X], {"where": lambda *_: False}, r"selects no linear of the model; legal: a, b"),
        (Unused, X, {}, r"not a list of batches"),
        (Unused, [], {}, r"batches is empty"),
    ],
)
def test_what_cannot_be_pruned_is_one_sentence(kind, batches, options, words):
    with pytest.raises(sd.UserError, match=words):
        sd.prune(kind(nnx.Rngs(0)), batches, **{"block": 4, **options})
