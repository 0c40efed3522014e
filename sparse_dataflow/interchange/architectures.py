"""Hugging Face architectures as data, for import and export.

A row of `ARCHITECTURES` has rules for config.json (`config_rules`) and the names of tensors
(`tensor_names`). Both directions follow from the same row, so a new architecture is one row.

A config is written to config.json and read back. An architecture can represent a model if that
returns the same config, except that it may have more biases, which are zeros then.
"""

import contextlib
import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.activations import ACTIVATIONS
from sparse_dataflow.core.config.attention_settings import (
    ALL_HEADS,
    EACH_HEAD,
    EXPERT_TRAINING,
    PARALLEL,
    ROTATED,
    SEQUENTIAL,
    SHARED_NORM,
    SLIDING,
    UNROTATED,
)
from sparse_dataflow.core.config.attention_settings import shortest_layer_types as pattern
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import PROJECTIONS
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.interchange.config_rules import (
    Always,
    AttentionMultiplier,
    Biases,
    FieldRule,
    LocalLayers,
    Mixture,
    Named,
    Only,
    QueryNorms,
    Same,
    SharedExpert,
    UnrotatedLayers,
    Window,
    unsupported,
)
from sparse_dataflow.interchange.equivalent_forms import QKV, split_config, unit_gate_config
from sparse_dataflow.interchange.llama_cpp.family import JOINED_GATE, JOINED_QKV, Family
from sparse_dataflow.interchange.rotary_rule import Rotary, comparable


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row: how config.json and tensor names map to this project's model.

    Attributes:
      class_name: class of `transformers` that loads an export.
      rules: of config.json.
      tensors: our parameter, or our module, without its section's index -> their name. The first
        "{}" is the number of the layer, the second that of the expert. Modules with one name are
        concatenated along their outputs.
      prefixes: legal prefixes of their names; the first is written.
      transposed: whether kernels are stored [out, in].
      position_offset: rows of the position table in front of position 0.
      extra: fields of config.json that an export has in addition.
      ignored: ends of the names of tensors that a checkpoint may have and that hold no weights.
      aliases: other names of fields of config.json that transformers reads.
      norm_offset: what the scale of a norm is above the tensor that stores it.
      outputs: names of the output layer, which have no prefix; the first is written.
      gguf: the family of llama.cpp that has these models; None for none.
      paired: see `Family`; of config.json's own tensors never.
    """

    class_name: str
    rules: tuple[FieldRule, ...]
    tensors: Mapping[str, str]
    prefixes: tuple[str, ...]
    transposed: bool = True
    position_offset: int = 0
    extra: JsonObject = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0
    outputs: tuple[str, ...] = ("lm_head",)
    gguf: Family | None = None
    paired: bool = False


AUTO = "auto"
"""Name for the first architecture that represents a model."""

_ACTIVATIONS = {theirs: row.name for row in ACTIVATIONS.values() for theirs in row.exported}
_GATED_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", **_ACTIVATIONS}

# Releases before 5 say gelu for the tanh form.
_GEMMA_ACTIVATIONS = {**_GATED_ACTIVATIONS, "gelu_pytorch_tanh": "gelu", "gelu": "gelu"}

_ATTENTION, _MLP = (*QKV, "attn_out"), ("mlp_in", "mlp_out")
_GATED_MLP = ("mlp_gate", *_MLP)

UNSUPPORTED = (Only("quantization_config", None), Only("add_cross_attention", False))
"""Rules of every architecture."""


_LLAMA = {"norm": "rmsnorm", "positions": "rotary", "gated_mlp": True, "fused_qkv": False}
_LAYERNORM = _LLAMA | {"norm": "layernorm"}
_UNGATED = _LAYERNORM | {"gated_mlp": False}


_LLAMA_ATTENTION = {
    "embed.tokens": "embed_tokens.weight",
    "blocks.norm1": "layers.{}.input_layernorm",
    "blocks.q": "layers.{}.self_attn.q_proj",
    "blocks.k": "layers.{}.self_attn.k_proj",
    "blocks.v": "layers.{}.self_attn.v_proj",
    "blocks.q_norm": "layers.{}.self_attn.q_norm",
    "blocks.k_norm": "layers.{}.self_attn.k_norm",
    "blocks.q_norms": "layers.{}.self_attn.q_norm",
    "blocks.k_norms": "layers.{}.self_attn.k_norm",
    "blocks.attn_out": "layers.{}.self_attn.o_proj",
    "blocks.norm2": "layers.{}.post_attention_layernorm",
    "head.norm": "norm",
}

_LLAMA_MLP = {
    "blocks.mlp_gate": "layers.{}.mlp.gate_proj",
    "blocks.mlp_in": "layers.{}.mlp.up_proj",
    "blocks.mlp_out": "layers.{}.mlp.down_proj",
}


_CONVOLUTION_MLP = {
    "blocks.mlp_in": "layers.{}.mlp.c_fc",
    "blocks.mlp_out": "layers.{}.mlp.c_proj",
}


def _expert_tensors(parent, gate, inside, outside):
    """Returns names of a router and of the experts' projections, in a module of a layer."""
    names = {"mlp_gate": gate, "mlp_in": inside, "mlp_out": outside}
    return {"blocks.experts.router": f"layers.{{}}.{parent}.gate.weight"} | {
        f"blocks.experts.{ours}": f"layers.{{}}.{parent}.experts.{{}}.{theirs}"
        for ours, theirs in names.items()
    }


