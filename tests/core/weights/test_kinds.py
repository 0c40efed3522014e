"""What a kind of weight says of itself holds, and nobody else knows its arrays."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import on_eight_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from kronecker import Kronecker
from marks import some
from places import ROOT
from small_models import whole_logits

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import KINDS, PATTERN_NAMES, LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors import sharding, whole
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.layouts.evolution import METHODS, phase_specs
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.partition import legal, trained_and_rest
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.optim.optimizers import learning_rate_multipliers
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.saved_state import SavedState
from sparse_dataflow.core.training.step import initial_state, make_train_step
from sparse_dataflow.core.training.transitions import change_model
from sparse_dataflow.core.weights import kind as kinds
from sparse_dataflow.core.weights.kind import LEAF, MATRIX, Leaf, Weight
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.equivalent_forms import dense_form
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.runs.adapted_model import with_adapters
from sparse_dataflow.runs.run_config import preset

PACKAGE = ROOT / "sparse_dataflow"
SIDES = (48, 96)
KEYS = sorted(KINDS)
each_kind = pytest.mark.parametrize("key", KEYS)
MODEL = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=16)


def spec_of(key):
    stores_blocks = KINDS[key].stores_blocks
    return LinearSpec(key, "random" if stores_blocks else key, density=0.5, block=8)


def drawn(key, sides=SIDES, seed=0):
    """Returns (spec, layout or None, drawn arrays)."""
    spec, rng = spec_of(key), np.random.default_rng(seed)
    layout = make_layout("random", *sides, 8, 0.5) if spec.weight.stores_blocks else None

    def normal(shape, scale):
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    return spec, layout, spec.weight.draw(spec, sides, 1.0, normal, layout)


def test_every_kind_is_tested():
    assert {
        "dense",
        "block_sparse",
        "block_tensor_train",
        "low_rank",
        "masked",
        "kronecker",
    } <= set(KEYS)


@each_kind
def test_drawn_arrays_are_those_that_it_names(key):
    spec, _, arrays = drawn(key)
    assert {name: array.shape for name, array in arrays.items()} == spec.weight.shapes(spec, SIDES)
    layouts = {kinds.LAYOUT} if spec.weight.stores_blocks else set()
    assert arrays.keys() | layouts == spec.leaves.keys()
    trained = [a for name, a in arrays.items() if spec.leaves[name].role != kinds.TABLE]
    size = sum(math.prod(array.shape) for array in trained)
    assert spec.weight.stored(spec, SIDES) == pytest.approx(size, rel=1e-12)
    for name, array in arrays.items():
        leaf = spec.leaves[name]
        blocks = leaf.is_blocks
        assert array.ndim == kinds.ROLE_AXES[leaf.role] + blocks
        assert all(len(leaf.cuts(rows)) <= array.ndim for rows in (False, True))
        if leaf.input_dim is not None:
            assert array.shape[leaf.input_dim] == SIDES[0]
        if leaf.output_dim is not None and not blocks:
            assert array.shape[leaf.output_dim] == SIDES[1]


@each_kind
def test_product_gradients_and_outputs_are_those_of_the_dense_form(key):
    spec, layout, arrays = drawn(key)
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        tables = {name: a for name, a in arrays.items() if spec.leaves[name].role == kinds.TABLE}
        arrays = {n: jnp.asarray(np.asarray(a, np.float64)) for n, a in arrays.items()}
        arrays = {n: a for n, a in arrays.items() if n not in tables}

        def weight(arrays):
            return spec.weight.from_arrays({**arrays, **tables, "layout": layout}, "compute_dtype")

        x, dy = rng.normal(size=(4, 5, SIDES[0])), rng.normal(size=(4, 5, SIDES[1]))
        y, pullback = jax.vjp(lambda a, x: x @ weight(a), arrays, jnp.asarray(x))
        gradients, dx = pullback(jnp.asarray(dy))
        matrix, through_dense = jax.vjp(lambda a: weight(a).dense(), arrays)
        [expected] = through_dense(jnp.einsum("bti,bto->io", x, dy))
        np.testing.assert_allclose(y, x @ np.asarray(matrix), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(dx, dy @ np.asarray(matrix).T, rtol=1e-10, atol=1e-10)
    for name in arrays:
        np.testing.assert_allclose(gradients[name], expected[name], rtol=1e-9, atol=1e-9)


@each_kind
def test_parameters_are_counted(key):
    model = MODEL.with_linears(spec_of(key))
    params, _ = trained_and_rest(model, jax.eval_shape(lambda: gpt.init(model, jax.random.key(0))))
    assert cost.parameter_count(model) == sum(math.prod(a.shape) for a in jax.tree.leaves(params))


@each_kind
@pytest.mark.parametrize("optimizer", some(["adamw", "muon", "adafactor"], "muon"))
def test_it_trains_and_its_matrices_are_those_of_muon(key, optimizer):
    model = dataclasses.replace(MODEL.with_linears(spec_of(key)), parametrization="supar")
    training = TrainingConfig(20, 4, 8, learning_rate=1e-2, optimizer=optimizer)
    state = initial_state(model, training)
    batch = Batch.from_windows(np.random.default_rng(0).integers(0, 40, (4, 9), np.int32))
    step, losses = jax.jit(make_train_step(model, training)), []
    for _ in range(6):
        state, report = step(state, batch, 1e-3 if optimizer == "adafactor" else 1e-2)
        losses.append(float(report.loss))
    assert losses[-1] < losses[0] and np.isfinite(losses).all()
    if optimizer == "muon":
        spec, moments = spec_of(key), next(e for e in state.moments if hasattr(e, "nu"))
        assert not {p[-1].key for p, _ in jax.tree_util.tree_leaves_with_path(moments.nu)} & {
            name for name, leaf in spec.weight.leaves().items() if leaf.has_muon
        }


@each_kind
def test_the_dense_form_of_a_model_computes_the_same(key):
    model = MODEL.with_linears(spec_of(key))
    training = TrainingConfig(20, 4, 8)
    state = initial_state(model, training)
    dense, params = dense_form(model, state.merged)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 10), np.int32)
    expected = whole_logits(model, weights_of(model, state.merged), tokens)
    actual = whole_logits(dense, weights_of(dense, params, {}), tokens)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KEYS),
    st.tuples(*[st.sampled_from((1, 2, 4, 8))] * 2),
    st.sampled_from(((48, 96), (40, 64), (24, 56), (136, 72))),
    st.booleans(),
)
def test_planner_and_mesh_cut_alike(key, axes, sides, rows):
    """The planner says that "fsdp" shards an array where the sharding rules do."""
    fsdp, tensor = axes
    sizes = meshes.parse(f"fsdp:{fsdp},tensor:{tensor}", None)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    spec = spec_of(key)
    projection = "mlp_out" if rows else "mlp_in"
    model = MODEL.with_linears(spec)
    shards = {"fsdp": fsdp, "tensor": tensor, "feature": 1}
    for name, shape in spec.weight.shapes(spec, sides).items():
        cuts = spec.leaves[name].cuts(rows)
        divides = plan_memory._divides(shape, cuts, shards)
        entries = sharding.spec(model, f"blocks.{projection}.{name}", (2, *shape), mesh)
        shards_fsdp = "fsdp" in itertools.chain(*map(sharding.entry_axes, entries))
        has_fsdp = any("fsdp" in axes for axes in cuts)
        assert shards_fsdp == (bool(divides) and has_fsdp and fsdp > 1)


def test_a_pattern_chooses_a_kind_of_somebody_else_in_a_run(monkeypatch):
    # All tests of a process share the registry, and some read the legal patterns.
    monkeypatch.delitem(KINDS, "kronecker")
    monkeypatch.setattr(Kronecker, "is_pattern", True)
    monkeypatch.setattr(kinds, "ON_REGISTER", [])  # It is a pytree already.
    kinds.register(Kronecker)
    try:
        config = preset("pico").change(sparsity__pattern="kronecker")
        specs = config.sparsity.linears(config.model)
        assert {spec.weight for spec in specs.values()} == {Kronecker}
    finally:
        assert PATTERN_NAMES.pop() == kinds.KIND_NAMES.pop() == "kronecker"


def test_a_run_trains_a_kind_of_blocks_of_somebody_else_on_tensor(tmp_path):
    whole, by_tensor = on_eight_devices("core/weights/own_kind.py", str(tmp_path))
    assert len(whole[0]) == 3 and whole[0] != whole[0][::-1]
    np.testing.assert_allclose(by_tensor[0], whole[0], rtol=2e-5)
    assert by_tensor[1] == pytest.approx(whole[1], rel=1e-4)


def test_a_kind_of_blocks_is_no_kind_of_a_pattern_without_them():
    with pytest.raises(UserError, match=r"kind=block_sparse with sparsity.pattern=low_rank, which"):
        preset("pico").change(sparsity__kind="block_sparse", sparsity__pattern="low_rank")
    with pytest.raises(UserError, match=r"kind=low_rank.*[Ll]egal: auto, block_sparse"):
        preset("pico").change(sparsity__kind="low_rank")


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        (lambda m: dataclasses.replace(m, experts=4), "mlp_in of experts .*Kronecker products"),
        (lambda m: dataclasses.replace(m, precision="int8"), "precision=int8 .*Kronecker"),
        (lambda m: LinearSpec("kronecker", hadamard=2), "hadamard=2 does not go with Kronecker"),
        (lambda m: LinearSpec("kronecker", turned_dense=True), "turned_dense=True does not"),
    ],
)
def test_what_a_kind_does_not_offer_is_refused(feature, words):
    with pytest.raises(UserError, match=words):
        feature(MODEL.with_linears(LinearSpec("kronecker", "kronecker")))


EXCHANGING = sorted(name for name, method in METHODS.items() if method.changes_blocks)


@pytest.mark.parametrize("method", EXCHANGING)
def test_a_kind_that_is_no_part_of_a_dense_weight_is_not_evolved(method):
    model = MODEL.with_linears(LinearSpec("kronecker", "kronecker", rank=2))
    with pytest.raises(UserError, match="needs a sparse projection"):
        phase_specs(model, EvolutionConfig(method))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("kronecker", "dense"),
        ("dense", "kronecker"),
        ("low_rank", "masked"),
        ("block_sparse", "low_rank"),
    ],
)
def test_a_model_does_not_turn_into_a_kind_that_has_no_way_there(before, after):
    before, after = (MODEL.with_linears(spec_of(key)) for key in (before, after))
    state = initial_state(before, TrainingConfig(20, 4, 8))
    with pytest.raises(UserError, match=r"a change of what is stored does not go with .*; legal"):
        change_model(state, before, after)


TERMED = sorted(key for key in KEYS if "rank" in KINDS[key].offers)


@pytest.mark.parametrize("key", some(TERMED, "kronecker"))
def test_an_added_term_goes_with_each_kind_that_offers_one(key):
    """It is counted, drawn, all that adapters train, and part of the dense form."""
    base = MODEL.with_linears(spec_of(key))
    model = with_adapters(base, rank=3)
    params, _ = trained_and_rest(model, jax.eval_shape(lambda: gpt.init(model, jax.random.key(0))))
    assert cost.parameter_count(model) == sum(math.prod(a.shape) for a in jax.tree.leaves(params))
    sides = [sum(model.projection_shape(name)) for name in model.projections]
    assert memory.term_count(model) == 3 * MODEL.num_layers * sum(sides)
    added = cost.flops_per_token(model, 8, training=False).total
    added -= cost.flops_per_token(base, 8, training=False).total
    assert added == 2 * memory.term_count(model)
    training = TrainingConfig(20, 4, 8, learning_rate=1e-2, adapter_rank=3)
    state = initial_state(model, training)
    names = {p[-1].key for p, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    assert names == {"a_kernel", "b_kernel"}
    state = state._replace(params=jax.tree.map(lambda leaf: leaf + 0.1, state.params))
    tokens = np.random.default_rng(0).integers(0, 40, (2, 9), np.int32)
    dense, params = dense_form(model, state.merged)
    expected = whole.logits(model, weights_of(model, state.merged), tokens)
    actual = whole.logits(dense, weights_of(dense, params, {}), tokens)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("key", TERMED)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_leaf_of_a_kind_and_of_its_term_has_a_learning_rate(key, optimizer):
    spec = dataclasses.replace(spec_of(key), rank=2)
    model = dataclasses.replace(MODEL.with_linears(spec), parametrization="supar")
    training = TrainingConfig(20, 4, 8, optimizer=optimizer, sparse_rate=2.0)
    state = jax.eval_shape(lambda: initial_state(model, training))
    rates = learning_rate_multipliers(model, training, state.params)
    assert all(0 < rate < np.inf for rate in jax.tree.leaves(rates))


@pytest.fixture
def registry(monkeypatch):
    """Lets a test register kinds of its own: all tests of a process share the registry."""
    names = ("KINDS", "KIND_NAMES", "PATTERN_NAMES", "CLASSES")
    before = {name: getattr(kinds, name).copy() for name in names}
    yield
    for name, content in before.items():
        shared = getattr(kinds, name)
        shared.clear()
        shared.update(content) if isinstance(shared, dict) else shared.extend(content)


@pytest.mark.parametrize("key", some(["dense", "block_sparse", "masked"], "block_sparse"))
def test_a_kind_with_the_arrays_of_another_one_changes_no_model_of_that_one(registry, key):
    model = MODEL.with_linears(spec_of(key))
    state = initial_state(model, TrainingConfig(20, 4, 8))
    tokens = np.random.default_rng(0).integers(0, 40, (2, 9), np.int32)
    before = whole.logits(model, weights_of(model, state.merged), tokens)
    parent = KINDS[key]
    facts = {
        "__doc__": "Half the product.",
        "kind": "halved",
        "words": "halved weights",
        "is_pattern": False,
        "__rmatmul__": lambda self, x: parent.__rmatmul__(self, x) * 0.5,
    }
    kinds.register(dataclasses.dataclass(frozen=True, eq=False)(type("Halved", (parent,), facts)))
    after = whole.logits(model, weights_of(model, state.merged), tokens)
    np.testing.assert_array_equal(after, before)
    halved = MODEL.with_linears(dataclasses.replace(spec_of(key), kind="halved"))
    changed = whole.logits(halved, weights_of(halved, state.merged), tokens)
    assert np.abs(np.asarray(changed) - before).max() > 1e-3


def test_kinds_say_different_things_of_arrays_of_the_same_name(registry):
    """What an array is follows from the kind of its projection, never from its name."""
    fields = {"kernel": dataclasses.field(metadata={LEAF: Leaf(kinds.TABLE)}), "mine": None}
    kinds.register(incomplete(**fields, __annotations__={"kernel": object}))
    model = MODEL.with_linears(LinearSpec("mine"), ["mlp_in"])
    params = {"blocks": {name: {"kernel": 0} for name in ("mlp_in", "mlp_out")}}
    trained, tables = trained_and_rest(model, params)
    assert trained == {"blocks": {"mlp_out": {"kernel": 0}}}
    assert tables == {"blocks": {"mlp_in": {"kernel": 0}}}


def test_an_array_of_a_kind_is_not_taken_for_that_of_a_norm(registry):
    """Norms have a "scale" and a "bias", the head has an "output": none of them is a weight's."""
    state = initial_state(MODEL, TrainingConfig(20, 4, 8))
    names = {"scale": object, "output": object}
    fields = {name: dataclasses.field(metadata={LEAF: Leaf(kinds.TABLE)}) for name in names}
    kinds.register(incomplete(**fields, __annotations__=names, mine=None))
    after = initial_state(MODEL, TrainingConfig(20, 4, 9))
    assert jax.tree.structure(after.params) == jax.tree.structure(state.params)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("optimizer", ["muon", "optax:noisy_sgd"])
