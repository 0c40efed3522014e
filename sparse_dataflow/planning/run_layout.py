"""How a model is laid out on chips and in time: the choices that the planner prices and searches.

The axes are those of `parallel/mesh.py`, from the outermost: "data" copies the model, "stage" cuts
it by layers, "fsdp" deals out what the ZeRO stage says, "tensor" cuts every layer.
"""

import dataclasses
from collections.abc import Collection

import numpy as np

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models.sizes import DTYPES

Counts = int | np.ndarray

EXECUTORS = ("whole", "pipeline", "relay")
BUBBLES = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0, "zero_bubble": 1 / 3}
"""Schedule -> seconds of its bubble in units of (stages - 1) / chunks stage passes.

gpipe, 1f1b and interleaved: arXiv 2104.04473, section 2.2.  zero_bubble defers the gradients of
weights into the bubble of 1f1b and leaves F + B - W of it, a third where the three are equally long
(ZB-H1, arXiv 2401.10241, table 2).  Tests compare all with the tables of
`parallel/pipeline/schedules.py`.
"""

RECOMPUTED = {
    "none": (),
    "dots": ("attention",),
    "full": ("qkv", "attention", "attn_out", "mlp_in"),
    "block": ("qkv", "attention", "attn_out", "mlp_in", "mlp_out"),
    "keep_qkv": ("attention", "attn_out", "mlp_in"),
    "keep_qkv_out": ("attention", "mlp_in"),
}
"""Remat -> sections computed a second time.  "none", "dots" and "full" are this project's own; the
rest are of published runs: "block" is Megatron's full recomputation, "keep_qkv" and "keep_qkv_out"
are MaxText's policies that offload those projections."""


@dataclasses.dataclass(frozen=True)
class RunLayout:
    """One layout; counts may be equally long numpy arrays, which makes it as many layouts at once.

    Attributes:
      data: copies of the model.
      stage: pipeline stages.
      fsdp: chips of a group that deals out state, and batch rows.
      tensor: chips that share each layer.
      zero: ZeRO stage over "fsdp": 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights.
      micro_batch: sequences that a group of stage x tensor chips computes at once.
      accumulation: micro-batches of an optimizer step.
      chunks: parts of the model that a stage holds, above 1 for the schedule "interleaved" only.
      schedule: a key of BUBBLES; has no effect where stage is 1.
      remat: a key of RECOMPUTED.
      executor: one of EXECUTORS.
      sequence_parallel: activations between the products of "tensor" are cut along the sequence
        (arXiv 2205.05198).
      fused: element-wise operations are fused with each other and into the products.
      fused_attention: attention's scores never reach memory.
      gradient_bytes: of one gradient in a collective.
      island: chips joined by fast links; None for the chip's own.
      state_dtype: of the moments, and of the gradients of a micro-batch; see
        `optim.optimizers.TrainingConfig`.
    """

    data: Counts = 1
    stage: Counts = 1
    fsdp: Counts = 1
    tensor: Counts = 1
    zero: int = 0
    micro_batch: Counts = 1
    accumulation: Counts = 1
    chunks: Counts = 1
    schedule: str = "1f1b"
    remat: str = "none"
    executor: str = "whole"
    sequence_parallel: bool = False
    fused: bool = True
    fused_attention: bool = True
    gradient_bytes: int = 4
    island: int | None = None
    state_dtype: str = "float32"

    def __post_init__(self):
        named: dict[str, Collection[str]] = {
            "schedule": BUBBLES,
            "remat": RECOMPUTED,
            "executor": EXECUTORS,
            "state_dtype": DTYPES,
        }
        for name, legal in named.items():
            if getattr(self, name) not in legal:
                raise UserError(
                    f"{name} {getattr(self, name)!r} is unknown; legal: {', '.join(legal)}."
                )
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"ZeRO stage {self.zero} is unknown; legal: 0, 1, 2, 3.")

    @property
    def chips(self) -> Counts:
        """Chips that it uses."""
        return self.data * self.stage * self.fsdp * self.tensor

    @property
    def replicas(self) -> Counts:
        """Groups that compute different rows of the batch."""
        return self.data * self.fsdp

    @property
    def batch(self) -> Counts:
        """Sequences of an optimizer step."""
        return self.replicas * self.micro_batch * self.accumulation

    def __str__(self):
        parts = [f"data {self.data}", f"stage {self.stage}", f"fsdp {self.fsdp} (ZeRO {self.zero})"]
        parts += [f"tensor {self.tensor}", f"micro-batch {self.micro_batch}"]
        parts += [f"accumulation {self.accumulation}"]
        if np.any(np.asarray(self.stage) > 1):
            parts += [f"{self.schedule}, {self.chunks} chunks"]
        return ", ".join([*parts, f"remat {self.remat}"])
