"""Masked-language batches: some tokens of each window are hidden, and the model says which.

A window hides a fixed share of its tokens (BERT, arXiv 1810.04805, section 3.1).  Which ones
follows from a seed and the window's number in the data alone.  So a resumed run and one with
another batch size, mesh or executor hide the same tokens, and each epoch hides others.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError

_HELD_OUT = 2**32
"""Seed of the masks of held-out text: that of no training, and the same for all of them."""


@dataclasses.dataclass(frozen=True)
class Masking:
    """How tokens are hidden.

    Attributes:
      text_ids: ids below are tokens of text, which alone are hidden and drawn.
      mask_id: id of the mask token.
      end_id: id that ends a document.
      training: the shares of `TrainingConfig`, and the seed.
    """

    text_ids: int
    mask_id: int
    end_id: int
    training: TrainingConfig

    @classmethod
    def of(cls, training: TrainingConfig, tokenizer: Tokenizer) -> "Masking | None":
        """Returns the masking of a training; None for another objective.

        Raises:
          UserError: the tokenizer has no mask token.
        """
        if not training.hides_tokens:
            return None
        if tokenizer.mask_id is None:
            raise UserError(
                "training.objective=masked needs a mask token, and the tokenizer of run.init_from "
                "has none; legal: weights of a masked run, or drawn weights."
            )
        return cls(len(tokenizer.tokens), tokenizer.mask_id, tokenizer.eot_id, training)

    def count(self, tokens: int) -> int:
        """Returns how many of so many tokens are hidden, at least one."""
        return max(1, round(self.training.mask_share * tokens))

    def training_batch(self, inputs: np.ndarray, numbers: Sequence[int], rows: int) -> Batch:
        """Returns windows int32 [B, T] with hidden tokens; the weights of all are equal.

        Args:
          inputs: the windows of this process.
          numbers: of the windows in the data.
          rows: of the batch of all processes.
        """
        real = np.ones(inputs.shape, bool)
        batch = self.hidden(inputs, real, numbers, self.training.seed)
        return dataclasses.replace(
            batch, token_weights=batch.token_weights / (rows * self.count(inputs.shape[1]))
        )

    def hidden(
        self, inputs: np.ndarray, real: np.ndarray, numbers: Sequence[int], seed: int = _HELD_OUT
    ) -> Batch:
        """Returns windows with hidden tokens, whose weights are 1, among those that are `real`."""
        tokens, weights = inputs.copy(), np.zeros(inputs.shape, np.float32)
        replaced, drawn = self.training.mask_replaced, self.training.mask_random
        for row, number in enumerate(numbers):
            # The key is the window: no state passes from one window to the next.
            random = np.random.Generator(np.random.Philox(key=[seed, number]))
            # The first decides which tokens are hidden, the second what stands in their places.
            order, action = random.random((2, inputs.shape[1]))
            others = random.integers(self.text_ids, size=inputs.shape[1])
            # A fixed number for each window: so the weights do not depend on the other windows.
            legal = np.flatnonzero(real[row] & (inputs[row] < self.text_ids))
            chosen = legal[np.argsort(order[legal])[: self.count(real[row].sum())]]
            weights[row, chosen] = 1
            masks, draws = action < replaced, (action >= replaced) & (action < replaced + drawn)
            row_tokens = np.where(masks, self.mask_id, np.where(draws, others, inputs[row]))
            tokens[row, chosen] = row_tokens[chosen]
        return Batch(tokens, inputs, weights)
