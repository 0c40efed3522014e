"""Experiment trackers: they get the rows of `metrics.jsonl` and the alerts of a training.

A tracker is any object with the methods of `Tracker`. The trackers of others are imported only when
they are named. An error of theirs ends their tracking and not the training.
"""

import importlib
import importlib.util
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sparse_dataflow.files.errors import UserError, first_line

TENSORBOARD = "tensorboard"
PROJECT = "sparse_dataflow"
_FLUSH_SECONDS = 10.0

Row = Mapping[str, object]


@dataclass(frozen=True)
class TrackedRun:
    """The training that a tracker follows.

    Attributes:
      folder: the variant's folder in the run folder.
      name: such as "my_run/sparse".
      step: the last step of an earlier start; 0 for a new run.
      config: the `RunConfig` as JSON; {} if unknown.
      id: of the run and its variant, wherever the folder is.
    """

    folder: Path
    name: str
    step: int
    config: Mapping[str, object]
    id: str = ""


class Tracker(Protocol):
    """Follows one training."""

    def write(self, row: Row) -> None:
        """Takes a row of metrics.jsonl: "kind", "step" and numbers by name; None is unknown."""

    def alert(self, kind: str, text: str, step: int) -> None:
        """Takes an alert; kinds are restart, spike, rollback, nan and stall. Any thread calls."""

    def close(self) -> None:
        """Ends the tracking; what was taken must be stored."""


def scalars(row: Row) -> dict[str, float]:
    """Returns the known numbers of a row by "kind/name"."""
    return {
        f"{row['kind']}/{name}": value
        for name, value in row.items()
        if name not in ("kind", "step") and isinstance(value, int | float)
    }


class TensorBoard:
    """A TensorBoard file of scalars, written in the caller's thread.

    tensorboardX's SummaryWriter writes in a thread of its own.  That thread dies if the disk is
    full, and the training then waits for its queue forever.
    """

    def __init__(self, folder: Path, first_step: int):
        """Opens a new file; TensorBoard hides the steps of earlier files from `first_step` on."""
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        # The time comes first, so that earlier files sort before this one.
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}"
        self._event = event_pb2.Event
        self._writer = RecordWriter(str(folder / name))
        self._put(file_version="brain.Event:2")
        self._put(step=first_step, session_log=event_pb2.SessionLog(status="START"))
        self._writer.flush()
        self._flushed = time.monotonic()

    def write(self, row: Row) -> None:
        """Adds the scalars of a row; flushes to disk about every _FLUSH_SECONDS."""
        values = [{"tag": name, "simple_value": value} for name, value in scalars(row).items()]
        self._put(step=row["step"], summary={"value": values})
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()

    def _put(self, **fields):
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class WeightsAndBiases:
    """A run of Weights & Biases, online or offline as its own variables (WANDB_MODE) say."""

    def __init__(self, run: TrackedRun):
        import wandb

        self._folder = run.folder
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            # Variants are tracked one by one, and a new one must not end another's run.
            reinit="create_new",
        )
        # A resumed run repeats steps, which wandb's own step counter refuses.
        self._run.define_metric("*", step_metric="step")
        self._remove_outside_links()

    def _remove_outside_links(self):
        """Removes its links to logs in a cache: a run folder that has such links is refused."""
        for path in (self._folder / "wandb").rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(self._folder.resolve()):
                path.unlink(missing_ok=True)

    def write(self, row: Row) -> None:
        """Logs the scalars of a row over the axis "step"."""
        self._run.log({"step": row["step"], **scalars(row)})

    def alert(self, kind: str, text: str, step: int) -> None:
        """Sends an alert, which Weights & Biases may mail."""
        self._run.alert(title=f"{kind} at step {step}", text=text)

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()
        self._remove_outside_links()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI; a resumed run continues it."""

    def __init__(self, run: TrackedRun):
        import mlflow

        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient()
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(title)
        number = experiment.experiment_id if experiment else self._client.create_experiment(title)
        # A resumed run goes on in the run that has its tag.
        same = self._client.search_runs([number], f"tags.sparse_dataflow = '{run.id}'")
        if same:
            self._run_id = same[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {"sparse_dataflow": run.id}
        self._run_id = self._client.create_run(number, tags=tags, run_name=run.name).info.run_id
        for path, value in _flat(run.config):
            self._client.log_param(self._run_id, path, value)

    def write(self, row: Row) -> None:
        """Logs the scalars of a row in one request."""
        now = int(1000 * time.time())
        metrics = [
            # MLflow refuses names with other characters.
            self._entities.Metric(re.sub(r"[^\w./: -]", "_", name), float(value), now, row["step"])
            for name, value in scalars(row).items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def alert(self, kind: str, text: str, step: int) -> None:
        """Sets the tag "alert.KIND"."""
        self._client.set_tag(self._run_id, f"alert.{kind}", f"step {step}: {text}")

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run_id)


PACKAGES: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""Package -> its tracker."""


def tracker_names(text: str) -> tuple[str, ...]:
    """Returns the trackers that a setting names; imports none.

    Args:
      text: comma list of tensorboard, wandb, mlflow and MODULE:ATTRIBUTE; "none" for none.

    Raises:
      UserError: a name is illegal or repeated, or its package is not installed.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip() not in ("", "none"))
    for name in names:
        custom = re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name)
        if name not in (TENSORBOARD, *PACKAGES) and not custom:
            raise UserError(
                f"run.trackers has {name[:60]!r}; legal: {TENSORBOARD}, {', '.join(PACKAGES)}, "
                "MODULE:ATTRIBUTE, or none."
            )
        if names.count(name) > 1:
            raise UserError(f"run.trackers has {name[:60]!r} twice; legal: each tracker once.")
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise UserError(f"The tracker {name} needs its package: pip install {name}.")
    return names


def opened(name: str, run: TrackedRun) -> Tracker:
    """Opens a tracker of others: of `PACKAGES`, or what MODULE:ATTRIBUTE returns for the run.

    Raises:
      UserError: it cannot be imported, or raises.
    """
    try:
        if name in PACKAGES:
            return PACKAGES[name](run)
        module, _, attribute = name.partition(":")
        return getattr(importlib.import_module(module), attribute)(run)
    except (Exception, SystemExit) as error:  # The code of others raises any error.
        raise UserError(f"The tracker {name} cannot start ({first_line(error)}).") from error


def _flat(config):
    for part, fields in config.items():
        yield from ((f"{part}.{name}", value) for name, value in fields.items())
