"""When what happened in a step: spans with real timestamps, and how much transfer was hidden."""

import threading
import time
from collections.abc import Iterable
from contextlib import contextmanager
from typing import NamedTuple

KINDS = ("fetch", "compute", "return", "update")


class Span(NamedTuple):
    """One piece of work.

    Attributes:
      kind: one of KINDS.
      section: "embed", "block 3", "head".
      start: seconds of `time.perf_counter`.
      stop: likewise.
    """

    kind: str
    section: str
    start: float
    stop: float


class Timeline:
    """Collects spans from several threads."""

    def __init__(self):
        self.spans: list[Span] = []
        self._lock = threading.Lock()

    def add(self, kind: str, section: str, start: float, stop: float) -> None:
        """Notes one span."""
        with self._lock:
            self.spans.append(Span(kind, section, start, stop))

    @contextmanager
    def span(self, kind: str, section: str):
        """Notes the time that the block takes."""
        start = time.perf_counter()
        yield
        self.add(kind, section, start, time.perf_counter())


def seconds(spans: Iterable[Span], kind: str) -> float:
    """Time in which at least one span of a kind was under way."""
    return sum(stop - start for start, stop in _union(spans, (kind,)))


def hidden_share(spans: Iterable[Span], kinds: tuple[str, ...] = ("fetch", "return")) -> float:
    """Fraction, in [0, 1], of the time of `kinds` during which the device computed as well.

    1 where there was none.
    """
    spans = list(spans)
    wanted, computing = _union(spans, kinds), _union(spans, ("compute",))
    total = sum(stop - start for start, stop in wanted)
    both = sum(
        max(0.0, min(stop, end) - max(start, begin))
        for start, stop in wanted
        for begin, end in computing
    )
    return both / total if total else 1.0


def _union(spans, kinds):
    merged: list[list[float]] = []
    for start, stop in sorted((s.start, s.stop) for s in spans if s.kind in kinds):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return merged
