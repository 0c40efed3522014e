"""Nothing that is read is executed, and nothing in a run folder leads out of it."""

import ast
import json
import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.config.model import LinearSpec, ModelConfig
from sparse_dataflow.evaluation import trained
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.links import refuse_outside_links
from sparse_dataflow.parallel.relay.server_files import _refuse_another_folder

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = [
    p for room in ("sparse_dataflow", "experiments", "launch") for p in (ROOT / room).rglob("*.py")
]
EXECUTING = {
    "_pickle", "cPickle", "cloudpickle", "code", "codeop", "dill", "joblib", "marshal",
    "pickle", "shelve",
}  # fmt: skip
"""Modules that make objects, or run code, from bytes."""


def called(node):
    """The dotted name of what a call calls, as far as it is one."""
    parts, here = [], node.func
    while isinstance(here, ast.Attribute):
        parts.append(here.attr)
        here = here.value
    return ".".join(reversed([*parts, here.id] if isinstance(here, ast.Name) else parts))


def offences(source):
    """What a source does that may execute what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in EXECUTING]
        elif isinstance(node, ast.ImportFrom) and node.module in EXECUTING:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = called(node)
            options = {o.arg: getattr(o.value, "value", None) for o in node.keywords}
            if name in ("eval", "exec", "__import__") or name.endswith("yaml.load"):
                found.append(name)
            if name in ("np.load", "numpy.load") and options.get("allow_pickle", 0) is not False:
                found.append(f"{name} without allow_pickle=False")
            if options.get("allow_pickle") is True or options.get("shell") is True:
                found.append(f"{name} with allow_pickle or shell")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from marshal import loads", "eval(text)", "np.load(path)",
        "np.load(path, allow_pickle=True)", "subprocess.run(words, shell=True)", "yaml.load(file)",
    ],
)  # fmt: skip
def test_what_executes_is_found(source):
    assert offences(source)


def test_no_source_executes_what_it_reads():
    assert len(SOURCES) > 200
    assert {str(p): o for p in SOURCES if (o := offences(p.read_text()))} == {}


@given(st.lists(st.sampled_from(["a", "b", "c/d"]), max_size=3), st.booleans())
def test_a_link_out_of_the_folder_is_refused_and_one_within_is_not(tmp_path_factory, names, out):
    base = tmp_path_factory.mktemp("links")
    run, outside = base / "run", base / "outside"
    outside.mkdir()
    (run / "sparse").mkdir(parents=True)
    (base / "reached").symlink_to(run)
    for name in dict.fromkeys(names):
        link = run / "sparse" / name
        link.parent.mkdir(exist_ok=True, parents=True)
        link.symlink_to(outside / "x" if out else run / "config.json")
    if names and out:
        with pytest.raises(UserError, match="outside the run folder"):
            refuse_outside_links(base / "reached")
    else:
        refuse_outside_links(base / "reached")


@pytest.mark.parametrize("name", ["..", "../other", "/etc", "a/b", "", "sparse\0", "."])
def test_a_variant_names_no_place_elsewhere(tmp_path, name):
    model = ModelConfig(1, 8, 1, 32, 300, 4).to_json()
    training = {"steps": 1, "batch": 1, "sequence": 4}
    variants = {name: {"model": model, "training": training, "evolution": {}}}
    config = {"variants": variants, "corpus": {"name": "sotu"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not a legal variant name"):
        trained.read_config(tmp_path)


@pytest.mark.parametrize(
    "sizes",
    [
        (10**9, 8, 1, 32, 300, 4), (1, 10**12, 1, 32, 300, 4), (1, 8, 1, 10**15, 300, 4),
        (1, 8, 1, 32, 10**18, 4), (1, 8, 1, 32, 300, 2**40),
    ],
)  # fmt: skip
def test_sizes_are_bounded_before_anything_is_made(sizes):
    with pytest.raises(UserError, match="at most"):
        ModelConfig(*sizes)


def test_blocks_are_bounded_before_any_layout_is_made():
    wide = 2**21
    with pytest.raises(UserError, match="larger blocks"):
        ModelConfig(8, wide, 1, wide, 300, 4, {"qkv": LinearSpec("block_sparse", block=1)})


@pytest.mark.parametrize("name", ["thesis.txt", "lock/", "slot0 ->"])
def test_the_relay_s_files_go_to_a_folder_of_their_own_alone(tmp_path, name):
    if name.endswith("->"):
        (tmp_path / "folder").mkdir()
        (tmp_path / "precious").write_text("mine")
        (tmp_path / "folder" / name.split()[0]).symlink_to(tmp_path / "precious")
    else:
        path = tmp_path / "folder" / name
        path.mkdir(parents=True) if name.endswith("/") else path.parent.mkdir()
        if not name.endswith("/"):
            path.write_text("mine")
    before = sorted((p.name, p.is_dir()) for p in tmp_path.rglob("*"))
    with pytest.raises(UserError, match="not a file of the parameter server"):
        _refuse_another_folder(tmp_path / "folder")
    assert sorted((p.name, p.is_dir()) for p in tmp_path.rglob("*")) == before


def test_a_pipe_a_giant_and_a_tower_are_no_json_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text(json.dumps("x" * 2000))
    (tmp_path / "tower").write_text("[" * 100_000)
    wanted = {
        "pipe": "not a regular file",
        "large": "larger than 1000",
        "tower": "nested too deeply",
    }
    for name, words in wanted.items():
        with pytest.raises(ValueError, match=words):
            json_files.load(tmp_path / name, 1000 if name == "large" else 10**6)
