"""Rules that map fields of a Hugging Face config.json to fields of `ModelConfig`, and back.

A rule is data of one row of `architectures.ARCHITECTURES`. It has two methods:

- `read(fields)` returns the fields of `ModelConfig` that it sets. It raises UserError with the
  name, value and legal values of a field of config.json that this project does not support.
- `write(model)` returns the fields of config.json that it sets. What they cannot express shows when
  they are read back; see `architectures.represent`.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sparse_dataflow.core.config.attention_settings import FULL, ROTATED, SLIDING, UNROTATED
from sparse_dataflow.core.config.attention_settings import shortest_layer_types as pattern
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject

REQUIRED = object()
"""Default of a field that every config.json must have."""

Default = Any | Callable[[Mapping[str, Any]], object]
"""Value of a field that config.json lacks, or a function from its fields to that value."""


class FieldRule(Protocol):
    """See the module docstring."""

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Maps fields of config.json to fields of `ModelConfig`."""

    def write(self, model: ModelConfig) -> JsonObject:
        """Maps a config to fields of config.json."""


def unsupported(name: str, value: object, legal: str) -> UserError:
    """Returns the error of a field with a value that is not supported."""
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return UserError(f"{name}={text} (legal: {legal})")


@dataclasses.dataclass(frozen=True)
class Same(FieldRule):
    """A field of config.json with the value of a field of `ModelConfig`.

    Attributes:
      theirs: name in config.json.
      ours: field of `ModelConfig`.
      default: value where config.json lacks the field.
      written: attribute of `ModelConfig` that is written; "" for `ours`.
      null: value where config.json has null; that of `default` if None.
      zero: what is written for 0.
    """

    theirs: str
    ours: str
    default: Default = REQUIRED
    written: str = ""
    null: object = None
    zero: object = 0

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        if self.null is not None and self.theirs in fields:
            value = fields[self.theirs]
            return {self.ours: self.null if value is None else value}
        return {self.ours: _value(fields, self.theirs, self.default)}

    def write(self, model: ModelConfig) -> JsonObject:
        value = getattr(model, self.written or self.ours)
        # False equals 0 too, and is written as false.
        return {self.theirs: self.zero if value == 0 and value is not False else value}


@dataclasses.dataclass(frozen=True)
class Named(FieldRule):
    """A field of config.json whose names differ from those of `ModelConfig`.

    Attributes:
      theirs: name in config.json.
      ours: field of `ModelConfig`.
      names: their value -> our value; the first of several is written.
      default: their value where config.json lacks the field.
      also: another field of the same meaning, which other releases of transformers read.
    """

    theirs: str
    ours: str
    names: Mapping[Any, str]
    default: object
    also: str = ""

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        value = _value(fields, self.theirs, self.default)
        if not isinstance(value, str | bool) or value not in self.names:
            raise unsupported(self.theirs, value, ", ".join(map(str, self.names)))
        other = fields.get(self.also) if self.also else None
        if other is not None and self.names.get(str(other)) != self.names[value]:
            raise unsupported(self.also, other, f"{value!r}, as {self.theirs}")
        return {self.ours: self.names[value]}

    def write(self, model: ModelConfig) -> JsonObject:
        # Reading the default back shows what differs.
        ours = getattr(model, self.ours)
        value = next((t for t, o in self.names.items() if o == ours), self.default)
        return {name: value for name in (self.theirs, self.also) if name}


@dataclasses.dataclass(frozen=True)
class Always(FieldRule):
    """Fields of `ModelConfig` that an architecture fixes."""

    fields: JsonObject

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        return dict(self.fields)

    def write(self, model: ModelConfig) -> JsonObject:
        return {}


@dataclasses.dataclass(frozen=True)
class Only(FieldRule):
    """A field of config.json that must have one value.

    Attributes:
      theirs: name in config.json.
      legal: the value; also the default.
    """

    theirs: str
    legal: Default

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        legal = self.legal(fields) if callable(self.legal) else self.legal
        value = fields.get(self.theirs)
        if value is not None and value != legal:
            raise unsupported(self.theirs, value, repr(legal))
        return {}

    def write(self, model: ModelConfig) -> JsonObject:
        return {} if callable(self.legal) else {self.theirs: self.legal}


@dataclasses.dataclass(frozen=True)
class Biases(FieldRule):
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

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        biases = self.always
        for name, projections in self.switches.items():
            value = _value(fields, name, self.default)
            if not isinstance(value, bool):
                raise unsupported(name, value, "true, false")
            biases += projections if value else ()
        return {"biases": biases}

    def write(self, model: ModelConfig) -> JsonObject:
        biases = set(model.selected(model.biases, "biases"))
        return {name: bool(biases & set(p)) for name, p in self.switches.items()}


