"""Runs the main job as a user does, at the scale 'pico', and compares what two runs left."""

import dataclasses
import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from forks import Fork, Forks
from places import ROOT

PICO = ("--scale=pico", "--block=16", "--density=0.25")
PLAN = ("--steps=12", "--set=run.checkpoint_every=3", "--set=run.eval_every=6")
TIMES = ("seconds", "tokens_per_second", "mfu", "update_seconds")
IMPORTED = (
    "array_record.python.array_record_data_source", "sparse_dataflow.commands.train", "grain",
    "jax.interpreters.mlir", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg",
    "scipy.optimize", "sparse_dataflow.data.documents", "sparse_dataflow.reporting.page",
    "tensorboardX", "tokenizers",
)  # fmt: skip
"""What a run imports, most of it when it needs it."""
# Seconds, for a machine that is busy; less than pytest gives a test, whose end shows no run's text.
TIMEOUT = 780


@dataclasses.dataclass(frozen=True)
class MainJob:
    """The experiments in processes of their own, with a corpus and caches of the tests."""

    corpus: Path
    cache: Path
    logs: Path

    @functools.cached_property
    def forks(self) -> Forks:
        """What starts them."""
        return Forks(self.environment, self.logs, IMPORTED)

    def start(
        self,
        *arguments,
        experiment="gpt13b_sparse",
        events=(),
        calls=(),
        ignored=(),
        flushed="",
        whole=False,
        cwd=None,
        **options,
    ) -> Fork:
        """A run of `python -m experiments.EXPERIMENT ARGUMENTS` as a fork.

        Args:
          events: what happens to it, as in `eventful_run`.
          calls: likewise.
          ignored: names of signals that it ignores from its start, as under nohup.
          flushed: file that gets a line for each flush of a file, as in `eventful_run`.
          whole: with all that `eventful_run.shorten` leaves out.
          cwd: the folder that it runs in; that of the tests' corpus if None.
          options: of `Forks.start`.
        """
        arguments = without_repeats(arguments)
        asked = {"events": list(events), "calls": list(calls), "ignored": list(ignored)}
        asked |= {"whole": whole, "flushed": str(flushed)}
        program = Path(__file__).with_name("eventful_run.py")
        cwd = cwd or self.corpus.parent
        return self.forks.start(
            program, json.dumps(asked), experiment, *arguments, cwd=cwd, **options
        )

    def run(self, *arguments, cache=None, **options) -> subprocess.CompletedProcess:
        """`start` to its end; `cache` is the folder of caches where it is not that of the tests."""
        environment = {"XDG_CACHE_HOME": str(cache)} if cache else {}
        run = self.start(*arguments, environment=environment, **options)
        run.wait(TIMEOUT)
        return subprocess.CompletedProcess(arguments, run.returncode, run.stdout, run.stderr)

    def process(self, *arguments) -> subprocess.CompletedProcess:
        """`python -m experiments.gpt13b_sparse ARGUMENTS` to its end, as a user starts it."""
        return subprocess.run(
            [sys.executable, "-m", "experiments.gpt13b_sparse", *without_repeats(arguments)],
            cwd=self.corpus.parent,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )

    def plan(self, folder: Path, *arguments) -> list[str]:
        """The flags of the tests' plan, into `folder`."""
        return [*PICO, *PLAN, f"--corpus={self.corpus}", f"--out={folder}", *arguments]

    def new(self, folder: Path, *arguments, **options) -> subprocess.CompletedProcess:
        """A new run of the tests' plan into `folder`."""
        return self.run(*self.plan(folder, *arguments), **options)

    def resume(self, folder: Path, *arguments, **options) -> subprocess.CompletedProcess:
        """Goes on with the run in `folder`."""
        return self.run(f"--resume={folder}", *arguments, **options)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(self.cache),
            # Compiling is most of a run's time here; a program from the cache is the same program.
            "JAX_ENABLE_COMPILATION_CACHE": "1",
            # As in the tests' own process, also for a test with all optimizations.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }


def without_repeats(arguments) -> list[str]:
    """The flags with the last value of each, as a test overrides its plan."""
    last = {}
    for argument in map(str, arguments):
        path = argument.removeprefix("--set=").partition("=")[0]
        last[path.removeprefix("--no").removeprefix("--")] = argument
    return list(last.values())


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> Path:
    """A folder of English-like .txt files, the same for the same seed."""
    draw = random.Random(seed)
    words = "the of and to in is it was for on are as with his they at be this have from".split()
    words += ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(3, 7))) for _ in range(200)]
    folder.mkdir(parents=True)
    for number in range(documents):
        lines = (" ".join(draw.choices(words, k=12)) for _ in range(60))
        (folder / f"{number:02}.txt").write_text("\n".join(lines) + "\n")
    return folder


def rows(folder: Path, variant: str) -> list[dict]:
    """All lines of metrics.jsonl, as they stand."""
    lines = (folder / variant / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def checkpoint_steps(folder: Path, variant: str) -> list[int]:
    """Steps of the finished checkpoints."""
    found = (folder / variant / "checkpoints").glob("*")
    return sorted(int(path.name) for path in found if path.name.isdigit())


def arrays(folder: Path, variant: str, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by name."""
    path = folder / variant / "checkpoints" / str(step) / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        names = checkpointer.metadata(path.absolute()).item_metadata.tree
        # Into numpy, as the devices of the processes that saved need not be here.
        wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return checkpointer.restore(path.absolute(), restore_args=wanted)


def assert_same_results(folder: Path, other: Path, steps: int = 12) -> None:
    """Both runs ended at the same bits and tell the same numbers, but for times."""
    names = sorted(json.loads((other / "run.json").read_text())["steps"])
    assert sorted(json.loads((folder / "run.json").read_text())["steps"]) == names
    for variant in names:
        mine, theirs = arrays(folder, variant, steps), arrays(other, variant, steps)
        assert mine.keys() == theirs.keys()
        assert {"step", "key"} <= mine.keys()
        assert any(name.startswith("moments") for name in mine)
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype, name
            assert mine[name].tobytes() == theirs[name].tobytes(), name
        assert untimed(rows(folder, variant)) == untimed(rows(other, variant))
    assert (folder / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
    assert (folder / "report.html").exists()
    reports = (json.loads((path / "report.json").read_text()) for path in (folder, other))
    results = [[(v["name"], v["loss"], v["steps"]) for v in r["variants"]] for r in reports]
    assert results[0] == results[1]


def untimed(of: list[dict]) -> list[dict]:
    """Rows without what depends on the clock."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in of]


def complaint(done: subprocess.CompletedProcess, status: int = 2) -> str:
    """What a refused process says: one line, without a trace."""
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    return errors[0]
