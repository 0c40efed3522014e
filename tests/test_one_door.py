"""Files that others made are opened through `storage`, and JSON is read through `json_files`.

`storage.open_regular`, and what is made of it, neither waits for a named pipe nor reads a device. A
library that takes a name gets that of `storage.regular`.
"""

import ast

import pytest
from places import ROOT

PACKAGE = ROOT / "sparse_dataflow"
DOORS = {"open_regular", "regular", "regular_descriptor", "local_parquet"}
METHODS = {"open", "read_text", "read_bytes"}
READERS = {
    *("open", "load", "memmap", "fromfile", "loadtxt", "genfromtxt", "safe_open", "load_file"),
    *("ParquetFile", "ParquetTable", "read_schema", "read_table", "memory_map", "OSFile", "mmap"),
    *("load_from_disk", "ArrayRecordDataSource", "from_file", "unpickle"),
}
LIBRARIES = {
    *("np", "numpy", "json", "pickle", "torch", "mmap", "parquet", "arrow", "library"),
    *("gzip", "tarfile", "zipfile", "lzma", "bz2"),
}
OTHERS = {
    "chips/cpu/kernels.py": "the package's own source",
    "commands/experiment_modules.py": "the package's own source",
    "commands/run_folder.py": "the metadata of the package",
    "data/cache.py": "a file that the process itself wrote",
    "data/documents.py": "Python's own standard library",
    "data/hub.py": "a folder whose files were opened through the door before",
    "data/packed_files.py": "an open file",
    "data/shards.py": "an address that fsspec opens",
    "files/addresses.py": "a file that was fetched, below the size that its store lists",
    "files/folders.py": "locks, and /proc",
    "files/storage.py": "the door itself",
    "files/json_files.py": "the door of JSON",
    "hardware/detect.py": "/proc and /sys",
    "hardware/large_pages.py": "memory of no file",
    "hardware/processor.py": "/proc",
    "interchange/serving/readers.py": "the package's own source",
    "interchange/serving/run_in_jax.py": "a program that is shipped alone",
    "interchange/serving/run_in_torch.py": "a program that is shipped alone",
    "relay/server_files.py": "the moments that the process itself wrote",
}
"""File of the package -> what it opens without the door."""


def name_of(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def writes(call):
    """Whether a call of `open` makes a file, or opens nothing of the disk."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    nodes = [node for argument in arguments for node in ast.walk(argument)]
    modes = [node.value for node in nodes if isinstance(node, ast.Constant)]
    modes = [mode for mode in modes if isinstance(mode, str)]
    return any(set(mode) & set("wax+") and len(mode) <= 3 for mode in modes)


def through_the_door(call):
    """Whether an argument is what a door returned."""
    return any(
        isinstance(node, ast.Call) and name_of(node.func) in DOORS
        for argument in call.args
        for node in ast.walk(argument)
    )


def readers(path):
    """Line and text of each call that reads a file beside the door."""
    tree = ast.parse(path.read_text())
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        function, name = call.func, name_of(call.func)
        owner = name_of(function.value) if isinstance(function, ast.Attribute) else ""
        if owner in ("storage", "json_files", "os", "folders", "StoredArray", "cls", "tensors"):
            continue
        if isinstance(function, ast.Name):
            reads = name in READERS - {"load", "from_file"}
        else:
            reads = name in METHODS or (name in READERS and owner in LIBRARIES)
        if reads and not writes(call) and not through_the_door(call):
            yield f"{path.relative_to(PACKAGE).as_posix()}:{call.lineno} {ast.unparse(call)[:90]}"


def test_every_file_of_others_is_opened_through_the_door():
    beside = [
        line
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in OTHERS
        for line in readers(path)
    ]
    assert not beside, "\n".join(beside)


def test_files_that_need_no_door_are_still_there():
    assert all((PACKAGE / name).exists() for name in OTHERS)


@pytest.mark.parametrize(
    "line",
    ["open(path)", "path.open('rb')", "Path(path).read_text()", "np.load(path)", "json.load(file)",
     "safe_open(path, framework='numpy')", "parquet.ParquetFile(path)", "gzip.open(path, 'rb')"],
)  # fmt: skip
def test_the_search_finds_what_reads(tmp_path, monkeypatch, line):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text(f"{line}\nopen(path, 'wb')\nstorage.open_regular(path)\n")
    assert [found.partition(" ")[0] for found in readers(tmp_path / "a.py")] == ["a.py:1"]