def test_a_kind_is_legal_after_any_update(key, optimizer):
    """Of both optimizers, an update is not zero where the gradient is."""
    if KINDS[key].project.__func__ is Weight.project.__func__:
        pytest.skip("each value of it is legal")
    model = MODEL.with_linears(spec_of(key))
    training = TrainingConfig(20, 4, 8, optimizer=optimizer)
    state = initial_state(model, training)
    batch = Batch.from_windows(np.random.default_rng(0).integers(0, 40, (4, 9), np.int32))
    step = jax.jit(make_train_step(model, training))
    for _ in range(2):
        state, _ = step(state, batch, 1e-2)
    broken = jax.tree.map(lambda leaf: leaf + 1, state.params)
    for params in (state.params, broken):
        projected = legal(model, params, state.rest)
        again = legal(model, projected, state.rest)
        jax.tree.map(np.testing.assert_array_equal, again, projected)
        changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), projected, params)
        assert any(jax.tree.leaves(changed)) == (params is broken)
        numpy = legal(model, *map(jax.device_get, (params, state.rest)))
        jax.tree.map(np.testing.assert_array_equal, numpy, projected)


def test_adapters_of_a_masked_weight_are_restored_without_it():
    model = with_adapters(MODEL.with_linears(spec_of("masked")), rank=2)
    state = initial_state(model, TrainingConfig(20, 4, 8, adapter_rank=2))
    restored = SavedState.of(state, has_base=True).state(model)
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)


