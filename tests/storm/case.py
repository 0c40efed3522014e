"""A case: the settings in which a run of the storm differs from its default, as texts by path."""

import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from sparse_dataflow.commands import devices, flag_conflicts
from sparse_dataflow.core.config import settings
from sparse_dataflow.interchange import starting_point
from sparse_dataflow.runs import variants
from sparse_dataflow.runs.run_config import RunConfig, preset
from storm.machine import with_devices
from storm.places import Places
from storm.scene import TABLE, scene_of

TINY = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 2,
    "model.d_ff": 64,
    "model.vocab_size": 300,
    "model.max_len": 32,
    "sparsity.block": 8,
    "sparsity.density": 0.5,
}
"""One shape, so that cases share compiled programs."""

SHORT: dict[str, Any] = {
    "training.sequence": 16,
    "training.batch": 4,
    "training.steps": 4,
    "run.twin": "no",
    "run.trackers": "none",
    "run.eval_every": 2,
    "run.checkpoint_every": 2,
    "parallel.mesh": "auto",
    "data.corpus": "@folder",
    "model.remat": "none",
    "training.micro_batches": 1,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A case.

    Attributes:
      changes: (path, text) pairs, sorted by path; texts are those of a command line, and may name
        places.
    """

    changes: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, changes: Mapping[str, str] | Iterable[tuple[str, str]]) -> "Case":
        """Returns the case of changes in any order."""
        return cls(tuple(sorted(dict(changes).items())))

    @classmethod
    def parsed(cls, text: str) -> "Case":
        """Returns the case that `str` writes."""
        return cls.of(word.split("=", 1) for word in shlex.split(text))

    def __str__(self):
        return shlex.join(f"{path}={text}" for path, text in self.changes)

    @functools.cached_property
    def values(self) -> dict[str, str]:
        """Path -> text."""
        return dict(self.changes)

    def with_change(self, path: str, text: str) -> "Case":
        """Returns the case with one more change."""
        return Case.of({**self.values, path: text})

    def without(self, *paths: str) -> "Case":
        """Returns the case without changes of these paths."""
        return Case.of({p: t for p, t in self.changes if p not in paths})

    def config(self, places: Places, make: bool = True) -> RunConfig:
        """Returns the config of the case.

        Args:
          make: whether to make the corpora that it names.

        Raises:
          UserError: its settings are not legal, or do not go together.
        """
        texts = {path: text for path, text in self.changes if not path.startswith("scene.")}
        if start := texts.get("run.init_from"):
            base = starting_point.run_config(places.resolved(start, make))
            base = settings.changed(base, _short(places, make))
            if start != "@sparse":  # Its weights have a block and a density.
                base = settings.changed(base, {p: TINY[p] for p in TINY if "sparsity" in p})
        else:
            base = settings.changed(preset("pico"), {**TINY, **_short(places, make)})
        changes = {
            path: settings.parsed(TABLE[path], places.resolved(text, make))
            for path, text in texts.items()
        }
        spelled = {path: f"--set {path}" for path in changes}
        flag_conflicts.refuse_flags(changes, spelled, False)
        return settings.changed(base, changes)

    def devices(self) -> int:
        """Returns the number of devices of the case."""
        sizes = re.findall(r":(\d+)", self.values.get("parallel.mesh", ""))
        return math.prod(map(int, sizes)) if sizes else scene_of(self.values).devices


def _short(places, make):
    return {**SHORT, "data.corpus": places.resolved(SHORT["data.corpus"], make)}


def refuse(config: RunConfig, count: int) -> None:
    """Refuses what a run would refuse before it reads any text.

    Args:
      count: devices.

    Raises:
      UserError: the models, or the executor on so many devices, are impossible.
    """
    with with_devices(count):
        models = variants.variants(config)
        devices.check(devices.executor(config), config, models)
