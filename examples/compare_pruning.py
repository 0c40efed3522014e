"""Compares what pruning costs in each shape: blocks, rows, single weights, or a narrow model.

    python examples/compare_pruning.py                      a small Llama, trained here first
    python examples/compare_pruning.py --model=DIR          your language model

Half of every projection stays, except keys and values.  The narrow model has half of the heads and
hidden features.  The table has the loss on held-out text in nats per token, right after pruning.
Five minutes on two CPU cores without --model.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import numpy as np
import prune_a_llama

import sparse_dataflow as sd

SHAPES = (64, 32, 16, 8, "1x16", "16x1", "1x64", "2:4", 1, "narrow")
SEQUENCES, TESTED = 64, 64


def rows_of(model, texts):
    """Returns int32 [rows, tokens] of texts, in random order."""
    ids = np.concatenate([model.tokenizer.encode(text) for text in texts])
    width = min(256, model.context)
    rows = ids[: len(ids) // width * width].reshape(-1, width)
    return np.random.default_rng(0).permutation(rows).astype(np.int32)


def main(model="", out="", shapes=SHAPES, rounds=(1, 4, 16), texts=75, steps=480):
    """Returns {"dense": loss, shape: {rounds: loss}}; writes it to `out` as JSON."""
    texts = prune_a_llama.read_texts(texts)
    train, test = texts[: len(texts) * 4 // 5], texts[len(texts) * 4 // 5 :]
    if not model:
        folder = pathlib.Path(tempfile.mkdtemp())
        model, _ = prune_a_llama.make_llama(folder, train, steps)
    model = sd.load(model)
    calibration, held_out = rows_of(model, train)[:SEQUENCES], rows_of(model, test)[:TESTED]
    batches = np.array_split(calibration, 8)

    def loss(model):
        return round(float(sd.loss(model, held_out)), 4)

    losses = {"dense": loss(model)}
    print(f"dense: {losses['dense']:.3f}")
    for shape in shapes:
        where = None if shape == "narrow" else lambda name, _: name in prune_a_llama.PRUNED
        losses[str(shape)] = {
            str(count): loss(sd.prune(model, batches, block=shape, where=where, rounds=count).model)
            for count in rounds
        }
        shown = ", ".join(f"{value:.3f}" for value in losses[str(shape)].values())
        print(f"{shape}: {shown} with {', '.join(map(str, rounds))} rounds", flush=True)
    if out:
        record = {"command": " ".join(["python", *sys.argv]), "losses": losses}
        pathlib.Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="", help="run or Hugging Face directory; empty makes one"
    )
    parser.add_argument("--out", default="", help="JSON file to write")
    main(**vars(parser.parse_args()))
