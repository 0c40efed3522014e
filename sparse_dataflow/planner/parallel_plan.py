"""Parallel plans: how a model is sharded over chips and scheduled in time.

The mesh axes are those of `core/executors/mesh.py`, outermost first.  "data" replicates the model,
"stage" splits it by layers, "fsdp" and "context" shard the state that the ZeRO stage names, and
"feature" and "tensor" shard every layer.
"""

import dataclasses
from collections.abc import Collection

import numpy as np

from sparse_dataflow.core.config.model import DTYPES, ModelConfig
from sparse_dataflow.core.config.training import OPTIMIZERS, is_factory
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.parallel import EXPERTS

Counts = int | np.ndarray

BUBBLES = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0, "zero_bubble": 1 / 3}
"""Schedule -> duration of its bubble, in units of (stages - 1) / chunks passes over a stage.

gpipe, 1f1b and interleaved: arXiv 2104.04473, section 2.2.  zero_bubble fills the bubble of 1f1b
with gradients of weights, which leaves F + B - W: a third if the three take equal time (ZB-H1,
arXiv 2401.10241, table 2).
"""

RECOMPUTED = {
    "none": (),
    "keep": (),
    "dots": ("attention",),
    "full": ("qkv", "q", "k", "v", "attention", "attn_out", "mlp_gate", "mlp_in"),
    "block": ("qkv", "q", "k", "v", "attention", "attn_out", "mlp_gate", "mlp_in", "mlp_out"),
    "keep_qkv": ("attention", "attn_out", "mlp_gate", "mlp_in"),
    "keep_qkv_out": ("attention", "mlp_gate", "mlp_in"),
    "keep_attention": ("mlp_gate", "mlp_in"),
    "selective_op": ("attn_out", "mlp_gate", "mlp_in"),
    "minimal": (),
}
"""Remat policy -> sections that are recomputed, where the model has them.

"none", "keep" and "full" are policies of this project.  The others describe published runs: "dots"
saves the outputs of products, as Megatron's selective recomputation, "block"
is Megatron's full recomputation, "keep_qkv", "keep_qkv_out" and "keep_attention" are MaxText's
policies that save or offload these projections, the last with attention's output, and
"selective_op" is torchtitan's, which recomputes every second product; "minimal" is MaxText's
minimal_with_context, which recomputes element-wise operations only.
"""


KEY_EXCHANGES = ("own", "gather", "ring")
"""How the chips of "context" get keys and values of others.

"own" is this project's executor: they are gathered, and XLA computes the visible scores in chunks.
The others describe published runs with fused attention: "gather" gathers keys before it (arXiv
2407.21783, section 3.3.2), and "ring" passes them on while attention computes with those that are
there (arXiv 2310.01889; NVIDIA/TransformerEngine, AttnFuncWithCPAndKVP2P).
"""

PUBLISHED_EXPERTS = (*EXPERTS, "dropless")
"""What travels for experts: as this project's runs, or the routed rows alone.

"dropless" describes published runs, whose all-to-all has as many rows as tokens choose
(NVIDIA/Megatron-LM, MoEAlltoAllTokenDispatcher); a compiled program has buffers of one size, with
room for the fullest expert.
"""

OWN_CAST_BYTES = 2 * (2 + 2 + 1)
"""Bytes of an element of an operand that rounding to 8 bits moves in a step of this project.

Inputs, weights and gradients are each an operand of two products, which sum them along different
axes.  Each time they are read for their scales, read again and written in 8 bits (`ops.quantized`).
"""


