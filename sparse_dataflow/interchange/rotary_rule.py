"""The rule of config.json for rotary positions; see `config_rules`.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 one `rope_parameters`. Both
read the former, which this writes.
"""

import dataclasses
import math
from collections.abc import Mapping

from sparse_dataflow.core.config.attention_settings import READ_BY_SCALING as USED
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.interchange.config_rules import FieldRule, unsupported

_FACTOR = {"rotary_factor": "factor"}
_LENGTH = {"rotary_length": "original_max_position_embeddings"}

SCALED: Mapping[str, Mapping[str, str]] = {
    "llama3": {
        **_FACTOR,
        "rotary_low": "low_freq_factor",
        "rotary_high": "high_freq_factor",
        **_LENGTH,
    },
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "yarn": {
        **_FACTOR,
        "rotary_low": "beta_slow",
        "rotary_high": "beta_fast",
        **_LENGTH,
        "rotary_attention": "attention_factor",
    },
    "longrope": {
        **_FACTOR,
        **_LENGTH,
        "rotary_attention": "attention_factor",
        "rotary_factors": "short_factor",
    },
}
"""Type of scaling -> field of `ModelConfig` -> field of the scaling."""

_DEFAULTS = {"rotary_low": 1.0, "rotary_high": 32.0, "rotary_attention": 0.0}
"""Of yarn and longrope."""

_IGNORED = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate", "mscale",
            "mscale_all_dim", "long_factor", "finetuned"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rotary(FieldRule):
    """Base, share and scaling of rotary positions.

    Attributes:
      base: base where config.json lacks it.
      share: share of a head that is rotated where config.json lacks `partial_rotary_factor`; 0
        where the architecture rotates whole heads.
      config_length: whether longrope's length is in config.json itself, as in Phi 3.
      aliases: other name of `rope_theta` or `partial_rotary_factor` -> that name; both are written.
      kinds: legal types of scaling, besides "default".
      names: other name of a type -> its name.
      local: base of layers with a window where config.json lacks `rope_local_base_freq`; 0 where
        all layers have one base.
    """

    base: float = 10_000.0
    share: float = 0.0
    config_length: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kinds: tuple[str, ...] = tuple(SCALED)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    local: float = 0.0

    def read(self, fields: Mapping[str, object]) -> dict[str, object]:
        for alias, name in self.aliases.items():
            value = fields.get(alias)
            if None not in (value, fields.get(name)) and fields[name] != value:
                raise unsupported(alias, value, f"{fields[name]!r}, as {name}")
            fields = fields if value is None else {**fields, name: value}
        given = [name for name in ("rope_parameters", "rope_scaling") if fields.get(name)]
        settings = [self._read(fields, name) for name in given] or [self._read(fields, "")]
        # A file with both fields says everything twice.
        if settings[0] != settings[-1]:
            value, legal = fields[given[1]], f"the values of {given[0]}, or one of both"
            raise unsupported(given[1], value, legal)
        return settings[0]

    def _read(self, fields, name):
        """Returns the settings by one of two fields, or by the base alone."""
        scaling = fields.get(name) or {}
        if not isinstance(scaling, Mapping):
            raise unsupported(name, scaling, "an object")
        ours: JsonObject = {}
        if self.local:
            scaling, ours = self._local(fields, name, scaling)
        if any(isinstance(value, Mapping) for value in scaling.values()):
            raise unsupported(name, dict(scaling), "one for all layers")
        # transformers 5 has these inside of the field, earlier versions beside it, and some files
        # both.
        for key, other in (
            ("rope_theta", fields.get("rope_theta")),
            ("partial_rotary_factor", fields.get("partial_rotary_factor")),
            ("type", scaling.get("rope_type")),
            (_LENGTH["rotary_length"], fields.get(_LENGTH["rotary_length"])),
        ):
            if None not in (scaling.get(key), other) and scaling[key] != other:
                raise unsupported(f"{name}.{key}", scaling[key], f"{other!r}, as elsewhere")
        kind = scaling.get("rope_type") or scaling.get("type")
        if name == "rope_scaling" and kind is None and "full_attention" not in fields[name]:
            raise unsupported(name, dict(scaling), "with rope_type")
        kind = self.names.get(kind or "default", kind or "default")
        base = scaling.get("rope_theta") or fields.get("rope_theta") or self.base
        ours |= {"rotary_base": float(base), **self._read_share(fields, scaling)}
        if kind == "default":
            return ours
        if kind not in self.kinds:
            raise UserError(f"{name} of type {kind!r} (legal: default, {', '.join(self.kinds)})")
        return ours | {"rotary_scaling": kind} | _scaled(name, kind, fields, scaling)

    def _local(self, fields, name, scaling):
        """Returns the scaling of layers without a window, and the base of the others."""
        base = fields.get("rope_local_base_freq")
        sliding = scaling.get("sliding_attention") or {}
        if "full_attention" in scaling or sliding:
            if sliding.get("rope_type", "default") != "default":
                raise unsupported(f"{name}.sliding_attention", dict(sliding), "rope_type default")
            other = sliding.get("rope_theta")
            if None not in (base, other) and base != other:
                raise unsupported(f"{name}.sliding_attention", dict(sliding), f"rope_theta {base}")
            base, scaling = base or other, scaling.get("full_attention") or {}
        return scaling, {"rotary_local_base": float(base or self.local)}

    def _read_share(self, fields, scaling):
        name = "partial_rotary_factor"
        share = scaling.get(name) or fields.get(name) or self.share or 1
        if share == 1:
            return {}
        if not self.share:
            raise unsupported(name, share, "1")
        return {"rotary_share": share}

    def write(self, model: ModelConfig) -> JsonObject:
        scaling, kind = None, model.rotary_scaling
        fields: JsonObject = {"rope_theta": model.rotary_base}
        if kind == "longrope" or model.rotary_factor != 1:
            scaling = {
                theirs: getattr(model, ours)
                for ours, theirs in SCALED[kind].items()
                if ours != "rotary_attention" or model.rotary_attention
            }
            scaling["rope_type"] = kind
        if scaling and kind == "longrope":
            factors = list(model.rotary_factors)
            scaling |= {"short_factor": factors, "long_factor": factors}
            if self.config_length:
                fields[_LENGTH["rotary_length"]] = model.rotary_length
                # Phi-3's class refuses more than these three fields.
                scaling = {"type": kind, "short_factor": factors, "long_factor": factors}
        fields["rope_scaling"] = scaling
        if self.local:
            fields["rope_local_base_freq"] = model.rotary_local_base or model.rotary_base
        if self.share:
            fields["partial_rotary_factor"] = model.rotary_share
        return fields | {alias: fields[name] for alias, name in self.aliases.items()}


