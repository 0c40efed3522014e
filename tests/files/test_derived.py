"""A derived file is what its maker wrote for the same data, or is made again."""

import dataclasses
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.files import derived, storage


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.0,) * 5)


def entry(store, content=b"content", origin="one", **more):
    """Returns the bytes of a derived file, and whether it was made now."""
    calls = []

    def make(partial):
        calls.append(partial)
        partial.write_bytes(content)
        return {"size": len(content)}

    result = derived.derive(store, "file", origin, make, ".bin", **more)
    assert result.facts == {"size": len(result.path.read_bytes())}
    return result.path.read_bytes(), bool(calls)


DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(DATA, DATA)
def test_keys_are_equal_where_the_data_is(first, second):
    assert derived.key(first) == derived.key(first)
    same = repr(derived.as_data(first)) == repr(derived.as_data(second))
    assert (derived.key(first) == derived.key(second)) == same


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float = 0.1
    names: tuple[str, ...] = ("a",)
    name: str = "a"


def test_values_that_change_places_change_the_key():
    @dataclasses.dataclass(frozen=True)
    class Files:
        train: str
        held_out: str

    assert derived.key(Files("a", "b")) != derived.key(Files("b", "a"))


@pytest.mark.parametrize("change", [{"rate": 0.2}, {"names": ()}, {"name": "ä"}])
def test_each_field_of_a_dataclass_is_a_part_of_the_key(change):
    assert derived.key(Settings()) == derived.key(Settings())
    assert derived.key(dataclasses.replace(Settings(), **change)) != derived.key(Settings())


def test_what_is_no_data_is_refused():
    with pytest.raises(TypeError, match="is no data"):
        derived.key({"function": print})


def test_a_file_is_made_once_for_the_same_data(tmp_path):
    assert entry(tmp_path) == (b"content", True)
    assert entry(tmp_path, b"other") == (b"content", False)
    assert entry(tmp_path, b"other", origin="two") == (b"other", True)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": flip,
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("damages_record", [False, True])
def test_what_is_damaged_is_made_again(tmp_path, caplog, damage, damages_record):
    entry(tmp_path)
    (path,) = tmp_path.glob("*.bin")
    damage(derived.record_of(path) if damages_record else path)
    assert entry(tmp_path) == (b"content", True)
    assert entry(tmp_path) == (b"content", False)
    missing = damage is DAMAGES["missing"]
    assert len(caplog.messages) == (not missing) and (missing or "made again" in caplog.text)


def test_the_record_of_another_file_is_no_record(tmp_path):
    entry(tmp_path, b"first", "one")
    entry(tmp_path, b"other", "two")
    first, second = (next(tmp_path.glob(f"*{derived.key(n)[:32]}.bin")) for n in ("one", "two"))
    for name in (lambda path: path, derived.record_of):
        shutil.copy(name(first), name(second))
    assert entry(tmp_path, b"other", "two") == (b"other", True)


def test_a_maker_that_fails_leaves_nothing(tmp_path):
    def make(partial):
        partial.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        derived.derive(tmp_path, "file", "one", make)
    assert not list(tmp_path.iterdir())


def test_bytes_are_on_disk_before_the_names(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace
    name_of = lambda number: os.readlink(f"/proc/self/fd/{number}").rsplit("/", 1)[-1]  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda n: (events.append(("flush", name_of(n))), fsync(n)))
    rename = lambda a, b: (events.append(("name", str(a).rsplit("/", 1)[-1])), replace(a, b))  # noqa: E731
    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(type(tmp_path), "replace", rename)
    entry(tmp_path)
    named = [(number, name) for number, (event, name) in enumerate(events) if event == "name"]
    assert len(named) == 2 and "record" in named[1][1]
    assert all(("flush", name) in events[:number] for number, name in named)


def folder_maker(partial):
    (partial / "inner").mkdir(parents=True)
    (partial / "inner/a").write_bytes(b"a" * 100)
    (partial / "b").write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "inner/a"),
        lambda folder: (folder / "b").unlink(),
        lambda folder: (folder / "c").write_bytes(b""),
    ],
)
def test_a_folder_is_verified_as_a_whole(tmp_path, damage):
    folder_of_store = lambda: derived.derive(tmp_path, "folder", 1, folder_maker).path  # noqa: E731
    inode = folder_of_store().stat().st_ino
    assert folder_of_store().stat().st_ino == inode
    damage(folder_of_store())
    assert sorted(p.name for p in folder_of_store().rglob("*")) == ["a", "b", "inner"]
    assert (folder_of_store() / "inner/a").read_bytes() == b"a" * 100


def test_a_large_file_is_read_again_only_in_another_state(tmp_path, monkeypatch):
    monkeypatch.setattr(derived, "LARGE", 5)
    read = []
    digest = derived.digest
    monkeypatch.setattr(derived, "digest", lambda path: read.append(path) or digest(path))
    entry(tmp_path)
    assert entry(tmp_path) == (b"content", False) and not read
    (path,) = tmp_path.glob("*.bin")
    os.utime(path, ns=(1, 1))
    assert entry(tmp_path) == (b"content", False) and len(read) == 1
    assert entry(tmp_path) == (b"content", False) and len(read) == 1
    flip(path)
    assert entry(tmp_path) == (b"content", True)


def test_makers_at_once_leave_whole_files(tmp_path):
    """Each maker writes bytes of its own, as a compiler may, so no two halves may meet."""
    barrier = threading.Barrier(3)

    def maker(number):
        barrier.wait()
        content = f"maker {number} ".encode() * 999
        return [entry(tmp_path, content, origin=n)[0] for n in range(20)]

    with ThreadPoolExecutor(3) as threads:
        contents = list(threads.map(maker, range(3)))
    stored = [entry(tmp_path, origin=n) for n in range(20)]
    assert contents == [[content for content, _ in stored]] * 3
    assert not any(is_new for _, is_new in stored)
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.new"))


def test_a_value_that_cannot_be_kept_is_computed(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert derived.value(tmp_path / "file", "count", 1, lambda: {"n": 2}) == {"n": 2}
    assert "is not kept" in caplog.text
    assert derived.value(tmp_path, "count", 1, lambda: {"n": 2}) == {"n": 2}
    assert derived.value(tmp_path, "count", 1, lambda: {"n": 3}) == {"n": 2}
    assert derived.value(tmp_path, "count", 2, lambda: {"n": 3}) == {"n": 3}


def test_a_file_of_others_is_read_again_after_any_write(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"1")
    status, before = path.stat(), (derived.file_state(path), derived.digest(path))
    path.write_bytes(b"2")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = derived.file_state(path), derived.digest(path)
    assert before[0] != after[0] and before[1] != after[1]
