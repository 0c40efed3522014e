"""Makes an MLP of flax nnx block-sparse, and trains it beside the dense one.

    python examples/sparsify_mlp.py

The MLP predicts the next byte of Python source from the 16 bytes before it.  Its two wide layers
store 1/8 of their blocks, which RigL moves every 50 steps.  The rest is plain flax and optax.
Half a minute on two CPU cores.
"""

import pathlib
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparse_dataflow as sd

CONTEXT = 16


class Mlp(nnx.Module):
    """Bytes [batch, CONTEXT] -> logits [batch, 256]."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.first = nnx.Linear(CONTEXT * 32, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens):
        """Applies the model."""
        x = self.embed(tokens).reshape(len(tokens), -1)
        return self.head(nnx.relu(self.second(nnx.relu(self.first(x)))))


def loss_fn(model, inputs, targets):
    """Returns the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets).mean()


@nnx.jit
def train_step(model, optimizer, inputs, targets):
    """Updates model and optimizer in place; returns the loss."""
    loss, gradients = nnx.value_and_grad(loss_fn)(model, inputs, targets)
    optimizer.update(model, gradients)
    return loss


def train(model, steps, evolve_every=0):
    """Trains the model; returns its mean loss over the last tenth of the steps."""
    modules = sorted(pathlib.Path(random.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in modules), np.uint8)
    draw, losses = np.random.default_rng(0), []
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    for step in range(steps):
        start = draw.integers(0, len(text) - CONTEXT, 256)
        window = text[start[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
        batch = window[:, :-1], window[:, -1]
        if evolve_every and step and step % evolve_every == 0 and step < 0.75 * steps:
            sd.evolve(model, optimizer, "rigl", share=0.1, loss=loss_fn, batch=batch)
        losses.append(float(train_step(model, optimizer, *batch)))
    return float(np.mean(losses[-max(1, steps // 10) :]))


def main(steps=300, width=1024, block=32, evolve_every=50):
    """Trains both; returns {name: loss}."""
    dense = Mlp(width, nnx.Rngs(0))
    sparse = sd.sparsify(
        Mlp(width, nnx.Rngs(0)),
        density=1 / 8,
        block=block,
        where=lambda path, linear: path in ("first", "second"),
        evolving=True,
    )
    results = {}
    for name, model in {"dense": dense, "sparse": sparse}.items():
        began = time.perf_counter()
        results[name] = train(model, steps, evolve_every if name == "sparse" else 0)
        seconds = time.perf_counter() - began
        size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        print(f"{name:>6}: {size:9,} parameters, loss {results[name]:.3f}, {seconds:.0f} s")
    sd.evolve(sparse, None, "static")  # The layouts are final: specialise programs to them.
    logits = sparse(jnp.zeros((1, CONTEXT), jnp.int32))
    assert logits.shape == (1, 256)
    return results


if __name__ == "__main__":
    main()
