"""The server's files: a step is complete, or rolled back."""

import dataclasses
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import server_process
from server_process import IDENTITY, MODEL, TRAINING, advance, first_state, key, open_files

from sparse_dataflow.core import collectives
from sparse_dataflow.core.config.projections import KINDS, PATTERN_NAMES, LinearSpec
from sparse_dataflow.core.config.training import BUILT_IN
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import partition, stacks
from sparse_dataflow.core.optim.optimizers import adam_state
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.relay import host_state, server_files
from sparse_dataflow.relay import relay_executor as executor
from sparse_dataflow.relay.parameter_server import InMemory
from sparse_dataflow.relay.server_files import MappedFiles

# Pieces per step: one per leaf.
PIECES = 3 * 16 + 4


def in_memory(steps):
    return advance(first_state(*host_state.zeros(MODEL, TRAINING)), InMemory(), steps)


def assert_same_bits(mine, theirs):
    assert int(mine.step) == int(theirs.step)
    for actual, expected in zip(
        jax.tree.leaves((mine.params, mine.moments, mine.rest)),
        jax.tree.leaves((theirs.params, theirs.moments, theirs.rest)),
        strict=True,
    ):
        assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


@pytest.fixture
def process(forks):
    """Function (folder, steps, where, count) -> (exit status, restored step)."""

    def process(folder, steps, where="never", count=0):
        run = forks.start(server_process.__file__, folder, steps, where, count)
        assert run.wait() in (0, -signal.SIGKILL), run.stderr
        return run.returncode, int(run.stdout)

    return process


