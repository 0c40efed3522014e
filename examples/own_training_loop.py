"""Trains a block-sparse GPT in a loop of your own: optax, your data, your schedule.

    python examples/own_training_loop.py

A model is a pytree of its parameters, so jax.grad, jax.jit and optax take it as it is.  The texts
are modules of Python's standard library.  Half a minute on two CPU cores.
"""

import pathlib
import random

import jax
import numpy as np
import optax

import sparse_dataflow as sd


def read_texts(count):
    """Returns the first modules of the standard library, as strings."""
    paths = sorted(pathlib.Path(random.__file__).parent.glob("*.py"))[:count]
    return [path.read_text(encoding="utf-8") for path in paths]


def main(steps=300, texts=40, folder=None):
    """Trains, saves into `folder` if there is one, and returns the losses."""
    texts = read_texts(texts)
    tokenizer = sd.Tokenizer.from_texts(texts, vocab_size=512)
    ids = [np.append(tokenizer.encode(text), tokenizer.eot_id) for text in texts]
    stream = np.concatenate(ids).astype(np.int32)

    config = sd.preset("pico").change(sparsity__density=1 / 8, sparsity__block=16)
    model = sd.init(config, jax.random.key(0), tokenizer)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps)),
    )
    state = optimizer.init(model)

    @jax.jit
    def train_step(model, state, tokens):
        loss, gradients = jax.value_and_grad(sd.loss)(model, tokens)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, loss

    draw, losses = np.random.default_rng(0), []
    for step in range(steps):
        start = draw.integers(0, len(stream) - model.context, 8)
        tokens = stream[start[:, None] + np.arange(model.context + 1)]
        model, state, loss = train_step(model, state, tokens)
        losses.append(float(loss))
        if step % max(1, steps // 6) == 0:
            print(f"step {step:4}: loss {loss:.3f}")
    if folder:
        print(f"saved in {sd.save(model, folder)}; sd.load reads it")
    print(sd.generate(model, ["def "], max_new_tokens=40, temperature=0.8)[0].text)
    return losses


if __name__ == "__main__":
    main()
