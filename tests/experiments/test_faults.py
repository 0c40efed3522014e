"""Faults that happen to two processes while they train: what ends, what is lost, how it goes on.

Both train one model over loopback, its layouts changing by rigl and its spikes skipped, so that a
run which goes on has all of that to take up again.
"""

import json
import os
import re
import shutil
import signal

import psutil
import pytest
from fault_records import Record
from main_job import checkpoint_steps, rows
from pairs import READ, STEP, UPDATE, Pair, same, until

SAVE_8, SAVE_12 = r"checkpoints/8\.saving", r"checkpoints/12\.saving"
LOST = "it gave no reason"
SILENT, BACK = "stalled: process 1 on ", "going on after the stall"


@pytest.fixture(scope="module")
def whole(job, shared, tmp_path_factory):
    """The folder of the same run, left alone."""
    folder, lock = shared
    with lock:
        if not (folder / "pair").exists():
            attempt = tmp_path_factory.mktemp("pair") / "run"
            with Pair(job, attempt) as pair:
                statuses, _, texts = pair.end(pair.start())
            assert statuses == [0, 0], texts
            attempt.rename(folder / "pair")
    return folder / "pair"


@pytest.fixture
def pair(job, tmp_path):
    with Pair(job, tmp_path / "run") as begun:
        yield begun


def assert_in_words(texts):
    for text in texts:
        assert "Traceback" not in text, text


@pytest.mark.slow
def test_the_undisturbed_run_has_all_that_faults_may_break(whole):
    kinds = {row["kind"] for row in rows(whole, "sparse")}
    assert {"train", "evolution", "eval", "final"} <= kinds
    assert checkpoint_steps(whole, "sparse") == [8, 12, 16]


KILLS = {
    "kill -9 of a worker": {"at_1": {"calls": [(STEP, 11, "SIGKILL")]}},
    "kill -9 of the coordinator": {"at_0": {"calls": [(STEP, 11, "SIGKILL")]}},
    "kill -9 during a save": {"at_0": {"events": [(SAVE_8, 12, "SIGKILL")]}},
    "kill -9 during a layout's evolution": {"at_1": {"calls": [(UPDATE, 3, "SIGKILL")]}},
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=() if "evolution" in name else pytest.mark.nightly)
        for name in KILLS
    ],
)
@pytest.mark.slow
def test_kills(pair, whole, fault):
    record = Record(fault)
    [killed] = [int(at[3:]) for at in KILLS[fault]]
    statuses, seconds, texts = pair.end(pair.start(**KILLS[fault]))
    assert statuses[killed] == -signal.SIGKILL, texts
    other = texts[1 - killed]
    assert statuses[1 - killed] == 75 and f"error: process {killed} ended: {LOST}" in other, texts
    kept = max(checkpoint_steps(pair.folder, "sparse"))
    made = max(pair.steps())
    repeated, back = pair.go_on()
    assert repeated == made - kept <= 4 + (fault == "kill -9 during a save")
    ending = f'75, "process {killed} ended"'
    record.note(ending, seconds, repeated, back, same(pair.folder, whole))


@pytest.mark.nightly
def test_kill_during_a_restore(pair, whole):
    record = Record("kill -9 during a restore")
    pair.end(pair.start(at_1={"calls": [(STEP, 11, "SIGKILL")]}))
    statuses, seconds, texts = pair.end(pair.start(at_1={"calls": [(READ, 1, "SIGKILL")]}))
    assert statuses == [75, -signal.SIGKILL], texts
    repeated, back = pair.go_on()
    assert repeated <= 4
    ending = '75, "process 1 ended"'
    record.note(ending, seconds, repeated, back, same(pair.folder, whole))


