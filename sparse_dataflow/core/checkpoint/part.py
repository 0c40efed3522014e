"""Reading some arrays of a checkpoint while a run writes and deletes others.

Nothing is verified, as checksums are those of whole files: a reader checks what the arrays say.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from sparse_dataflow.core.checkpoint import named_arrays
from sparse_dataflow.core.checkpoint.save_barrier import SaveBarrier
from sparse_dataflow.files import manifest


def read_part(
    folder: Path, step: int, abstract_part: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns some arrays of the checkpoint of a step.

    Args:
      folder: the `checkpoints` folder of a variant.
      step: one of `checkpoint_folder.steps`.
      abstract_part: extra.json's values -> {name of a part of the state: tree of numpy arrays of
        the shapes and dtypes to read}.

    Raises:
      UserError: it is gone or damaged, or has no such arrays.
    """
    path = folder / str(step)
    # Damaged or vanishing files raise errors of any type in orbax.
    with named_arrays.user_errors(path, Exception):
        tree = abstract_part(manifest.load_json(path / "extra.json")["extra"])
        if not jax.tree.leaves(tree):
            return dict(tree)
        with contextlib.closing(named_arrays.make_checkpointer(SaveBarrier())) as checkpointer:
            return named_arrays.read(checkpointer, path / "state", dict(tree))
