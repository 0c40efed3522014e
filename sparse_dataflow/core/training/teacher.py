"""The teacher of a distillation: a trained model whose hidden states each training step reads."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.executor import Executor
from sparse_dataflow.core.executors.sharded import put_global
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.partition import ArrayTree
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training import cost


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model that trainings learn from.

    Attributes:
      params: its parameters with layouts, on the host; see `model.gpt`.
      source: where the weights are and their hash, as JSON values.
    """

    model: ModelConfig
    params: dict
    source: Mapping[str, object] = dataclasses.field(default_factory=dict)
    _placed: dict[Executor, ArrayTree] = dataclasses.field(default_factory=dict, repr=False)

    def flops_per_token(self, sequence: int, share: float = 1.0) -> float:
        """Returns the FLOPs of the forward pass for one token of a sequence of this length.

        Args:
          share: of the tokens, of which the teacher reads the text.  The loss of every token has
            the logits of the teacher, at a weight of 0 too.
        """
        flops = cost.flops_per_token(self.model, sequence, training=False)
        return flops.head + share * (flops.total - flops.head)

    @property
    def width(self) -> int:
        """Features of the hidden states, with that of an output bias."""
        return self.model.d_model + self.model.output_bias

    def program(
        self, student: ModelConfig, executor: Executor, example: Batch, training: TrainingConfig
    ) -> Callable[[Batch, float], Batch]:
        """Returns the compiled (batch, share of the teacher's weight) -> the batch with the fields
        of a teacher.

        With a share of 0 the hidden states are those of an earlier batch: the compiled step takes
        some, and their logits have no weight in the loss.

        Hidden states are normalised and lie where the rows of the tokens do.  They and the output
        layer are those of `gpt.output_layer`, in the student's compute dtype.  Every device holds
        all of the teacher.

        Args:
          student: gives the compute dtype, and whether attention stays within a document.
          executor: of the student.
          example: a batch as the executor puts it.
          training: gives the teacher's weight and the micro-batches, which run one by one.
        """
        config = dataclasses.replace(
            self.model.dropless(),
            compute_dtype=student.compute_dtype,
            mask_documents=student.mask_documents,
        )

        def hidden(weights, tokens):
            # One after another, so that the activations of one micro-batch are in memory at once.
            parts = tokens.reshape(training.micro_batches, -1, tokens.shape[1])
            states = lax.map(lambda rows: whole.hidden_states(config, weights, rows), parts)
            states = states.reshape(len(tokens), *states.shape[2:])
            return gpt.output_layer(weights["head"], weights["embed"]["tokens"], states)[0]

        if executor not in self._placed:  # All phases of a training share one copy.
            target = executor.replicated()
            weights = weights_of(config, self.params)
            self._placed[executor] = (
                jax.device_put(weights)
                if target is None
                else jax.tree.map(lambda leaf: put_global(leaf, target), weights)
            )
        weights = self._placed[executor]
        no_states = jnp.zeros((0, self.model.d_model), student.compute_dtype)
        _, output = gpt.output_layer(weights["head"], weights["embed"]["tokens"], no_states)
        program = jax.jit(executor.over_rows(hidden)).lower(weights, example.tokens).compile()
        states: jax.Array | None = None

        def teach(batch, share):
            nonlocal states
            if share or states is None:
                states = program(weights, batch.tokens)
            teacher = output, np.float32(share * training.teacher_weight)
            return dataclasses.replace(batch, teacher_hidden=states, teacher=teacher)

        return teach
