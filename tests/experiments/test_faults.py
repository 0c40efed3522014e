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

import fault_records
import pytest
from forks import Forks
from main_job import PICO, arrays, checkpoint_steps, rows, untimed
from ports import free_port

STEPS = 16
PLAN = ("--checkpoint_every=4", "--eval_every=8", "--notwin")
CHANGING = ("--evolution=rigl", "--evolve_every=4", "--evolve_at=0.9", "--skip_spikes=1")
STEP = "sparse_dataflow.training.loop.stepped"
UPDATE = "sparse_dataflow.training.loop.evolved"
READ = "sparse_dataflow.training.named_arrays.read"
SAVE_8 = r"checkpoints/8\.saving"
LOST = "it ended without a word"


@pytest.fixture(scope="module")
def forks(job, tmp_path_factory):
    with Forks(job.environment, tmp_path_factory.mktemp("forks")) as found:
        yield found


class Pair:
    """A run of two processes, its folder and what happens to them."""

    def __init__(self, forks, job, folder, steps=STEPS):
        self._forks, self._job, self.folder, self._steps = forks, job, folder, steps

    def start(self, *flags, processes=2, **happening):
        """Begins the run, or goes on with it; `happening` as {"at_0": {...}} for `Forks.start`."""
        begun = (self.folder / "config.json").exists()
        corpus = f"--corpus={self._job.corpus}"
        run = [f"--resume={self.folder}"] if begun else [
            *PICO, *PLAN, *CHANGING, f"--steps={self._steps}", corpus, f"--out={self.folder}"
        ]  # fmt: skip
        where = f"--coordinator=127.0.0.1:{free_port()}"
        self.before, self.began = self.steps(), time.monotonic()
        return [
            self._forks.start(
                where,
                f"--processes={processes}",
                f"--process={number}",
                f"--mesh=data:{processes}",
                *run,
                *flags,
                **happening.get(f"at_{number}", {}),
            )
            for number in range(processes)
        ]

    def steps(self):
        """Steps in the metrics, made again or not."""
        if not (self.folder / "sparse" / "metrics.jsonl").exists():
            return []
        found = rows(self.folder, "sparse")
        return [row["step"] for row in found if row["kind"] in ("train", "skipped")]

    def end(self, processes):
        """(statuses, seconds until the last has ended since the first did, output of each)."""
        first = None
        while any(process.returncode is None for process in processes):
            if first is None and any(process.returncode is not None for process in processes):
                first = time.monotonic()
            time.sleep(0.02)
        seconds = 0.0 if first is None else time.monotonic() - first
        return [p.wait() for p in processes], seconds, [p.text for p in processes]

    def go_on(self, *flags, **happening):
        """Goes on to the end: (steps made again, seconds to the first new step)."""
        made = max(self.steps(), default=0)
        processes = self.start(*flags, **happening)
        back = None
        while any(process.returncode is None for process in processes):
            if back is None and max(self.steps(), default=0) > made:
                back = time.monotonic() - self.began
            time.sleep(0.02)
        statuses, _, texts = self.end(processes)
        assert statuses == [0] * len(processes), texts
        found = re.search(r"goes on after step (\d+) of", texts[0])
        return made - int(found[1]), back


@pytest.fixture(scope="module")
def whole(forks, job, shared, tmp_path_factory):
    """The folder of the same run, left alone."""
    folder, lock = shared
    with lock:
        if not (folder / "pair").exists():
            attempt = tmp_path_factory.mktemp("pair") / "run"
            pair = Pair(forks, job, attempt)
            statuses, _, texts = pair.end(pair.start())
            assert statuses == [0, 0], texts
            attempt.rename(folder / "pair")
    return folder / "pair"


@pytest.fixture
def pair(forks, job, tmp_path):
    return Pair(forks, job, tmp_path / "run")


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
    fault_records.note(fault, ending, seconds, repeated, back, same(pair.folder, whole))


@pytest.mark.nightly
def test_kill_during_a_restore(pair, whole):
    pair.end(pair.start(at_1={"calls": [(STEP, 11, "SIGKILL")]}))
    statuses, seconds, texts = pair.end(pair.start(at_1={"calls": [(READ, 1, "SIGKILL")]}))
    assert statuses == [75, -signal.SIGKILL], texts
    repeated, back = pair.go_on()
    assert repeated <= 4
    ending = '75, "process 1 ended"'
    name = "kill -9 during a restore"
    fault_records.note(name, ending, seconds, repeated, back, same(pair.folder, whole))


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named_and_nothing_is_lost(pair, whole):
    """For longer than the heartbeat; ten times as long, and it would be taken for lost."""
    processes = pair.start("--heartbeat=20", at_1={"calls": [(STEP, 11, "SIGSTOP")]})
    processes[0].wait_for("stalled: process 1 on ")
    named = time.monotonic()
    processes[1].signal(signal.SIGCONT)
    statuses, _, texts = pair.end(processes)
    assert statuses == [0, 0], texts
    assert re.search(r"not been heard of for \d+ s, last in step \d+ of sparse, phase ", texts[0])
    assert "going on after the stall" in texts[0]
    name = "SIGSTOP for longer than the heartbeat"
    assert named > 0 and same(pair.folder, whole)
    fault_records.note(name, "nothing; host and phase are named", None, 0, None, True)


@pytest.mark.nightly
def test_a_process_that_stays_stopped_ends_all(pair, whole):
    processes = pair.start("--heartbeat=6", at_1={"calls": [(STEP, 11, "SIGSTOP")]})
    assert processes[0].wait() == 75
    assert "is taken for lost" in processes[0].text
    processes[1].signal(signal.SIGCONT)
    statuses, seconds, texts = pair.end(processes)
    assert statuses == [75, 75], texts
    repeated, back = pair.go_on()
    name = "SIGSTOP for ten times the heartbeat"
    ending = '75, "taken for lost"'
    fault_records.note(name, ending, seconds, repeated, back, same(pair.folder, whole))


