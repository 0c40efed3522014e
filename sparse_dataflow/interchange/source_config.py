"""The config.json that a model was imported with: what of it is not read, and what of it stays."""

from collections.abc import Mapping

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.interchange.architectures import (
    UNSUPPORTED,
    Representation,
    read_config,
    represent,
    row,
    without_aliases,
)

_SILENT = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path",
    "use_cache", "initializer_range", "n_ctx", "reorder_and_upcast_attn", "pretraining_tp",
    "task_specific_params", "classifier_dropout", "is_decoder", "context",
    "_sliding_window_pattern",
}  # fmt: skip
"""Fields of config.json that do not change what a model computes."""


class _Recorded(Mapping):
    """Fields that remember which of them were read."""

    def __init__(self, fields):
        self.fields, self.read = fields, set()

    def __getitem__(self, name):
        self.read.add(name)
        return self.fields[name]

    def __iter__(self):
        return iter(self.fields)

    def __len__(self):
        return len(self.fields)


def unread(fields: Mapping[str, object]) -> list[str]:
    """Returns the fields of a config.json, of a value but zero or false, that change nothing here,
    without those that change nothing anywhere."""
    architecture = row(fields)
    recorded = _Recorded(without_aliases(architecture, fields))
    for rule in (*UNSUPPORTED, *architecture.rules):
        rule.read(recorded)
    silent = recorded.read | set(architecture.aliases) | _SILENT
    return [n for n, v in fields.items() if v and n not in silent and not n.endswith("_token_id")]


def changed(
    name: str, source: Mapping[str, object], representation: Representation
) -> JsonObject | None:
    """Returns a config.json with the fields of `representation` that `source` has otherwise.

    Args:
      name: architecture of the representation.
      source: fields of another config.json.
      representation: see `represent`.

    Returns:
      Fields that are read as the represented model; None if those of `source` cannot be.
    """
    if source.get("model_type") != name:
        return None
    try:
        before = represent(name, read_config(source)).fields
        new = {n: v for n, v in representation.fields.items() if before.get(n, ...) != v}
        # What the source lacks, older releases of transformers may read.
        fields = {**representation.fields, **source, **new}
        return fields if read_config(fields) == representation.model else None
    except UserError:
        return None
