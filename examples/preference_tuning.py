"""Tunes a block-sparse GPT on pairs of a chosen and a rejected answer, with Tunix's DPO trainer.

    python examples/preference_tuning.py                needs google-tunix; a small model, made here
    python examples/preference_tuning.py --model=DIR    your run folder or export

The pairs prefer no space after a comma in Python.  `Policy` makes a flax nnx model of a `sd.Model`,
as Tunix calls it.  Prints reward margins of held-out pairs, and saves a model that `sd.load` reads.
A minute on two CPU cores without --model.
"""

import argparse
import pathlib
import random
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.sft.dpo import dpo_trainer

import sparse_dataflow as sd

BETA, RATE = 0.1, 5e-4
NAMES = "width height path name key value size count item index text other first last".split()


class Policy(nnx.Module):
    """A language model with the call of Tunix's models; its layouts are static."""

    def __init__(self, model):
        named, self.structure = jax.tree.flatten_with_path(model)
        # The names have the layouts' hash, so a checkpoint of other layouts is refused.
        self.weights = nnx.Dict({jax.tree_util.keystr(path): nnx.Param(x) for path, x in named})
        self.order = tuple(self.weights)

    def model(self):
        """Returns the model with the weights of now."""
        return jax.tree.unflatten(self.structure, [self.weights[n][...] for n in self.order])

    def __call__(self, tokens, positions, cache, attention_mask):
        """Returns (logits [batch, sequence, vocabulary], no cache)."""
        # Tunix fills prompts up on the left.  Rolled to the left, their first token is at
        # position 0; what is then on the right is seen by no token before it.
        first = jnp.argmax(attention_mask[:, -1], axis=-1)
        roll = jax.vmap(lambda row, shift: jnp.roll(row, shift, axis=0))
        return roll(sd.logits(self.model(), roll(tokens, -first)), first), None


def make_model(folder, steps):
    """Trains a small block-sparse model on Python's standard library; returns its run folder."""
    paths = sorted(pathlib.Path(random.__file__).parent.glob("*.py"))[:40]
    config = sd.preset("pico").change(
        sparsity__block=16, training__steps=steps, run__twin="no", run__out=str(folder / "run")
    )
    sd.train(config, texts=[path.read_text(encoding="utf-8") for path in paths])
    return folder / "run"


def draw_pairs(count, seed):
    """Returns (prompt, chosen answer, rejected answer) of functions with drawn names."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        function, *arguments = draw.sample(NAMES, 4)
        pairs.append((f"def {function}(", ",".join(arguments) + "):", ", ".join(arguments) + "):"))
    return pairs


def padded(tokenizer, texts, length, left):
    """Returns (token ids, mask), int32 [texts, length]."""
    ids, mask = np.zeros((2, len(texts), length), np.int32)
    for row, text in enumerate(texts):
        tokens = tokenizer.encode(text)[:length]
        place = slice(length - len(tokens), None) if left else slice(len(tokens))
        ids[row, place], mask[row, place] = tokens, 1
    return ids, mask


def make_batches(tokenizer, pairs, size=16, length=32):
    """Yields the pairs as Tunix takes them: prompts end, and answers begin, at the same place."""
    for start in range(0, len(pairs) - size + 1, size):
        prompts, chosen, rejected = zip(*pairs[start : start + size])
        prompt_ids, prompt_mask = padded(tokenizer, prompts, 16, left=True)
        chosen_ids, chosen_mask = padded(tokenizer, chosen, length, left=False)
        rejected_ids, rejected_mask = padded(tokenizer, rejected, length, left=False)
        yield dpo_trainer.TrainingInput(
            prompt_ids, prompt_mask, chosen_ids, chosen_mask, rejected_ids, rejected_mask
        )


@jax.jit
def answer_scores(model, tokens, is_answer):
    """Returns the log-probability of the answer in each row, float32 [rows]."""
    scores = jax.nn.log_softmax(sd.logits(model, tokens[:, :-1]))
    scores = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(scores * is_answer[:, 1:], axis=-1)


def margins(model, reference, pairs, length=48):
    """Returns the reward margin of each pair: how much more the model prefers the chosen answer."""
    gains = []
    for answers in ([(p, yes) for p, yes, _ in pairs], [(p, no) for p, _, no in pairs]):
        tokens, is_answer = np.zeros((2, len(pairs), length), np.int32)
        for row, texts in enumerate(answers):
            prompt, answer = (model.tokenizer.encode(text) for text in texts)
            end = len(prompt) + len(answer)
            tokens[row, :end], is_answer[row, len(prompt) : end] = [*prompt, *answer], 1
        gains.append(
            np.subtract(*(answer_scores(m, tokens, is_answer) for m in (model, reference)))
        )
    return BETA * (gains[0] - gains[1])


def main(model="", folder=None, steps=40, pretraining=300):
    """Returns (model before, model after, folder of the export, margins of held-out pairs)."""
    folder = pathlib.Path(folder or tempfile.mkdtemp())
    before = sd.load(model or make_model(folder, pretraining))
    # Tunix donates arrays of the policy, so the reference has its own.
    policy, reference = Policy(before), Policy(jax.tree.map(jnp.copy, before))
    config = dpo_trainer.DPOTrainingConfig(beta=BETA, eval_every_n_steps=steps, max_steps=steps)
    trainer = dpo_trainer.DPOTrainer(policy, reference, optax.adam(RATE), config)
    trainer.train(make_batches(before.tokenizer, draw_pairs(16 * steps, seed=0)))
    after = policy.model()
    held_out = margins(after, before, draw_pairs(16, seed=1))
    assert jax.tree.structure(after) == jax.tree.structure(before)  # The same stored blocks.
    path = sd.save(after, folder / "tuned")
    print(f"reward margin of 16 held-out pairs: {np.mean(held_out):.2f} (0 before)")
    for name, each in {"before": before, "after": sd.load(path)}.items():
        (answer,) = sd.generate(each, ["def make_item(self,"], max_new_tokens=8, temperature=0)
        print(f"{name}: {answer.text!r}")
    print(f"{path}: sd.load, `sparse-dataflow generate` and `export` read it")
    return before, after, path, held_out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="run folder or export; empty makes one")
    parser.add_argument("--folder", default=None, help="new folder for the run and the export")
    parser.add_argument("--steps", type=int, default=40, help="steps of preference tuning")
    parser.add_argument(
        "--pretraining", type=int, default=300, help="steps before, without --model"
    )
    main(**vars(parser.parse_args()))