@pytest.mark.nightly
def test_full_disk(pair, whole):
    statuses, seconds, texts = pair.end(pair.start(at_0={"events": [(SAVE_8, 1, "full")]}))
    assert statuses == [2, 2], texts
    assert "checkpoint of step 8 could not be written" in texts[0] and "Make room" in texts[0]
    assert_in_words(texts)
    assert checkpoint_steps(pair.folder, "sparse") == [4]
    repeated, back = pair.go_on()
    ending = '2, "could not be written; make room"'
    fault_records.note("disk full", ending, seconds, repeated, back, same(pair.folder, whole))


@pytest.mark.nightly
def test_full_disk_on_a_worker_alone(pair, whole):
    """The first process, which has room, does not wait for arrays that are never written."""
    writing = "sparse_dataflow.training.named_arrays.start_writing"
    statuses, seconds, texts = pair.end(pair.start(at_1={"calls": [(writing, 2, "full")]}))
    assert statuses == [2, 2], texts
    assert "could not be written" in texts[0] and "(File too large)" in texts[1]
    assert_in_words(texts)
    assert checkpoint_steps(pair.folder, "sparse") == [4]
    repeated, back = pair.go_on()
    name, ending = "disk full on a worker alone", '2, "could not be written; make room"'
    fault_records.note(name, ending, seconds, repeated, back, same(pair.folder, whole))


@pytest.mark.nightly
def test_storage_that_fails_for_a_moment(pair, whole):
    """Input/output errors while a checkpoint is made, named and hashed, and while metrics are."""
    again = [(SAVE_8, n, "EIO") for n in (1, 3, 2)] + [(r"12\.saving/extra", 1, "ESTALE")]
    statuses, _, texts = pair.end(pair.start(at_0={"events": again}))
    assert statuses == [0, 0], texts
    assert "failed (Input/output error); attempt 2 of 6" in texts[0]
    name = "storage that answers EIO or ESTALE a few times"
    ending = "nothing; each attempt is told"
    fault_records.note(name, ending, None, 0, None, same(pair.folder, whole))


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
    pair.end(pair.start(at_1={"calls": [(STEP, 11, "SIGKILL")]}))
    assert max(checkpoint_steps(pair.folder, "sparse")) == 8
    damage(pair.folder / "sparse" / "checkpoints" / "8" / "state")
    repeated, back = pair.go_on()
    assert repeated == max(pair.before) - 4
    assert (pair.folder / "sparse" / "checkpoints" / "8.damaged").exists()
    names = {truncate: "a truncated checkpoint", flip: "a bit-flipped checkpoint"}
    ending = "nothing; the one before is used"
    kept = same(pair.folder, whole)
    fault_records.note(names[damage], ending, None, repeated, back, kept)


@pytest.mark.nightly
def test_corrupt_records(pair, whole, job, tmp_path):
    """Prepared tokens that lie on disk otherwise than they were written are made again."""
    pair.end(pair.start(at_1={"calls": [(STEP, 11, "SIGKILL")]}))
    cache = tmp_path / "cache"
    shutil.copytree(job.cache, cache)
    for path in cache.rglob("train.npy"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 64
        path.write_bytes(content)
    here = {"environment": {"XDG_CACHE_HOME": str(cache)}}
    repeated, back = pair.go_on(at_0=here, at_1=here)
    ending = "nothing; the record is made again"
    kept = same(pair.folder, whole)
    fault_records.note("a corrupt record in the data", ending, None, repeated, back, kept)


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [-1e8, 1e8])
def test_clock_jumps(pair, whole, seconds):
    jump = {"events": [(r"checkpoints/4\.saving", 1, f"clock {seconds}")]}
    statuses, _, texts = pair.end(pair.start(at_0=jump))
    assert statuses == [0, 0], texts
    report = json.loads((pair.folder / "report.json").read_text())
    assert 0 < sum(report["goodput"].values()) < 1e6
    name = f"a clock that jumps {'back' if seconds < 0 else 'ahead'} three years"
    fault_records.note(name, "nothing", None, 0, None, same(pair.folder, whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "steps"), [(4, 32), pytest.param(50, 240, marks=pytest.mark.nightly)]
)
def test_random_kills_in_a_row_end_at_the_same_bits(forks, job, tmp_path, kills, steps):
    """Before a random file operation or step, of a training that goes on after each."""
    whole = Pair(forks, job, tmp_path / "whole", steps)
    statuses, _, texts = whole.end(whole.start(processes=1))
    assert statuses == [0], texts
    pair, draw, began = (
        Pair(forks, job, tmp_path / "run", steps),
        random.Random(1),
        time.monotonic(),
    )
    inside = re.escape(str(pair.folder)) + "/sparse/"
    for _ in range(kills):
        if draw.random() < 0.5:
            happening = {"calls": [(STEP, draw.randint(1, 7), "SIGKILL")]}
        else:
            happening = {"events": [(inside, draw.randint(1, 70), "SIGKILL")]}
        statuses, _, texts = pair.end(pair.start(processes=1, at_0=happening))
        assert statuses == [-signal.SIGKILL], texts
    seconds = (time.monotonic() - began) / kills
    statuses, _, texts = pair.end(pair.start(processes=1))
    assert statuses == [0], texts
    kept = same(pair.folder, whole.folder, steps)
    if kills == 50:
        name = "50 kills in a row at random moments of one training"
        fault_records.note(name, "-9, each time", None, None, seconds, kept)
