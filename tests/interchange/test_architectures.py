"""Every row of the table of architectures has the logits of transformers, in both directions."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import make_fixture
import numpy as np
import pytest
from make_fixture import BYTES, FOLDERS, LLAMA3_SCALING, OPT_SPECIALS, SHAPES
from marks import some
from models import DENSE, change_tensors, export, logits, random_model
from places import ROOT
from safetensors.numpy import load_file

from sparse_dataflow.core.checkpoint.named_arrays import flatten
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.evaluation.generate import generate
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import architectures, huggingface, tensors
from sparse_dataflow.interchange.architectures import ARCHITECTURES
from sparse_dataflow.interchange.equivalent_forms import joined_config, split_config
from sparse_dataflow.interchange.load import load
from sparse_dataflow.interchange.rotary_rule import Rotary
from sparse_dataflow.runs.families import FAMILIES

IDS = np.random.default_rng(0).integers(0, BYTES.vocab_size, (2, 16), np.int32)
each_architecture = pytest.mark.parametrize("name", ARCHITECTURES)

ROTARY = dataclasses.replace(DENSE, positions="rotary", norm="rmsnorm")
"""This project's own recipe: GPT's biases and MLP with rotary positions and RMSNorm."""
SPLIT = dataclasses.replace(ROTARY, **FAMILIES["llama"], num_kv_heads=2, head_dim=16)
GEMMA = {"post_norms": True, "scaled_embeddings": True, "tied_embeddings": True,
         "activation": "gelu", "attention_scalar": 11}  # fmt: skip
OLMO2 = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_scope": "all_heads"}
OWN = {
    "gpt": (DENSE, "gpt2"),
    "rotary and rmsnorm": (ROTARY, "llama"),
    "grouped queries in qkv": (dataclasses.replace(ROTARY, num_kv_heads=2), "llama"),
    "relu without biases": (dataclasses.replace(ROTARY, activation="relu", biases=()), "llama"),
    "supar": (dataclasses.replace(ROTARY, parametrization="supar"), "llama"),
    "block-sparse": (
        ROTARY.with_linears(LinearSpec("block_sparse", "random", 0.5, 8, rank=2, hadamard=4)),
        "llama",
    ),
    "llama": (dataclasses.replace(SPLIT, rotary_factor=8.0, rotary_length=16), "llama"),
    "some biases": (dataclasses.replace(SPLIT, biases=("v", "mlp_gate")), "llama"),
    # Qwen 2 of transformers 4.46 has no head_dim.
    "qwen2": (dataclasses.replace(SPLIT, biases=("q", "k", "v"), window=5, head_dim=0), "qwen2"),
    "mistral": (dataclasses.replace(SPLIT, window=5), "mistral"),
    "qwen3": (
        dataclasses.replace(SPLIT, qk_norm=True, parametrization="supar", tied_embeddings=True),
        "qwen3",
    ),
    "mixtral": (dataclasses.replace(SPLIT, experts=4, top_k=2, window=5, head_dim=0), "mixtral"),
    "mixtral of stored blocks": (
        dataclasses.replace(
            SPLIT, head_dim=0, experts=3, top_k=3, expert_capacity=1.5, parametrization="supar"
        ).with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8, hadamard=4)),
        "mixtral",
    ),
    "qwen3_moe": (dataclasses.replace(SPLIT, qk_norm=True, experts=5), "qwen3_moe"),
    "qwen2_moe": (
        dataclasses.replace(
            SPLIT,
            experts=5,
            top_k=2,
            raw_gates=True,
            shared_expert=2,
            shared_gate=True,
            head_dim=0,
            biases=("q", "k", "v"),
        ),
        "qwen2_moe",
    ),
    "gemma2": (
        dataclasses.replace(
            SPLIT,
            **GEMMA,
            window=5,
            layer_types="sliding+full",
            attention_cap=2.0,
            logit_cap=9.0,
        ),
        "gemma2",
    ),
    "gemma3": (
        dataclasses.replace(
            SPLIT,
            **GEMMA,
            window=5,
            layer_types="full+sliding",
            qk_norm=True,
            rotary_local_base=30.0,
            rotary_scaling="linear",
            rotary_factor=2.0,
        ),
        "gemma3_text",
    ),
    "phi3": (dataclasses.replace(SPLIT, rotary_share=0.75, head_dim=0), "phi3"),
    "gemma": (
        dataclasses.replace(
            SPLIT, activation="gelu", scaled_embeddings=True, tied_embeddings=True, biases=("k",)
        ),
        "gemma",
    ),
    "olmo2": (
        dataclasses.replace(SPLIT, **OLMO2, head_dim=0, parametrization="supar"),
        "olmo2",
    ),
    "granite": (
        dataclasses.replace(
            SPLIT,
            embedding_scale=3.5,
            residual_scale=0.4,
            logit_divisor=1.3,
            attention_scalar=7.3,
            head_dim=0,
            parametrization="supar",
        ),
        "granite",
    ),
    "smollm3": (
        dataclasses.replace(
            SPLIT, rotary_layers="unrotated+rotated", window=5, layer_types="sliding+full"
        ),
        "smollm3",
    ),
    "starcoder2": (
        dataclasses.replace(SPLIT, norm="layernorm", gated_mlp=False, head_dim=0, window=5),
        "starcoder2",
    ),
    "stablelm": (
        dataclasses.replace(
            SPLIT, norm="layernorm", rotary_share=0.5, head_dim=0, biases=("q", "v")
        ),
        "stablelm",
    ),
    "stablelm with norms of each head": (
        dataclasses.replace(
            SPLIT,
            norm="layernorm",
            head_dim=0,
            residual="parallel_shared_norm",
            qk_norm=True,
            qk_norm_scope="each_head",
            parametrization="supar",
        ),
        "stablelm",
    ),
    "phi": (
        dataclasses.replace(
            SPLIT,
            norm="layernorm",
            gated_mlp=False,
            head_dim=0,
            qk_norm=True,
            residual="parallel_shared_norm",
            output_bias=True,
            activation="gelu",
            biases=("q", "mlp_in"),
        ),
        "phi",
    ),
    "neox": (
        dataclasses.replace(DENSE, positions="rotary", residual="parallel", rotary_share=0.5),
        "gpt_neox",
    ),
    "neox of separate projections": (
        dataclasses.replace(
            DENSE,
            positions="rotary",
            fused_qkv=False,
            residual="parallel",
            biases=("v", "mlp_out"),
            parametrization="supar",
        ).with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8)),
        "gpt_neox",
    ),
    "gpt_neo": (
        dataclasses.replace(
            DENSE, window=5, layer_types="sliding+full", attention_scalar=1.0, biases=("attn_out",)
        ),
        "gpt_neo",
    ),
    "yarn": (
        dataclasses.replace(
            SPLIT, rotary_scaling="yarn", rotary_factor=2.0, rotary_length=8, rotary_high=32.0
        ),
        "llama",
    ),
}
each_own = pytest.mark.parametrize(("config", "expected"), OWN.values(), ids=OWN)


def order_of(name):
    """The Hugging Face id of each of our ids."""
    if name != "opt":
        return np.arange(BYTES.vocab_size)
    vocab = {token: number for number, token in enumerate((*OPT_SPECIALS, *BYTES.tokens))}
    return np.array([vocab[token] for token in [*BYTES.tokens, "<s>", "<pad>", "<unk>", "</s>"]])


def check(name, folder):
    """Compares an import's logits with those that transformers saved."""
    imported, saved = huggingface.read(folder), load_file(folder / "expected.safetensors")
    order = order_of(name)
    ids = np.argsort(order)[saved["ids"]].astype(np.int32)
    actual = logits(imported.model, imported.params, {}, ids)
    np.testing.assert_allclose(actual, saved["logits"][..., order], rtol=0, atol=1e-4)
    assert np.abs(saved["logits"]).max() > 1  # Rules out a model of zeros.
    assert imported.tokenizer.tokens == BYTES.tokens and imported.architecture == name


