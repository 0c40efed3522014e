"""Named places in values: "@jsonl" is a corpus of the scene, "@run" a finished run, and so on.

A place is made when it is first needed.  Corpora belong to a case; models that runs begin with
are shared by all cases.
"""

import re
from pathlib import Path

import other_tokenizers

from sparse_dataflow.data.hub import HubFiles
from storm import writing
from storm.scene import Scene

MODELS = ("run", "dense", "sparse")
"""A finished run of a dense model, and its exports; `models` makes them."""

TOKENIZERS = tuple(sorted(other_tokenizers.KINDS))
_NAME = re.compile(r"@([a-z]\w*)")


def files_of(place: Path) -> list[str]:
    """Returns the files of a corpus that is streamed."""
    return [str(place)] if place.is_file() else sorted(str(path) for path in place.iterdir())


class Places:
    """The places of a case.

    Args:
      shared: folder of the places of all cases.
      folder: folder of those of this case.
    """

    def __init__(self, shared: Path, folder: Path, scene: Scene):
        self.shared, self.folder, self.scene = shared, folder, scene
        self._paths: dict[str, Path] = {}

    def resolved(self, text: str, make: bool = True) -> str:
        """Returns a text with the paths of the places that it names.

        Args:
          make: whether to make them where they are missing.
        """
        return _NAME.sub(lambda match: str(self.path(match[1], make)), text)

    def texts(self, name: str) -> list[str]:
        """Returns the documents of a corpus.  "jsonl_2" has others than "jsonl", half of "jsonl_3"
        are those of "jsonl"."""
        number = int(name.rpartition("_")[2]) if "_" in name else 1
        seeds = {1: [1], 2: [2], 3: [3, 1]}[number]
        count = self.scene.documents // len(seeds)
        return [
            text for seed in seeds for text in writing.documents(self.scene.writing, count, seed)
        ]

    def path(self, name: str, make: bool = True) -> Path:
        """Returns the path of a place."""
        if name in self._paths:
            return self._paths[name]
        if name in MODELS:
            return self.shared / name
        if name in TOKENIZERS:
            place = self.shared / "tokenizers" / name
            if make and not place.exists():
                other_tokenizers.write(place, name)
            return place
        form = name.partition("_")[0]
        if form not in writing.FORMATS:
            return self.folder / name
        place = self.folder / "corpora" / name
        if make:
            place = self._paths[name] = writing.FORMATS[form](place, self.texts(name))
        return place

    def hub_files(self, name: str) -> HubFiles:
        """Returns the files of the dataset storm/NAME, in place of `hub.hub_files`."""
        corpus = name.removeprefix("storm/").partition("@")[0]
        return HubFiles(f"hf:storm/{corpus}@0", {"train": tuple(files_of(self.path(corpus)))})
