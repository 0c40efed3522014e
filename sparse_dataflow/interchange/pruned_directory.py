"""A Hugging Face directory that takes the layers of a pruned model one by one.

It is a sparse form with a file for each layer.  Until it is complete, it is a hidden folder beside
its place, where each layer is a derived file.  The same pruning goes on there after an interrupt,
to the same bits (a narrow model: to rounding), and prunes damaged layers again.
"""

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.checkpoint.named_arrays import flatten
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.model import stacks
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import derived, json_files, manifest, storage
from sparse_dataflow.files.addresses import local_path
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.folders import FolderLock
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.interchange import huggingface, sparse_form, tensors
from sparse_dataflow.interchange.model_card import short_card
from sparse_dataflow.pruning.layer_by_layer import Layers
from sparse_dataflow.pruning.rebuild import RebuiltLayer
from sparse_dataflow.pruning.stored import StoredLayer, stored_layouts

FACTS = "pruning.json"
VERSION = 1
"""Raise it when the same pruning gives other weights."""


def digest_of(batches: Sequence[np.ndarray]) -> str:
    """Returns the sha256 (hex) of token batches."""
    combined = hashlib.sha256()
    for batch in batches:
        combined.update(f"{batch.shape}".encode() + np.ascontiguousarray(batch).tobytes())
    return combined.hexdigest()


class PrunedDirectory:
    """Takes pruned layers, and writes each into a file of a new directory, which one process owns
    until the `with` block ends.

    Attributes:
      errors: those of the layers so far.
    """

    def __init__(self, folder: str | Path, model: ModelConfig, dtype: str, facts: JsonObject):
        """Makes the hidden folder, or goes on in it.

        Args:
          folder: to make; it must not exist.
          model: the pruned model.
          dtype: of the floats, one of `tensors.DTYPES`.
          facts: JSON values of all that the weights follow from, besides model and dtype.

        Raises:
          UserError: the folder exists, or the hidden one is of another pruning or process.
        """
        tensors.as_dtype({}, dtype)  # Refuses an unknown one.
        self.errors: dict[str, float] = {}
        self._layouts: dict[int, dict[str, BlockLayout]] = {}
        self._folder, self._model, self._dtype = local_path("out", folder), model, dtype
        if os.path.lexists(self._folder):
            raise UserError(f"{self._folder} exists already; name a new folder.")
        self._work = self._folder.with_name(f".{self._folder.name}.pruning")
        self._facts = {"code": VERSION, "model": model.to_json(), "dtype": dtype, **facts}
        path = self._work / FACTS
        with storage.writing(self._folder):
            self._work.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self._work)
        try:
            self._go_on(path)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "PrunedDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _go_on(self, path):
        """Writes the facts of a new pruning; refuses those of another one."""
        facts = json_files.parse(json.dumps(self._facts))
        try:
            saved = manifest.parse(json_files.read_bytes(path))["facts"]
        except (FileNotFoundError, ValueError, manifest.Damaged):
            saved = facts  # Each layer also says what it was made from.
            with storage.writing(self._folder):
                storage.replace(path, manifest.text(facts, {}))
        if different := sorted(name for name in facts if saved.get(name) != facts[name]):
            raise UserError(
                f"{self._work} has layers that were pruned with other {' and '.join(different)}; "
                "legal: the same ones, another folder, or none of these layers (remove it)."
            )

    def rounded(self, array: object) -> np.ndarray:
        """Returns floats as the files have them, in float32."""
        return np.asarray(np.asarray(array, jnp.dtype(self._dtype)), np.float32)

    def _path(self, number):
        """Returns the file of a layer; that of the ends is the one before the first layer's."""
        return self._work / tensors.shard_name(number + 1, self._model.num_layers + 1)

    @functools.cached_property
    def _shapes(self):
        return sparse_form.layer_shapes(self._model)

    def restored(self, number: int) -> tuple[ModelConfig, dict] | None:
        """Returns the model and the parameters of a layer that is written; None without."""
        path = self._path(number)
        if (facts := derived.read(path, self._origin(number))) is None:
            return None
        files = tensors.Tensors(self._work, [path])
        layer = sparse_form.read_layer(files, self._model, self._shapes[number], number)
        self.errors |= facts["errors"]
        self._layouts[number] = {
            name: layout for name, (layout,) in stacks.layouts_of(self._model, layer).items()
        }
        say(f"prune: layer {number + 1} of {self._model.num_layers}: is in {self._work}")
        return self._model, layer

    def put(self, layer: RebuiltLayer, stored: StoredLayer) -> None:
        """Writes a layer."""
        arrays = sparse_form.layer_tensors(
            self._model, stored.with_layouts(self._model), layer.number
        )
        self.errors |= layer.errors
        self._layouts[layer.number] = stored.layouts
        self._write(layer.number, arrays, {"errors": layer.errors})

    def _origin(self, number):
        return {**self._facts, "layer": number}

    def _write(self, number, arrays, facts):
        """Writes a file, which has its name when it is complete."""
        path = self._path(number)
        partial = path.with_suffix(".partial")
        arrays = tensors.as_dtype(arrays, self._dtype)
        with self._writing():
            tensors.write_file(partial, arrays, sparse_form.METADATA)
            derived.write(partial, path, self._origin(number), facts)

    def _writing(self):
        then = " The same call goes on after the layers that are finished."
        return storage.writing(self._folder, then)

    def finish(self, weights: Layers, tokenizer: Tokenizer, context: int) -> Path:
        """Writes what is of no layer, and gives the folder its name; returns it.

        Args:
          weights: of the model that was pruned.
          tokenizer: see `huggingface.write`.
          context: sequence length of the training, in tokens.
        """
        ends = huggingface.reordered(weights.ends(), tokenizer.ids_from_original)
        self._write(-1, flatten(ends), {})
        del ends
        layouts = [self._layouts[number] for number in range(self._model.num_layers)]
        more = huggingface.sparse_fields(tokenizer)
        sentence = "`sparse_dataflow.load` reads this model."
        card = short_card(self._folder.name, sentence, self._model)
        with self._writing():
            stored = stored_layouts(self._model, layouts)
            sparse_form.write_small_files(self._work, self._model, stored, context, more)
            files = tensors.write_index(self._work, self._places())
            huggingface.write_rest(self._work, files, tokenizer, context, card)
            storage.flush_tree(self._work)
        self._lock.release()
        try:
            self._work.rename(self._folder)
        except OSError as error:
            raise UserError(
                f"{self._folder} was made by another program meanwhile ({error.strerror}). The "
                f"pruned model is in {self._work}: rename it, or remove {self._folder} and call "
                "again."
            ) from error
        # Last, so that layers are never without what they were made from.
        for path in (FACTS, *(derived.record_of(self._path(n)).name for n in self._numbers)):
            (self._folder / path).unlink(missing_ok=True)
        return self._folder

    @property
    def _numbers(self):
        """Numbers of the layers, after that of the ends."""
        return range(-1, self._model.num_layers)

    def _places(self):
        """Returns tensor -> (name of its file, its bytes)."""
        places = {}
        for number in self._numbers:
            path = self._path(number)
            for name, size in tensors.sizes(path).items():
                places[name] = path.name, size
        return places