def library_logits(folder, ids):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.config.architectures == [type(model).__name__]
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(ids)).long()).logits.numpy()


def need_transformers(name=""):
    for library in ("transformers", "torch"):
        module = pytest.importorskip(library, reason=f"{library} is not installed")
        if library == "transformers" and name and name not in module.CONFIG_MAPPING:
            pytest.skip(f"transformers {module.__version__} has no {name}")


def test_the_ends_of_yarns_ramp_are_read_by_their_names():
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    fields = Rotary().read({"rope_scaling": {**scaling, "beta_fast": 24.0, "beta_slow": 2.0}})
    assert (fields["rotary_low"], fields["rotary_high"]) == (2.0, 24.0)


def drawn_scaling(pick, pairs=0):
    """A rope_scaling of yarn, linear or dynamic; of longrope if pairs of features are given."""
    factor = {"factor": pick(2.0, 3.7)}
    if pairs:
        lists = {name: [pick(1.0, 1.7, 4.0) for _ in range(pairs)] for name in ("short", "long")}
        return {"rope_type": "longrope"} | {f"{name}_factor": v for name, v in lists.items()}
    yarn = factor | {"rope_type": "yarn", "original_max_position_embeddings": pick(8, 16)}
    return pick(
        factor | {"rope_type": "linear"},
        factor | {"rope_type": "dynamic"},
        yarn | pick({}, {"attention_factor": 1.3}) | pick({}, {"beta_fast": 4.0, "beta_slow": 0.5}),
        yarn | {"mscale": 0.7, "mscale_all_dim": pick(1.1, 0.4)},
    )