@dataclasses.dataclass(frozen=True)
class AttentionMultiplier(FieldRule):
    """The factor of attention scores, the inverse square root of `attention_scalar`."""

    theirs: str

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        factor = _value(fields, self.theirs, 1.0)
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not number or not 1e-6 < factor < 1e6:
            raise unsupported(self.theirs, factor, "numbers between 1e-6 and 1e6")
        # Without the rounding of the inverse that `write` computes.
        return {"attention_scalar": float(f"{factor**-2:.12g}")}

    def write(self, model: ModelConfig) -> JsonObject:
        return {self.theirs: model.attention_width**-0.5}


@dataclasses.dataclass(frozen=True)
class QueryNorms(FieldRule):
    """Norms of queries and keys, if a switch of config.json is true.

    Attributes:
      theirs: name of the switch, which is false by default.
      scope: `qk_norm_scope` of the norms.
    """

    theirs: str
    scope: str

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        value = _value(fields, self.theirs, False)
        if not isinstance(value, bool):
            raise unsupported(self.theirs, value, "true, false")
        return {"qk_norm": True, "qk_norm_scope": self.scope} if value else {"qk_norm": False}

    def write(self, model: ModelConfig) -> JsonObject:
        return {self.theirs: model.qk_norm}


@dataclasses.dataclass(frozen=True)
class LocalLayers(FieldRule):
    """Layers with a window ("local") and without ("global"), as GPT-Neo lists them."""

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        layers, legal = fields.get("num_layers") or 0, '[[["global", "local"], 12]]'
        types = _value(fields, "attention_types", [[["global", "local"], 12]])
        try:
            count = sum(len(names) * max(0, operator.index(times)) for names, times in types)
            fits = count == layers
            kinds = [kind for names, times in types for kind in list(names) * times] if fits else []
        except (TypeError, ValueError):
            raise unsupported("attention_types", types, f"lists as {legal}") from None
        if not fits or not set(kinds) <= {"global", "local"}:
            raise unsupported("attention_types", types, f"{layers} of global, local, as {legal}")
        # transformers saves the expanded list too, and the two must agree.
        listed = fields.get("attention_layers")
        if listed is not None and listed != kinds:
            raise unsupported("attention_layers", listed, "those of attention_types")
        window = _value(fields, "window_size", 256)
        if "local" not in kinds:
            return {"window": 0}
        ours = [SLIDING if kind == "local" else FULL for kind in kinds]
        return {"window": window, "layer_types": pattern(ours)}

    def write(self, model: ModelConfig) -> JsonObject:
        kinds = [model.layer_type(i) if model.window else FULL for i in range(model.num_layers)]
        names = ["local" if kind == SLIDING else "global" for kind in kinds]
        return {
            "attention_types": [[[name], 1] for name in names],
            "attention_layers": names,
            "window_size": model.window or 256,
        }


@dataclasses.dataclass(frozen=True)
class UnrotatedLayers(FieldRule):
    """Layers without rotary positions: 0 in a list with a number for each layer, or else every
    fourth."""

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        rotated = _rotated(fields)
        return {"rotary_layers": pattern([ROTATED if r else UNROTATED for r in rotated])}

    def write(self, model: ModelConfig) -> JsonObject:
        return {"no_rope_layers": [int(model.rotates(i)) for i in range(model.num_layers)]}


