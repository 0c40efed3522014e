"""The public API: small, quick to import, documented, and enough to train on strings."""

import dataclasses
import doctest
import importlib.metadata
import inspect
import json
import os
import random
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sparse_dataflow as sd
from sparse_dataflow.core.config import settings
from sparse_dataflow.data import cache


def test_importing_it_imports_nothing_else():
    # Where typing is imported the interpreter's own modules vary; those of packages do not.
    probe = "import sys, sparse_dataflow; print(*(m for m in ('jax', 'numpy') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", sd.__all__)
def test_every_name_is_there_and_says_what_it_takes_and_raises(name):
    thing = getattr(sd, name)
    doc = inspect.getdoc(thing)
    assert doc and name in dir(sd) and thing.__name__ == name
    if inspect.isfunction(thing):
        for section in ("Args:", "Raises:"):
            if section == "Raises:" and name == "parameter_count":
                continue  # It refuses nothing.
            assert section in doc or not inspect.signature(thing).parameters, (name, section)
    elif dataclasses.is_dataclass(thing):
        helped = {s.name for s in settings.settings(thing) if s.help}
        names = {field.name for field in dataclasses.fields(thing)}
        assert all(f"{name}:" in doc for name in names - helped)


SHAPE = re.compile(r"\[[\w., +]*\]")


@pytest.mark.parametrize("name", sd.__all__)
def test_the_reference_of_a_function_has_its_arguments_and_shapes(name):
    """Every argument stands under Args, and an array there or in the result has its shape."""
    function = getattr(sd, name)
    if not inspect.isfunction(function):
        pytest.skip("a class")
    doc, signature = inspect.getdoc(function), inspect.signature(function)
    arguments = re.search(r"^Args:\n((?:  .*\n|\n)*)", doc, re.M)[1]
    helps = dict(re.findall(r"^  \**(\w+)((?:, .*?)?:.*(?:\n   .*)*)", arguments, re.M))
    assert [each for each in signature.parameters if each not in helps] == []
    arrays = [n for n, p in signature.parameters.items() if "Array" in str(p.annotation)]
    assert [n for n in arrays if n != "key" and not SHAPE.search(helps[n])] == []
    if "Array" in str(signature.return_annotation):
        assert SHAPE.search(doc.replace(arguments, "").partition("Examples:")[0])


def refuses(function):
    """Whether a function raises UserError, or has its fields checked against their legal values."""
    words = ("raise UserError", "raise ValueError", "validate(")
    return inspect.isfunction(function) and any(w in inspect.getsource(function) for w in words)


@pytest.mark.parametrize("name", sd.__all__)
def test_a_method_that_refuses_says_so(name):
    thing = getattr(sd, name)
    if not inspect.isclass(thing):
        pytest.skip("a function")
    methods = {n: getattr(m, "__func__", m) for n, m in vars(thing).items() if n[0] != "_"}
    functions = {n: m for n, m in methods.items() if inspect.isfunction(m)}
    assert [n for n, m in functions.items() if not inspect.getdoc(m)] == []
    raising = [n for n, m in functions.items() if refuses(m)]
    assert [n for n in raising if "Raises" not in inspect.getdoc(functions[n])] == []
    inits = [
        vars(thing).get("__init__" if not dataclasses.is_dataclass(thing) else "__post_init__")
    ]
    assert "Raises:" in inspect.getdoc(thing) or not any(map(refuses, filter(None, inits)))


EXAMPLE_NAMES = {
    "sd": sd, "jax": jax, "jnp": jnp, "np": np, "nnx": nnx, "optax": optax,
    "os": os, "tempfile": tempfile,
}  # fmt: skip
"""What the examples of the API reference have imported; its page says so."""

EXAMPLES = [pytest.param(n, marks=pytest.mark.slow if n == "train" else ()) for n in sd.__all__]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    finder = doctest.DocTestFinder(exclude_empty=True)
    thing = getattr(sd, name)
    tests = finder.find(thing, name, module=inspect.getmodule(thing), globs=dict(EXAMPLE_NAMES))
    assert any(test.examples for test in tests)
    for test in tests:
        outcome = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(test)
        assert not outcome.failed, name