def drawn_shape(name, rng):
    """Fields of a small random config.json of an architecture."""
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    if name == "gpt2":
        return SHAPES[name] | {
            "n_head": pick(1, 2, 4),
            "n_inner": pick(None, 40),
            "activation_function": pick("gelu_new", "gelu", "relu", "silu"),
            "layer_norm_epsilon": pick(1e-5, 1e-3),
            "tie_word_embeddings": pick(True, False),
        }
    if name == "opt":
        return SHAPES[name] | {
            "num_attention_heads": pick(1, 2, 4),
            "ffn_dim": pick(16, 24),
            "enable_bias": pick(True, False),
            "activation_function": pick("relu", "gelu"),
        }
    if name == "gpt_neo":
        kinds = pick([["global", "local"]], [["local"], ["local", "global"]], [["global"]])
        types = [[each, pick(1, 2)] for each in kinds]
        return SHAPES[name] | {
            "attention_types": types,
            "num_layers": sum(len(each) * times for each, times in types),
            "num_heads": pick(2, 4),
            "window_size": pick(1, 3, 16),
            "intermediate_size": pick(None, 40),
            "layer_norm_epsilon": pick(1e-5, 1e-2),
            "activation_function": pick("gelu_new", "gelu", "relu", "silu"),
            "tie_word_embeddings": pick(True, False),
        }
    if name == "gpt_neox":
        return (
            SHAPES[name]
            | {
                "hidden_size": 32,
                "num_attention_heads": pick(1, 2, 4),
                "intermediate_size": pick(24, 56),
                "hidden_act": pick("gelu", "gelu_new", "relu"),
                "layer_norm_eps": pick(1e-5, 1e-2),
                "use_parallel_residual": pick(True, False),
                "attention_bias": pick(True, False),
                "tie_word_embeddings": pick(True, False),
                "rotary_pct": pick(0.25, 0.5, 1.0),
                "rotary_emb_base": pick(50, 10_000),
            }
            | pick({}, {"rope_scaling": {"rope_type": "linear", "factor": 2.7}})
        )
    heads, kv_heads = pick((4, 4), (4, 2), (4, 1), (2, 2))
    shape = make_fixture._LLAMA | {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": pick(24, 56),
        "rms_norm_eps": pick(1e-6, 1e-2),
        "rope_theta": pick(50.0, 10_000.0, 5e5),
        "tie_word_embeddings": pick(True, False),
        "hidden_act": pick("silu", "gelu_pytorch_tanh", "gelu"),
    }
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    own = {
        "llama": {"attention_bias": pick(True, False), "mlp_bias": pick(True, False)}
        | pick({}, {"rope_scaling": dict(LLAMA3_SCALING)}, {"rope_scaling": drawn_scaling(pick)})
        | pick({}, {"head_dim": 4}),
        "mistral": {"sliding_window": pick(None, 4)} | pick({}, {"head_dim": 10}),
        "qwen2": pick({}, window),
        "qwen3": {"attention_bias": pick(True, False), "head_dim": pick(6, 12)} | pick({}, window),
        "mixtral": {
            "num_local_experts": pick(2, 6),
            "num_experts_per_tok": 2,
            "sliding_window": pick(None, 4),
        },
        "qwen3_moe": {
            "attention_bias": pick(True, False),
            "head_dim": pick(6, 12),
            "moe_intermediate_size": pick(8, 20),
        }
        | {"num_experts": pick(4, 7), "use_sliding_window": pick(True, False), "sliding_window": 3}
        | pick(
            {"num_experts_per_tok": 1, "norm_topk_prob": False},
            {"num_experts_per_tok": 3, "norm_topk_prob": pick(True, False)},
        ),
        "qwen2_moe": {
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": pick(12, 36),
            "num_experts": pick(4, 7),
            "num_experts_per_tok": pick(2, 3),
            "norm_topk_prob": pick(True, False),
            "qkv_bias": pick(True, False),
        },
        "phi3": {"sliding_window": pick(None, 5), "partial_rotary_factor": pick(1.0, 0.7)}
        | {"hidden_size": pick(24, 40), "pad_token_id": None},
        "gemma": {
            "head_dim": pick(6, 10),
            "attention_bias": pick(True, False),
            "hidden_act": pick("gelu_pytorch_tanh", "gelu", "silu"),
        },
        "olmo2": {"attention_bias": pick(True, False)} | pick({}, {"head_dim": 10}),
        "granite": {
            "embedding_multiplier": pick(1.0, 12),
            "residual_multiplier": pick(1.0, 0.22),
            "attention_multiplier": pick(1.0, 0.015625, 0.3),
            "logits_scaling": pick(1.0, 0.13),
            "attention_bias": pick(True, False),
            "mlp_bias": pick(True, False),
        },
        "smollm3": {
            "num_hidden_layers": 3,
            "attention_bias": pick(True, False),
            "mlp_bias": pick(True, False),
            "use_sliding_window": pick(True, False),
            "sliding_window": pick(None, 3, 7),
            "pad_token_id": None,
        }
        | pick({"no_rope_layers": [0, 1, 0]}, {"no_rope_layer_interval": pick(1, 2, 4)}),
        "starcoder2": {
            "norm_epsilon": pick(1e-5, 1e-2),
            "use_bias": pick(True, False),
            "sliding_window": pick(None, 4),
            "hidden_act": pick("gelu_pytorch_tanh", "gelu"),
        },
        "stablelm": {
            "hidden_size": 32,
            "layer_norm_eps": pick(1e-5, 1e-2),
            "partial_rotary_factor": pick(0.25, 0.5, 1.0),
            "use_qkv_bias": pick(True, False),
            "qk_layernorm": pick(True, False),
            "use_parallel_residual": pick(True, False),
        },
        "phi": {
            "hidden_size": 40,
            "layer_norm_eps": pick(1e-5, 1e-2),
            "partial_rotary_factor": pick(0.4, 1.0),
            "qk_layernorm": pick(True, False),
            "hidden_act": pick("gelu_new", "gelu", "relu"),
        },
        "gemma2": drawn_gemma(pick)
        | {"attn_logit_softcapping": pick(None, 2.5)}
        | {"final_logit_softcapping": pick(None, 5.0)},
        "gemma3_text": drawn_gemma(pick)
        | {"rope_theta": 3e3, "rope_local_base_freq": pick(1e2, 9e3)},
    }
    if name == "phi3" and rng.integers(2):
        pairs = own[name]["hidden_size"] // heads // 2
        own[name]["partial_rotary_factor"] = 1.0
        own[name]["rope_scaling"] = drawn_scaling(pick, pairs)
        own[name]["original_max_position_embeddings"] = pick(16, 32)
    return shape | own[name]


