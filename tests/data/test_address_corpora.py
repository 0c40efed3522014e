"""Corpora at addresses of an object store: the same documents as in a folder of this machine."""

import gzip
import shutil

import pytest
from object_store import object_store

from sparse_dataflow.data import fetched as module
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.fetched import fetched
from sparse_dataflow.files.addresses import Address
from sparse_dataflow.files.errors import UserError


@pytest.fixture(scope="module")
def store():
    with object_store() as server:
        server.make_bucket("texts")
        yield server


@pytest.fixture
def folder(store, tmp_path):
    """A folder of text in several formats, with a copy at s3://texts/TEST_FOLDER_NAME."""
    folder = tmp_path / tmp_path.name
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("One document of words.\n" * 30)
    (folder / "deep" / "b.txt").write_text("Zwölf Boxkämpfer jagen Viktor.\n" * 30)
    lines = b"".join(b'{"text": "Line %d has words."}\n' % n for n in range(50))
    (folder / "deep" / "c.jsonl.gz").write_bytes(gzip.compress(lines))
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{folder.name}/{path.relative_to(folder)}"
            store.write("texts", key, path.read_bytes())
    return folder


def documents(corpus):
    return [(d.id, d.text) for split in (corpus.train, corpus.validation) for d in split]


def test_a_folder_a_file_and_a_mixture_at_addresses_are_those_of_local_copies(folder, tmp_path):
    address = f"s3://texts/{folder.name}"
    for name, remote_name in [
        (str(folder), address),
        (str(folder / "deep" / "c.jsonl.gz"), f"{address}/deep/c.jsonl.gz"),
        (f"{folder}:1,{folder}/deep/b.txt:3", f"{address}:1,{address}/deep/b.txt:3"),
    ]:
        local = load_corpus(name, tmp_path / "local")
        remote = load_corpus(remote_name, tmp_path / "cache")
        assert documents(remote) == documents(local) and remote.name == remote_name
        assert remote.content_hash == local.content_hash


def test_an_unchanged_address_is_fetched_once_and_a_changed_one_again(
    folder, store, tmp_path, monkeypatch
):
    address = f"s3://texts/{folder.name}"
    downloads = []
    download = Address.download
    monkeypatch.setattr(
        Address, "download", lambda a, *rest: (downloads.append(a.name), download(a, *rest))
    )
    first = load_corpus(address, tmp_path / "cache")
    assert len(downloads) == 3
    assert load_corpus(address, tmp_path / "cache").content_hash == first.content_hash
    assert len(downloads) == 3
    changed = b"Two document of words.\n" * 30  # As long as before.
    store.write("texts", f"{folder.name}/a.txt", changed)
    assert load_corpus(address, tmp_path / "cache").content_hash != first.content_hash


def test_a_fetch_that_was_killed_goes_on(folder, tmp_path, monkeypatch):
    address = f"s3://texts/{folder.name}"
    download, downloads = Address.download, []

    def killed(address, *rest):
        if len(downloads) == 2:
            raise KeyboardInterrupt
        downloads.append(address.name)
        download(address, *rest)

    monkeypatch.setattr(Address, "download", killed)
    with pytest.raises(KeyboardInterrupt):
        fetched(address, tmp_path / "cache")
    monkeypatch.setattr(
        Address, "download", lambda a, *rest: (downloads.append(a.name), download(a, *rest))
    )
    copy = fetched(address, tmp_path / "cache")
    assert sorted(downloads) == ["a.txt", "b.txt", "c.jsonl.gz"]
    for path in folder.rglob("*.*"):
        assert (copy / path.relative_to(folder)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["s3://texts/nothing", "s3://nowhere/x", "s3://texts/nothing.txt"])
def test_an_address_without_objects_is_refused(store, tmp_path, name):
    with pytest.raises(UserError, match=r"does not exist|bucket does not exist"):
        load_corpus(name, tmp_path / "cache")


def test_a_store_that_is_away_is_refused_in_words(folder, store, tmp_path, monkeypatch):
    fetched(f"s3://texts/{folder.name}", tmp_path / "cache")

    def away(self):
        raise OSError(71, "Could not connect to the endpoint URL", str(self))

    monkeypatch.setattr(Address, "entry", away)
    with pytest.raises(UserError, match="cannot be read: Could not connect"):
        fetched(f"s3://texts/{folder.name}", tmp_path / "cache")


def test_a_disk_without_room_is_refused_before_a_byte_is_fetched(folder, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(module.addresses.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="name another cache folder with XDG_CACHE_HOME"):
        fetched(f"s3://texts/{folder.name}", tmp_path / "cache")
