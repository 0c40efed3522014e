"""Faults that happen to two processes while they train: what ends, what is lost, how it goes on.

Both train one model over loopback, its layouts changing by rigl and its spikes skipped, so that a
run which goes on has all of that to take up again.
"""

import json
import os
import random
import re
import shutil
import signal
import time

import psutil
import pytest
from fault_records import Record
from forks import TIMEOUT_SECONDS
from main_job import PICO, arrays, checkpoint_steps, rows, untimed
from ports import free_port

from sparse_dataflow.training.metrics import read_metrics

STEPS = 16
PLAN = ("--set=run.checkpoint_every=4", "--set=run.eval_every=8", "--notwin")
CHANGING = (
    "--evolution=rigl",
    "--set=evolution.every=4",
    "--set=evolution.at=0.9",
    "--set=training.skip_spikes=1",
)
STEP = "sparse_dataflow.training.loop.run_step"
UPDATE = "sparse_dataflow.training.loop.evolve_layouts"
READ = "sparse_dataflow.checkpoint.named_arrays.read"
SAVE_8 = r"checkpoints/8\.saving"
LOST = "it gave no reason"
FIFTY = "50 kills in a row at random moments of one training"
SILENT, BACK = "stalled: process 1 on ", "going on after the stall"


class Pair:
    """A run of two processes, its folder and what happens to them."""

    def __init__(self, job, folder, steps=STEPS):
        self._job, self.folder, self._steps = job, folder, steps
        self._started = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._started:
            process.signal(signal.SIGKILL)

    def start(self, *flags, processes=2, **happening):
        """Begins the run, or goes on with it; `happening` as {"at_0": {...}} for `Forks.start`."""
        begun = (self.folder / "config.json").exists()
        corpus = f"--corpus={self._job.corpus}"
        run = [f"--resume={self.folder}"] if begun else [
            *PICO, *PLAN, *CHANGING, f"--steps={self._steps}", corpus, f"--out={self.folder}"
        ]  # fmt: skip
        where = f"--set=parallel.coordinator=127.0.0.1:{free_port()}"
        self.before, self.began = self.steps(), time.monotonic()
        started = [
            self._job.start(
                where,
                f"--set=parallel.processes={processes}",
                f"--set=parallel.process={number}",
                f"--mesh=data:{processes}",
                *run,
                *flags,
                **happening.get(f"at_{number}", {}),
            )
            for number in range(processes)
        ]
        self._started += started
        return started

    def steps(self):
        """Steps in the metrics, which may be read while they are written."""
        found = read_metrics(self.folder / "sparse" / "metrics.jsonl")
        return [row["step"] for row in found if row["kind"] in ("train", "skipped")]

    def end(self, processes):
        """(statuses, seconds until the last has ended since the first did, output of each)."""
        until(lambda: any(p.returncode is not None for p in processes), processes)
        first = time.monotonic()
        until(lambda: all(p.returncode is not None for p in processes), processes)
        seconds = time.monotonic() - first
        return [p.returncode for p in processes], seconds, [p.text for p in processes]

    def go_on(self, *flags, **happening):
        """Goes on to the end: (steps made again, seconds to the first new step)."""
        made = max(self.steps(), default=0)
        processes = self.start(*flags, **happening)
        until(lambda: max(self.steps(), default=0) > made, processes)
        back = time.monotonic() - self.began if max(self.steps(), default=0) > made else None
        statuses, _, texts = self.end(processes)
        assert statuses == [0] * len(processes), texts
        found = re.search(r"resumes after step (\d+) of", texts[0])
        return made - int(found[1]), back


def until(true, processes):
    """Returns once it is `true`, or all processes have ended; fails where neither ever comes."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not true() and any(process.returncode is None for process in processes):
        assert time.monotonic() < end, [process.text for process in processes]
        time.sleep(0.02)


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


def same(folder, whole, steps=STEPS):
    """Whether both ended at the same bits and tell the same."""
    mine, right = arrays(folder, "sparse", steps), arrays(whole, "sparse", steps)
    assert mine.keys() == right.keys()
    for name in mine:
        assert mine[name].tobytes() == right[name].tobytes(), name
    assert untimed(_last(rows(folder, "sparse"))) == untimed(_last(rows(whole, "sparse")))
    return True


def _last(found):
    """Each row once, as it was told last."""
    return list({(row["kind"], row["step"]): row for row in found}.values())


def assert_in_words(texts):
    for text in texts:
        assert "Traceback" not in text, text


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
    assert re.search(r"not been heard of for \d+ s, last in step \d+ of sparse, phase ", texts[0])
    kept = same(pair.folder, whole)
    record.note("nothing; host and phase are named", None, 0, None, kept)


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
    writing = "sparse_dataflow.checkpoint.named_arrays.start_writing"
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
    again = [("train.json", 1, "EIO"), ("train.npy", 1, "ESTALE"), ("config.json.new", 1, "EIO")]
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


@pytest.mark.nightly
def test_random_kills_in_a_row_end_at_the_same_bits(job, tmp_path):
    """Before a random file operation or step, of a training that goes on after each."""
    record, kills, steps = Record(FIFTY), 50, 240
    with Pair(job, tmp_path / "whole", steps) as whole:
        statuses, _, texts = whole.end(whole.start(processes=1))
    assert statuses == [0], texts
    draw, began = random.Random(1), time.monotonic()
    with Pair(job, tmp_path / "run", steps) as pair:
        inside = re.escape(str(pair.folder)) + "/sparse/"
        for _ in range(kills):
            # So near to the end it is killed before the next checkpoint: it comes no nearer.
            near = max(pair.steps(), default=0) > steps - 16
            if near or draw.random() < 0.5:
                happening = {"calls": [(STEP, draw.randint(1, 3 if near else 7), "SIGKILL")]}
            else:
                happening = {"events": [(inside, draw.randint(1, 70), "SIGKILL")]}
            statuses, _, texts = pair.end(pair.start(processes=1, at_0=happening))
            assert statuses == [-signal.SIGKILL], texts
        seconds = (time.monotonic() - began) / kills
        statuses, _, texts = pair.end(pair.start(processes=1))
    assert statuses == [0], texts
    kept = same(pair.folder, whole.folder, steps)
    record.note("-9, each time", None, None, seconds, kept)