def drawn_gemma(pick):
    """Fields of a Gemma: an odd number of layers, windows in any of them, an odd width."""
    layers = pick(1, 3, 5)
    kinds = pick(*[["sliding_attention"] * n + ["full_attention"] for n in (1, 2, 4)])
    return {
        "num_hidden_layers": layers,
        "hidden_size": pick(20, 28),
        "head_dim": pick(6, 10),
        "sliding_window": pick(3, 7),
        "query_pre_attn_scalar": pick(5, 10),
        "hidden_activation": pick("gelu_pytorch_tanh", "gelu"),
        "attention_bias": pick(True, False),
    } | pick({}, {"layer_types": (kinds * layers)[:layers]})


@each_architecture
def test_imported_logits_equal_the_fixture_of_transformers(name):
    """make_fixture.py wrote the fixtures with transformers."""
    check(name, FOLDERS[name])


@each_architecture
@pytest.mark.parametrize("seed", range(3))
def test_imported_logits_equal_the_installed_transformers(tmp_path, name, seed):
    need_transformers(name)
    rng = np.random.default_rng([seed, *name.encode()])
    make_fixture.write(name, tmp_path / "model", drawn_shape(name, rng), seed)
    check(name, tmp_path / "model")


@each_architecture
def test_an_import_is_exported_to_the_same_tensors(tmp_path, name):
    imported = huggingface.read(FOLDERS[name])
    model = imported.model, imported.params, imported.tokenizer
    huggingface.write(tmp_path / "model", "dense", *model, context=16, card="", architecture=name)
    expected, actual = (tensors.Tensors(f) for f in (FOLDERS[name], tmp_path / "model"))
    assert actual.names == expected.names
    reread = huggingface.read(tmp_path / "model")
    assert reread.model == imported.model and reread.architecture == name
    same = jax.tree.map(np.array_equal, reread.params, imported.params)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    ("config", "expected"),
    some(
        OWN, "some biases", "mixtral of stored blocks",
    ),
)  # fmt: skip
def test_the_dense_form_of_our_own_models_keeps_their_logits(tmp_path, config, expected):
    params, tables = export(tmp_path / "model", "dense", config)
    imported = huggingface.read(tmp_path / "model")
    assert imported.architecture == expected
    expected_logits = logits(config, params, tables, IDS)
    np.testing.assert_allclose(
        logits(imported.model, imported.params, {}, IDS),
        expected_logits,
        atol=1e-5 * np.abs(expected_logits).max(),  # Float32 rounds by the size of the sums.
    )


