"""Metadata of GGUF files from fields of config.json, and back, by a row of `architectures`.

The rules of the row name the fields; a rule whose field has a key in `family.KEYS` needs nothing
here. What is written is read back, so that an export of a model that its family lacks is refused.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model.rotary import frequencies
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.interchange import architectures
from sparse_dataflow.interchange.architectures import Architecture
from sparse_dataflow.interchange.config_rules import (
    AttentionMultiplier,
    Biases,
    FieldRule,
    Mixture,
    Named,
    QueryNorms,
    Same,
    SharedExpert,
    Window,
)
from sparse_dataflow.interchange.llama_cpp.family import (
    JOINED_GATE,
    JOINED_QKV,
    KEYS,
    OUTPUT,
    RMS_EPSILON,
    TENSORS,
    Family,
)
from sparse_dataflow.interchange.rotary_rule import Rotary

ARCHITECTURE = "general.architecture"
FREQUENCIES = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (FREQUENCIES, SHORT_FACTORS, LONG_FACTORS)
"""Tensors that scale rotary positions."""

_EMBEDDING = TENSORS["embed.tokens"]
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
"""Settings of every published model with Llama 3's scaling; a file has only what follows."""

_SILENT = {"vocab_size", "attention.value_length", "rope.scaling.finetuned", "attention.causal",
           "rope.scaling.attn_factor", "expert_weights_norm", "expert_gating_func"}  # fmt: skip
"""Keys that repeat what other parts of a file say."""


class Source(NamedTuple):
    """What a model is read from.

    Attributes:
      metadata: value of each key.
      shapes: shape of each tensor.
      factors: returns the numbers of one of FACTORS.
    """

    metadata: JsonObject
    shapes: Mapping[str, tuple[int, ...]]
    factors: Callable[[str], np.ndarray]


class _Keys:
    """The keys of one family, of which those that were read are remembered."""

    def __init__(self, source: Source, row: Architecture):
        self.source, self.family = source, family_of(row)
        self.prefix = f"{self.family.name}."
        self.read: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        value = self.source.metadata.get(self.prefix + key, default)
        self.read.add(key)
        # Some writers repeat one number for every layer.
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, list):
            raise UserError(f"{self.prefix}{key} has a value for each layer (legal: one for all)")
        return value

    def has(self, tensor: str) -> bool:
        """Returns whether the first layer has a tensor."""
        return tensor.format(0) in self.source.shapes

    def unread(self) -> list[str]:
        """Returns the keys that were not read, of a value but zero or false."""
        expected = self.read | _SILENT
        names = (
            n.removeprefix(self.prefix) for n in self.source.metadata if _starts(n, self.prefix)
        )
        return sorted(
            n for n in names if n not in expected and self.source.metadata[self.prefix + n]
        )


def _starts(name, prefix):
    return name.startswith(prefix)


def family_of(row: Architecture) -> Family:
    """Returns what a row says of GGUF; raises UserError if llama.cpp has no such family."""
    if row.gguf is None:
        legal = ", ".join(name for name, row in architectures.ARCHITECTURES.items() if row.gguf)
        raise UserError(f"llama.cpp has no {row.class_name} (legal: {legal})")
    return row.gguf


def stored_row(row: Architecture, names: Mapping[str, object] | None = None) -> Architecture:
    """Returns the row of the tensors of a GGUF file, which `tensor_names` reads and writes.

    Args:
      row: row of `ARCHITECTURES`.
      names: names of the tensors of a file, whose projections may be joined; None for those that
        the family of llama.cpp writes.
    """
    family = family_of(row)
    tensors = {**{n: TENSORS[n] for n in TENSORS if n != "blocks.qkv"}, **family.tensors}
    if names is not None:
        joined = [*JOINED_QKV, *JOINED_GATE]
        tensors |= {name: TENSORS[name] for name in joined}
        if "blk.0.attn_qkv.weight" in names:
            tensors |= JOINED_QKV
        if "blk.0.ffn_gate.weight" not in names:
            tensors |= JOINED_GATE
    return dataclasses.replace(
        row,
        class_name=family.name,
        tensors=tensors,
        prefixes=("",),
        transposed=True,
        position_offset=0,
        norm_offset=0.0,
        outputs=(OUTPUT,),
        ignored=FACTORS,
        paired=family.paired,
    )


