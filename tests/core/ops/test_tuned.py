"""Measured tile sizes: the search with a fake timer, reading, writing, damaged files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import targeted_tpu
from simulated_hopper import targeted_gpu

from experiments.benchmarks.kernels.tuning import descend
from sparse_dataflow.chips.hopper import api as pallas_hopper
from sparse_dataflow.chips.hopper import tuning as tuning_hopper
from sparse_dataflow.chips.tpu.matmul import api as pallas_tpu
from sparse_dataflow.chips.tpu.matmul import tuning
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops import tuned
from sparse_dataflow.core.ops.block_sparse_matmul import xla
from sparse_dataflow.core.ops.block_sparse_matmul import xla_tuning as tuning_xla
from sparse_dataflow.files.errors import UserError

PROJECTIONS = [(5120, 15360), (5120, 5120), (5120, 20480), (20480, 5120)]
BACKENDS = {
    "xla": (tuning_xla, lambda: targeted_tpu()),
    "pallas_tpu": (pallas_tpu, lambda: targeted_tpu("TPU v5 lite", 1)),
    "pallas_hopper": (pallas_hopper, lambda: targeted_gpu()),
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def shapes(layout, tokens, dtype=jnp.bfloat16):
    """Return (shape of x, shape of values, tables) of a layout."""
    x = jax.ShapeDtypeStruct((tokens, layout.in_features), dtype)
    values = jax.ShapeDtypeStruct((layout.nnz, layout.block, layout.block), dtype)
    return x, values, layout.tables()


SMALL = shapes(make_layout("cyclic", 512, 1024, 128, 0.5), 300)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A temporary folder of the measurements; caches of files and warnings start empty."""
    monkeypatch.setattr(tuned, "file_path", lambda kind: tmp_path / "chip.json")
    for cache in (tuned._entries, tuned._warn_ignored):
        cache.cache_clear()
    yield tmp_path
    for cache in (tuned._entries, tuned._warn_ignored):
        cache.cache_clear()


@pytest.fixture
def warnings(monkeypatch):
    """The logged warnings, at any verbosity."""
    lines = []
    monkeypatch.setattr(
        tuned.logging, "warning", lambda text, *arguments: lines.append(text % arguments)
    )
    return lines


def default_tiles(backend, operands=SMALL):
    kernels, environment = BACKENDS[backend]
    with environment():
        return kernels.default_tuning(*operands)


def spaces(backend, operands=SMALL):
    kernels, environment = BACKENDS[backend]
    with environment():
        return kernels.spaces(*operands)


@settings(max_examples=20)
@given(goal=st.tuples(st.integers(0, 4), st.integers(0, 4)), seed=st.integers(0, 9))
def test_descent_finds_the_fastest_legal_tiles(goal, seed):
    """Time grows with the distance from a goal; one size bounds the other."""
    space = tuned.SearchSpace(
        tuning.StreamTiles(1, 1),
        {"entries": tuple(range(1, 6)), "ahead": tuple(range(1, 6))},
        lambda tiles: tiles.entries <= tiles.ahead + 2,
    )
    evaluated = []

    def seconds_of(tried):
        evaluated.extend(tried)
        return [
            1 + abs(tiles.entries - 1 - goal[0]) + abs(tiles.ahead - 1 - goal[1]) for tiles in tried
        ]

    best, results, start = descend(space, seconds_of, rounds=8)
    assert all(map(space.legal, evaluated))
    everywhere = [
        tuning.StreamTiles(entries, ahead) for entries in range(1, 6) for ahead in range(1, 6)
    ]
    assert results == min(seconds_of(list(filter(space.legal, everywhere))))
    assert seconds_of([best, space.start]) == [results, start]


def test_tiles_that_fail_or_gain_nothing_are_not_chosen():
    space = tuned.SearchSpace(tuning.StreamTiles(2, 2), {"entries": (1, 3), "ahead": (1, 3)}, bool)

    def seconds_of(tried):
        return [{1: float("inf"), 2: 1.0, 3: 0.99}[tiles.entries] for tiles in tried]

    assert descend(space, seconds_of) == (space.start, 1.0, 1.0)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("tokens", [1, 300, 2048])
@every_backend
def test_every_candidate_at_13b_fits_the_chip(backend, tokens, block):
    for shape in PROJECTIONS:
        for pattern in ("monarch", "random"):
            layout = make_layout(pattern, *shape, block, 1 / 8)
            for case, space in spaces(backend, shapes(layout, tokens)).items():
                assert space.legal(space.start), case
                for tiles in space.neighbours(space.start):
                    assert fits(backend, tiles, case), tiles
                if tokens == 2048:
                    assert space.neighbours(space.start)


def fits(backend, tiles, case):
    if backend == "pallas_hopper":
        if isinstance(tiles, tuning_hopper.GradientTiles):
            return tuning_hopper.gradient_bytes(tiles, case.block) <= tuning_hopper.SHARED_BYTES
        return tuning_hopper.product_bytes(tiles, False) <= tuning_hopper.SHARED_BYTES
    if backend == "pallas_tpu" and isinstance(tiles, tuning.ProductTiles):
        resident_bytes = (
            tiles.buffers
            * tiles.tokens
            * 2
            * {
                "forward": case.in_features,
                "input_gradient": case.out_features,
            }[case.product]
        )
        return resident_bytes <= 128 << 20 and tiles.tokens % tiles.rows == 0
    return tiles.tokens > 0