@each_own
def test_transformers_has_the_logits_of_our_own_models(tmp_path, config, expected):
    need_transformers(expected)
    params, tables = export(tmp_path / "model", "dense", config)
    np.testing.assert_allclose(
        library_logits(tmp_path / "model", IDS), logits(config, params, tables, IDS), atol=1e-4
    )


@each_architecture
def test_transformers_reads_an_export_of_its_own_model(tmp_path, name):
    need_transformers(name)
    imported = huggingface.read(FOLDERS[name])
    model = imported.model, imported.params, imported.tokenizer
    huggingface.write(tmp_path / "model", "dense", *model, context=16, card="", architecture=name)
    saved = load_file(FOLDERS[name] / "expected.safetensors")
    actual = library_logits(tmp_path / "model", saved["ids"])
    np.testing.assert_allclose(actual, saved["logits"], rtol=0, atol=1e-4)


@each_architecture
def test_a_batch_of_unequal_prompts_goes_on_as_in_transformers(name):
    """There each prompt alone and without a cache, so that no padding and no cache agree."""
    need_transformers(name)
    import torch
    from transformers import AutoModelForCausalLM

    order, rng = order_of(name), np.random.default_rng(1)
    theirs = AutoModelForCausalLM.from_pretrained(FOLDERS[name]).eval()
    prompts = [rng.integers(0, 256, count).tolist() for count in (1, 4, 9)]
    texts = generate(load(FOLDERS[name]), prompts, max_new_tokens=6)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = order[prompt].tolist()
        for _ in range(6):
            with torch.no_grad():
                logits = theirs(torch.tensor([ids])).logits[0, -1].numpy()
            ids.append(int(order[logits[order].argmax()]))
        expected = np.argsort(order)[ids[len(prompt) :]].tolist()
        assert text.tokens == expected[: len(text.tokens)] and text.tokens
        assert text.stopped_by == "end" or len(text.tokens) == 6


