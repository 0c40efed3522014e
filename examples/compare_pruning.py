"""Compares what pruning costs in each shape: blocks, rows, single weights, or a narrow model.

    python examples/compare_pruning.py                      a small Llama, trained here first
    python examples/compare_pruning.py --model=DIR          your language model
    python examples/compare_pruning.py --model=DIR --ids=FILE --sequences=512
        on token ids of sd.load(DIR), a JSON list of equally long lists: the first 64 for the loss

Half of every projection stays, except keys and values.  The narrow model has half of the heads and
hidden features.  The table has the loss on held-out text in nats per token, right after pruning,
for several seeds of calibration data.  With --recover the best rounds of each shape are also
trained, on shares of the tokens of the dense model, which is the teacher.  Half an hour on two CPU
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
SEQUENCES = 64


def rows_of(model, texts, seed=0):
    """Returns int32 [rows, tokens] of texts, in random order."""
    ids = np.concatenate([model.tokenizer.encode(text) for text in texts])
    width = min(256, model.context)
    rows = ids[: len(ids) // width * width].reshape(-1, width)
    return np.random.default_rng(seed).permutation(rows).astype(np.int32)


def rows_of_ids(path):
    """Returns int32 [rows, tokens], the token ids of a JSON file."""
    return np.asarray(json.loads(pathlib.Path(path).read_text(encoding="utf-8")), np.int32)


def recovered(dense, pruned, texts, steps, folder):
    """Trains a pruned model at a tenth of the rate, with the dense one as teacher; returns it."""
    config = sd.preset(sd.save(pruned, folder / "pruned"))
    if not pruned.model.linears:
        config = config.dense()
    config = config.change(
        training__steps=steps,
        training__teacher=str(dense),
        training__learning_rate=config.training.learning_rate / 10,
        run__twin="no",
        run__eval_every=steps,
        run__out=str(folder / "run"),
    )
    return sd.train(config, texts=texts).model()


def main(model="", out="", shapes=SHAPES, rounds=ROUNDS, seeds=SEEDS, texts=75, steps=480,
         recover=(), ids="", sequences=SEQUENCES, tested=SEQUENCES):  # fmt: skip
    """Returns {"dense": loss, shape: {rounds or recovery: losses of seeds}}; writes it to `out`.

    Args:
      model: run or Hugging Face directory; "" trains a small Llama.
      out: JSON file; "" for none.
      shapes: values of `block` of `sd.prune`.
      rounds: values of `rounds`.
      seeds: of the calibration data.
      texts: number of texts.
      steps: of the dense model's training.
      recover: shares of `steps` to train the pruned models for; not with `ids`.
      ids: JSON file of rows of token ids, instead of texts; it needs a `model`.
      sequences: number of sequences for the fit.
      tested: number of sequences for the loss.
    """
    if ids and (recover or not model):
        raise SystemExit("--ids needs --model, and does not go with --recover.")
    texts = [] if ids else prune_a_llama.read_texts(texts)
    train, test = texts[: len(texts) * 4 // 5], texts[len(texts) * 4 // 5 :]
    folder = pathlib.Path(tempfile.mkdtemp())
    place = model or prune_a_llama.make_llama(folder, train, steps)[0]
    model = sd.load(place)
    given = rows_of_ids(ids) if ids else None
    held_out = (rows_of(model, test) if given is None else given)[:tested]

    def loss(model):
        return round(float(sd.loss(model, held_out)), 4)

    def pruned(shape, count, seed):
        where = None if shape == "narrow" else lambda name, _: name not in ("k", "v")
        if given is None:
            rows = rows_of(model, train, seed)
        else:
            rows = np.random.default_rng(seed).permutation(given[tested:])
        batches = np.array_split(rows[:sequences], 8)
        return sd.prune(model, batches, block=shape, where=where, rounds=count).model

    def write():
        if out:
            record = {"command": " ".join(["python", *sys.argv]), "losses": losses}
            text = json.dumps(record, indent=1) + "\n"
            pathlib.Path(out).write_text(text, encoding="utf-8")

    losses = {"dense": loss(model)}
    print(f"dense: {losses['dense']:.3f}")
    for shape in shapes:
        row = losses[str(shape)] = {
            str(count): [loss(pruned(shape, count, seed)) for seed in seeds] for count in rounds
        }
        means = {count: np.mean(values) for count, values in row.items()}
        shown = ", ".join(f"{mean:.3f} with {count}" for count, mean in means.items())
        shown += " rounds"
        best = int(min(means, key=means.get))
        starts = [pruned(shape, best, seed) for seed in seeds] if recover else []
        for share in recover:
            count = max(1, round(share * steps))
            folders = [pathlib.Path(tempfile.mkdtemp(dir=folder)) for _ in seeds]
            row[f"after {share:g}"] = [
                loss(recovered(place, start, train, count, each))
                for start, each in zip(starts, folders)
            ]
            shown += f"; {np.mean(row[f'after {share:g}']):.3f} after {share:.0%} of the tokens"
            write()
        print(f"{shape}: {shown}", flush=True)
        write()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="", help="run or Hugging Face directory; empty makes one"
    )
    parser.add_argument("--out", default="", help="JSON file to write")
    parser.add_argument("--shapes", default=SHAPES, nargs="+", help="values of `block` of sd.prune")
    parser.add_argument("--rounds", default=ROUNDS, nargs="+", type=int, help="see sd.prune")
    parser.add_argument("--seeds", default=SEEDS, nargs="+", type=int, help="calibration data")
    parser.add_argument(
        "--recover", default=(), nargs="+", type=float,
        help="shares of the dense training, such as 0.01 0.05 0.2, to train the pruned models for",
    )  # fmt: skip
    parser.add_argument("--ids", default="", help="JSON file of rows of token ids, as of sd.load")
    parser.add_argument("--sequences", default=SEQUENCES, type=int, help="of the fit")
    parser.add_argument("--tested", default=SEQUENCES, type=int, help="sequences of the loss")
    main(**vars(parser.parse_args()))