@dataclasses.dataclass(frozen=True)
class ParallelPlan:
    """A parallel plan.  Counts may be numpy arrays that broadcast, which describes many plans.

    Attributes:
      data: size of the axis "data", replicas of the model.
      stage: pipeline stages.
      fsdp: size of the axis "fsdp", which shards state and batch rows.
      context: size of the axis "context", which shards state and the tokens of each sequence.
      tensor: tensor-parallel chips.
      feature: size of the axis "feature", which cuts the features of the residual stream.  The
        estimate multiplies strips of blocks at the rate of whole blocks.
      zero: ZeRO stage over "fsdp": 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also
        weights.
      experts: what travels for the experts of a layer, in PUBLISHED_EXPERTS; see
        `ParallelConfig`.
      expert: chips that share the experts of a layer, of those with other rows or tokens; None for
        those of "fsdp".
      micro_batch: sequences in a micro-batch of one replica.
      accumulation: micro-batches per optimizer step.
      chunks: model chunks per stage; above 1 only for the schedule "interleaved".
      schedule: key of BUBBLES; no effect if stage is 1.
      remat: key of RECOMPUTED.
      sequence_parallel: whether activations between tensor-parallel products are sharded along the
        sequence (arXiv 2205.05198).
      tensor_overlaps: whether collectives within layers may overlap with products.
      fused: whether element-wise operations are fused with each other and into products.
      fused_norms: whether a norm is one kernel where element-wise operations are fused.
      fused_attention: whether attention scores stay on chip (flash attention).
      tpu: whether the chips are TPUs, whose kernel of a block-sparse MLP recomputes GELU.
      gradient_bytes: bytes of one gradient element in a collective.
      island: number of chips joined by fast links; None for that of the chip.
      state_dtype: dtype of moments, and of the gradients of a micro-batch; see
        `TrainingConfig`.
      optimizer: see `TrainingConfig`.
      cast_bytes: bytes of an input, weight or gradient that rounding to 8 bits moves in a
        micro-batch, each element in all of its products.
      weight_casts: micro-batches for which a weight is rounded once.
      narrow_gathers: whether inputs of 8-bit products are rounded before "tensor" gathers them.
      key_exchange: one of KEY_EXCHANGES.
    """

    data: Counts = 1
    stage: Counts = 1
    fsdp: Counts = 1
    context: Counts = 1
    tensor: Counts = 1
    feature: Counts = 1
    zero: int = 0
    experts: str = "gather"
    expert: Counts | None = None
    micro_batch: Counts = 1
    accumulation: Counts = 1
    chunks: Counts = 1
    schedule: str = "1f1b"
    remat: str = "none"
    sequence_parallel: bool = False
    tensor_overlaps: bool = True
    fused: bool = True
    fused_norms: bool = True
    fused_attention: bool = True
    tpu: bool = False
    gradient_bytes: int = 4
    island: int | None = None
    state_dtype: str = "float32"
    optimizer: str = "adamw"
    cast_bytes: int = OWN_CAST_BYTES
    weight_casts: Counts = 1
    narrow_gathers: bool = False
    key_exchange: str = "own"

    def __post_init__(self):
        choices: dict[str, Collection[str]] = {
            "schedule": BUBBLES,
            "remat": RECOMPUTED,
            "state_dtype": DTYPES,
            "optimizer": (*OPTIMIZERS, *filter(is_factory, [self.optimizer])),
            "experts": PUBLISHED_EXPERTS,
            "key_exchange": KEY_EXCHANGES,
        }
        for name, legal in choices.items():
            if getattr(self, name) not in legal:
                raise UserError(
                    f"{name} {getattr(self, name)!r} is unknown; legal: {', '.join(legal)}."
                )
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"ZeRO stage {self.zero} is unknown; legal: 0, 1, 2, 3.")

    @property
    def exchanges(self) -> bool:
        """Whether tokens travel to the experts."""
        return self.experts != "gather"

    @property
    def expert_chips(self) -> Counts:
        """Number of chips that share the experts of a layer where tokens travel to them."""
        return self.fsdp if self.expert is None else self.expert

    @property
    def chips(self) -> Counts:
        """Number of chips."""
        return self.data * self.stage * self.state_shards * self.layer_chips

    @property
    def mesh(self) -> str:
        """The axes of a plan with integers as its counts, as `--mesh` has them."""
        rare = [axis for axis in ("context", "feature") if getattr(self, axis) != 1]
        axes = ("data", "stage", "fsdp", *rare, "tensor")
        return ",".join(f"{axis}:{getattr(self, axis)}" for axis in axes)

    @property
    def state_shards(self) -> Counts:
        """Number of chips that share the state which the ZeRO stage names."""
        return self.fsdp * self.context

    @property
    def layer_chips(self) -> Counts:
        """Number of chips that share every layer."""
        return self.feature * self.tensor

    @property
    def replicas(self) -> Counts:
        """Number of replicas, which compute different rows of the batch."""
        return self.data * self.fsdp

    @property
    def batch(self) -> Counts:
        """Sequences per optimizer step."""
        return self.replicas * self.micro_batch * self.accumulation

    def stage_layers(self, config: ModelConfig) -> np.ndarray:
        """Returns the layers of the fullest stage."""
        # Stages have whole layers, and the fullest one sets the pace.
        return np.ceil(config.num_layers / np.asarray(self.stage))

    def __str__(self):
        words = [f"data {self.data}", f"stage {self.stage}", f"fsdp {self.fsdp} (ZeRO {self.zero})"]
        words += [f"context {self.context}"] if np.any(np.asarray(self.context) > 1) else []
        words += [f"feature {self.feature}"] if np.any(np.asarray(self.feature) > 1) else []
        words += [f"tensor {self.tensor}", f"micro-batch {self.micro_batch}"]
        words += [f"accumulation {self.accumulation}"]
        words += ["experts exchange tokens"] if self.exchanges else []
        if np.any(np.asarray(self.stage) > 1):
            words += [f"{self.schedule}, {self.chunks} chunks"]
        return ", ".join([*words, f"remat {self.remat}"])
