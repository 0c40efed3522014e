"""The work of the experiment `watch`: reads run folders and serves their page on loopback."""

import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from sparse_dataflow.commands import run_list
from sparse_dataflow.core.config import settings
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.evaluation import run_files
from sparse_dataflow.files import json_files, loopback, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring import goodput
from sparse_dataflow.monitoring.metrics import MetricsReader
from sparse_dataflow.monitoring.saved_layouts import LayoutReader, SavedLayouts
from sparse_dataflow.reporting import watch_page
from sparse_dataflow.reporting.quantities import finite
from sparse_dataflow.reporting.watch_page import WatchedRun

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
        raise UserError(
            f"--run names {len(folders)} run folders; legal: 1 to {MOST_RUNS}, or --run alone for "
            f"the newest; {run_list.runs_in_words()}."
        )
    for folder in folders:
        if not folder.is_dir() or run_list.runs_in(folder):
            run_list.refuse_other_folder("--run", folder)
    jax.config.update("jax_platforms", "cpu")  # The chip is for the runs that train.
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with loopback.served(options.port, {"GET": responder(folders, options.refresh)}) as port:
        say(f"watching {', '.join(map(str, folders))} at http://{loopback.HOST}:{port}")
        stopped.wait()


def responder(folders: Sequence[Path], refresh: float) -> loopback.Respond:
    """Returns what answers "/" with the page and "/content" with its changing part.

    Both take the number of the layer whose layouts are drawn, as in "/?layer=3".

    Args:
      refresh: seconds between two readings of the page; requests in between share a reading.
    """
    lock = threading.Lock()  # Figures are drawn by one thread at a time.
    content, drawn, drawn_layer = "", float("-inf"), 0
    readers = Readers()

    def respond(path: str, query: Mapping[str, str]) -> loopback.Answer | None:
        nonlocal content, drawn, drawn_layer
        if path not in ("/", "/content"):
            return None
        layer = _layer(query)
        with lock:
            if time.monotonic() - drawn > refresh / 2 or layer != drawn_layer:
                runs = [read_run(folder, readers) for folder in folders]
                content = watch_page.content(runs, config_differences(folders), layer)
                drawn, drawn_layer = time.monotonic(), layer
            page = watch_page.page(content, refresh, layer)
            return "text/html", content if path == "/content" else page

    return respond


def _layer(query):
    text = query.get("layer", "0")
    if not re.fullmatch(r"\d{1,6}", text):
        raise UserError(f"layer={text[:60]}; legal: a number from 0.")
    return int(text)


@dataclasses.dataclass
class Readers:
    """What is read again and again, each line and checkpoint once.

    Attributes:
      layouts: run folder -> its sparse model, and the reader of its layouts.
      metrics: metrics.jsonl -> its reader.
    """

    layouts: dict[Path, tuple[Variant, LayoutReader]] = dataclasses.field(default_factory=dict)
    metrics: dict[Path, MetricsReader] = dataclasses.field(default_factory=dict)

    def rows(self, path: Path) -> list[dict[str, object]]:
        """Returns the rows of a metrics.jsonl."""
        return self.metrics.setdefault(path, MetricsReader(path)).read()


def read_run(folder: Path, readers: Readers) -> WatchedRun:
    """Reads what a run folder has so far; an unreadable folder has its reason alone.

    Args:
      readers: of earlier calls, which this call adds to.
    """
    try:
        config = run_files.read_config(folder)
        record = run_files.read_record(folder, config)
        histories = {
            name: [_numbers(row) for row in readers.rows(folder / name / "metrics.jsonl")]
            for name in config.variants
        }
        sparse = run_files.read_variants(config, record).get("sparse")
    except (UserError, OSError) as error:
        return WatchedRun(str(folder), problem=str(error))
    trained = sum(_training_seconds(rows) for rows in histories.values())
    attempts = goodput.read(folder / goodput.NAME)
    summary = goodput.summary(goodput.seconds_by_category(attempts, trained)) if attempts else ""
    alerts = [
        alert for name in histories for alert in read_alerts(folder / name / "alerts.jsonl", name)
    ]
    layouts = _layouts(folder, sparse, readers)
    return WatchedRun(str(folder), record.steps, histories, summary, alerts, layouts)


def _layouts(folder: Path, sparse: Variant | None, readers: Readers) -> SavedLayouts | str:
    if sparse is None:
        return "The model is dense: it stores every block."
    known = readers.layouts
    if folder not in known or known[folder][0] != sparse:
        known[folder] = sparse, LayoutReader(folder / sparse.name, sparse)
    try:
        saved = known[folder][1].read()
    except UserError as error:
        return f"The layouts cannot be read now: {error}"
    return saved or "The first checkpoint will have the layouts of the initial weights."


def _numbers(row):
    """Returns the kind and the numbers of a row, which may be damaged."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {**numbers, "kind": row.get("kind")}


def _training_seconds(rows):
    seconds = (finite(row.get("seconds")) for row in rows if row.get("kind") == "train")
    return max(filter(None, seconds), default=0.0)


def read_alerts(path: Path, variant: str) -> list[json_files.JsonObject]:
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
