"""Three processes of a run: one is killed, a fourth would join, a tracker fails in the middle."""

import re
import signal

import psutil
import pytest
from fault_records import THREE, Record
from main_job import complaint
from pairs import STEP, Pair, same, until

FEW = "--batch=6"
UPDATE = "sparse_dataflow.core.training.programs.update_layouts"
PLACE = "sparse_dataflow.core.checkpoint.named_arrays._place"


class Three(Pair):
    """A run of three processes, its batch divisible by them."""

    def start(self, *flags, **happening):
        first = () if (self.folder / "config.json").exists() else (FEW,)
        return super().start(*first, *flags, processes=3, **happening)


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    with Three(job, tmp_path_factory.mktemp("three") / "run") as three:
        statuses, _, texts = three.end(three.start())
        assert statuses == [0] * 3, texts
    return three.folder


@pytest.fixture
def three(job, tmp_path):
    with Three(job, tmp_path / "run") as processes:
        yield processes


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("killed", "name"), [(1, "SIGKILL"), (0, "SIGKILL"), (2, "SIGKILL"), (2, "SIGTERM")]
)
def test_the_other_two_end_and_all_go_on(three, whole, killed, name):
    """Inside an evolution, then inside the restore of the next start."""
    record = Record(THREE)
    # Two updates are measured before the training begins.
    for inside in ((UPDATE, 4), (PLACE, 2)):
        happening = {f"at_{killed}": {"calls": [(*inside, name)]}}
        statuses, _, texts = three.end(three.start(**happening))
        expected = [75] * 3
        expected[killed] = -signal.SIGKILL if name == "SIGKILL" else 75
        assert statuses == expected, texts
        assert not any("Traceback" in text for text in texts), texts
        for text in texts[:killed] + texts[killed + 1 :] if name == "SIGKILL" else ():
            assert re.findall(r"error: process (\d) ended", text) == [str(killed)], text
    repeated, back = three.go_on()
    record.note('75, "process N ended"', None, repeated, back, same(three.folder, whole))


@pytest.mark.nightly
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_joins_a_running_run_is_refused_and_disturbs_nobody(job, tmp_path, number):
    """A second process of a number that the run has, in the folder of the run or in another."""
    with Pair(job, tmp_path / "run") as pair:
        started = pair.start(at_0={"calls": [(STEP, 9, "SIGSTOP")]})
        first = psutil.Process(started[0].pid)
        until(lambda: first.status() == psutil.STATUS_STOPPED, started)
        flags = [pair.where, "--set=parallel.processes=2", f"--set=parallel.process={number}"]
        flags += ["--mesh=data:2", "--set=parallel.join_timeout=5"]
        late = [
            job.resume(pair.folder, *flags),
            job.new(tmp_path / "other", *flags, "--notwin"),
        ]
        words = [complaint(done) for done in late]
        print(words)
        started[0].signal(signal.SIGCONT)
        statuses, _, texts = pair.end(started)
        assert statuses == [0, 0], texts
        assert not any("refused" in text for text in texts), texts