@pytest.mark.nightly
def test_one_process_goes_on_where_two_were_killed(pair, whole):
    """Killed again in its restore and in a save; the mesh is another, so the curve is the same."""
    record = Record("kill -9 of two processes, then of the one that goes on")
    pair.end(pair.start(at_1={"calls": [(STEP, 11, "SIGKILL")]}))
    for happening in ({"calls": [(READ, 1, "SIGKILL")]}, {"events": [(SAVE_12, 12, "SIGKILL")]}):
        statuses, _, texts = pair.end(pair.start(processes=1, at_0=happening))
        assert statuses == [-signal.SIGKILL], texts
    repeated, back = pair.go_on(processes=1)
    mine, right = (
        {(row["kind"], row["step"]): row["loss"] for row in rows(folder, "sparse") if "loss" in row}
        for folder in (pair.folder, whole)
    )
    assert mine.keys() == right.keys()
    for key, loss in right.items():
        assert mine[key] == pytest.approx(loss, rel=1e-3), key
    record.note('75, "process 1 ended"; -9', None, repeated, back, "same curve")


def until_stopped(processes):
    """Returns once the second has been stopped."""
    second = psutil.Process(processes[1].pid)
    until(lambda: second.status() == psutil.STATUS_STOPPED, processes)


@pytest.mark.nightly
def test_a_process_that_is_stopped_is_named_and_nothing_is_lost(pair, whole):
    """For longer than the heartbeat; ten times as long, and it would be taken for lost.

    That all hear of it when it goes on, which this run may not live to tell, test_watch proves
    every day.
    """
    record = Record("SIGSTOP for longer than the heartbeat")
    processes = pair.start("--set=parallel.heartbeat=10", at_1={"calls": [(STEP, 11, "SIGSTOP")]})
    until_stopped(processes)
    # It may have been named before, on a busy machine, and have gone on.
    until(lambda: processes[0].text.rfind(SILENT) > processes[0].text.rfind(BACK), processes)
    processes[1].signal(signal.SIGCONT)
    statuses, _, texts = pair.end(processes)
    assert statuses == [0, 0], texts
    assert re.search(r"been silent for \d+ s, last in step \d+ of sparse, activity ", texts[0])
    kept = same(pair.folder, whole)
    record.note("nothing; host and activity are named", None, 0, None, kept)


@pytest.mark.nightly
def test_a_process_that_stays_stopped_ends_all(pair, whole):
    record = Record("SIGSTOP for ten times the heartbeat")
    processes = pair.start("--set=parallel.heartbeat=6", at_1={"calls": [(STEP, 11, "SIGSTOP")]})
    until_stopped(processes)
    assert processes[0].wait() == 75, processes[0].text
    assert re.search(r"process 1 on .* and is taken for lost", processes[0].text)
    processes[1].signal(signal.SIGCONT)
    statuses, seconds, texts = pair.end(processes)
    # The service of jax's runtime is gone: what hears of it first, the watch or that runtime, ends
    # the process that goes on.
    assert statuses[1] in (75, -signal.SIGABRT), texts
    repeated, back = pair.go_on()
    ending = '75, "taken for lost"'
    if statuses[1] != 75:
        ending += f"; the one that was stopped, once it goes on, {statuses[1]}"
    record.note(ending, seconds, repeated, back, same(pair.folder, whole))


@pytest.mark.nightly
def test_full_disk(pair, whole):
    record = Record("disk full")
    statuses, seconds, texts = pair.end(pair.start(at_0={"events": [(SAVE_8, 1, "full")]}))
    assert statuses == [2, 2], texts
    assert "checkpoint of step 8 could not be written" in texts[0] and "Make room" in texts[0]
    assert_in_words(texts)
    assert checkpoint_steps(pair.folder, "sparse") == [4]
    repeated, back = pair.go_on()
    ending = '2, "could not be written; make room"'
    record.note(ending, seconds, repeated, back, same(pair.folder, whole))


