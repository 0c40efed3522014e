"""Where a run's numbers go: JSONL and TensorBoard files, and a progress bar or plain lines."""

import json
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from sparse_dataflow.reporting.report import read_metrics


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and scalars to `tensorboard/` in one variant's folder.

    Opening at step s drops rows past s, which a killed run wrote after its last checkpoint.
    """

    def __init__(self, folder: Path, step: int = 0):
        from tensorboardX import SummaryWriter

        self._path = folder / "metrics.jsonl"
        rows = [row for row in read_metrics(self._path) if row["step"] <= step]
        rewritten = self._path.with_suffix(".new")
        rewritten.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(rewritten, self._path)
        self._file = self._path.open("a")
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, row: dict) -> None:
        """Adds one row: {"kind", "step", ...numbers}."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in row.items():
            if name not in ("kind", "step") and value is not None:
                self._tensorboard.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def close(self) -> None:
        """Flushes and closes both files."""
        self._file.close()
        self._tensorboard.close()


class Progress:
    """A progress bar on a terminal, a plain line every `every` seconds elsewhere."""

    def __init__(self, name: str, total: int, step: int, position: int, every: float = 15.0):
        self._name, self._total, self._every = name, total, every
        self._told = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                desc=f"{name:>6}", total=total, initial=step, position=position, unit="step",
                dynamic_ncols=True,
            )  # fmt: skip

    def update(self, step: int, text: str, seconds_left: float) -> None:
        """Shows that `step` is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif time.monotonic() - self._told > self._every or step == self._total:
            self._told = time.monotonic()
            eta = f"{seconds_left:.0f} s left" if step < self._total else "done"
            say(f"{self._name:>6} step {step}/{self._total}  {text}  {eta}")

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def say(text: str) -> None:
    """Prints a line without breaking a progress bar."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
