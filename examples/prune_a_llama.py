"""Prunes a Hugging Face Llama to block-sparse weights, trains it until it recovers, exports it.

    python examples/prune_a_llama.py                    a small Llama, trained here first
    python examples/prune_a_llama.py --model=DIR        your Llama, Mistral, Qwen, OPT or GPT-2

DIR has config.json, safetensors and a tokenizer.  Features change places, so that the blocks of
the pattern `monarch` store the largest weights.  These blocks are fitted to the outputs of the
dense model on a few batches, which then teaches the pruned one.  Keys and
values stay dense: with grouped queries they are small.  The export is a directory of the same
architecture, which transformers loads.  A minute on two CPU cores without --model.
"""

import argparse
import pathlib
import random
import tempfile

import sparse_dataflow as sd

LLAMA = {
    "model__norm": "rmsnorm",
    "model__positions": "rotary",
    "model__activation": "silu",
    "model__gated_mlp": True,
    "model__fused_qkv": False,
    "model__biases": (),
    "model__tied_embeddings": False,
    "model__num_kv_heads": 1,
    "model__d_ff": 256,
}
"""A Llama with one key and value head, as settings of a preset."""

PRUNED = ("q", "qkv", "attn_out", "mlp_gate", "mlp_in", "mlp_out")


def read_texts(count):
    """Returns the first modules of the standard library, as strings."""
    paths = sorted(pathlib.Path(random.__file__).parent.glob("*.py"))[:count]
    return [path.read_text(encoding="utf-8") for path in paths]


def make_llama(folder, texts, steps):
    """Trains a small Llama and writes it in Hugging Face's format; returns (path, its loss)."""
    config = sd.preset("pico").dense()
    config = config.change(**LLAMA, training__steps=steps, run__out=str(folder / "dense"))
    run = sd.train(config, texts=texts)
    path = sd.save(run.model(), folder / "llama", form="dense", architecture="llama")
    return path, losses(run)[-1]


def losses(run):
    """Returns the held-out losses of a run in order, in bits per byte."""
    return [row["bits_per_byte"] for row in run.metrics() if row["kind"] == "eval"]


def size(path):
    """Returns the MB of the weights in a directory."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1e6


def main(model="", folder=None, density=0.25, block=16, steps=120, texts=60):
    """Returns (path of the pruned and exported model, its losses in order, loss before or None)."""
    folder, texts = pathlib.Path(folder or tempfile.mkdtemp()), read_texts(texts)
    dense_loss = None
    if not model:
        model, dense_loss = make_llama(folder, texts, 4 * steps)
    config = sd.preset(model)  # The shape of the weights, and the recipe of the nearest size.
    config = config.change(
        sparsity__projections=tuple(n for n in config.model.projections if n in PRUNED),
        sparsity__density=density,
        sparsity__block=block,
        run__prune_to="pattern",
        run__twin="no",
        run__eval_every=max(1, steps // 6),
        run__out=str(folder / "sparse"),
        training__steps=steps,
        training__teacher=str(model),
    )
    run = sd.train(config, texts=texts)
    path = sd.save(run.model(), folder / "pruned", form="dense")
    small = sd.save(run.model(), folder / "small")
    if dense_loss:
        print(f"dense: {dense_loss:.3f} bits per byte")
    for number, loss in enumerate(losses(run), start=1):
        print(f"density {density:g}, step {number * max(1, steps // 6):4}: {loss:.3f}")
    print(sd.generate(sd.load(path), [[]], max_new_tokens=40)[0].text)
    print(f"{size(small):.2f} MB for this project in {small}")
    print(f"{size(path):.2f} MB with zeros in {path}, which transformers loads")
    return path, losses(run), dense_loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="Hugging Face directory; empty makes one")
    parser.add_argument("--folder", default=None, help="new folder for the runs and the export")
    parser.add_argument("--density", type=float, default=0.25, help="fraction of blocks stored")
    parser.add_argument("--block", type=int, default=16, help="side of a block, in features")
    parser.add_argument("--steps", type=int, default=120, help="training steps after pruning")
    main(**vars(parser.parse_args()))
