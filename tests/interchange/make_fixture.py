"""Writes tests/interchange/gpt2 and opt: small random models saved by transformers, with logits.

python tests/interchange/make_fixture.py        needs transformers and torch
"""

import json
import sys
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.interchange import tokenizer_files

FOLDER = Path(__file__).with_name("gpt2")
OPT_FOLDER = Path(__file__).with_name("opt")
BYTES = Tokenizer(tuple(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())), (), 260)
SHAPE = {"vocab_size": 260, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}


OPT_SHAPE = {
    "vocab_size": 260,
    "max_position_embeddings": 24,
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 48,
}
OPT_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")


def write(gpt2_folder, opt_folder, seed=0):
    """Saves a random model of each architecture with transformers, and its logits."""
    import torch
    import transformers

    torch.manual_seed(seed)
    rates = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), BYTES.eot_id)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE, **rates, **ends))
    save(gpt2_folder, gpt2, SHAPE["vocab_size"])
    tokenizer_files.write(gpt2_folder, BYTES, SHAPE["n_positions"])
    opt = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **OPT_SHAPE, dropout=0.0, bos_token_id=2, pad_token_id=1, eos_token_id=2
        )
    )
    save(opt_folder, opt, OPT_SHAPE["vocab_size"])
    vocab = {token: number for number, token in enumerate((*OPT_SPECIALS, *BYTES.tokens))}
    (opt_folder / "vocab.json").write_text(json.dumps(vocab))
    (opt_folder / "merges.txt").write_text("#version: 0.2\n")


def save(folder, model, vocab_size):
    """Draws new weights, then saves the model and its logits of random tokens."""
    import torch
    import transformers

    model.eval()
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    ids = np.random.default_rng(0).integers(4, vocab_size, (2, 16), np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long()).logits.numpy()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file({"ids": ids, "logits": logits}, folder / "expected.safetensors")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    (folder / "made_with.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(write(FOLDER, OPT_FOLDER))