# In a Gemma post_attention_layernorm norms attention's output, in a Llama the MLP's input.
_SANDWICH = {
    "blocks.norm1_out": "layers.{}.post_attention_layernorm",
    "blocks.norm2": "layers.{}.pre_feedforward_layernorm",
    "blocks.norm2_out": "layers.{}.post_feedforward_layernorm",
}

_PHI = {
    **{f"blocks.{name}": "layers.{}.self_attn.qkv_proj" for name in QKV},
    "blocks.mlp_gate": "layers.{}.mlp.gate_up_proj",
    "blocks.mlp_in": "layers.{}.mlp.gate_up_proj",
    "blocks.mlp_out": "layers.{}.mlp.down_proj",
}


_ROTARY = Rotary()
_WHOLE_HEADS = Only(
    "head_dim", lambda fields: fields["hidden_size"] // fields["num_attention_heads"]
)


def _llama_row(
    class_name,
    *rules,
    kv_heads=0,
    head_dim=0,
    width="intermediate_size",
    base=_LLAMA,
    epsilon=1e-6,
    epsilon_name="rms_norm_eps",
    rotary=_ROTARY,
    mlp=_LLAMA_MLP,
    tied=False,
    activation=("hidden_act", "silu"),
    activations=_GATED_ACTIVATIONS,
    extra=types.MappingProxyType({}),
    **more,
):
    """Returns the row of an architecture that differs from Llama in a few rules.

    `kv_heads`, `head_dim`, `epsilon`, `tied` and the second of `activation` are the defaults of its
    config class; heads of 0 follow the other sizes. `width` is the name of d_ff, and the first of
    `activation` that of the activation, whose values are `activations`; see `Named`. `base` are
    fields that the architecture fixes, and `mlp` names of tensors that Llama does not have. `more`
    are fields of `Architecture`.
    """
    # Rules that all relatives of Llama share stand first, those of one architecture follow.
    return Architecture(
        class_name,
        (
            Always(base),
            Same("num_hidden_layers", "num_layers"),
            Same("hidden_size", "d_model"),
            Same("num_attention_heads", "num_heads"),
            Same(width, "d_ff"),
            Same("vocab_size", "vocab_size"),
            Same("max_position_embeddings", "max_len"),
            Same("num_key_value_heads", "num_kv_heads", kv_heads, "kv_heads", null=0),
            Same("head_dim", "head_dim", head_dim, "head_width"),
            Same(epsilon_name, "norm_epsilon", epsilon),
            Same("tie_word_embeddings", "tied_embeddings", tied),
            Named(activation[0], "activation", activations, *activation[1:]),
            rotary,
            *rules,
        ),
        _LLAMA_ATTENTION | mlp,
        ("model.", ""),
        extra={"attention_dropout": 0.0, **extra},
        ignored=("rotary_emb.inv_freq",),
        **more,
    )