@pytest.mark.parametrize("form", huggingface.READABLE)
def test_a_large_export_has_shards_that_are_read_back(tmp_path, monkeypatch, form):
    write = tensors.write
    monkeypatch.setattr(tensors, "write", lambda *arguments: write(*arguments, shard_bytes=20_000))
    params, _ = export(tmp_path / "model", form, DENSE)
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2 and files[0].startswith("model-00001-of-0000")
    reread = huggingface.read(tmp_path / "model")
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, reread.params, params)))
    (tmp_path / "model" / files[1]).unlink()
    with pytest.raises(UserError, match=f"lacks {files[1]}, which its index names"):
        huggingface.read(tmp_path / "model")


def config_of(name, **changes):
    fields = json.loads((FOLDERS[name] / "config.json").read_text())
    fields |= changes
    return {key: value for key, value in fields.items() if value != "absent"}


@pytest.mark.parametrize(
    ("name", "changes", "problems"),
    [
        (
            "llama",
            {"rope_scaling": {"type": "ntk", "factor": 4.0}},
            ["type 'ntk' (legal: default,"],
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic"}},
            ["rope_parameters without factor"],
        ),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}},
            ["rope_scaling.truncate=False (legal: true)"],
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 4.0, "scale": 2}},
            ["rope_scaling.scale=2 (legal: none of type linear)"],
        ),
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                }
            },
            ["model.rotary_factors has 1 numbers with model.rotary_scaling=longrope and 8 rotat"],
        ),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["without low_freq_"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5 (legal: 1)"]),
        ("qwen2", {"attention_bias": 3, "hidden_act": "mish"}, ["hidden_act='mish'"]),
        ("qwen3", {"attention_bias": 3}, ["attention_bias=3 (legal: true, false)"]),
        ("mistral", {"quantization_config": {"quant_method": "awq"}}, ["quantization_config={'q"]),
        ("llama", {"hidden_size": "absent"}, ["no hidden_size, which is required"]),
        ("opt", {"word_embed_proj_dim": 8}, ["word_embed_proj_dim=8 (legal: 16)"]),
        (
            "opt",
            {"do_layer_norm_before": False, "activation_function": "tanh"},
            ["do_layer_norm_before=False (legal: True)", "activation_function='tanh' (legal: gelu"],
        ),
        (
            "qwen3",
            {"model_type": "deepseek_v3", "n_routed_experts": 256},
            [
                "type 'deepseek_v3'; legal: gpt2, opt, ll",
                "mixture of experts (n_routed_experts=256)",
            ],
        ),
        ("mixtral", {"num_experts_per_tok": 1}, ["num_experts_per_tok=1 (legal: 2 or more)"]),
        ("mixtral", {"num_local_experts": "absent"}, ["no num_local_experts, which is required"]),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 2, "mlp_only_layers": [0]},
            [
                "decoder_sparse_step=2 (legal: 1)",
                "mlp_only_layers=[0] (legal: [])",
            ],
        ),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 1},
            ["norm_topk_prob=True (legal: true with num_exp"],
        ),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 33, "use_sliding_window": True},
            [
                "shared_expert_intermediate_size=33 (legal: multiples of moe_intermediate_size=16)",
                "use_sliding_window=True (legal: False)",
            ],
        ),
        ("llama", {"model_type": "gpt_oss"}, ["type 'gpt_oss'; legal: gpt2,", "has sinks"]),
        ("gemma", {"hidden_activation": "silu"}, ["hidden_activation='silu' (legal: 'gelu_pytor"]),
        ("gemma", {"use_bidirectional_attention": True}, ["use_bidirectional_attention=True"]),
        ("phi", {"head_dim": 9, "qk_layernorm": 2}, ["head_dim=9 (legal: 6)", "qk_layernorm=2"]),
        ("stablelm", {"use_parallel_residual": 1}, ["use_parallel_residual=1 (legal: False, Tr"]),
        ("granite", {"attention_multiplier": 0}, ["attention_multiplier=0 (legal: numbers bet"]),
        ("granite", {"residual_multiplier": 0.0}, ["model.residual_scale=0.0 is not legal"]),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, ["no_rope_layers=[1, 2, 0] (legal: 3 of 0"]),
        ("smollm3", {"no_rope_layers": "absent", "no_rope_layer_interval": 0}, ["interval=0 (leg"]),
        (
            "smollm3",
            {"use_sliding_window": False},
            ["layer_types=['full_attention', 'sliding_attention', 'full_attention'] (legal: "],
        ),
        (
            "gpt_neo",
            {"attention_types": [[["global", "sparse"], 1]], "num_layers": 2},
            ["attention_types=[[['global', 'sparse'], 1]] (legal: 2 of global, local"],
        ),
        ("gpt_neo", {"attention_layers": ["local"] * 3}, ["attention_layers=['local', 'local', "]),
        ("gpt_neox", {"rotary_pct": 0.1, "partial_rotary_factor": 0.5}, ["rotary_pct=0.1 (legal"]),
        ("gpt_neox", {"head_dim": 9}, ["head_dim=9 (legal: 6)"]),
        ("qwen3_moe", {"num_experts": 0}, ["num_experts=0 (legal: 1 or more)"]),
        ("qwen3_moe", {"num_experts": 2}, ["model.top_k=3 is above the 2 experts"]),
    ],
)
def test_features_that_are_not_supported_are_all_named(name, changes, problems):
    with pytest.raises(UserError) as error:
        architectures.read_config(config_of(name, **changes))
    for problem in problems:
        assert problem in str(error.value)


