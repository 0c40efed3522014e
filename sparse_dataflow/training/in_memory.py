"""Training in memory, for a notebook: a corpus and two configs in, a trained model out.

Experiments train with `training.loop.Trainer` instead, which keeps checkpoints and metrics in a run
folder and can be stopped.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.data import cache
from sparse_dataflow.data.batches import EvalBatches, TrainBatches, bits_per_byte
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.tokenizer import train_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.evaluation.trained import Trained
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models import gpt
from sparse_dataflow.optim.optimizers import learning_rate_schedule
from sparse_dataflow.sparsity.evolution import phase_specs
from sparse_dataflow.training.programs import (
    TrainingData,
    any_loss,
    compile_programs,
    held_out_nats,
    stepped,
)
from sparse_dataflow.training.step import initial_state

HELD_OUT_WINDOWS = 32


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a training is.

    Attributes:
      step: optimizer steps done, from 1.
      loss: of this step's batch, in nats a token.
      seconds: in training steps so far; compiling and evaluating are not counted.
      bits_per_byte: over held-out text, where this step was evaluated; else None.
    """

    step: int
    loss: float
    seconds: float
    bits_per_byte: float | None


def train(
    model: ModelConfig,
    training: TrainingConfig,
    corpus: str = "python_stdlib",
    *,
    eval_every: int = 0,
    on_step: Callable[[Progress], None] | None = None,
    cache_dir: str | Path | None = None,
) -> Trained:
    """Trains `model` on a corpus with a byte-level BPE tokenizer of `model.vocab_size` tokens.

    Args:
      model: its `max_len` is at least `training.sequence`.
      training: steps, sequences in a batch, tokens in a sequence, peak learning rate.
      corpus: "python_stdlib", "sotu", a folder or file of text, or a tfds name.
      eval_every: steps between evaluations on held-out documents; 0 evaluates after the last only.
      on_step: told of every step.
      cache_dir: for the prepared corpus; `data.cache.FOLDER` where None.

    Returns:
      The model as `generate` takes it; `facts["bits_per_byte"]` is over held-out text.

    Raises:
      UserError: the corpus, the layout or the shapes are not legal, or a loss is not finite.
    """
    if training.sequence > model.max_len:
        raise UserError(
            f"sequence {training.sequence} is longer than the model's max_len {model.max_len}."
        )
    cache_dir = cache.FOLDER if cache_dir is None else Path(cache_dir)
    texts = load_corpus(corpus, cache_dir)
    tokenizer = train_tokenizer(texts, model.vocab_size, cache_dir)
    tokens = prepare_tokens(texts, tokenizer, cache_dir)
    shape = training.batch, training.sequence
    held_out = EvalBatches(tokens.validation.tokens, *shape, HELD_OUT_WINDOWS)
    held_out_bytes = held_out.total_bytes(tokenizer.token_bytes)
    batches = TrainBatches(tokens.train.tokens, *shape, training.seed)
    data = TrainingData(
        batches, held_out, held_out_bytes, held_out, held_out_bytes, tokenizer.content_hash
    )
    [programs] = compile_programs(phase_specs(model, EvolutionConfig()), training, data)
    state = initial_state(model, training)
    tables, rate = programs.tables(state.tables), learning_rate_schedule(training)
    seconds, quality = 0.0, None
    for number, batch in zip(range(training.steps), batches.iterate()):
        start = time.perf_counter()
        limit = any_loss(training)
        state, tables, report = stepped(programs, state, tables, batch, rate(number), limit)
        loss = float(report.loss)
        seconds += time.perf_counter() - start
        step, quality = number + 1, None
        if not np.isfinite(loss):
            raise UserError(f"the loss of step {step} is {loss}; a lower learning rate may help.")
        if step == training.steps or (eval_every and step % eval_every == 0):
            nats = held_out_nats(programs, state.params, tables, held_out)
            quality = bits_per_byte(nats, held_out_bytes)
        if on_step is not None:
            on_step(Progress(step, loss, seconds, quality))
    return Trained(
        folder=Path(),
        variant="sparse" if model.sparse_projections else "dense",
        model=model,
        params=jax.block_until_ready(state.params),
        tables=gpt.layout_tables(gpt.layouts(model)),
        tokenizer=tokenizer,
        step=training.steps,
        training=training,
        config={"corpus": {"name": corpus}},
        facts={"seconds": seconds, "bits_per_byte": quality},
    )
