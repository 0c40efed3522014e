"""Addresses of object stores: which are legal, and what a real server at them does."""

import contextlib
import gzip
import hashlib
import http.server
import threading

import pytest
from marks import some
from object_store import object_store

from sparse_dataflow.core.config.settings import Setting
from sparse_dataflow.files import address_lock, addresses, folders, storage
from sparse_dataflow.files.address_lock import AddressLock
from sparse_dataflow.files.addresses import Address, Entry
from sparse_dataflow.files.errors import UserError

PLACE = Setting("out", str, "", "", path=True, address=True)
PATH = Setting("to", str, "", "", path=True)


@pytest.fixture(scope="module")
def store():
    with object_store() as server:
        server.make_bucket("here")
        yield server


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s3://b/run", "s3://b/run"),
        ("s3://b/run/", "s3://b/run"),
        ("S3://B/Run", "s3://B/Run"),
        ("s3://b", "s3://b"),
        ("hf://datasets/owner/name", "hf://datasets/owner/name"),
        ("file:///tmp/x", "/tmp/x"),
        ("a:b/c", "a:b/c"),
        ("2026-01-01T12:30/run", "2026-01-01T12:30/run"),
        ("./gs:/b", "./gs:/b"),
        ("hf:owner/name", "hf:owner/name"),
        ("c4/en:3.0.1", "c4/en:3.0.1"),
        ("s3://b/x:0.5,lm1b:0.5", "s3://b/x:0.5,lm1b:0.5"),
    ],
)
def test_an_address_or_a_path_is_taken_in_one_spelling(text, value):
    assert PLACE.parse(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gs:/b/run", "legal: gs://... for an address, ./gs:/b/run for a path"),
        ("gs:b", "legal: gs://"),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("memory://x", "the memory of this process"),
        ("file://x/y", "a path on this machine"),
        ("nothing://b/run", "of no kind that fsspec knows"),
        ("oci://b/run", "needs the package ocifs: pip install ocifs"),
        ("s3://me:secret@b/run", "holds a password"),
        ("s3://b//run", "without empty"),
        ("s3://b/../run", "without empty"),
        ("simplecache::s3://b/run", "one address"),
        ("zip://a.txt::s3://b/run", "one address"),
        ("s3://b/x:0.5,gs:/y:0.5", "legal: gs://"),
    ],
)
def test_what_is_neither_address_nor_path_is_refused_in_one_sentence(text, words):
    with pytest.raises(ValueError, match=r"^(is|names|holds|needs) ") as refused:
        PLACE.parse(text)
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["s3://b/run", "gs:/b", "memory://x", "hf://datasets/a/b"])
def test_a_setting_for_paths_alone_never_makes_a_folder_of_an_address(text):
    with pytest.raises(ValueError, match="legal: "):
        PATH.parse(text)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(addresses.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'sparse_dataflow[buckets]'" in addresses.missing_library("gs://b/run")
    with pytest.raises(ValueError, match="needs the package gcsfs"):
        PLACE.parse("gs://b/run")
    # A saved config is read where the library is missing.
    assert not PLACE.value_refusal("gs://b/run")


def test_objects_are_written_listed_read_and_deleted(store, tmp_path):
    place = Address("s3://here/files/")
    content = bytes(range(256)) * 2**17
    (tmp_path / "large").write_bytes(content)
    (place / "deep/large").upload(tmp_path / "large")
    (place / "small").write(b"small")
    assert store.keys("here", "files") == ["files/deep/large", "files/small"]
    assert store.read("here", "files/deep/large") == content
    listed = place.entries()
    assert {name: entry.size for name, entry in listed.items()} == {
        "deep/large": len(content),
        "small": 5,
    }
    assert (place / "small").entry() == listed["small"] and place.entry() is None
    assert (place / "deep/large").sha256(len(content)) == hashlib.sha256(content).hexdigest()
    addresses.fetch(place, listed, tmp_path / "copy")
    assert (tmp_path / "copy" / "deep" / "large").read_bytes() == content
    store.write("here", "files/small", b"other")
    assert (place / "small").entry().version != listed["small"].version
    with pytest.raises(FileExistsError):
        (place / "small").create(b"x")
    for name in place.entries():
        (place / name).delete()
    (place / "small").delete()
    assert place.entries() == {} and store.keys("here", "files") == []


def test_every_failure_is_an_oserror_that_names_the_address(store, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"bucket does not exist.*s3://nowhere/x"):
        Address("s3://nowhere/x").write(b"")
    with pytest.raises(FileNotFoundError):
        Address("s3://here/nothing").read()
    with pytest.raises(FileNotFoundError):
        Address("s3://here/nothing").download(tmp_path / "new" / "file")
    assert not list(tmp_path.rglob("file"))
    # HTTP cannot be written.
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:9/x"):
        Address("http://127.0.0.1:9/x").write(b"")


def test_an_object_that_no_run_wrote_is_not_read_whole(store, monkeypatch):
    monkeypatch.setattr(addresses, "MAX_BYTES", 4)
    store.write("here", "long", b"12345")
    with pytest.raises(OSError, match="it has 5 bytes; legal: 4"):
        Address("s3://here/long").read()


@pytest.mark.parametrize("name", ["../out", "a/../../out", "a//b", "/out"])
def test_a_name_in_a_store_never_leads_out_of_the_folder(tmp_path, name):
    with pytest.raises(UserError, match="no file can be called"):
        addresses.fetch(Address("s3://here/x"), {name: Entry(1, "")}, tmp_path / "copy")
    assert not (tmp_path / "out").exists()


def test_a_fetch_that_does_not_fit_on_the_disk_is_refused(tmp_path):
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        addresses.fetch(Address("s3://here/x"), {"a": Entry(2**60, "")}, tmp_path)


@pytest.fixture
def fast_locks(monkeypatch):
    monkeypatch.setattr(folders, "BEAT_SECONDS", 0.2)


def test_an_address_has_one_owner_until_it_is_released(store, monkeypatch):
    place = Address("s3://here/owned")
    lock = AddressLock(place, "--out")
    assert store.keys("here", "owned") == ["owned/.lock"]
    monkeypatch.setattr(folders.os, "getpid", lambda: 1)  # Another process of this machine.
    with pytest.raises(UserError, match="s3://here/owned is in use by process"):
        AddressLock(place, "--out")
    lock.release()
    lock.release()
    assert store.keys("here", "owned") == []
    AddressLock(place, "--out").release()


def test_a_store_that_replaces_what_it_must_create_has_one_owner_too(store, monkeypatch):
    monkeypatch.setattr(Address, "create", Address.write)
    place = Address("s3://here/replaced")
    lock = AddressLock(place, "--out")
    monkeypatch.setattr(folders.os, "getpid", lambda: 1)
    with pytest.raises(UserError, match="is in use by process"):
        AddressLock(place, "--out")
    lock.release()
    assert store.keys("here", "replaced") == []


def test_what_is_no_lock_is_replaced(store):
    store.write("here", "odd/.lock", b"mine")
    AddressLock(Address("s3://here/odd"), "--out").release()


def test_a_dead_owner_of_this_machine_is_replaced_at_once(store):
    place = Address("s3://here/dead")
    owner = folders.this_process() | {"pid": 2**22 + 1, "id": "dead"}
    (place / ".lock").write(address_lock.json.dumps(owner).encode())
    AddressLock(place, "--out").release()


@pytest.mark.parametrize("machine", ["other", folders.machine()], ids=["far", "container"])
def test_an_owner_elsewhere_is_alive_while_it_counts(store, fast_locks, machine):
    """Its process id means nothing here."""
    place = Address("s3://here/elsewhere")
    owner = folders.this_process() | {"machine": machine, "host": "far", "pid": 2**22 + 1}
    write = lambda: (place / ".lock").write(address_lock.json.dumps(owner).encode())  # noqa: E731
    write()
    stop = threading.Event()

    def count():
        while not stop.wait(0.1):
            owner["count"] += 1
            write()

    thread = threading.Thread(target=count)
    thread.start()
    with pytest.raises(UserError, match=r"in use by process .* on far"):
        AddressLock(place, "--out")
    stop.set()
    thread.join()
    AddressLock(place, "--out").release()


def test_an_owner_whose_address_was_taken_over_is_told(store, fast_locks):
    place = Address("s3://here/taken")
    lock = AddressLock(place, "--out")
    lock.check()
    (place / ".lock").write(b'{"id": "another"}')
    lock._thread.join(30)
    with pytest.raises(UserError, match="taken over by another process"):
        lock.check()
    lock.release()
    assert (place / ".lock").read() == b'{"id": "another"}'


def test_a_bucket_that_does_not_exist_is_refused(store):
    with pytest.raises(UserError, match=r"--out=s3://nowhere/x cannot be written: .*not exist"):
        AddressLock(Address("s3://nowhere/x"), "--out")


@contextlib.contextmanager
def web(answer):
    """Serves on 127.0.0.1: answer(path, head, number of the request) -> (status, size, body,
    headers)."""
    count = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self, head=False):
            count[self.path] = count.get(self.path, 0) + 1
            status, size, body, headers = answer(self, head, count[self.path])
            self.send_response(status)
            self.send_header("Content-Length", str(size))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                head or self.wfile.write(body)

        def do_HEAD(self):
            self.do_GET(True)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("listed", "sent"), [(1000, 999), (1000, 1001), (1, 2**22), (0, 1), (5, 0)]
)
def test_an_object_of_another_size_than_listed_is_refused(tmp_path, listed, sent):
    def answer(handler, head, _):
        return 200, listed if head else sent, b"x" * sent, {}

    with web(answer) as at:
        place = Address(f"{at}/a")
        for entry in (None, Entry(listed, "")):
            with pytest.raises(OSError, match=r"bytes"):
                place.download(tmp_path / "a", entry)
        with pytest.raises(OSError, match=r"bytes"):
            place.read()
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("content", some([b"", b"a", b"word " * 10**5], b"", b"word " * 10**5))
def test_an_object_of_the_listed_size_is_read_and_not_compressed_on_the_way(tmp_path, content):
    def answer(handler, head, _):
        if "gzip" in handler.headers.get("Accept-Encoding", ""):
            small = gzip.compress(content)
            return 200, len(small), small, {"Content-Encoding": "gzip"}
        return 200, len(content), content, {}

    with web(answer) as at:
        place = Address(f"{at}/a")
        place.download(tmp_path / "a", place.entry())
        assert (tmp_path / "a").read_bytes() == place.read() == content


