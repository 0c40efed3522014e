"""No input is executed, and no path in a run folder leads out of it."""

import ast
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.evaluation.run_files import RunRecord, read_record
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.folders import refuse_outside_links
from sparse_dataflow.relay.server_files import refuse_unusable
from sparse_dataflow.runs.run_config import preset

SOURCES = [
    p for room in ("sparse_dataflow", "experiments", "launch") for p in (ROOT / room).rglob("*.py")
]
EXECUTING = {
    "_pickle", "cPickle", "cloudpickle", "code", "codeop", "dill", "joblib", "marshal",
    "pickle", "shelve",
}  # fmt: skip
"""Modules that create objects or run code from bytes."""


def dotted_name(node):
    """Returns the dotted name of a called function; "" or its last words if it has none."""
    names, function = [], node.func
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    return ".".join(reversed([*names, function.id] if isinstance(function, ast.Name) else names))


def offences(source):
    """Returns the imports and calls of a source that could execute input."""
    result = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            result += [alias.name for alias in node.names if alias.name in EXECUTING]
        elif isinstance(node, ast.ImportFrom) and node.module in EXECUTING:
            result.append(node.module)
        elif isinstance(node, ast.Call):
            name = dotted_name(node)
            options = {o.arg: getattr(o.value, "value", None) for o in node.keywords}
            if name in ("eval", "exec", "__import__") or name.endswith("yaml.load"):
                result.append(name)
            if name in ("np.load", "numpy.load") and options.get("allow_pickle", 0) is not False:
                result.append(f"{name} without allow_pickle=False")
            if options.get("allow_pickle") is True or options.get("shell") is True:
                result.append(f"{name} with allow_pickle or shell")
    return result


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from marshal import loads", "eval(text)", "np.load(path)",
        "np.load(path, allow_pickle=True)", "subprocess.run(words, shell=True)", "yaml.load(file)",
    ],
)  # fmt: skip
def test_code_that_executes_input_is_found(source):
    assert offences(source)


GENERATED = {"experiments/benchmarks/schedules/schedule.py": ["exec"]}
"""Sources that execute text which they make themselves, of checked parts."""


def test_no_source_executes_input():
    assert len(SOURCES) > 200
    found = {p.relative_to(ROOT).as_posix(): o for p in SOURCES if (o := offences(p.read_text()))}
    assert found == GENERATED


UNBOUNDED = (
    "files/json_files.py", "data/template_child.py",
    "interchange/serving/run_in_jax.py", "interchange/serving/run_in_torch.py",
    "experiments/benchmarks/",
)  # fmt: skip
"""Sources that call `json.loads`: the bounded reader itself, programs that run alone, and
measurements that read what their own child processes print."""


def test_json_from_outside_is_read_with_a_limit_of_its_depth():
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = dotted_name(node) if isinstance(node, ast.Call) else ""
            # `json.loads(json.dumps(value))` reads what the program has.
            if name in ("json.load", "json.loads", "json.JSONDecoder") and not (
                isinstance(node.args[0], ast.Call) and dotted_name(node.args[0]) == "json.dumps"
            ):
                found.append(path.relative_to(ROOT).as_posix().removeprefix("sparse_dataflow/"))
    assert found and not [place for place in found if not place.startswith(UNBOUNDED)]


@pytest.mark.parametrize("kind", ["[]", '{"a":}'])
def test_json_is_read_up_to_100_levels(kind):
    start, end = kind[:-1], kind[-1]
    innermost = "1" if kind == '{"a":}' else ""
    for depth in (1, 99, 100):
        json_files.parse(start * depth + innermost + end * depth)
    for depth in (101, 102, 950, 9_996, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            json_files.parse(start * depth + innermost + end * depth)


@given(st.lists(st.sampled_from(["a", "b", "c/d"]), max_size=3), st.booleans())
def test_links_out_of_the_run_folder_are_refused(tmp_path_factory, names, out):
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
        with pytest.raises(UserError, match="outside of the folder"):
            refuse_outside_links(base / "reached")
    else:
        refuse_outside_links(base / "reached")


@pytest.mark.parametrize("name", ["..", "../other", "/etc", "a/b", "", "sparse\0", "."])
def test_a_variant_name_cannot_leave_the_run_folder(tmp_path, name):
    texts = dict.fromkeys(("date", "machine", "corpus", "corpus_hash", "tokenizer"), "x")
    record = RunRecord("gpt13b_sparse", ("python",), versions={}, vocab_size=300, steps={}, **texts)
    fields = record.to_json() | {"steps": {name: 1}}
    (tmp_path / "run.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="steps do not fit the models"):
        read_record(tmp_path, preset("pico"))


@pytest.mark.parametrize(
    "sizes",
    [
        (10**9, 8, 1, 32, 300, 4), (1, 10**12, 1, 32, 300, 4), (1, 8, 1, 10**15, 300, 4),
        (1, 8, 1, 32, 10**18, 4), (1, 8, 1, 32, 300, 2**40),
    ],
)  # fmt: skip
def test_sizes_are_checked_before_any_allocation(sizes):
    with pytest.raises(UserError, match="it must be from 1 to"):
        ModelConfig(*sizes)


def test_block_counts_are_checked_before_any_layout_exists():
    wide = 2**21
    with pytest.raises(UserError, match="larger blocks"):
        ModelConfig(8, wide, 1, wide, 300, 4, {"qkv": LinearSpec("block_sparse", block=1)})


@pytest.mark.parametrize("name", ["thesis.txt", "lock/", "slot0 ->"])
def test_the_relay_refuses_a_folder_with_other_files(tmp_path, name):
    folder = tmp_path / "root" / "folder"
    refuse_unusable(folder.parent, {folder: 1})  # Makes and marks it.
    (tmp_path / "precious").write_text("mine")
    (folder / "lock").unlink()
    if name.endswith("->"):
        (folder / name.split()[0]).symlink_to(tmp_path / "precious")
    elif name.endswith("/"):
        (folder / name).mkdir()
    else:
        (folder / name).write_text("mine")
    before = sorted((p.name, p.is_dir()) for p in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"not a file of the parameter server|may not replace"):
        refuse_unusable(folder.parent, {folder: 1})
    assert sorted((p.name, p.is_dir()) for p in tmp_path.rglob("*")) == before


def test_a_pipe_a_large_file_and_deep_nesting_are_not_json_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text(json.dumps("x" * 2000))
    (tmp_path / "tower").write_text("[" * 100_000)
    messages = {
        "pipe": "not a regular file",
        "large": "larger than 1000",
        "tower": "nested too deeply",
    }
    for name, words in messages.items():
        with pytest.raises((OSError, ValueError), match=words):
            json_files.load(tmp_path / name, 1000 if name == "large" else 10**6)