def _rotated(fields):
    """Returns whether each layer has rotary positions, by the fields of `UnrotatedLayers`."""
    layers, period = (
        fields.get("num_hidden_layers") or 0,
        _value(fields, "no_rope_layer_interval", 4),
    )
    if not isinstance(period, int) or period < 1:
        raise unsupported("no_rope_layer_interval", period, "a whole number of 1 or more")
    listed = fields.get("no_rope_layers")
    if listed is None:
        return [(i + 1) % period != 0 for i in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or not set(listed) <= {0, 1}:
        raise unsupported("no_rope_layers", listed, f"{layers} of 0, 1")
    return [bool(each) for each in listed]


_LAYER_TYPES = {SLIDING: "sliding_attention", FULL: "full_attention"}


@dataclasses.dataclass(frozen=True)
class Window(FieldRule):
    """Sliding-window attention, of all layers, of some, or of none.

    Attributes:
      default: window where config.json lacks `sliding_window`.
      switched: whether `use_sliding_window` must be true, as in Qwen.
      counted: whether `max_window_layers` counts the first layers without a window.
      period: every layer of this number has no window, as in Gemma; 0 where all layers are alike.
      named: whether `sliding_window_pattern` has the period.
      unrotated: whether the window is that of the layers without rotary positions, where
        `layer_types` is absent.
    """

    default: int | None = None
    switched: bool = False
    counted: bool = False
    period: int = 0
    named: bool = False
    unrotated: bool = False

    def read(self, fields: Mapping[str, Any]) -> dict[str, object]:
        window = fields.get("sliding_window", self.default) or 0
        layers = fields.get("num_hidden_layers") or 0
        # Qwen's files have a window that is off unless this field says otherwise.
        if self.switched and not fields.get("use_sliding_window", False):
            window = 0
        kinds = fields.get("layer_types")
        period = self._period(fields)
        if kinds is not None:
            kinds, window = self._listed(fields, kinds, window, layers)
        elif self.counted and window:
            # The first layers are full and the rest have the window; 28 is transformers' default.
            full = min(max(fields.get("max_window_layers", 28), 0), layers)
            kinds = [FULL] * full + [SLIDING] * (layers - full)
        elif self.unrotated and window:
            kinds = [FULL if rotated else SLIDING for rotated in _rotated(fields)]
        elif period and window:
            kinds = [SLIDING if (i + 1) % period else FULL for i in range(layers)]
        if not kinds or not window:
            return {"window": window}
        if SLIDING not in kinds:
            return {"window": 0}
        return {"window": window, "layer_types": pattern(kinds)}

    def _period(self, fields):
        period = fields.get("sliding_window_pattern", self.period) if self.named else self.period
        if not isinstance(period, int) or period < 0:
            raise unsupported("sliding_window_pattern", period, "a whole number")
        return period

    def _listed(self, fields, kinds, window, layers):
        """Returns our name of each of `layer_types`, and the window."""
        ours = {theirs: kind for kind, theirs in _LAYER_TYPES.items()}
        legal = f"{layers} of {', '.join(ours)}"
        if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(ours):
            raise unsupported("layer_types", kinds, legal)
        kinds = [ours[kind] for kind in kinds]
        mixed = len(set(kinds)) > 1
        if mixed and not (self.counted or self.period or self.unrotated):
            raise unsupported("layer_types", fields["layer_types"], f"one of {', '.join(ours)}")
        # Where a switch may turn the window off, transformers obeys layer_types.
        sliding, obeyed = SLIDING in kinds, self.switched or self.period
        if sliding != bool(window) and (sliding or not obeyed):
            has = f"sliding_window={fields.get('sliding_window', self.default)!r}"
            raise unsupported("layer_types", fields["layer_types"], f"one that agrees with {has}")
        return kinds, window if sliding else 0

    def write(self, model: ModelConfig) -> JsonObject:
        kinds = [model.layer_type(i) if model.window else FULL for i in range(model.num_layers)]
        fields: JsonObject = {"sliding_window": model.window or None}
        # These classes demand a number; layer_types says that no layer uses it.
        if self.period and not model.window:
            fields["sliding_window"] = self.default
        if self.switched:
            fields["use_sliding_window"] = bool(model.window)
        if self.counted:
            first = kinds.index(SLIDING) if model.window else 0
            fields["max_window_layers"] = first
        if self.period or self.unrotated or (len(set(kinds)) > 1 and self.counted):
            fields["layer_types"] = [_LAYER_TYPES[kind] for kind in kinds]
        if self.named and FULL in kinds[:-1]:
            fields["sliding_window_pattern"] = kinds.index(FULL) + 1
        return fields


@dataclasses.dataclass(frozen=True)
class Mixture(FieldRule):
    """Experts in every layer, of which each token has the most probable.

    Attributes:
      name: name in config.json of the number of experts.
      switch: name in config.json that says whether the router probabilities of a token's experts
        are divided by their sum; "" where they always are.
    """

    name: str
    switch: str = ""

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        experts = _value(fields, self.name, REQUIRED)
        if not experts:
            raise unsupported(self.name, experts, "1 or more")
        chosen = _value(fields, "num_experts_per_tok", REQUIRED)
        if not self.switch and chosen == 1:
            raise unsupported("num_experts_per_tok", chosen, "2 or more")
        divided = fields.get(self.switch, False)
        if self.switch and divided and chosen == 1:
            raise unsupported(self.switch, divided, "true with num_experts_per_tok of 2 or more")
        raw = bool(self.switch) and not divided and chosen > 1
        return {"experts": experts, "top_k": chosen, "raw_gates": raw}

    def write(self, model: ModelConfig) -> JsonObject:
        # The fewest that can be read, so that reading them back shows what differs.
        fewest = 1 if self.switch else 2
        chosen = max(fewest, model.top_k)
        fields = {self.name: max(fewest, model.experts), "num_experts_per_tok": chosen}
        divided = chosen > 1 and not model.raw_gates
        return fields | ({self.switch: divided} if self.switch else {})


@dataclasses.dataclass(frozen=True)
class SharedExpert(FieldRule):
    """An expert of every token, of a multiple of the others' width, with a gate.

    Attributes:
      name: name in config.json of its width.
      width: name of the width of the others.
    """

    name: str
    width: str

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        shared, width = (_value(fields, name, REQUIRED) for name in (self.name, self.width))
        if not shared or shared % width:
            raise unsupported(self.name, shared, f"multiples of {self.width}={width}")
        return {"shared_expert": shared // width, "shared_gate": True}

    def write(self, model: ModelConfig) -> JsonObject:
        # The least that can be read, so that reading it back shows what differs.
        return {self.name: max(1, model.shared_expert) * model.d_ff}


def _value(fields, name, default):
    value = fields.get(name)
    if value is not None:
        return value
    if default is REQUIRED:
        raise UserError(f"no {name}, which is required")
    return default(fields) if callable(default) else default
