"""Models at addresses of object stores or on the hub, fetched before they are read."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path

from sparse_dataflow.data import cache
from sparse_dataflow.data.fetched import fetched
from sparse_dataflow.evaluation.run_files import CONFIG, RECORD, TOKENIZER
from sparse_dataflow.evaluation.trained import NEWEST
from sparse_dataflow.files import addresses, manifest
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import hub_models, huggingface, tensors

_DIRECTORY = (*huggingface.SMALL, ".safetensors")
"""How the files end that a Hugging Face directory is read from."""


def on_this_machine(place: str | Path, checkpoint: str = NEWEST) -> Path:
    """Returns the folder of a model; one at an address is fetched as far as it is read.

    Of a run that is what describes it and one checkpoint of each model, of a Hugging Face directory
    its own files without subfolders, and weights only after its small files were checked.

    Args:
      place: folder or address of a run or a Hugging Face directory, or name on the hub.
      checkpoint: of a run: "newest" or a step number.

    Raises:
      UserError: the address is empty or cannot be read, or see `hub_models.fetched`.
    """
    if not addresses.is_address(addresses.normal(str(place))):
        return hub_models.local_folder(place)
    choose = functools.partial(_needed, checkpoint=checkpoint)
    folder = fetched(str(place), cache.FOLDER, lambda names: choose(set(names), weights=False))
    if huggingface.is_directory(folder):
        huggingface.describe(folder)
        folder = fetched(str(place), cache.FOLDER, lambda names: choose(set(names)))
    return folder


def origin(place: str | Path, folder: Path) -> str:
    """Returns where a model came from: an address, a name on the hub with its commit, or the
    absolute path of a folder.

    Args:
      place: what `on_this_machine` got.
      folder: what it returned.
    """
    name = hub_models.hub_name(place)
    if name is not None:
        return hub_models.pinned(name, folder)
    text = addresses.normal(str(place))
    return text if addresses.is_address(text) else str(Path(text).expanduser().absolute())


def _needed(names: set[str], checkpoint: str, weights: bool = True) -> Iterable[str]:
    """Returns the names that a model is read from; of a directory its small files alone without
    `weights`."""
    whole = {CONFIG, RECORD, TOKENIZER}
    if RECORD not in names:
        if not any(name.endswith(".safetensors") for name in names):
            if words := tensors.other_format(sorted(names)):
                raise UserError(f"The address has no weights in safetensors; {words}")
        endings = _DIRECTORY if weights else huggingface.SMALL
        return [name for name in names if "/" not in name and name.endswith(endings)]
    finished: dict[str, list[int]] = {}
    for name in names:
        pattern = rf"([^/]+)/checkpoints/(\d+)/{re.escape(manifest.NAME)}"
        if match := re.fullmatch(pattern, name):
            finished.setdefault(match[1], []).append(int(match[2]))
    prefixes = tuple(
        f"{variant}/checkpoints/{max(steps) if checkpoint == NEWEST else checkpoint}/"
        for variant, steps in finished.items()
    )
    return [name for name in names if name in whole or (prefixes and name.startswith(prefixes))]
