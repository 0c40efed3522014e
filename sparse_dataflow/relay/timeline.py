"""Timeline of a step: spans with real timestamps, and the fraction of hidden transfer."""

import threading
import time
from collections.abc import Iterable
from contextlib import contextmanager
from typing import NamedTuple

KINDS = ("fetch", "compute", "return", "update")


class Span(NamedTuple):
    """Time span of one piece of work.

    Attributes:
      kind: one of KINDS.
      section: such as "embed", "block 3" or "head".
      start: seconds of `time.perf_counter`.
      stop: seconds of `time.perf_counter`.
    """

    kind: str
    section: str
    start: float
    stop: float


class Timeline:
    """Collects spans; thread-safe."""

    def __init__(self):
        self.spans: list[Span] = []
        self._lock = threading.Lock()

    def add(self, kind: str, section: str, start: float, stop: float) -> None:
        """Adds a span."""
        with self._lock:
            self.spans.append(Span(kind, section, start, stop))

    @contextmanager
    def span(self, kind: str, section: str):
        """Adds a span for a block of code."""
        start = time.perf_counter()
        yield
        self.add(kind, section, start, time.perf_counter())


def seconds(spans: Iterable[Span], kind: str) -> float:
    """Returns the seconds during which at least one span of a kind was active."""
    return sum(stop - start for start, stop in _union(spans, (kind,)))


def hidden_share(spans: Iterable[Span], kinds: tuple[str, ...] = ("fetch", "return")) -> float:
    """Returns the fraction in [0, 1] of the time of `kinds` that overlaps with device compute.

    It is 1 if there are no spans of these kinds.
    """
    spans = list(spans)
    selected, computing = _union(spans, kinds), _union(spans, ("compute",))
    # Unions, because spans of several threads overlap: time that two updates share counts once.
    total = sum(stop - start for start, stop in selected)
    overlap = sum(
        max(0.0, min(stop, compute_stop) - max(start, compute_start))
        for start, stop in selected
        for compute_start, compute_stop in computing
    )
    return overlap / total if total else 1.0


def _union(spans, kinds):
    merged: list[list[float]] = []
    for start, stop in sorted((s.start, s.stop) for s in spans if s.kind in kinds):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return merged