@pytest.mark.slow
def test_a_killed_process_resumes_from_the_last_complete_step(process, tmp_path):
    """In the first update, between two steps, before the record and before its rename."""
    killed = -signal.SIGKILL
    assert process(tmp_path, 8, "update", PIECES // 2) == (killed, 0)
    assert process(tmp_path, 8, "update", 2 * PIECES + 3) == (killed, 0)
    assert process(tmp_path, 8, r"/server\.json", 1) == (killed, 2)
    assert process(tmp_path, 8, r"/server\.json", 4) == (killed, 2)
    assert process(tmp_path, 8, "slot", 2) == (killed, 3)
    assert process(tmp_path, 8) == (0, 4)
    assert_same_bits(open_files(tmp_path).restore(key()), in_memory(8))


@pytest.mark.parametrize("clipping", ["exact", "eager"])
def test_files_change_no_bit(tmp_path, clipping):
    files = open_files(tmp_path)
    mine = advance(files.new_state(first_state), files, 3, clipping)
    state = first_state(*host_state.zeros(MODEL, TRAINING))
    assert_same_bits(mine, advance(state, InMemory(), 3, clipping))


@pytest.mark.parametrize("pattern", sorted({*PATTERN_NAMES} - {*KINDS}))
def test_layouts_that_are_read_equal_those_that_were_written(tmp_path, pattern):
    """Of every pattern, also one whose layouts are equal groups."""
    density = 1.0 if pattern == "dense" else 0.25
    model = MODEL.with_linears(LinearSpec("block_sparse", pattern, density, block=4))
    files = open_files(tmp_path, model)
    state = files.new_state(lambda *trees: first_state(*trees, model))
    written = advance(state, files, 3, model=model)
    files.close()
    read = open_files(tmp_path, model).restore(key())
    assert_same_bits(read, written)
    assert stacks.layouts_of(model, read.rest) == model_layouts.layouts(model)
    with_groups = stacks.with_groups(read.rest)
    assert jax.tree.structure(with_groups) == jax.tree.structure(stacks.with_groups(written.rest))


def test_masks_that_are_read_equal_those_that_were_written(tmp_path):
    """Also where a step after the first has other masks."""
    model = MODEL.with_linears(LinearSpec("masked", "masked", 0.5, block=1))
    files = open_files(tmp_path, model)
    state = files.new_state(lambda *trees: first_state(*trees, model))
    masks, layouts = stacks.split_layouts(state.rest)
    masks = jax.tree.map(lambda leaf: np.arange(leaf.size).reshape(leaf.shape) % 3 > 0, masks)
    assert jax.tree.leaves(masks)
    rest = partition.merged(masks, layouts)
    written = advance(state._replace(rest=rest), files, 3, model=model)
    files.close()
    read = open_files(tmp_path, model).restore(key())
    assert_same_bits(read, written)
    assert jax.tree.all(jax.tree.map(np.array_equal, stacks.split_layouts(read.rest)[0], masks))


@pytest.mark.parametrize("optimizer", BUILT_IN)
def test_bfloat16_moments_that_are_read_equal_those_that_were_written(tmp_path, optimizer):
    """In less space, and a training that goes on from them has the same bits."""
    training = dataclasses.replace(TRAINING, state_dtype="bfloat16", optimizer=optimizer)
    first = lambda *trees: first_state(*trees, MODEL, training)  # noqa: E731
    steps = lambda state, storage, count: advance(state, storage, count, training=training)  # noqa: E731
    files = open_files(tmp_path / "narrow", training=training)
    assert files.bytes < open_files_bytes(tmp_path / "wide", optimizer)
    written = steps(files.new_state(first), files, 3)
    files.close()
    files = open_files(tmp_path / "narrow", training=training)
    read = files.restore(key())
    assert_same_bits(read, written)
    narrow = {str(a.dtype) for a in jax.tree.leaves(adam_state(read.moments)[1:])}
    assert narrow == {"bfloat16"}
    expected = steps(first(*host_state.zeros(MODEL, training)), InMemory(), 6)
    assert_same_bits(steps(read, files, 6), expected)


def open_files_bytes(folder, optimizer):
    """Bytes of the files of the same training with float32 moments."""
    training = dataclasses.replace(TRAINING, optimizer=optimizer)
    files = open_files(folder, training=training)
    files.close()
    return files.bytes


def run_until(folder, steps):
    files = open_files(folder)
    advance(files.new_state(first_state), files, steps)
    slot = files._commits[0]["slot"]
    files.close()
    return slot


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_step_is_rolled_back(tmp_path):
    slot = run_until(tmp_path, 3)
    flip(tmp_path / f"slot{slot}", 5000)
    files = open_files(tmp_path)
    state = files.restore(key())
    assert_same_bits(state, in_memory(2))
    assert_same_bits(advance(state, files, 5), in_memory(5))


def test_a_step_that_another_process_lacks_is_rolled_back(tmp_path, monkeypatch):
    """Processes continue from the newest step that all of them have."""
    run_until(tmp_path, 3)
    for minimum, step in ((3, 3), (2, 2), (1, None), (-1, None)):
        files = open_files(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(collectives, "minimum", lambda step, minimum=minimum: min(step, minimum))
            state = executor._restore_common_step(files, TRAINING)
        assert (None if state is None else int(state.step)) == step
        if step == 2:
            assert_same_bits(state, in_memory(2))
            assert_same_bits(advance(state, files, 5), in_memory(5))
            files.close()
            run_until(tmp_path, 3)
        files.close()


def test_damage_of_all_steps_is_refused(tmp_path):
    run_until(tmp_path, 3)
    for slot in (0, 1):
        flip(tmp_path / f"slot{slot}", 5000)
    with pytest.raises(UserError, match=r"All complete steps in .* are damaged"):
        open_files(tmp_path).restore(key())


def test_an_unfinished_record_of_a_killed_process_is_no_foreign_file(tmp_path):
    run_until(tmp_path, 2)
    (tmp_path / "server.json.0123abcd.new").write_text("{")
    assert_same_bits(open_files(tmp_path).restore(key()), in_memory(2))


def test_a_damaged_record_is_refused(tmp_path):
    run_until(tmp_path, 2)
    flip(tmp_path / "server.json", 60)
    with pytest.raises(UserError, match=r"server\.json is damaged"):
        open_files(tmp_path)


def test_another_training_is_refused(tmp_path):
    run_until(tmp_path, 1)
    other = IDENTITY | {"model": IDENTITY["model"] | {"seed": 9}}
    with pytest.raises(UserError, match=r"another training: model\.seed is 0 there and 9 here"):
        MappedFiles(tmp_path, host_state.abstract_state(MODEL, TRAINING), other)


def test_another_training_with_other_sizes_stays_whole(tmp_path):
    run_until(tmp_path, 2)
    smaller = dataclasses.replace(TRAINING, state_dtype="bfloat16")
    other = IDENTITY | {"training": smaller.state_dtype}
    with pytest.raises(UserError, match="another training"):
        MappedFiles(tmp_path, host_state.abstract_state(MODEL, smaller), other)
    assert_same_bits(open_files(tmp_path).restore(key()), in_memory(2))


def test_two_runs_cannot_share_a_folder(tmp_path):
    files = open_files(tmp_path)
    with pytest.raises(UserError, match="in use by another run"):
        open_files(tmp_path)
    files.close()
    open_files(tmp_path).close()


def test_a_small_disk_is_refused_before_the_first_step(tmp_path, monkeypatch):
    small = shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
    monkeypatch.setattr(server_files.shutil, "disk_usage", lambda path: small)
    with pytest.raises(UserError, match=r"needs .* GiB and its disk has .*larger disk"):
        open_files(tmp_path)


def test_a_system_without_fallocate_reserves_the_space_too(tmp_path, monkeypatch):
    monkeypatch.delattr(server_files.os, "posix_fallocate")
    files = open_files(tmp_path)
    for slot in tmp_path.glob("slot*"):
        assert 512 * slot.stat().st_blocks >= slot.stat().st_size > 0
    mine = advance(files.new_state(first_state), files, 2)
    assert_same_bits(mine, in_memory(2))


def test_a_full_disk_keeps_the_previous_step(tmp_path, monkeypatch):
    files = open_files(tmp_path)
    state = advance(files.new_state(first_state), files, 2)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(server_files.os, "fsync", full)
        with pytest.raises(UserError, match=r"Step 3 cannot be written .*step 2 is complete"):
            advance(state, files, 3)
    files.close()
    assert_same_bits(open_files(tmp_path).restore(key()), in_memory(2))


def test_an_illegal_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"cannot be written.*name another with parallel.server_dir"
    ):
        open_files(tmp_path / "file")


def test_unusable_folders_are_refused(tmp_path, monkeypatch):
    """Folders that cannot be written, are in use, have other files, or lack space."""
    needs = {tmp_path / "server" / name: 600 * 2**20 for name in ("sparse", "dense")}
    roomy = shutil._ntuple_diskusage(2**40, 0, 2**40)
    monkeypatch.setattr(server_files.shutil, "disk_usage", lambda path: roomy)
    server_files.refuse_unusable(tmp_path / "server", needs)
    files = open_files(tmp_path / "server" / "sparse")
    with pytest.raises(UserError, match=r"sparse is in use by another run"):
        server_files.refuse_unusable(tmp_path / "server", needs)
    files.close()
    # Each folder has space, both together have not; the present files count as free.
    occupied = sum(
        path.stat().st_blocks * 512 for path in (tmp_path / "server/sparse").glob("slot*")
    )
    small = shutil._ntuple_diskusage(2**40, 2**40, 2 * 600 * 2**20 - occupied)
    monkeypatch.setattr(server_files.shutil, "disk_usage", lambda path: small)
    server_files.refuse_unusable(tmp_path / "server", needs)
    small = small._replace(free=small.free - 1)
    with pytest.raises(UserError, match=r"server needs 1\.17 GiB and its disk has 1\.17"):
        server_files.refuse_unusable(tmp_path / "server", needs)
    monkeypatch.setattr(server_files.shutil, "disk_usage", lambda path: roomy)
    (tmp_path / "server/dense/letter.txt").touch()
    with pytest.raises(UserError, match=r"may not replace \(letter\.txt\)"):
        server_files.refuse_unusable(tmp_path / "server", needs)

    def read_only(path, *arguments, **options):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "open", read_only)
    for folder in (tmp_path / "new", Path("/proc/none")):
        with pytest.raises(
            UserError, match=r"cannot be written.*name another with parallel.server_dir"
        ):
            server_files.refuse_unusable(folder, {folder / "sparse": 1})


@pytest.mark.parametrize("name", ["lock", "slot0", "server.json", ".server.json"])
def test_foreign_files_stay(tmp_path, name):
    """In the folder of a training and in its parent, such as /etc."""
    for folder in (tmp_path / "sparse", tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"mine")
        with pytest.raises(UserError, match="may not replace"):
            open_files(tmp_path / "sparse")
        with pytest.raises(UserError, match="may not replace"):
            server_files.refuse_unusable(tmp_path, {tmp_path / "sparse": 1})
        assert (folder / name).read_bytes() == b"mine"


def test_a_slow_disk_is_reported_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(server_files, "SLOW_SECONDS", 0.0)
    files = open_files(tmp_path)
    advance(files.new_state(first_state), files, 3)
    warnings = [record for record in caplog.records if "to write a step" in record.getMessage()]
    assert len(warnings) == 1
