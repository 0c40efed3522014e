"""Settings of attention: which tokens each layer sees, and how scores are scaled."""

import dataclasses
from collections.abc import Sequence

from sparse_dataflow.core.config.settings import MOST_SIZE, Readable, between, setting
from sparse_dataflow.files.errors import UserError

SLIDING, FULL = "sliding", "full"
LAYER_TYPES = (SLIDING, FULL)
"""Kinds of layers: those with the window, and those that see all tokens."""

DENSE_TOKENS = 1024
"""Most keys whose scores XLA computes at once, where no kernel of attention runs; the scores of
more are computed in chunks."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AttentionSettings(Readable):
    """The attention of a `ModelConfig`.

    Attributes:
      attention_cap: the scores s become cap * tanh(s / cap) before the softmax (Gemma 2, arXiv
        2408.00118).
      layer_types: "sliding+full" alternates, beginning with a layer with the window.  A list that
        is longer than the model counts from its start.
    """

    qk_norm: bool = setting(
        False, "Normalise queries and keys over the width of a head, before rotation."
    )
    window: int = setting(
        0,
        "Last tokens that each token attends to, itself included; 0 is all.",
        legal=between(0, MOST_SIZE),
    )
    layer_types: str = setting(
        SLIDING,
        "Layers with model.window (sliding) and without (full): names joined by +, repeated over "
        "the depth.",
    )
    attention_cap: float = setting(
        0.0, "Soft cap of attention scores; 0 is none.", legal=between(0, MOST_SIZE)
    )
    attention_scalar: int = setting(
        0,
        "Attention scores are divided by its square root; 0 is the width of a head.",
        legal=between(0, MOST_SIZE),
    )

    def layer_type(self, layer: int) -> str:
        """Returns the kind of a layer, one of LAYER_TYPES."""
        names = self.layer_types.split("+")
        return names[layer % len(names)]

    def check_layer_types(self) -> None:
        """Raises UserError if `layer_types` is unknown, or differs without a window."""
        names = self.layer_types.split("+")
        if not set(names) <= set(LAYER_TYPES):
            raise UserError(
                f"model.layer_types={self.layer_types[:60]} is unknown. Legal: "
                f"{', '.join(LAYER_TYPES)}, or several of them as in sliding+full."
            )
        if FULL in names and not self.window:
            raise UserError(
                f"model.layer_types={self.layer_types[:60]} needs a window; legal with "
                f"model.window=0: {SLIDING}."
            )


def pattern(kinds: Sequence[str]) -> str:
    """Returns the shortest `layer_types` that gives the kinds of all layers, in order."""
    for period in range(1, len(kinds)):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return "+".join(kinds[:period])
    return "+".join(kinds)