def test_the_rotary_fields_of_transformers_5_are_those_of_4():
    scaling = dict(LLAMA3_SCALING)
    old = config_of("llama", rope_theta=5e5, rope_scaling=scaling)
    new = config_of("llama", rope_theta="absent", rope_scaling="absent")
    new["rope_parameters"] = {"rope_theta": 5e5, **scaling}
    assert architectures.read_config(old) == architectures.read_config(new)


def test_the_experts_of_transformers_5_are_those_of_4():
    old = config_of("qwen3_moe")
    new = config_of("qwen3_moe", num_experts="absent", num_local_experts=old["num_experts"])
    assert architectures.read_config(old) == architectures.read_config(new)


def test_absent_fields_have_the_defaults_of_the_config_class():
    fields = {"model_type": "mistral", "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 300}
    fields |= {"num_attention_heads": 16, "intermediate_size": 8, "max_position_embeddings": 64}
    model = architectures.read_config(fields)
    assert (model.kv_heads, model.window, model.norm_epsilon) == (8, 4096, 1e-6)
    assert model.rotary_base == 10_000 and not model.tied_embeddings
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    model = architectures.read_config(fields | mixture)
    assert (model.kv_heads, model.window, model.norm_epsilon) == (8, 0, 1e-5)
    assert model.rotary_base == 1e6


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            {"norm": "layernorm", "gated_mlp": True},
            ["the nearest one: LlamaForCausalLM has no norm=layernorm (legal: rmsnorm)"],
        ),
        ({"qk_norm": True}, ["the nearest one: LlamaForCausalLM has no qk_norm=True"]),
        (
            {"window": 5, "logit_cap": 2.0},
            ["the nearest one: SmolLM3ForCausalLM has no logit_cap=2.0", "Legal: the sparse form"],
        ),
    ],
)
def test_a_model_that_no_architecture_represents_is_refused(tmp_path, changes, problems):
    with pytest.raises(UserError) as error:
        export(tmp_path / "model", "dense", dataclasses.replace(ROTARY, **changes))
    assert all(problem in str(error.value) for problem in problems)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"top_k": 1}, ["the nearest one: MixtralForCausalLM has no top_k=1 (legal: 2)"]),
        ({"prototypes": 2}, ["MixtralForCausalLM has no prototypes=2 (legal: 1)"]),
        ({"shared_expert": True}, ["MixtralForCausalLM has no shared_expert=1 (legal: 0)"]),
        ({"gated_mlp": False}, ["MixtralForCausalLM has no gated_mlp=False (legal: True)"]),
        ({"biases": ("mlp_in",)}, ["MixtralForCausalLM has no biases of mlp_in"]),
    ],
)
def test_a_mixture_that_no_architecture_represents_is_refused(tmp_path, changes, problems):
    mixture = dataclasses.replace(SPLIT, **{"experts": 4, "top_k": 2} | changes)
    with pytest.raises(UserError) as error:
        export(tmp_path / "model", "dense", mixture)
    assert all(problem in str(error.value) for problem in (*problems, "Legal: the run folder."))
    assert not list(tmp_path.iterdir())


