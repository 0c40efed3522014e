"""Rules that map fields of a Hugging Face config.json to fields of `ModelConfig`, and back.

A rule is data of one row of `architectures.ARCHITECTURES`. It has two methods:

- `read(fields)` returns the fields of `ModelConfig` that it sets. It raises UserError with the
  name, value and legal values of a field of config.json that this project does not support.
- `write(model)` returns the fields of config.json that it sets. What they cannot express shows when
  they are read back; see `architectures.represent`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError

REQUIRED = object()
"""Default of a field that every config.json must have."""

Default = Any | Callable[[Mapping[str, Any]], Any]
"""Value of a field that config.json lacks, or a function from its fields to that value."""


class Rule(Protocol):
    """See the module docstring."""

    def read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Maps fields of config.json to fields of `ModelConfig`."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Maps a config to fields of config.json."""


def unsupported(name: str, value: Any, legal: str) -> UserError:
    """Returns the error of a field with a value that is not supported."""
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return UserError(f"{name}={text} (legal: {legal})")


@dataclasses.dataclass(frozen=True)
class Same:
    """A field of config.json with the value of a field of `ModelConfig`.

    Attributes:
      theirs: name in config.json.
      ours: field of `ModelConfig`.
      default: value where config.json lacks the field.
      written: attribute of `ModelConfig` that is written; "" for `ours`.
      null: value where config.json has null; that of `default` if None.
    """

    theirs: str
    ours: str
    default: Default = REQUIRED
    written: str = ""
    null: Any = None

    def read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Rule`."""
        if self.null is not None and self.theirs in fields:
            value = fields[self.theirs]
            return {self.ours: self.null if value is None else value}
        return {self.ours: _value(fields, self.theirs, self.default)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Rule`."""
        return {self.theirs: getattr(model, self.written or self.ours)}


@dataclasses.dataclass(frozen=True)
class Named:
    """A field of config.json whose names differ from those of `ModelConfig`.

    Attributes:
      theirs: name in config.json.
      ours: field of `ModelConfig`.
      names: their name -> our name; the first of several is written.
      default: their name where config.json lacks the field.
    """

    theirs: str
    ours: str
    names: Mapping[str, str]
    default: str

    def read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Rule`."""
        value = _value(fields, self.theirs, self.default)
        if not isinstance(value, str) or value not in self.names:
            raise unsupported(self.theirs, value, ", ".join(self.names))
        return {self.ours: self.names[value]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Rule`."""
        value = getattr(model, self.ours)
        return {self.theirs: next(t for t, o in self.names.items() if o == value)}


@dataclasses.dataclass(frozen=True)
class Always:
    """Fields of `ModelConfig` that an architecture fixes.

    Attributes:
      fields: the fields.
    """

    fields: Mapping[str, Any]

    def read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Rule`."""
        return dict(self.fields)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Rule`."""
        return {}


@dataclasses.dataclass(frozen=True)
class Only:
    """A field of config.json that must have one value.

    Attributes:
      theirs: name in config.json.
      legal: the value; also the default.
    """

    theirs: str
    legal: Default

    def read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Rule`."""
        legal = self.legal(fields) if callable(self.legal) else self.legal
        value = fields.get(self.theirs)
        if value is not None and value != legal:
            raise unsupported(self.theirs, value, repr(legal))
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Rule`."""
        return {} if callable(self.legal) else {self.theirs: self.legal}


@dataclasses.dataclass(frozen=True)
class Biases:
    """Projections with a bias: some always, others with a switch of config.json.

    A config with fewer biases than the written switches gets zeros for the others.

    Attributes:
      always: projections that always have a bias.
      switches: name in config.json -> projections that have a bias where it is true.
      default: value of a switch that config.json lacks.
    """

    always: tuple[str, ...] = ()
    switches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    default: bool = False

    def read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Rule`."""
        biases = self.always
        for name, projections in self.switches.items():
            value = _value(fields, name, self.default)
            if not isinstance(value, bool):
                raise unsupported(name, value, "true, false")
            biases += projections if value else ()
        return {"biases": biases}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Rule`."""
        biases = set(model.selected(model.biases, "biases"))
        return {name: bool(biases & set(p)) for name, p in self.switches.items()}


@dataclasses.dataclass(frozen=True)
class Window:
    """Sliding-window attention, of all layers or of none.

    Attributes:
      default: window where config.json lacks `sliding_window`.
      switched: whether `use_sliding_window` must be true, as in Qwen.
      counted: whether `max_window_layers` counts the first layers without a window.
    """

    default: int | None = None
    switched: bool = False
    counted: bool = False

    def read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Rule`."""
        window = fields.get("sliding_window", self.default) or 0
        layers = fields.get("num_hidden_layers")
        if self.switched and not fields.get("use_sliding_window", False):
            window = 0
        kinds = fields.get("layer_types")
        if kinds is None and self.counted and window:
            full = fields.get("max_window_layers", 28)
            if 0 < full < layers:
                raise unsupported("max_window_layers", full, f"0, or {layers} and more: one window")
            window = window if full <= 0 else 0
        elif kinds is not None:
            legal = f"{layers} times sliding_attention, or {layers} times full_attention"
            if not isinstance(kinds, list) or kinds not in (
                [kind] * len(kinds) for kind in ("sliding_attention", "full_attention")
            ):
                raise unsupported("layer_types", kinds, legal)
            if len(kinds) != layers:
                raise unsupported("layer_types", kinds, legal)
            sliding = "sliding_attention" in kinds
            # Where a switch may turn the window off, transformers obeys layer_types.
            if sliding != bool(window) and (sliding or not self.switched):
                has = f"sliding_window={fields.get('sliding_window', self.default)!r}"
                raise unsupported("layer_types", kinds, f"one that agrees with {has}")
            window = window if sliding else 0
        return {"window": window}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Rule`."""
        fields: dict[str, Any] = {"sliding_window": model.window or None}
        if self.switched:
            fields["use_sliding_window"] = bool(model.window)
        if self.counted:
            fields["max_window_layers"] = 0
        return fields


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Experts in every layer, of which each token has the most probable.

    Attributes:
      name: name in config.json of the number of experts.
      switch: name in config.json that says whether the router probabilities of a token's experts
        are divided by their sum; "" where they always are.
    """

    name: str
    switch: str = ""

    def read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Rule`."""
        experts = _value(fields, self.name, REQUIRED)
        if not experts:
            raise unsupported(self.name, experts, "1 or more")
        chosen = _value(fields, "num_experts_per_tok", REQUIRED)
        if not self.switch and chosen == 1:
            raise unsupported("num_experts_per_tok", chosen, "2 or more")
        divided = fields.get(self.switch, False)
        if self.switch and divided != (chosen != 1):
            legal = "true with num_experts_per_tok of 2 or more, else false"
            raise unsupported(self.switch, divided, legal)
        return {"experts": experts, "top_k": chosen}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Rule`."""
        # The fewest that can be read, so that reading them back shows what differs.
        fewest = 1 if self.switch else 2
        chosen = max(fewest, model.top_k)
        fields = {self.name: max(fewest, model.experts), "num_experts_per_tok": chosen}
        return fields | ({self.switch: chosen > 1} if self.switch else {})


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Base and scaling of rotary positions.

    transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 one `rope_parameters`.
    Both read the former, which this writes.

    Attributes:
      base: base where config.json lacks it.
    """

    base: float = 10_000.0

    SCALED: ClassVar[Mapping[str, str]] = {
        "factor": "rotary_factor",
        "low_freq_factor": "rotary_low",
        "high_freq_factor": "rotary_high",
        "original_max_position_embeddings": "rotary_length",
    }
    """Field of scaling type "llama3" -> field of `ModelConfig`."""

    def read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Rule`."""
        given = [name for name in ("rope_parameters", "rope_scaling") if fields.get(name)]
        settings = [self._read(fields, name) for name in given] or [self._read(fields, "")]
        if settings[0] != settings[-1]:
            value, legal = fields[given[1]], f"the values of {given[0]}, or one of both"
            raise unsupported(given[1], value, legal)
        return settings[0]

    def _read(self, fields, name):
        """Returns the settings by one of two fields, or by the base alone."""
        scaling = fields.get(name) or {}
        if not isinstance(scaling, Mapping):
            raise unsupported(name, scaling, "an object")
        nested = [key for key, value in scaling.items() if isinstance(value, Mapping)]
        if nested:
            raise unsupported(name, dict(scaling), "one for all layers")
        for key, other in (
            ("rope_theta", fields.get("rope_theta")),
            ("partial_rotary_factor", fields.get("partial_rotary_factor")),
            ("type", scaling.get("rope_type")),
        ):
            if None not in (scaling.get(key), other) and scaling[key] != other:
                raise unsupported(f"{name}.{key}", scaling[key], f"{other!r}, as elsewhere")
        base = scaling.get("rope_theta") or fields.get("rope_theta") or self.base
        kind = scaling.get("rope_type") or scaling.get("type")
        if name == "rope_scaling" and kind is None:
            raise unsupported(name, dict(scaling), "with rope_type")
        kind = kind or "default"
        partial = scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1
        if partial != 1:
            raise unsupported("partial_rotary_factor", partial, "1")
        ours = {"rotary_base": float(base)}
        if kind == "default":
            return ours
        if kind != "llama3":
            raise UserError(f"{name} of type {kind!r} (legal: default, llama3)")
        missing = [theirs for theirs in self.SCALED if scaling.get(theirs) is None]
        if missing:
            raise UserError(f"{name} without {', '.join(missing)} (legal: all of type llama3)")
        return ours | {ours_name: scaling[theirs] for theirs, ours_name in self.SCALED.items()}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Rule`."""
        scaling = None
        if model.rotary_factor != 1:
            scaling = {theirs: getattr(model, ours) for theirs, ours in self.SCALED.items()}
            scaling["rope_type"] = "llama3"
        return {"rope_theta": model.rotary_base, "rope_scaling": scaling}


def _value(fields, name, default):
    value = fields.get(name)
    if value is not None:
        return value
    if default is REQUIRED:
        raise UserError(f"no {name}, which is required")
    return default(fields) if callable(default) else default
