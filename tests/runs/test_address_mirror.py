"""A mirror at an address of an object store, on a real server that can fail."""

import os
import shutil

import pytest
from checkpoint_states import CONFIG, restored_step, saved, small_state
from marks import some
from object_store import object_store

from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.files import manifest, storage
from sparse_dataflow.files.addresses import Address
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.mirror import AddressCopies, copied_to


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.0,) * 5)


@pytest.fixture(scope="module")
def server():
    with object_store() as store:
        yield store


@pytest.fixture
def store(server, request):
    """The server with an empty bucket of the test's own, `store.bucket`."""
    server.bucket = f"bucket{abs(hash(request.node.name))}"
    server.make_bucket(server.bucket)
    return server


@pytest.fixture
def places(store, tmp_path):
    return tmp_path / "run" / "checkpoints", Address(f"s3://{store.bucket}/run/checkpoints")


def copied_steps(store):
    """Steps with a manifest, as the server lists them."""
    keys = store.keys(store.bucket, "run/checkpoints/")
    return sorted(int(key.split("/")[2]) for key in keys if key.endswith("/manifest.json"))


def test_the_newest_and_the_best_are_copied_bit_by_bit(places, store, tmp_path):
    first, second = places
    checkpoints = Checkpoints(first, 2, config=CONFIG, mirror=copied_to(second))
    for step, metric in ((1, 5.0), (2, 0.5), (3, 4.0), (4, 3.0), (5, 2.0)):
        checkpoints.save(step, small_state(step), {"position": step}, metric)
        checkpoints.wait()
    assert copied_steps(store) == sorted(map(int, os.listdir(first))) == [2, 4, 5]
    store.download(store.bucket, "run/checkpoints", tmp_path / "copy")
    for name in os.listdir(first):
        assert manifest.verify(tmp_path / "copy" / name) == manifest.verify(first / name)
    assert restored_step(tmp_path / "copy") == 5


def test_lost_and_damaged_checkpoints_are_restored_from_an_address(places, store, caplog):
    first, second = places
    first.parent.mkdir()
    (first.parent / "metrics.jsonl").write_text('{"step": 3}\n')
    saved(first, [1, 2, 3], mirror=copied_to(second))
    (first / "3" / "extra.json").write_text("{}")
    assert restored_step(first, mirror=copied_to(second)) == 3
    assert "Restoring the checkpoint of step 3 from s3://" in caplog.text
    shutil.rmtree(first.parent)
    assert restored_step(first, mirror=copied_to(second)) == 3
    assert (first.parent / "metrics.jsonl").read_text() == '{"step": 3}\n'
    assert restored_step(first) == 3


def test_a_damaged_copy_at_an_address_is_kept_and_the_one_before_is_used(places, store, caplog):
    first, second = places
    for step in (1, 2):
        saved(first, [step], mirror=copied_to(second))
    store.write(store.bucket, "run/checkpoints/2/extra.json", b"{}")
    shutil.rmtree(first)
    assert restored_step(first, mirror=copied_to(second)) == 1
    assert "extra.json has 2 bytes" in caplog.text
    assert "run/checkpoints/2/manifest.json.damaged" in store.keys(store.bucket)
    saved(first, [2], mirror=copied_to(second))
    assert copied_steps(store) == [1, 2]
    shutil.rmtree(first)
    assert restored_step(first, mirror=copied_to(second)) == 2


@pytest.mark.parametrize("objects", some(range(0, 8, 2), 2, 6))
def test_a_copy_that_a_kill_ends_after_any_object_never_counts(places, store, objects, monkeypatch):
    first, second = places
    saved(first, [1], mirror=copied_to(second))
    saved(first, [2])
    writes = {name: getattr(Address, name) for name in ("upload", "write")}
    left = [objects]

    def fails(name):
        def write(address, content):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt  # No clean-up runs, as after a kill.
            writes[name](address, content)

        return write

    assert objects < 1 + len(manifest.files(first / "2"))
    for name in writes:
        monkeypatch.setattr(Address, name, fails(name))
    with pytest.raises(KeyboardInterrupt):
        AddressCopies(second).put(2, first)
    monkeypatch.undo()
    monkeypatch.setattr(storage, "WAITS", (0.0,) * 5)
    assert copied_steps(store) == [1]
    shutil.rmtree(first)
    assert restored_step(first, mirror=copied_to(second)) == 1
    # The next start has removed the unfinished copy.
    keys = store.keys(store.bucket, "run/checkpoints/2/")
    assert keys == []


def test_a_store_that_answers_other_bytes_has_no_copy(places, store, monkeypatch, caplog):
    first, second = places
    checkpoints = saved(first, [1], mirror=copied_to(second))
    upload = Address.upload

    def flipped(address, path):
        upload(address, path)
        if address.name == "extra.json":
            address.write(path.read_bytes()[:-1] + b"x")

    monkeypatch.setattr(Address, "upload", flipped)
    checkpoints.save(2, small_state(2), {"position": 2})
    checkpoints.wait()
    assert "is not what was written to it" in caplog.text and copied_steps(store) == [1]
    monkeypatch.setattr(Address, "upload", upload)
    checkpoints.save(3, small_state(3), {"position": 3})
    checkpoints.wait()
    assert copied_steps(store) == [1, 3]


def test_a_bucket_that_disappears_ends_nothing_and_is_caught_up(places, store, caplog):
    first, second = places
    checkpoints = saved(first, [1], mirror=copied_to(second))
    store.remove_bucket(store.bucket)
    checkpoints.save(2, small_state(2), {"position": 2})
    checkpoints.wait()
    assert "step 2 could not be copied to s3://" in caplog.text
    assert "bucket does not exist" in caplog.text and restored_step(first) == 2
    store.make_bucket(store.bucket)
    checkpoints.save(3, small_state(3), {"position": 3})
    checkpoints.wait()
    assert copied_steps(store) == [3]


def test_a_mirror_that_cannot_be_read_never_means_a_new_start(places, store):
    first, second = places
    saved(first, [1], mirror=copied_to(second))
    shutil.rmtree(first)
    checkpoints = Checkpoints(first, config=CONFIG, mirror=copied_to(second))
    store.remove_bucket(store.bucket)
    with pytest.raises(UserError, match=r"mirror s3://.* cannot be read: .*not exist"):
        checkpoints.restore(small_state(0))