def test_the_example_of_the_package_runs():
    assert not doctest.testmod(sd, extraglobs=EXAMPLE_NAMES).failed


def test_there_are_few_and_no_others():
    assert len(sd.__all__) <= 35 and sd.__all__ == sorted(sd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sd.nothing  # noqa: B018


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    lines = [f"word{draw.randrange(30)} and {draw.randrange(9)}\n" for _ in range(2400)]
    return ["".join(lines[start : start + 300]) for start in range(0, 2400, 300)]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    return sd.preset("pico").change(
        model__num_layers=1,
        model__vocab_size=300,
        sparsity__block=32,
        sparsity__density=0.5,
        training__steps=30,
        training__batch=4,
        training__learning_rate=1e-2,
        training__sequence=16,
        run__eval_every=10,
        run__twin=False,
        run__out=str(tmp_path / "run"),
    )


def test_a_training_on_strings_learns_and_can_be_resumed_and_generates(texts, config, tmp_path):
    run = sd.train(config, texts=texts, metrics={"twice": lambda step: 2 * step.numbers["loss"]})
    assert run.finished and run.folder == tmp_path / "run" and (run.folder / "report.html").exists()
    call = json.loads((run.folder / "run.json").read_text())["command"][0]
    assert call.endswith(", texts=texts, metrics=metrics)")
    train = [row for row in run.metrics() if row["kind"] == "train"]
    assert [row["step"] for row in train] == list(range(1, 31))
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    assert [row["twice"] for row in train] == [2 * row["loss"] for row in train]
    quality = [row["bits_per_byte"] for row in run.metrics() if row["kind"] == "eval"]
    assert len(quality) == 3 and quality[-1] < quality[0]
    trained = run.model()
    assert trained.variant == "sparse" and trained.step == 30
    [continuation] = sd.generate(trained, ["word"], max_new_tokens=5)
    assert len(continuation.tokens) == 5 and np.isin(continuation.tokens, range(300)).all()
    loaded, saved = sd.load(run.folder), sd.load(sd.save(trained, tmp_path / "saved"))
    assert loaded.variant == "sparse" and saved.context == 16
    for other in (loaded, saved):
        assert sd.generate(other, ["word"], max_new_tokens=5)[0] == continuation
    again = sd.train(config, texts=texts, resume=True)
    assert again.finished and again.headline == run.headline


def test_a_run_is_not_resumed_with_other_settings_or_texts(texts, config):
    sd.train(config.change(training__steps=1), texts=texts)
    with pytest.raises(sd.UserError, match=r"training.steps is 1 there and 30 here"):
        sd.train(config, texts=texts, resume=True)
    with pytest.raises(sd.UserError, match="has changed since"):
        sd.train(config.change(training__steps=1), texts=texts[:-1], resume=True)


def test_held_out_text_that_is_missing_is_refused_before_a_folder_is_made(texts, config):
    config = config.change(data__validation="/missing/text")
    with pytest.raises(sd.UserError, match="/missing/text does not exist"):
        sd.train(config, texts=texts)
    assert not os.path.exists(config.run.out)


@pytest.mark.parametrize("texts", ["one string", [1, 2], [], ["a"]])
def test_texts_that_cannot_be_split_into_documents_are_refused_in_words(texts, config, tmp_path):
    with pytest.raises(sd.UserError, match="texts"):
        sd.train(config, texts=texts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("metrics", [{"loss": len}, {"a b": len}, {"x": 1}, [len], len])
def test_metrics_that_no_step_can_have_are_refused_before_any_work(texts, config, metrics):
    with pytest.raises(sd.UserError, match="metrics"):
        sd.train(config, texts=texts, metrics=metrics)


def test_what_cannot_be_trained_is_refused_in_words(texts, config):
    with pytest.raises(sd.UserError, match=r"training.sequence=128 is longer than"):
        config.change(training__sequence=128)
    with pytest.raises(sd.UserError, match="too small for byte-level BPE"):
        sd.train(config.change(model__vocab_size=100), texts=texts)


ODD = (None, "5", b"x", 2.5, -1, 0, [5], ["a"], {}, object(), float("nan"), "\ud83d", 10**30)
"""Values that Python programs pass by mistake."""


def legal_calls(tmp_path):
    """Returns a legal call of each public function: name -> (function, arguments)."""
    config = sd.preset("pico").change(sparsity__block=16, model__num_layers=1)
    model, linear = sd.init(config, jax.random.key(0)), nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    size = {"in_features": 64, "out_features": 128}
    layer = sd.BlockSparseLinear(**size, density=0.25, block=16, rngs=nnx.Rngs(0), evolving=True)
    layout = sd.make_layout("random", **size, block=16, density=0.25)
    arrays = {"x": jnp.ones((2, 64)), "values": jnp.ones((layout.nnz, 16, 16)), "layout": layout}
    tokens = {"model": model, "tokens": np.zeros((1, 8), np.int32)}
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("d",))
    shape = {"num_layers": 2, "d_model": 128, "num_heads": 2, "d_ff": 512, "vocab_size": 512}
    calls = {
        "sparsify": {"model": linear, "density": 0.25, "block": 16},
        "densify": {"model": layer},
        "partition_specs": {"model": layer, "mesh": mesh, "axis": "d"},
        "erk_densities": {"model": linear, "density": 0.5, "block": 16},
        "cubic_density": {"step": 1, "first": 0, "last": 10, "end": 0.5},
        "make_layout": {"pattern": "random", **size, "block": 16, "density": 0.25},
        "legal_densities": {**size, "block": 16},
        "block_sparse_matmul": arrays,
        "flops_per_token": {"config": model.model, "sequence": 16},
        "parameter_count": {"config": model.model},
        "preset": {"scale": "pico"},
        "init": {"config": config, "key": jax.random.key(0)},
        "logits": tokens,
        "loss": tokens,
        "load": {"folder": tmp_path / "none"},
        "generate": {"model": model, "prompts": ["a"], "max_new_tokens": 2},
        "LinearSpec": {},
        "ModelConfig": {**shape, "max_len": 64},
        "BlockLayout": dict.fromkeys(("block", "in_blocks", "out_blocks"), 1)
        | {"rows": np.array([0]), "cols": np.array([0])},
    }
    methods = {
        "from_texts": (sd.Tokenizer.from_texts, {"texts": ["abc " * 9], "vocab_size": 260}),
        "encode": (model.tokenizer.encode, {"text": "a"}),
        "encode_batch": (model.tokenizer.encode_batch, {"texts": ["a"]}),
        "decode": (model.tokenizer.decode, {"ids": [3]}),
    }
    return {name: (getattr(sd, name), arguments) for name, arguments in calls.items()} | methods


@pytest.mark.parametrize("name", sd.__all__)
def test_every_public_function_checks_its_arguments_by_their_annotations(name):
    thing = getattr(sd, name)
    if inspect.isfunction(thing):
        assert hasattr(thing, "__wrapped__")


def test_odd_values_act_or_are_refused_by_every_public_function(tmp_path):
    crashes = []
    for name, (function, arguments) in legal_calls(tmp_path).items():
        for argument in arguments:
            for value in ODD:
                try:
                    function(**{**arguments, argument: value})
                except sd.UserError:
                    pass
                except Exception as error:
                    crashes.append(f"{name}({argument}={value!r}): {type(error).__name__}: {error}")
    assert not crashes, "\n".join(crashes)


def test_the_version_is_that_of_the_package_and_dir_has_public_names_alone():
    assert sd.__version__ == importlib.metadata.version("sparse_dataflow")
    assert {name for name in dir(sd) if not name.startswith("__")} == set(sd.__all__)
