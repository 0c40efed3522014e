"""Tiny Llama directories as others hand them in: special tokens at any id, files that disagree."""

import json

import numpy as np
import tokenizers
from safetensors.numpy import save_file

SPECIALS = ("<|begin|>", "<|end|>", "<|turn|>", "<|header|>", "<|pad|>")
TEXTS = ["the cat sat on the mat and the dog ran home", "what is two plus two? it is four."]
WIDTH, VOCAB = 16, 336


def engine(prefixed=True, first=False):
    """Returns a byte-level tokenizer with SPECIALS behind or in front of the text tokens.

    Args:
      prefixed: whether its post-processor puts SPECIALS[0] in front of a text.
      first: whether the special tokens have the first ids.
    """
    result = tokenizers.Tokenizer(tokenizers.models.BPE())
    result.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIALS) if first else [],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    result.train_from_iterator(TEXTS * 9, trainer)
    result.add_special_tokens(list(SPECIALS))
    if prefixed:
        number = result.token_to_id(SPECIALS[0])
        result.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], number)]
        )
    return result


def config(**changes):
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def weights(always=None, seed=0):
    """Returns the tensors of the model of `config`, which writes the token `always` if given."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(0, 0.1, shape).astype(np.float32)  # noqa: E731
    layer = "model.layers.0."
    arrays = {
        "model.embed_tokens.weight": draw(VOCAB, WIDTH),
        "model.norm.weight": np.ones(WIDTH, np.float32),
        "lm_head.weight": draw(VOCAB, WIDTH),
        **{f"{layer}self_attn.{name}_proj.weight": draw(WIDTH, WIDTH) for name in "qkvo"},
        f"{layer}mlp.gate_proj.weight": draw(32, WIDTH),
        f"{layer}mlp.up_proj.weight": draw(32, WIDTH),
        f"{layer}mlp.down_proj.weight": draw(WIDTH, 32),
        f"{layer}input_layernorm.weight": np.ones(WIDTH, np.float32),
        f"{layer}post_attention_layernorm.weight": np.ones(WIDTH, np.float32),
    }
    if always is not None:
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            arrays[f"{layer}{name}.weight"][:] = 0
        arrays["model.embed_tokens.weight"][:] = 1
        arrays["lm_head.weight"][:] = 0
        arrays["lm_head.weight"][always] = 1
    return arrays


def write(folder, fields, tokenizer=None, arrays=None, **files):
    """Writes a directory; `files` are JSON values or texts by name, with "__" for a point."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    save_file(arrays or weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine_alphabet():
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