@pytest.mark.nightly
def test_full_disk_on_a_worker_alone(pair, whole):
    """The first process, which has room, does not wait for arrays that are never written."""
    record = Record("disk full on a worker alone")
    writing = "sparse_dataflow.core.checkpoint.named_arrays.start_writing"
    statuses, seconds, texts = pair.end(pair.start(at_1={"calls": [(writing, 2, "full")]}))
    assert statuses == [2, 2], texts
    assert "could not be written" in texts[0] and "(File too large)" in texts[1]
    assert_in_words(texts)
    assert checkpoint_steps(pair.folder, "sparse") == [4]
    repeated, back = pair.go_on()
    ending = '2, "could not be written; make room"'
    record.note(ending, seconds, repeated, back, same(pair.folder, whole))


@pytest.mark.nightly
def test_storage_that_fails_for_a_moment(pair, whole):
    """While a checkpoint is made, named and hashed, and while files of metrics, of the data and of
    the run are opened."""
    record = Record("storage that answers EIO or ESTALE a few times")
    again = [("train.json", 1, "EIO"), ("train.npy", 1, "ESTALE")]
    again += [(r"config\.json\.\w+\.new", 1, "EIO")]
    again += [("metrics.jsonl.new", 1, "EIO"), ("metrics.jsonl$", 2, "ESTALE")]
    again += [(SAVE_8, n, "EIO") for n in (1, 3, 2)] + [(r"12\.saving/extra", 1, "ESTALE")]
    again += [(r"report\.json", 1, "EIO")]
    statuses, _, texts = pair.end(pair.start(at_0={"events": again}))
    assert statuses == [0, 0], texts
    assert texts[0].count("; attempt 2 of 6") >= 7, texts[0]
    ending = "nothing; each attempt is told"
    record.note(ending, None, 0, None, same(pair.folder, whole))


def data_file(folder):
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


def truncate(folder):
    os.truncate(data_file(folder), data_file(folder).stat().st_size // 2)


def flip(folder):
    content = bytearray(data_file(folder).read_bytes())
    content[len(content) // 2] ^= 4
    data_file(folder).write_bytes(content)


@pytest.mark.nightly
@pytest.mark.parametrize("damage", [truncate, flip])
def test_damaged_checkpoints(pair, whole, damage):
    names = {truncate: "a truncated checkpoint", flip: "a bit-flipped checkpoint"}
    record = Record(names[damage])
    pair.end(pair.start(at_1={"calls": [(STEP, 11, "SIGKILL")]}))
    assert max(checkpoint_steps(pair.folder, "sparse")) == 8
    damage(pair.folder / "sparse" / "checkpoints" / "8" / "state")
    repeated, back = pair.go_on()
    assert repeated == max(pair.before) - 4
    assert (pair.folder / "sparse" / "checkpoints" / "8.damaged").exists()
    kept = same(pair.folder, whole)
    record.note("nothing; the one before is used", None, repeated, back, kept)


@pytest.mark.nightly
def test_corrupt_records(pair, whole, job, tmp_path):
    """Prepared tokens that lie on disk otherwise than they were written are made again."""
    record = Record("a corrupt record in the data")
    pair.end(pair.start(at_1={"calls": [(STEP, 11, "SIGKILL")]}))
    cache = tmp_path / "cache"
    shutil.copytree(job.cache, cache)
    for path in cache.rglob("train.npy"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 64
        path.write_bytes(content)
    here = {"environment": {"XDG_CACHE_HOME": str(cache)}}
    repeated, back = pair.go_on(at_0=here, at_1=here)
    kept = same(pair.folder, whole)
    record.note("nothing; the record is made again", None, repeated, back, kept)


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [-1e8, 1e8])
def test_clock_jumps(pair, whole, seconds):
    record = Record(f"a clock that jumps {'back' if seconds < 0 else 'ahead'} three years")
    jump = {"events": [(r"checkpoints/4\.saving", 1, f"clock {seconds}")]}
    statuses, _, texts = pair.end(pair.start(at_0=jump))
    assert statuses == [0, 0], texts
    report = json.loads((pair.folder / "report.json").read_text())
    assert 0 < sum(report["goodput"].values()) < 1e6
    record.note("nothing", None, 0, None, same(pair.folder, whole))
