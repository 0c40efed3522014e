"""Compares what pruning costs in each shape: blocks, rows, single weights, or a narrow model.

    python examples/compare_pruning.py                      a small Llama, trained here first
    python examples/compare_pruning.py --model=DIR          your language model

Half of every projection stays, except keys and values.  The narrow model has half of the heads and
hidden features.  The table has the loss on held-out text in nats per token, right after pruning,
for several seeds of calibration data.  With --recover the best rounds of each shape are also
trained, on 5% of the tokens of the dense model, which is the teacher.  Half an hour on two CPU
cores without --model.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import numpy as np
import prune_a_llama

import sparse_dataflow as sd

SHAPES = (16, "1x16", 1, "narrow", "2:4", "16x1", "1x64", 8, 32, 64)
ROUNDS, SEEDS = (1, 3, 16), (0, 1, 2)
SEQUENCES, TESTED = 64, 64


def rows_of(model, texts, seed=0):
    """Returns int32 [rows, tokens] of texts, in random order."""
    ids = np.concatenate([model.tokenizer.encode(text) for text in texts])
    width = min(256, model.context)
    rows = ids[: len(ids) // width * width].reshape(-1, width)
    return np.random.default_rng(seed).permutation(rows).astype(np.int32)


def recovered(dense, pruned, texts, steps, folder):
    """Trains a pruned model with the dense one as teacher, and returns it."""
    config = sd.preset(sd.save(pruned, folder / "pruned"))
    if not pruned.model.linears:
        config = config.dense()
    run = sd.train(
        config.change(
            training__steps=steps,
            training__teacher=str(dense),
            run__twin="no",
            run__out=str(folder / "run"),
        ),
        texts=texts,
    )
    return run.model()


def main(model="", out="", shapes=SHAPES, rounds=ROUNDS, seeds=SEEDS, texts=75, steps=480,
         recover=False):  # fmt: skip
    """Returns {"dense": loss, shape: {rounds: losses of the seeds}}; writes it to `out`."""
    texts = prune_a_llama.read_texts(texts)
    train, test = texts[: len(texts) * 4 // 5], texts[len(texts) * 4 // 5 :]
    folder = pathlib.Path(tempfile.mkdtemp())
    place = model or prune_a_llama.make_llama(folder, train, steps)[0]
    model = sd.load(place)
    held_out = rows_of(model, test)[:TESTED]

    def loss(model):
        return round(float(sd.loss(model, held_out)), 4)

    def pruned(shape, count, seed):
        where = None if shape == "narrow" else lambda name, _: name in prune_a_llama.PRUNED
        batches = np.array_split(rows_of(model, train, seed)[:SEQUENCES], 8)
        return sd.prune(model, batches, block=shape, where=where, rounds=count).model

    losses = {"dense": loss(model)}
    print(f"dense: {losses['dense']:.3f}")
    for shape in shapes:
        row = losses[str(shape)] = {
            str(count): [loss(pruned(shape, count, seed)) for seed in seeds] for count in rounds
        }
        means = {count: np.mean(values) for count, values in row.items()}
        shown = ", ".join(f"{mean:.3f} with {count}" for count, mean in means.items())
        if recover:
            best = min(means, key=means.get)
            row["recovered"] = [
                loss(
                    recovered(
                        place, pruned(shape, int(best), seed), train, max(1, steps // 20),
                        pathlib.Path(tempfile.mkdtemp(dir=folder)),
                    )
                )
                for seed in seeds
            ]  # fmt: skip
            shown += f"; {np.mean(row['recovered']):.3f} after recovery"
        print(f"{shape}: {shown} rounds", flush=True)
        if out:
            record = {"command": " ".join(["python", *sys.argv]), "losses": losses}
            text = json.dumps(record, indent=1) + "\n"
            pathlib.Path(out).write_text(text, encoding="utf-8")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="", help="run or Hugging Face directory; empty makes one"
    )
    parser.add_argument("--out", default="", help="JSON file to write")
    parser.add_argument("--shapes", default=SHAPES, nargs="+", help="values of `block` of sd.prune")
    parser.add_argument("--rounds", default=ROUNDS, nargs="+", type=int, help="see sd.prune")
    parser.add_argument("--recover", action="store_true", help="also train the pruned models")
    main(**vars(parser.parse_args()))