@pytest.mark.parametrize("axis", ["tensor", "feature"])
def test_a_kind_that_is_not_cut_over_an_axis_is_refused_there(axis):
    sizes = meshes.parse(f"{axis}:2", None)
    executor = Sharded(AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    model = MODEL.with_linears(LinearSpec("kronecker", "kronecker"), ["mlp_in"])
    with pytest.raises(UserError, match=r"Kronecker products.*; legal"):
        executor.check(model, TrainingConfig(20, 4, 8))
    executor.check(MODEL, TrainingConfig(20, 4, 8))


def incomplete(**changes):
    """A class of weights without some of its facts."""
    base = {
        "kind": "mine",
        "words": "my weights",
        "__rmatmul__": lambda self, x: x,
        "dense": lambda self: self.mine,
        "shapes": classmethod(lambda cls, spec, sides: {}),
        "draw": classmethod(lambda cls, *_: {}),
        "__annotations__": {"mine": object},
        "mine": dataclasses.field(metadata={LEAF: Leaf(MATRIX)}),
    }
    facts = {name: fact for name, fact in (base | changes).items() if fact is not None}
    return dataclasses.dataclass(frozen=True)(type("Mine", (Weight,), facts))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draw": None}, "'mine' lacks draw"),
        ({"dense": None, "shapes": None}, "'mine' lacks dense, shapes"),
        ({"words": None}, "'mine' lacks words"),
        ({"offers": frozenset({"experts"})}, "'mine' lacks expert_products"),
        ({"kind": "dense"}, "'dense' is registered twice"),
        ({"offers": frozenset({"rank", "speed"})}, "offers speed; legal: .*experts"),
        ({"offers": frozenset({"tensor_axis"})}, "offers tensor_axis and cuts no array over ten"),
        (
            {"__annotations__": {"gate": object}, "mine": None,
             "gate": dataclasses.field(metadata={LEAF: Leaf(MATRIX)})},
            "'gate' of Mine has a name that .* legal: other names than .*bias",
        ),
    ],
)  # fmt: skip
def test_a_kind_without_a_fact_is_refused_by_its_name(changes, words):
    before = dict(KINDS)
    with pytest.raises(UserError, match=words):
        kinds.register(incomplete(**changes))
    assert KINDS == before


