"""The work of the experiment `watch`: reads run folders and serves their page on loopback."""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_dataflow.config import settings
from sparse_dataflow.files import json_files, loopback, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.reporting import watch_page
from sparse_dataflow.reporting.quantities import finite
from sparse_dataflow.reporting.watch_page import WatchedRun
from sparse_dataflow.training import goodput, run_files
from sparse_dataflow.training.metrics import read_metrics, say

MOST_RUNS = 8
_ALERT_BYTES = 2**20
_UNCOMPARED = ("run.out",)


def serve(options) -> None:
    """Serves the page of the runs until SIGINT or SIGTERM.

    Args:
      options: of `experiments.watch`.

    Raises:
      UserError: a folder does not exist, or the port is not free.
    """
    folders = [Path(os.path.expanduser(name)) for name in options.run.split(",") if name]
    if not 1 <= len(folders) <= MOST_RUNS:
        raise UserError(f"--run names {len(folders)} run folders; legal: 1 to {MOST_RUNS}.")
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--run: {folder} is not a folder.")
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with loopback.served(options.port, {"GET": responder(folders, options.refresh)}) as port:
        say(f"watching {', '.join(map(str, folders))} at http://{loopback.HOST}:{port}")
        stopped.wait()


def responder(folders: Sequence[Path], refresh: float) -> loopback.Respond:
    """Returns what answers "/" with the page and "/content" with its changing part.

    Args:
      folders: run folders.
      refresh: seconds between two readings of the page; requests in between share a reading.
    """
    lock = threading.Lock()  # Figures are drawn by one thread at a time.
    content, drawn = "", float("-inf")

    def respond(path: str, query: Mapping[str, str]) -> loopback.Answer | None:
        nonlocal content, drawn
        if path not in ("/", "/content"):
            return None
        with lock:
            if time.monotonic() - drawn > refresh / 2:
                runs = [read_run(folder) for folder in folders]
                content = watch_page.content(runs, config_differences(folders))
                drawn = time.monotonic()
            return "text/html", content if path == "/content" else watch_page.page(content, refresh)

    return respond


def read_run(folder: Path) -> WatchedRun:
    """Reads what a run folder has so far; an unreadable folder has its reason alone."""
    try:
        config = run_files.read_config(folder)
        record = run_files.read_record(folder, config)
        histories = {
            name: [_numbers(row) for row in read_metrics(folder / name / "metrics.jsonl")]
            for name in config.variants
        }
    except (UserError, OSError) as error:
        return WatchedRun(str(folder), problem=str(error))
    trained = sum(_training_seconds(rows) for rows in histories.values())
    attempts = goodput.read(folder / goodput.NAME)
    summary = goodput.summary(goodput.seconds_by_category(attempts, trained)) if attempts else ""
    alerts = [
        alert for name in histories for alert in read_alerts(folder / name / "alerts.jsonl", name)
    ]
    return WatchedRun(str(folder), record.steps, histories, summary, alerts)


def _numbers(row):
    """Returns the kind and the numbers of a row, which may be damaged."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {**numbers, "kind": row.get("kind")}


def _training_seconds(rows):
    seconds = (finite(row.get("seconds")) for row in rows if row.get("kind") == "train")
    return max(filter(None, seconds), default=0.0)


def read_alerts(path: Path, variant: str) -> list[dict[str, Any]]:
    """Returns the alerts in a file in order, each with its "variant"; damaged lines have none."""
    try:
        with storage.open_regular(path) as file:
            lines = file.read(_ALERT_BYTES).splitlines()
    except OSError:
        return []
    alerts = []
    for line in lines:
        try:
            alert = json_files.parse(line)
        except ValueError:
            continue
        if isinstance(alert, dict):
            alerts.append({name: str(alert.get(name, "")) for name in ("kind", "step", "text")})
            alerts[-1]["variant"] = variant
    return alerts


def config_differences(folders: Sequence[Path]) -> list[tuple[str, list[str]]]:
    """Returns (path, its value in each run) of the settings in which the runs differ."""
    configs = []
    for folder in folders:
        try:
            fields = run_files.read_config(folder).to_json()
        except (UserError, OSError):
            fields = {}
        configs.append(
            {
                f"{part}.{name}": settings.shown(value)
                for part, values in fields.items()
                for name, value in values.items()
            }
        )
    rows = [
        (path, [config.get(path, "") for config in configs])
        for path in sorted(set().union(*configs))
        if path not in _UNCOMPARED
    ]
    return [(path, values) for path, values in rows if len(set(values)) > 1]