@pytest.mark.parametrize("content", some([b"", b"other", b"listeD"], b"listeD"))
def test_an_object_of_another_checksum_than_listed_is_refused(tmp_path, content):
    listed = hashlib.md5(b"listed").hexdigest()
    with web(lambda *_: (200, len(content), content, {})) as at:
        with pytest.raises(OSError, match=r"md5 is not that of the listing"):
            Address(f"{at}/a").download(tmp_path / "a", Entry(len(content), "", ("md5", listed)))
    assert not list(tmp_path.rglob("*"))


def test_the_checksum_of_a_listing_is_read():
    # "hello world", as `openssl md5 -binary | base64` has it.
    facts = {"size": 11, "md5Hash": "XrY7u+Ae7tCTyyK7j1rNww==", "type": "file"}
    assert addresses._entry(facts).checksum == ("md5", hashlib.md5(b"hello world").hexdigest())


@pytest.mark.parametrize("status", [404, 410])
def test_absent_is_what_the_store_says(status):
    with web(lambda *_: (status, 0, b"", {})) as at:
        assert Address(f"{at}/a").entry() is None
        with pytest.raises(FileNotFoundError):
            Address(f"{at}/a").read()


@pytest.mark.parametrize(
    ("status", "kind"),
    some(
        [(403, PermissionError), (401, PermissionError), (400, OSError), (418, OSError)], 401, 418
    ),
)
def test_another_answer_is_no_absence_and_is_named(status, kind):
    with web(lambda *_: (status, 0, b"", {})) as at:
        with pytest.raises(kind, match=str(status)) as error:
            Address(f"{at}/a").entry()
        assert not isinstance(error.value, FileNotFoundError)


def test_a_store_that_does_not_answer_is_no_absence():
    with pytest.raises(OSError) as error:
        Address("http://127.0.0.1:9/a").entry()
    assert not isinstance(error.value, FileNotFoundError)


@pytest.mark.parametrize("status", some([408, 425, 502, 504], 502))
def test_a_store_that_is_busy_is_asked_again(status, monkeypatch, tmp_path):
    monkeypatch.setattr(storage, "WAITS", (0.01,) * 3)

    def answer(handler, head, number):
        return (status, 0, b"", {}) if number in (1, 2, 5) else (200, 4, b"text", {})

    with web(answer) as at:
        assert Address(f"{at}/a").entry().size == 4
        Address(f"{at}/a").download(tmp_path / "a", Entry(4, ""))
    assert (tmp_path / "a").read_bytes() == b"text"
    with web(lambda *_: (status, 0, b"", {})) as at:
        with pytest.raises(OSError, match=f"the store answers {status}"):
            Address(f"{at}/a").entry()
