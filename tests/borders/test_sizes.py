"""No number of a config.json decides how much is done: it is used, or refused at once."""

import contextlib
import json
import shutil
import signal
import tracemalloc

import pytest
from marks import some
from places import TESTS

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface

FIXTURES = TESTS / "interchange"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
NAMES = [name for name in NAMES if not name.startswith("peft")]
SIZES = (10**12, 2**22, 2**14, -1)


@contextlib.contextmanager
def bounded(seconds=20, memory=400 * 2**20):
    def hang(number, frame):
        raise AssertionError(f"it took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def places(value, path=()):
    """Paths of the whole numbers in a JSON value."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from places(each, (*path, key))
    elif type(value) is int:
        yield path


def changed(value, path, number):
    if not path:
        return number
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], number)
    return copy


def opened(folder):
    """Reads all but the weights."""
    with contextlib.suppress(UserError):
        huggingface.open_dense(folder)


@pytest.mark.parametrize("name", some(NAMES, "gpt_neo", "smollm3"))
def test_any_size_of_a_config_is_used_or_refused_at_once(name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder)
    fields = json.loads((folder / "config.json").read_text())
    for path in places(fields):
        for size in SIZES:
            (folder / "config.json").write_text(json.dumps(changed(fields, path, size)))
            with bounded():
                opened(folder)


@pytest.mark.parametrize("layers", [2**14])
def test_kinds_of_many_layers_are_read_in_linear_time(layers, tmp_path):
    folder = tmp_path / "gpt_neo"
    shutil.copytree(FIXTURES / "gpt_neo", folder)
    fields = json.loads((folder / "config.json").read_text())
    del fields["attention_layers"]
    fields |= {"num_layers": layers}
    fields["attention_types"] = [[["global"], layers - 1], [["local"], 1]]
    (folder / "config.json").write_text(json.dumps(fields))
    with bounded(), pytest.raises(UserError, match="bytes of weights"):
        huggingface.open_dense(folder)


def test_more_ends_than_a_text_can_have_are_refused(tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(FIXTURES / "llama", folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["eos_token_id"] = list(range(10**6))
    (folder / "config.json").write_text(json.dumps(fields))
    with bounded(), pytest.raises(UserError, match="1,000,000 ids"):
        huggingface.open_dense(folder)


@pytest.mark.parametrize("name", ["a" * 1000 + ".safetensors", "../a.safetensors", ""])
def test_a_name_in_an_index_that_no_file_can_have_is_refused(tmp_path, name):
    folder = tmp_path / "llama"
    shutil.copytree(FIXTURES / "llama", folder)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {f"t{n}": name + "b" * n for n in range(50)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"which its index names|must name files|not a regular"):
        huggingface.open_dense(folder)