def read(source: Source) -> tuple[JsonObject, list[str]]:
    """Returns the fields of config.json of a file's model, and keys that change nothing here.

    Raises:
      UserError: the family, or a value, is not supported.
    """
    name = source.metadata.get(ARCHITECTURE)
    rows = {n: row for n, row in architectures.ARCHITECTURES.items() if row.gguf}
    candidates = [n for n, row in rows.items() if row.gguf and row.gguf.name == name]
    if not candidates:
        legal = ", ".join(dict.fromkeys(row.gguf.name for row in rows.values() if row.gguf))
        raise UserError(f"it has a model of the family {name!r} of llama.cpp; legal: {legal}.")
    results, problems = [], []
    for candidate in candidates:
        keys = _Keys(source, rows[candidate])
        try:
            fields = _fields(candidate, keys)
            architectures.read_config(fields)
            results.append((len(keys.unread()), fields, keys.unread()))
        except UserError as error:
            problems.append(error)
        except json_files.MALFORMED as error:
            problems.append(
                UserError(f"its metadata are damaged ({type(error).__name__}: {error}).")
            )
    if not results:
        raise problems[0]
    # Several classes share a family of llama.cpp; the right one understands most of its keys.
    _, fields, unread = min(results, key=lambda each: each[0])
    return fields, [f"{name}.{key}" for key in unread]


def _fields(name, keys):
    """Returns the fields of config.json of an architecture."""
    row, shapes = architectures.ARCHITECTURES[name], keys.source.shapes
    if _EMBEDDING not in shapes:
        raise UserError(f"it has no tensor {_EMBEDDING}; the weights are incomplete.")
    layers, width = keys.get("block_count"), keys.get("embedding_length")
    if type(layers) is not int or not 1 <= layers <= len(shapes):
        raise UserError(f"{keys.prefix}block_count={layers!r} with {len(shapes)} tensors")
    if shapes[_EMBEDDING][1:] != (width,):
        raise UserError(
            f"{keys.prefix}embedding_length={width!r}, and {_EMBEDDING} has the shape "
            f"{list(shapes[_EMBEDDING])}"
        )
    fields: JsonObject = {"model_type": name, "architectures": [row.class_name]}
    for rule in row.rules:
        fields |= _read_rule(rule, keys)
    named = architectures.without_aliases(row, fields)
    for field, value in keys.family.fixed.items():
        if named.get(field) is None:
            fields[field] = value(fields) if callable(value) else value
    return fields


def _read_rule(rule: FieldRule, keys: _Keys) -> JsonObject:
    """Returns the fields that a rule of config.json reads."""
    match rule:
        # The key is optional, the tensor is not.
        case Same(theirs="vocab_size"):
            return {rule.theirs: keys.source.shapes[_EMBEDDING][0]}
        case Same(theirs="tie_word_embeddings"):
            return {rule.theirs: f"{OUTPUT}.weight" not in keys.source.shapes}
        case Same() | Named():
            key = _key(rule.ours, keys.family)
            if key is None:
                return {}
            value = keys.get(key, _default(key, keys))
            if rule.ours == "norm_epsilon" and value is None:
                value = keys.get(RMS_EPSILON)
            return {} if value is None else {rule.theirs: value}
        case Rotary():
            return _read_rotary(rule, keys)
        case Window(switched=False):
            pattern, window = _pattern(rule, keys), keys.get("attention.sliding_window")
            # A family that must have a window has the whole context for none; see `_write_rule`.
            if keys.family.windowed and window == keys.get("context_length"):
                window = None
            fields = {"sliding_window": window} if window or not rule.period else {}
            return fields | pattern
        case Biases():
            return {
                switch: any(keys.has(f"{_tensor(name, keys)}.bias") for name in projections)
                for switch, projections in rule.switches.items()
            }
        case QueryNorms():
            return {rule.theirs: keys.has(f"{TENSORS['blocks.q_norm']}.weight")}
        case Mixture():
            return {
                rule.name: keys.get("expert_count"),
                "num_experts_per_tok": keys.get("expert_used_count"),
            }
        case SharedExpert():
            return {rule.name: keys.get("expert_shared_feed_forward_length")}
        case AttentionMultiplier():
            value = keys.get("attention.scale")
            return {} if value is None else {rule.theirs: value}
    return {}


def _pattern(rule, keys):
    """Returns the field that says which layers have a window: a period, or a list of all."""
    value = keys.source.metadata.get(f"{keys.prefix}attention.sliding_window_pattern")
    keys.read.add("attention.sliding_window_pattern")
    if isinstance(value, list):
        names = {True: "sliding_attention", False: "full_attention"}
        return {"layer_types": [names[bool(each)] for each in value]}
    return {"sliding_window_pattern": value} if value and rule.named else {}