def _scaled(name, kind, fields, scaling):
    """Returns the fields of `ModelConfig` of a type of scaling."""
    theirs = SCALED[kind]
    values = {ours: scaling.get(field) for ours, field in theirs.items()}
    if kind in ("yarn", "longrope"):
        if scaling.get("truncate") is False:
            raise unsupported(f"{name}.truncate", False, "true")
        longest = fields.get("max_position_embeddings")
        length = values["rotary_length"] or fields.get(_LENGTH["rotary_length"]) or longest
        defaults = {**_DEFAULTS, "rotary_length": length}
        if length and longest:
            # transformers' default where the file has no factor.
            defaults["rotary_factor"] = max(1.0, longest / length)
        values |= {n: defaults.get(n) for n, value in values.items() if value is None}
        if not scaling.get("attention_factor") and scaling.get("mscale"):
            values["rotary_attention"] = _mscale(values["rotary_factor"], scaling)
    missing = [theirs[ours] for ours, value in values.items() if value is None]
    if missing:
        raise UserError(f"{name} without {', '.join(missing)} (legal: all of type {kind})")
    given = {field for field, value in scaling.items() if value is not None}
    unknown = given - set(theirs.values()) - _IGNORED
    if unknown:
        raise unsupported(f"{name}.{min(unknown)}", scaling[min(unknown)], f"none of type {kind}")
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}


def _mscale(factor, scaling):
    """Returns the scale of the rotations by DeepSeek's two fields, 0 for yarn's own."""
    all_dim = scaling.get("mscale_all_dim")
    if not all_dim or factor <= 1:
        return 0.0
    return (0.1 * scaling["mscale"] * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)


def comparable(model: ModelConfig) -> JsonObject:
    """Returns changes to a model: defaults for the rotary settings that change nothing."""
    defaults = {n: f.default for n, f in type(model).__dataclass_fields__.items() if "rotary" in n}
    if model.positions != "rotary":
        return defaults
    kept = {"rotary_base", "rotary_share", "rotary_local_base", "rotary_layers"}
    if model.rotary_factor != 1 or model.rotary_scaling == "longrope":
        kept |= {"rotary_scaling", *USED[model.rotary_scaling]}
    return {name: value for name, value in defaults.items() if name not in kept}