def test_a_dense_model_is_no_mixture(tmp_path):
    weights = merged(*random_model(SPLIT))
    for name, experts in (("mixtral", 2), ("qwen3_moe", 1)):
        with pytest.raises(UserError, match=rf"has no .*experts=0 \(legal: {experts}\)"):
            huggingface.write(
                *(tmp_path / "model", "dense", SPLIT, weights, BYTES),
                **{"context": 16, "card": "", "architecture": name},
            )


def test_a_named_architecture_is_used_or_refused(tmp_path):
    weights = merged(*random_model(SPLIT))
    write = lambda name: huggingface.write(  # noqa: E731
        *(tmp_path / "model", "dense", SPLIT, weights, BYTES),
        **{"context": 16, "card": "", "architecture": name},
    )
    with pytest.raises(UserError, match=r"OPTForCausalLM has no .*norm=rmsnorm \(legal: layernorm"):
        write("opt")
    with pytest.raises(UserError, match="'gemma9' is unknown; legal: auto, gpt2, opt, llama"):
        write("gemma9")
    write("mistral")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "mistral"


def test_tensors_that_the_config_does_not_explain_are_refused(tmp_path):
    folder = Path(shutil.copytree(FOLDERS["qwen2"], tmp_path / "model"))
    name = "model.layers.0.self_attn.o_proj.bias"
    change_tensors(folder, lambda t: t.update({name: np.ones(24, np.float32)}))
    with pytest.raises(UserError, match=f"that a Qwen2ForCausalLM .* does not have: {name}"):
        huggingface.read(folder)


def test_the_page_lists_every_row():
    pages = ROOT / "docs"
    page = (pages / "guide" / "exchange.md").read_text()
    proofs = (pages / "evidence" / "compatibility.md").read_text()
    for name, row in ARCHITECTURES.items():
        assert re.search(rf"^\| `{name}`[^|]*\| `{row.class_name}` \|", page, re.MULTILINE), name
        assert f"\n| `{name}` | yes |" in proofs


def test_every_row_names_every_parameter_of_its_models():
    """A row is complete: no module of the forward pass lacks a name."""
    for name, folder in FOLDERS.items():
        model = architectures.read_config(config_of(name))
        assert isinstance(model, ModelConfig) and folder.exists()
        named = ARCHITECTURES[name].tensors
        stored = joined_config(model) if "blocks.qkv" in named else split_config(model)
        shapes = jax.eval_shape(lambda key, m=stored: gpt.init(m, key), jax.random.key(0))
        for leaf in flatten(shapes["blocks"]):
            assert {f"blocks.{leaf}", f"blocks.{leaf.rpartition('.')[0]}"} & set(named)