_EXPERT_WIDTH = {"d_ff": "expert_feed_forward_length"}


def _whole_width(layers):
    """Returns the attention scalar of a Gemma by its fields: of the largest model, which has so
    many layers, the width divided by its heads, as llama.cpp has it; else the width of a head."""

    def scalar(fields):
        if fields["num_hidden_layers"] == layers:
            return fields["hidden_size"] // fields["num_attention_heads"]
        return fields["head_dim"]

    return scalar


def _gemma_row(class_name, *rules, **options):
    """Returns the row of a Gemma from the second on: norms around attention and the MLP."""
    return _llama_row(
        class_name,
        Always({"post_norms": True, "scaled_embeddings": True}),
        Biases(switches={"attention_bias": _ATTENTION}),
        Same("query_pre_attn_scalar", "attention_scalar", 256, "attention_width"),
        Only("use_bidirectional_attention", False),
        *rules,
        head_dim=256,
        kv_heads=4,
        mlp=_LLAMA_MLP | _SANDWICH,
        tied=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=1.0,
        **options,
    )


def _four_widths(fields):
    """Returns the d_ff of a GPT-2 without `n_inner`; 4 for an illegal width, which is refused."""
    width = fields.get("n_embd")
    return 4 * width if isinstance(width, int) else 4


ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        (
            Same("n_layer", "num_layers"),
            Same("n_embd", "d_model"),
            Same("n_head", "num_heads"),
            Same("n_inner", "d_ff", _four_widths),
            Same("vocab_size", "vocab_size"),
            Same("n_positions", "max_len"),
            Same("layer_norm_epsilon", "norm_epsilon", 1e-5),
            Same("tie_word_embeddings", "tied_embeddings", True),
            Named("activation_function", "activation", _ACTIVATIONS, "gelu_new"),
            Biases((*_ATTENTION, *_MLP)),
            Only("scale_attn_weights", True),
            Only("scale_attn_by_inverse_layer_idx", False),
        ),
        {
            "embed.tokens": "wte.weight",
            "embed.positions": "wpe.weight",
            "blocks.norm1": "h.{}.ln_1",
            "blocks.q": "h.{}.attn.c_attn",
            "blocks.k": "h.{}.attn.c_attn",
            "blocks.v": "h.{}.attn.c_attn",
            "blocks.attn_out": "h.{}.attn.c_proj",
            "blocks.norm2": "h.{}.ln_2",
            "blocks.mlp_in": "h.{}.mlp.c_fc",
            "blocks.mlp_out": "h.{}.mlp.c_proj",
            "head.norm": "ln_f",
        },
        ("transformer.", ""),
        # Its Conv1D stores [in, out].
        transposed=False,
        extra=dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        # Causal masks, which older releases stored.
        ignored=("attn.bias", "attn.masked_bias"),
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        gguf=Family("gpt2", JOINED_QKV),
    ),
    "opt": Architecture(
        "OPTForCausalLM",
        (
            Same("num_hidden_layers", "num_layers"),
            Same("hidden_size", "d_model"),
            Same("num_attention_heads", "num_heads"),
            Same("ffn_dim", "d_ff"),
            Same("vocab_size", "vocab_size"),
            Same("max_position_embeddings", "max_len"),
            Same("tie_word_embeddings", "tied_embeddings", True),
            Named("activation_function", "activation", _ACTIVATIONS, "relu"),
            Biases(switches={"enable_bias": (*_ATTENTION, *_MLP)}, default=True),
            Only("word_embed_proj_dim", lambda fields: fields["hidden_size"]),
            Only("do_layer_norm_before", True),
            Only("layer_norm_elementwise_affine", True),
            Only("_remove_final_layer_norm", False),
        ),
        {
            "embed.tokens": "embed_tokens.weight",
            "embed.positions": "embed_positions.weight",
            "blocks.norm1": "layers.{}.self_attn_layer_norm",
            "blocks.q": "layers.{}.self_attn.q_proj",
            "blocks.k": "layers.{}.self_attn.k_proj",
            "blocks.v": "layers.{}.self_attn.v_proj",
            "blocks.attn_out": "layers.{}.self_attn.out_proj",
            "blocks.norm2": "layers.{}.final_layer_norm",
            "blocks.mlp_in": "layers.{}.fc1",
            "blocks.mlp_out": "layers.{}.fc2",
            "head.norm": "final_layer_norm",
        },
        ("model.decoder.", "decoder.", ""),
        # OPT adds 2 to each position.
        position_offset=2,
        extra={"dropout": 0.0, "pad_token_id": None},
    ),
    "llama": _llama_row(
        "LlamaForCausalLM",
        Biases(switches={"attention_bias": _ATTENTION, "mlp_bias": _GATED_MLP}),
        gguf=Family("llama", paired=True),
    ),
    "mistral": _llama_row(
        "MistralForCausalLM", Biases(), Window(4096), kv_heads=8, gguf=Family("llama", paired=True)
    ),
    "mixtral": _llama_row(
        "MixtralForCausalLM",
        Biases(),
        Window(),
        Mixture("num_local_experts"),
        kv_heads=8,
        epsilon=1e-5,
        rotary=Rotary(1e6),
        # w1 is the gate, w3 what it multiplies, and w2 the output.
        mlp=_expert_tensors("block_sparse_moe", "w1", "w3", "w2"),
        aliases={"num_experts": "num_local_experts"},
        gguf=Family("llama", paired=True),
    ),
    "qwen2": _llama_row(
        "Qwen2ForCausalLM",
        Biases(QKV),
        Window(4096, switched=True, counted=True),
        kv_heads=32,
        gguf=Family("qwen2"),
    ),
    "qwen3": _llama_row(
        "Qwen3ForCausalLM",
        Always({"qk_norm": True}),
        Biases(switches={"attention_bias": _ATTENTION}),
        Window(4096, switched=True, counted=True),
        kv_heads=32,
        head_dim=128,
        gguf=Family("qwen3"),
    ),
    "qwen3_moe": _llama_row(
        "Qwen3MoeForCausalLM",
        Always({"qk_norm": True}),
        Biases(switches={"attention_bias": _ATTENTION}),
        Window(4096, switched=True),
        Mixture("num_experts", "norm_topk_prob"),
        Only("decoder_sparse_step", 1),
        Only("mlp_only_layers", []),
        kv_heads=4,
        width="moe_intermediate_size",
        mlp=_expert_tensors("mlp", "gate_proj", "up_proj", "down_proj"),
        # transformers 5 writes num_local_experts; both generations read num_experts.
        aliases={"num_local_experts": "num_experts"},
        gguf=Family("qwen3moe", fixed={"norm_topk_prob": True}, keys=_EXPERT_WIDTH),
    ),
    "qwen2_moe": _llama_row(
        "Qwen2MoeForCausalLM",
        Biases(switches={"qkv_bias": QKV}, default=True),
        Window(4096, switched=True),
        Only("use_sliding_window", False),
        Mixture("num_experts", "norm_topk_prob"),
        SharedExpert("shared_expert_intermediate_size", "moe_intermediate_size"),
        Only("decoder_sparse_step", 1),
        Only("mlp_only_layers", []),
        kv_heads=16,
        width="moe_intermediate_size",
        mlp=_expert_tensors("mlp", "gate_proj", "up_proj", "down_proj")
        | {
            "blocks.experts.shared.router": "layers.{}.mlp.shared_expert_gate.weight",
            "blocks.experts.shared.mlp_gate": "layers.{}.mlp.shared_expert.gate_proj",
            "blocks.experts.shared.mlp_in": "layers.{}.mlp.shared_expert.up_proj",
            "blocks.experts.shared.mlp_out": "layers.{}.mlp.shared_expert.down_proj",
        },
        aliases={"num_local_experts": "num_experts"},
        gguf=Family("qwen2moe", fixed={"norm_topk_prob": False}, keys=_EXPERT_WIDTH),
    ),
    "gemma2": _gemma_row(
        "Gemma2ForCausalLM",
        Window(4096, period=2),
        Same("attn_logit_softcapping", "attention_cap", 50.0, null=0.0, zero=None),
        Same("final_logit_softcapping", "logit_cap", 30.0, null=0.0, zero=None),
        gguf=Family("gemma2", fixed={"query_pre_attn_scalar": _whole_width(46)}, windows=True),
    ),
    "gemma3_text": _gemma_row(
        "Gemma3ForCausalLM",
        Always({"qk_norm": True}),
        Window(4096, period=6, named=True),
        Same("final_logit_softcapping", "logit_cap", 0.0, null=0.0, zero=None),
        Only("attn_logit_softcapping", None),
        rotary=Rotary(1e6, local=1e4),
        gguf=Family("gemma3", fixed={"query_pre_attn_scalar": _whole_width(62)}, windows=True),
    ),
    "phi3": _llama_row(
        "Phi3ForCausalLM",
        Biases(),
        Window(),
        epsilon=1e-5,
        rotary=Rotary(
            share=1.0,
            config_length=True,
            kinds=("longrope",),
            names={"su": "longrope", "yarn": "longrope"},
        ),
        mlp=_PHI,
        extra={"pad_token_id": None},  # Its default is 32,000, whatever the vocabulary is.
        gguf=Family("phi3", JOINED_QKV | JOINED_GATE, windowed=True),
    ),
    "gemma": _llama_row(
        "GemmaForCausalLM",
        Always({"scaled_embeddings": True}),
        Biases(switches={"attention_bias": _ATTENTION}),
        Only("use_bidirectional_attention", False),
        kv_heads=16,
        head_dim=256,
        tied=True,
        activation=("hidden_act", "gelu_pytorch_tanh", "hidden_activation"),
        activations=_GEMMA_ACTIVATIONS,
        norm_offset=1.0,
        gguf=Family("gemma"),
    ),
    "olmo2": _llama_row(
        "Olmo2ForCausalLM",
        Biases(switches={"attention_bias": _ATTENTION}),
        base=_LLAMA
        | {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_scope": ALL_HEADS},
        epsilon=1e-5,
        mlp=_LLAMA_MLP
        | {
            "blocks.norm1_out": "layers.{}.post_attention_layernorm",
            "blocks.norm2_out": "layers.{}.post_feedforward_layernorm",
        },
        gguf=Family("olmo2"),
    ),
    "granite": _llama_row(
        "GraniteForCausalLM",
        Biases(switches={"attention_bias": _ATTENTION, "mlp_bias": _GATED_MLP}),
        Same("embedding_multiplier", "embedding_scale", 1.0),
        Same("residual_multiplier", "residual_scale", 1.0),
        Same("logits_scaling", "logit_divisor", 1.0),
        AttentionMultiplier("attention_multiplier"),
        gguf=Family("granite", paired=True),
    ),
    "smollm3": _llama_row(
        "SmolLM3ForCausalLM",
        Biases(switches={"attention_bias": _ATTENTION, "mlp_bias": _GATED_MLP}),
        UnrotatedLayers(),
        Window(switched=True, unrotated=True),
        kv_heads=4,
        rotary=Rotary(2e6),
        tied=True,
        extra={"pad_token_id": None},  # Its default is 128,004, whatever the vocabulary is.
        gguf=Family("smollm3", paired=True),
    ),
    "starcoder2": _llama_row(
        "Starcoder2ForCausalLM",
        Biases(switches={"use_bias": (*_ATTENTION, *_MLP)}, default=True),
        Window(),
        kv_heads=2,
        base=_UNGATED,
        epsilon=1e-5,
        epsilon_name="norm_epsilon",
        mlp=_CONVOLUTION_MLP,
        tied=True,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        extra={"residual_dropout": 0.0, "embedding_dropout": 0.0},
        gguf=Family("starcoder2"),
    ),
    "stablelm": _llama_row(
        "StableLmForCausalLM",
        Biases(switches={"use_qkv_bias": QKV}),
        Named("use_parallel_residual", "residual", {False: SEQUENTIAL, True: SHARED_NORM}, False),
        QueryNorms("qk_layernorm", EACH_HEAD),
        _WHOLE_HEADS,
        kv_heads=32,
        base=_LAYERNORM,
        epsilon=1e-5,
        epsilon_name="layer_norm_eps",
        rotary=Rotary(share=0.25),
        mlp=_LLAMA_MLP
        | {
            "blocks.q_norms": "layers.{}.self_attn.q_layernorm.norms.{}",
            "blocks.k_norms": "layers.{}.self_attn.k_layernorm.norms.{}",
        },
        extra={"hidden_dropout": 0.0},
        gguf=Family("stablelm"),
    ),
    "phi": _llama_row(
        "PhiForCausalLM",
        Biases((*_ATTENTION, *_MLP)),
        QueryNorms("qk_layernorm", "head"),
        _WHOLE_HEADS,
        base=_UNGATED | {"residual": SHARED_NORM, "output_bias": True},
        epsilon=1e-5,
        epsilon_name="layer_norm_eps",
        rotary=Rotary(share=0.5),
        mlp={
            "blocks.attn_out": "layers.{}.self_attn.dense",
            "blocks.q_norm": "layers.{}.self_attn.q_layernorm",
            "blocks.k_norm": "layers.{}.self_attn.k_layernorm",
            "blocks.mlp_in": "layers.{}.mlp.fc1",
            "blocks.mlp_out": "layers.{}.mlp.fc2",
            "head.norm": "final_layernorm",
        },
        activation=("hidden_act", "gelu_new"),
        extra={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        gguf=Family("phi2"),
    ),
    "gpt_neox": Architecture(
        "GPTNeoXForCausalLM",
        (
            Always({"positions": "rotary"}),
            Same("num_hidden_layers", "num_layers"),
            Same("hidden_size", "d_model"),
            Same("num_attention_heads", "num_heads"),
            Same("intermediate_size", "d_ff"),
            Same("vocab_size", "vocab_size"),
            Same("max_position_embeddings", "max_len", 2048),
            Same("layer_norm_eps", "norm_epsilon", 1e-5),
            Same("tie_word_embeddings", "tied_embeddings", False),
            Named("hidden_act", "activation", _ACTIVATIONS, "gelu"),
            Named("use_parallel_residual", "residual", {True: PARALLEL, False: SEQUENTIAL}, True),
            Biases(_MLP, switches={"attention_bias": _ATTENTION}, default=True),
            _WHOLE_HEADS,
            Rotary(
                share=0.25,
                aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
            ),
        ),
        {
            "embed.tokens": "embed_in.weight",
            "blocks.norm1": "layers.{}.input_layernorm",
            "blocks.qkv": "layers.{}.attention.query_key_value",
            "blocks.attn_out": "layers.{}.attention.dense",
            "blocks.norm2": "layers.{}.post_attention_layernorm",
            "blocks.mlp_in": "layers.{}.mlp.dense_h_to_4h",
            "blocks.mlp_out": "layers.{}.mlp.dense_4h_to_h",
            "head.norm": "final_layer_norm",
        },
        ("gpt_neox.", ""),
        extra={"attention_dropout": 0.0, "hidden_dropout": 0.0},
        ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
        outputs=("embed_out", "lm_head"),
        gguf=Family("gptneox", JOINED_QKV),
    ),
    "gpt_neo": Architecture(
        "GPTNeoForCausalLM",
        (
            # GPT-Neo does not scale its scores.
            Always({"fused_qkv": False, "attention_scalar": 1.0}),
            Same("num_layers", "num_layers"),
            Same("hidden_size", "d_model"),
            Same("num_heads", "num_heads"),
            Same("intermediate_size", "d_ff", lambda fields: 4 * fields["hidden_size"]),
            Same("vocab_size", "vocab_size"),
            Same("max_position_embeddings", "max_len", 2048),
            Same("layer_norm_epsilon", "norm_epsilon", 1e-5),
            Same("tie_word_embeddings", "tied_embeddings", True),
            Named("activation_function", "activation", _ACTIVATIONS, "gelu_new"),
            Biases(("attn_out", *_MLP)),
            LocalLayers(),
        ),
        {
            "embed.tokens": "wte.weight",
            "embed.positions": "wpe.weight",
            "blocks.norm1": "h.{}.ln_1",
            "blocks.q": "h.{}.attn.attention.q_proj",
            "blocks.k": "h.{}.attn.attention.k_proj",
            "blocks.v": "h.{}.attn.attention.v_proj",
            "blocks.attn_out": "h.{}.attn.attention.out_proj",
            "blocks.norm2": "h.{}.ln_2",
            "blocks.mlp_in": "h.{}.mlp.c_fc",
            "blocks.mlp_out": "h.{}.mlp.c_proj",
            "head.norm": "ln_f",
        },
        ("transformer.", ""),
        extra=dict.fromkeys(("attention_dropout", "embed_dropout", "resid_dropout"), 0.0),
        ignored=("attn.attention.bias", "attn.attention.masked_bias"),
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    ),
}
"""model_type -> its row. An export takes the first row that represents the model."""

_OTHERS = {
    "gpt_oss": "Its attention has sinks, which no model here has.",
    "deepseek_v2": "Its attention is latent, which that of no model here is.",
    "deepseek_v3": "Its attention is latent, which that of no model here is.",
    "gemma3": "It reads images; its text model alone has the type gemma3_text.",
}
"""model_type -> why it is not supported."""

_MIXTURES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

_FREE = ("linears", "density_by_depth", "remat", "compute_dtype", "precision", "parametrization",
         "seed", *EXPERT_TRAINING)  # fmt: skip
"""Fields of `ModelConfig` that config.json does not have."""


def row(fields: Mapping[str, object]) -> Architecture:
    """Returns the row of a config.json.

    Raises:
      UserError: its model_type is not supported; names its other features that are not either.
    """
    kind = str(fields.get("model_type"))
    if kind in ARCHITECTURES:
        return ARCHITECTURES[kind]
    experts = [f"{name}={fields[name]}" for name in _MIXTURES if fields.get(name)]
    more = f" It is a mixture of experts ({', '.join(experts)})." if experts else ""
    more += f" {_OTHERS[kind]}" if kind in _OTHERS else ""
    raise UserError(f"it has a model of type {kind!r}; legal: {', '.join(ARCHITECTURES)}.{more}")


def read_config(fields: Mapping[str, object]) -> ModelConfig:
    """Returns the model that a config.json describes.

    Raises:
      UserError: the architecture or a field is not supported; names all of them.
    """
    architecture = row(fields)
    ours: dict[str, Any] = {}
    problems = []
    try:
        fields = without_aliases(architecture, fields)
    except UserError as error:
        problems.append(str(error))
    rules = (*UNSUPPORTED, *architecture.rules)
    # Others count to sizes, such as the number of layers.
    sizes = [rule for rule in rules if isinstance(rule, Same)]
    for size in sizes:
        with _collected(problems):
            ours |= size.read(fields)
    illegal = list(filter(None, (_illegal(size, ours) for size in sizes)))
    for rule in rules:
        if not isinstance(rule, Same) and not illegal:
            with _collected(problems):
                ours |= rule.read(fields)
    if problems := illegal or problems:
        raise UserError(f"config.json has {'; '.join(problems)}.")
    # The fused projection has one bias for all three.
    if ours.get("fused_qkv", True):
        ours["biases"] = tuple(dict.fromkeys("qkv" if n in QKV else n for n in ours["biases"]))
    # No layer reads it, and equal models must compare equal.
    if not ours.get("window"):
        ours.pop("rotary_local_base", None)
    return _comparable(ModelConfig(**ours))


def _illegal(rule: Same, ours: Mapping[str, object]) -> str:
    """Returns the words for a size that no model has; "" for a legal one."""
    size = next((s for s in settings.settings(ModelConfig) if s.name == rule.ours), None)
    value = ours.get(rule.ours)
    if size is None or size.type is not int or value is None:
        return ""
    reason = size.value_refusal(value)
    return f"{rule.theirs}={settings.shown(value)}, which {reason.rstrip('.')}" if reason else ""


@contextlib.contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        problems.append(str(error))


def without_aliases(architecture: Architecture, fields: Mapping[str, object]) -> JsonObject:
    """Returns the fields by their first names; raises UserError if two names disagree."""
    named = dict(fields)
    for alias, name in architecture.aliases.items():
        value = named.pop(alias, None)
        if value is not None and named.get(name) not in (None, value):
            raise unsupported(alias, value, f"{named[name]!r}, as {name}")
        if named.get(name) is None and value is not None:
            named[name] = value
    return named


class Representation(NamedTuple):
    """How an architecture represents a model.

    Attributes:
      fields: fields of config.json.
      model: the dense model that they describe; its function is that of the represented model.
      exact: whether the model needs no unit gate and no zero biases.
    """

    fields: JsonObject
    model: ModelConfig
    exact: bool


def represent(name: str, model: ModelConfig) -> Representation:
    """Returns how the architecture `name` represents a dense model of standard parametrization.

    An MLP without gate becomes one with the gate and the roles of mlp_gate and mlp_in swapped; see
    `equivalent_forms.with_unit_gate`.

    Raises:
      UserError: it cannot; names each field that differs.
    """
    architecture = ARCHITECTURES[name]

    def written(model):
        fields = {"architectures": [architecture.class_name], "model_type": name}
        for rule in architecture.rules:
            fields |= rule.write(model)
        return fields, read_config(fields)

    # Read back as an import does: what the fields cannot say differs then.
    fields, read = written(model)
    gated = model
    if read.gated_mlp and not model.gated_mlp and not model.experts:
        gated = unit_gate_config(model)
        fields, read = written(gated)
    gated = _comparable(gated)
    problems = [
        f"{field.name}={getattr(gated, field.name)} (legal: {getattr(read, field.name)})"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in (*_FREE, "biases", "fused_qkv")
        and getattr(gated, field.name) != getattr(read, field.name)
    ]
    missing = [name for name in _split_biases(gated) if name not in _split_biases(read)]
    if missing:
        problems.append(f"biases of {', '.join(missing)} (legal: none there)")
    if problems:
        raise UserError(f"{architecture.class_name} has no {'; '.join(problems)}.")
    exact = gated == _comparable(model) and _split_biases(gated) == _split_biases(read)
    return Representation({**fields, **architecture.extra}, read, exact)


def choose(model: ModelConfig) -> str:
    """Returns the first architecture that represents a dense model exactly, or else at all.

    Raises:
      UserError: none does; names what the nearest one lacks.
    """
    inexact, problems = [], []
    for name in ARCHITECTURES:
        try:
            if represent(name, model).exact:
                return name
            inexact.append(name)
        except UserError as error:
            problems.append(str(error))
    if not inexact:
        legal = "the run folder" if model.experts else "the sparse form"
        nearest = min(problems, key=_distance)
        raise UserError(
            f"No architecture of transformers represents this model; the nearest one: {nearest} "
            f"Legal: {legal}."
        )
    return inexact[0]


def _distance(problem: str) -> tuple[bool, bool, int]:
    """Orders refusals: one that lacks experts is farther from a mixture than another mixture."""
    return " has no " not in problem, "experts=" in problem, problem.count("; ")


def _comparable(model):
    """Returns the config with values that mean the default replaced by it."""
    biases = model.selected(model.biases, "biases")
    changes: dict[str, object] = {"biases": PROJECTIONS if biases == model.projections else biases}
    if model.num_kv_heads == model.num_heads:
        changes["num_kv_heads"] = 0
    if model.head_dim * model.num_heads == model.d_model:
        changes["head_dim"] = 0
    if model.attention_scalar == model.head_width:
        changes["attention_scalar"] = 0
    if model.top_k == 1:
        changes["raw_gates"] = False
    kinds = [model.layer_type(layer) for layer in range(model.num_layers)]
    changes["layer_types"] = pattern(kinds) if SLIDING in kinds else SLIDING
    rotated = [ROTATED if model.rotates(i) else UNROTATED for i in range(model.num_layers)]
    changes["rotary_layers"] = pattern(rotated)
    if SLIDING not in kinds:
        # No layer reads them.
        changes |= {"window": 0, "rotary_local_base": 0.0}
    changes |= comparable(dataclasses.replace(model, **changes))
    return dataclasses.replace(model, **changes)


def _split_biases(model):
    split = split_config(model)
    return split.selected(split.biases, "biases")
