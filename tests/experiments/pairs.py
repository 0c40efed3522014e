"""A run of one process or of two over loopback, to which faults happen."""

import re
import signal
import time

from forks import TIMEOUT_SECONDS
from main_job import PICO, arrays, rows, untimed
from ports import free_port

from sparse_dataflow.monitoring.metrics import read_metrics

STEPS = 16
PLAN = ("--set=run.checkpoint_every=4", "--set=run.eval_every=8", "--notwin")
CHANGING = (
    "--evolution=rigl",
    "--set=evolution.every=4",
    "--set=evolution.at=0.9",
    "--set=training.skip_spikes=1",
)
STEP = "sparse_dataflow.core.training.loop.run_step"
UPDATE = "sparse_dataflow.core.training.hooks.evolve_layouts"
READ = "sparse_dataflow.core.checkpoint.named_arrays.read"


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
        self.where = where = f"--set=parallel.coordinator=127.0.0.1:{free_port()}"
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
