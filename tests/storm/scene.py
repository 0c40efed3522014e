"""What stands around a run: its text, its devices, and where it is interrupted.

These are settings too, so they are drawn, dropped and printed as those of a `RunConfig`.
"""

import dataclasses

from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.settings import between, setting
from sparse_dataflow.runs.run_config import RunConfig
from storm.writing import WRITINGS


@dataclasses.dataclass(frozen=True)
class Scene:
    """The settings of the storm itself."""

    writing: str = setting("plain", "Kind of the documents.", choices=WRITINGS)
    documents: int = setting(24, "Documents of a corpus.", legal=between(12, 48))
    devices: int = setting(
        1, "Devices, where the mesh names none.", legal=("1, 2 or 4", lambda n: n in (1, 2, 4))
    )
    stop: int = setting(2, "Step at which a run is interrupted.", legal=between(1, 6))
    choice: int = setting(0, "Draws what a relation may choose.", legal=between(0, 99))

    def __post_init__(self):
        settings.validate(self, "scene")


@dataclasses.dataclass(frozen=True)
class _Stage:
    scene: Scene


TABLE = settings.by_path(RunConfig) | settings.by_path(_Stage)
"""Path -> setting of everything that is drawn."""


def scene_of(changes: dict[str, str]) -> Scene:
    """Returns the scene of a case, whose changes are texts by path."""
    values = {
        path.partition(".")[2]: TABLE[path].parse(text)
        for path, text in changes.items()
        if path.startswith("scene.")
    }
    return Scene(**values)