def test_an_unknown_kind_is_refused_with_the_legal_ones():
    with pytest.raises(UserError, match=r"kind.*Legal: block_sparse, .*dense"):
        LinearSpec("sparse")


NAMES = {name for each in kinds.CLASSES for name in each.leaves()} - Kronecker.leaves().keys()
ROOMS = ("core", "interchange", "planner", "pipeline", "relay", "runs", "compile")
HOMES = (
    "core/weights/", "interchange/peft.py", "interchange/serving/run_in_torch.py",
)  # fmt: skip
"""Who names arrays: the kinds, a reader of a foreign format, and one that runs without us."""


def test_no_other_file_names_a_kind():
    """What a kind is stands in its class.  A help text has its name."""
    allowed = {"core/config/sparsity.py"}
    pattern = re.compile("low_?rank(?!-)", re.IGNORECASE)
    named = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert {name for name in named if not name.startswith("core/weights/")} == allowed


def test_no_other_file_compares_kinds_or_names_arrays():
    """In interchange "kernel" and "layout" are also names in files of other libraries."""
    compares = r"(spec|linear|before|after|linear\(\w+\))\.kind (==|!=|in|not in) "
    files = [path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")]
    found = []
    for path in sorted(files):
        name = path.relative_to(PACKAGE).as_posix()
        is_foreign = name.startswith(("interchange", "planner/pub"))
        names = NAMES - ({"kernel", "layout"} if is_foreign else set())
        pattern = re.compile(rf"[\"']({'|'.join(names)})[\"']|{compares}")
        lines = [] if name.startswith(HOMES) else path.read_text(encoding="utf-8").splitlines()
        numbered = enumerate(lines, 1)
        found += [f"{name}:{n}: {line.strip()}" for n, line in numbered if pattern.search(line)]
    assert not found, "\n".join(found)