def _key(ours, family):
    return {**KEYS, **family.keys}.get(ours)


def _default(key, keys):
    """Returns what llama.cpp takes where a file lacks a key."""
    if key == KEYS["num_kv_heads"]:
        return keys.get(KEYS["num_heads"])
    if key == KEYS["head_dim"]:
        heads = keys.get(KEYS["num_heads"])
        return keys.get("embedding_length") // heads if type(heads) is int and heads > 0 else None
    return None


def _tensor(projection, keys):
    joined = keys.has("blk.{}.attn_qkv.weight") and f"blocks.{projection}" in JOINED_QKV
    return (JOINED_QKV if joined else TENSORS)[f"blocks.{projection}"]


def _head_width(keys):
    return keys.get("attention.key_length", _default("attention.key_length", keys))


def _read_rotary(rule, keys):
    fields: JsonObject = {"rope_theta": keys.get("rope.freq_base", 10_000.0)}
    width = _head_width(keys)
    rotated = keys.get("rope.dimension_count", width)
    if rotated != width or rule.share:
        fields["partial_rotary_factor"] = rotated / width
    if rule.local and (base := keys.get("rope.freq_base_swa")):
        fields["rope_local_base_freq"] = base
    kind = keys.get("rope.scaling.type", "none")
    # rope.scale_linear is the name in older files.
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
    length = keys.get("rope.scaling.original_context_length")
    share = keys.get("rope.scaling.attn_factor")
    if FREQUENCIES in keys.source.shapes:
        fields["rope_scaling"] = _read_frequencies(keys, fields["rope_theta"], rotated)
    elif SHORT_FACTORS in keys.source.shapes:
        values = [_short(v) for v in keys.source.factors(SHORT_FACTORS)]
        scaling = {
            "rope_type": "longrope",
            "short_factor": values,
            "long_factor": values,
            "original_max_position_embeddings": length,
            "attention_factor": share,
        }
        fields["rope_scaling"] = {n: value for n, value in scaling.items() if value is not None}
        if rule.config_length:
            fields["original_max_position_embeddings"] = length
    elif kind == "yarn":
        betas = {theirs: keys.get(f"rope.scaling.yarn_{theirs}") for theirs in _BETAS}
        scaling = {"rope_type": "yarn", "factor": factor, **betas,
                   "original_max_position_embeddings": length}  # fmt: skip
        fields["rope_scaling"] = {n: value for n, value in scaling.items() if value is not None}
    elif kind not in ("none", "linear"):
        raise UserError(f"{keys.prefix}rope.scaling.type={kind!r} (legal: none, linear, yarn)")
    elif factor not in (None, 0, 1):
        fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return fields


_BETAS = ("beta_fast", "beta_slow")


def _short(number):
    """Returns the shortest number that rounds to a float32."""
    return float(str(np.float32(number)))


def _read_frequencies(keys, base, rotated):
    """Returns the scaling of config.json that divides frequencies by the numbers of FREQUENCIES."""
    factors = np.asarray(keys.source.factors(FREQUENCIES), np.float32).ravel()
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 4), **_LLAMA3}
    if np.allclose(factors, _llama3_factors(base, rotated, scaling), rtol=1e-3):
        return scaling
    values = [_short(value) for value in factors]
    length = keys.get("context_length")
    return {"rope_type": "longrope", "short_factor": values, "long_factor": values, "factor": 1.0,
            "original_max_position_embeddings": length, "attention_factor": 1.0}  # fmt: skip


def _llama3_factors(base, rotated, scaling):
    """Returns the divisors of the frequencies of Llama 3's scaling."""
    frequency = float(base) ** (-np.arange(0, rotated, 2) / rotated)
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / (unscaled + (1 - unscaled) / scaling["factor"])


class Written(NamedTuple):
    """What a GGUF file says of a model.

    Attributes:
      metadata: value of each key, but for those of the tokenizer.
      tensors: tensors that scale rotary positions.
      fields: config.json that is read from it.
    """

    metadata: JsonObject
    tensors: dict[str, np.ndarray]
    fields: JsonObject