@every_backend
def test_a_measured_case_changes_the_choice_and_no_other_does(folder, backend):
    before = default_tiles(backend)
    (case, space), *_ = spaces(backend).items()
    other = space.neighbours(space.start)[0]
    tuned.write(folder / "chip.json", [(case, other, {"ms": 1.0})], {"machine": "made up"})
    assert getattr(default_tiles(backend), case.product) == other
    assert default_tiles(backend) == dataclasses.replace(before, **{case.product: other})
    more = shapes(make_layout("cyclic", 512, 1024, 128, 0.25), 300)
    assert default_tiles(backend, more) == default_tiles(backend, more)
    assert getattr(default_tiles(backend, more), case.product) != other or other == space.start


def test_measured_tiles_compute_the_same(folder):
    layout = make_layout("random", 256, 128, 32, 0.5)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(300, 256)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(layout.nnz, 32, 32)), jnp.float32)
    tables = jax.tree.map(jnp.asarray, layout.tables())
    gradients = jax.value_and_grad(
        lambda x, v: jnp.sum(xla.block_sparse_matmul(x, v, tables) ** 2), argnums=(0, 1)
    )
    before = gradients(x, values)
    results = [
        (case, tuning_xla.TokenTiles(64), {})
        for case in tuning_xla.spaces(x, values, layout.tables())
    ]
    tuned.write(folder / "chip.json", results, {})
    assert tuning_xla.default_tuning(x, values, tables).weight_gradient.tokens == 64
    for got, right in zip(jax.tree.leaves(gradients(x, values)), jax.tree.leaves(before)):
        np.testing.assert_allclose(got, right, rtol=2e-4, atol=2e-2)


def test_the_first_tiles_of_13b_divide_the_tokens_of_a_gpu():
    layout = make_layout("random", 5120, 20480, 128, 1 / 8)
    x = jax.ShapeDtypeStruct((8192, 5120), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((layout.nnz, 128, 128), jnp.bfloat16)
    with targeted_gpu("NVIDIA A100-SXM4-80GB", 108):
        tuning = tuning_xla.default_tuning(x, values, layout.tables())
    tokens = [getattr(tuning, product).tokens for product in tuned.PRODUCTS]
    assert tokens == [256, 256, 1024]


def test_later_measurements_replace_earlier_ones_of_the_same_case(folder):
    path = folder / "chip.json"
    cases = list(spaces("xla"))
    for tokens in (7, 9):
        tuned.write(path, [(cases[0], tuning_xla.TokenTiles(tokens), {})], {})
    tuned.write(path, [(cases[1], tuning_xla.TokenTiles(5), {})], {})
    assert tuned.read(path) == {cases[0]: {"tokens": 9}, cases[1]: {"tokens": 5}}


ENTRY = {
    **dataclasses.asdict(next(iter(spaces("pallas_hopper")))),
    "tiles": dataclasses.asdict(default_tiles("pallas_hopper").forward),
}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", 'has no list of "entries"'),
        ('{"entries": {}}', 'has no list of "entries"'),
        ('{"entries": [3]}', 'entry 0 must be an object with "tiles"'),
        ('{"entries": [{"tiles": {}}]}', "Case needs the fields implementation, product, tokens"),
        (json.dumps({"entries": [{**ENTRY, "tokens": -1}]}), "integer from 0 to"),
        (json.dumps({"entries": [{**ENTRY, "block": True}]}), "integer from 0 to"),
        (json.dumps({"entries": [{**ENTRY, "dtype": 3}]}), "dtype is 3; legal: str"),
        ('{"entries": []}' + " " * tuned.MAX_FILE_BYTES, "has more than"),
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_file_falls_back_to_the_heuristic_with_one_warning(folder, warnings, text, words):
    before = default_tiles("pallas_hopper")
    tuned._entries.cache_clear()
    path = folder / "chip.json"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        tuned.read(path)
    for _ in range(2):
        assert default_tiles("pallas_hopper") == before
    assert len(warnings) == 1 and words in warnings[0]


def test_a_field_that_an_older_file_lacks_takes_its_default():
    @dataclasses.dataclass(frozen=True)
    class Tiles:
        rows: int
        wide: bool = False

    assert tuned.parse(Tiles, {"rows": 8}, "here") == Tiles(8)
    for data in ({"wide": True}, {"rows": 8, "deep": 1}):
        with pytest.raises(UserError, match="Tiles needs the fields rows, wide"):
            tuned.parse(Tiles, data, "here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": 100}, "This chip cannot run"),
        ({"stages": 4000}, "This chip cannot run"),
        ({"stages": 2**31}, "legal: an integer"),
        ({"stages": "5; rm"}, "legal: an integer"),
        ({"speed": 1}, "ProductTiles needs the fields rows, columns"),
    ],
    ids=str,
)
def test_illegal_tiles_fall_back_to_the_heuristic_with_one_warning(folder, warnings, change, words):
    before = default_tiles("pallas_hopper")
    tuned._entries.cache_clear()
    entry = {**ENTRY, "tiles": {**ENTRY["tiles"], **change}}
    (folder / "chip.json").write_text(json.dumps({"entries": [entry]}))
    for _ in range(2):
        assert default_tiles("pallas_hopper") == before
    assert len(warnings) == 1 and words in warnings[0]


def test_the_shipped_files_are_readable():
    for path in tuned.file_path("").parent.glob("*.json"):
        assert tuned.read(path)