def write(name: str, fields: JsonObject, shapes: Mapping[str, tuple[int, ...]]) -> Written:
    """Returns the metadata of a model.

    Args:
      name: architecture.
      fields: its config.json.
      shapes: shape of each tensor of the file.

    Raises:
      UserError: the family of llama.cpp lacks something of the model.
    """
    row = architectures.ARCHITECTURES[name]
    family, model = family_of(row), architectures.read_config(fields)
    named = architectures.without_aliases(row, fields)
    values: JsonObject = {"vocab_size": model.vocab_size}
    for rule in row.rules:
        values |= _write_rule(rule, named, family, model)
    tensors = _factors(model, family)
    metadata = {f"{family.name}.{key}": v for key, v in values.items() if v is not None}
    metadata[ARCHITECTURE] = family.name
    shapes = {**shapes, **{n: tensor.shape for n, tensor in tensors.items()}}
    # Read back as an import does: what llama.cpp has no key for differs then.
    fields, _ = read(Source(metadata, shapes, tensors.__getitem__))
    reread = architectures.read_config(fields)
    differences = [
        f"{field.name}={getattr(model, field.name)} (legal: {getattr(reread, field.name)})"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in _SAME_FUNCTION
        and getattr(model, field.name) != getattr(reread, field.name)
    ]
    if differences:
        raise UserError(f"The family {family.name} of llama.cpp has no {'; '.join(differences)}.")
    return Written(metadata, tensors, fields)


_SAME_FUNCTION = ("rotary_scaling", "rotary_factor", "rotary_low", "rotary_high", "rotary_length",
                  "rotary_attention", "rotary_factors")  # fmt: skip
"""Fields whose effect `_factors` compares."""


def _write_rule(rule, fields, family, model) -> JsonObject:
    """Returns the keys of a rule of config.json, without the name of the family."""
    match rule:
        case Same(theirs="vocab_size" | "tie_word_embeddings"):
            return {}
        case Same() | Named():
            key = _key(rule.ours, family)
            if rule.ours == "norm_epsilon" and model.norm == "rmsnorm":
                key = RMS_EPSILON
            if rule.ours == "head_dim" and key:
                # Values have a key of their own, whose default is d_model / num_heads.
                return {key: model.head_width, "attention.value_length": model.head_width}
            return {key: fields.get(rule.theirs)} if key else {}
        case Rotary():
            return _write_rotary(rule, model)
        case Window() if family.windows and model.window:
            return {"attention.sliding_window": model.window}
        case Window() if family.windowed:
            return {"attention.sliding_window": model.max_len}
        case Mixture():
            return {"expert_count": model.experts, "expert_used_count": model.top_k}
        case SharedExpert():
            return {"expert_shared_feed_forward_length": fields[rule.name]}
        case AttentionMultiplier():
            return {"attention.scale": fields[rule.theirs]}
    return {}


def _write_rotary(rule, model):
    values: JsonObject = {
        "rope.freq_base": model.rotary_base,
        "rope.dimension_count": model.rotated(model.head_width),
    }
    if rule.local and model.window:
        values["rope.freq_base_swa"] = model.rotary_local_base or model.rotary_base
    if model.rotary_scaling in ("linear", "yarn") and model.rotary_factor != 1:
        values |= {
            "rope.scaling.type": model.rotary_scaling,
            "rope.scaling.factor": model.rotary_factor,
        }
    if model.rotary_scaling == "yarn" and model.rotary_factor != 1:
        betas = dict(zip(_BETAS, (model.rotary_high, model.rotary_low)))
        values |= {f"rope.scaling.yarn_{name}": value for name, value in betas.items()}
        values["rope.scaling.original_context_length"] = model.rotary_length
    if model.rotary_scaling == "longrope":
        values["rope.scaling.original_context_length"] = model.rotary_length
        values["rope.scaling.attn_factor"] = frequencies(model, len(model.rotary_factors) * 2)[1]
    return values


def _factors(model, family):
    """Returns the tensors that scale rotary positions."""
    if model.positions != "rotary":
        return {}
    kind, plain = model.rotary_scaling, model.rotary_factor == 1
    if kind == "longrope":
        factors = np.asarray(model.rotary_factors, np.float32)
        return {SHORT_FACTORS: factors, LONG_FACTORS: factors}
    if plain or kind in ("linear", "dynamic"):
        return {}
    width = model.rotated(model.head_width)
    if kind == "llama3":
        base = model.rotary_base ** (-np.arange(0, width, 2) / width)
        return {FREQUENCIES: np.asarray(base / frequencies(model, width)[0], np.float32)}
    if model.rotary_attention:
        raise UserError(f"The family {family.name} of llama.cpp has no rotary_attention.")
    return {}
