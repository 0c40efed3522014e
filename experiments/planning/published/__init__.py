"""Published measurements: rows to which the planner's constants are fitted, and test rows.

`sources.csv` has the source of each file and its sample:

- 1: its rows were there with the first fits.
- 2: chosen and entered before any prediction of them, and then split.
- 3: chosen and entered before any prediction of them, after the first two fits.
- confirm 1: chosen and entered after all of these and before any prediction of them.
- confirm 2 and 3: entered in the same way after the one before.
- terms: in no fit, but terms of the model were chosen with a look at them.
- confirm 4: entered in its own commit with the runs of "terms", in no fit.  Its predictions were
  printed beside theirs while these terms were written.
- confirm 5: entered after these terms were committed and before any prediction of them.

Columns: the model, its plan as in `parallel_plan.ParallelPlan` (island: chips joined by fast links,
a node or a slice), the figure and its unit, and their status:

- `number`: "verified" (read in the source) or "recalled".
- `layout`: status of the parallel plan: "verified", "recalled" from the paper, or "assumed" if the
  source does not name it.
- `assumed`: fields of a verified plan that the source does not name; "network" is the links between
  islands, "compile" whether the model is compiled.
- `stack`: key of `efficiency.STACKS`; from the file where the column is absent.
- `family`: key of FAMILIES; "gpt3" where the column is absent.  `kv_heads`: heads of keys and
  values.
- `offload`: what is in host memory: layer "inputs", and what remat "saved".  It costs no time,
  because the copies take less time than the forward pass that they overlap with.
- `source`: who measured it, where a file has rows of several.
- `weights`: dtype of the master weights, gradients and moments where it is not float32.
- `schedule`: key of `parallel_plan.BUBBLES`; "interleaved" or "1f1b" by the chunks where it is
  empty.
- `attention`: "flash 1" where attention is FlashAttention 1; "flash 2" where it is the second on
  Hopper, and the software's constant is not of it.
- `fused_norms`: 0 where norms are not one kernel.
- `slow_gb_s`, `pair_gb_s`: GB/s of a chip to other islands and between two chips of an island,
  where they are not those of the chip's row in `hardware.chips`.
- `precision`: "fp8" for products of 8 bits.  `cast_bytes`: bytes that rounding an element of their
  operands moves: reads it in 16 bits and writes it twice in 8, because Hopper multiplies rows only
  (docs of Transformer Engine, "Handling transposes"); scales of the current step read it once more.
- `context`: chips that share a sequence; `key_exchange`: one of `parallel_plan.KEY_EXCHANGES`.
- `experts`, `top_k`, `capacity`, `head_dim`: as in `ModelConfig`.  `exchange`: one of
  `parallel_plan.PUBLISHED_EXPERTS`; `expert`: chips that share the experts of a layer.
- `split`: in the files of sample 1, of every four rows in the order of the source, the first and
  last are "fit", the others "test".  Rows of another source in the same file, and all scaling rows,
  are "test".  On MI250X only the 175B is "fit".  In the files of sample 2, the first of every two
  rows is "fit", the second "test".  In those of sample 3, the half of a source whose names have the
  smaller SHA-256 is "fit", the other half "test".  Rows of CONFIRMATIONS are "confirm": no fit has
  seen them, nor any choice of terms but that of confirm 4.

Protocol: constants and error bands are fitted to "fit" rows only.  The terms of the cost model that
were there with the first seven files were chosen with all of their rows known.  The other files of
sample 1 gave software stacks, `traffic`, collectives within layers that do not overlap and the
factor of families with few rows, chosen by the residuals of "fit" rows.  Two were looked for after
three test rows were off by more than 20%: `run_memory.retry_seconds`, which a fitted run shows too
and whose two constants are from fitted runs, and sends that overlap in interleaved schedules only,
which has no constant and leaves the fit as it was.

The files of sample 2 were a confirmation first, with a median error of 18.3%.  Their diagnosis by
kind of run was published with all of their rows.  Then they were split, and these were chosen by
the residuals of their "fit" rows: the stacks of `deepspeed`, `internevo`, `aleph` and `aleph-norm`;
`Efficiency.by_owner`; the rate of FlashAttention 1; `step_time.UNALIGNED`, from one row.  No test
row has been looked at between the split and the fit.

The files of sample 3 were a confirmation too, with a median error of 9.0% and a published
diagnosis.  Then they were split, and these were chosen by the residuals of "fit" rows: the stacks
of `paddle`, `sail` and `pipelining`; the layer less in the stage of the head, which Aleph Alpha's
fitted 30B in 8 and 16 stages show; the overhead of a repeated pass; `attention` of the MPT rows, as
their scripts say; `Efficiency.data_overlap`.  Constants and bands were committed before any test
row or row of CONFIRMATIONS was looked at.

After these fits, `fused_norms` and `pair_gb_s` were entered in fitted and test rows alike, where
residuals of "fit" rows led to the code of their sources: foundation-model-stack,
fms/modules/layernorm.py; LlamaRMSNorm of transformers, which vectorlm loads; RMSNorm of torchtitan
(torchtitan/models/norms.py) and KempnerForge (kempnerforge/model/norm.py); the column "kernel" of
Aleph Alpha's sheets; "use_fused_rms_norm=False" in FlagPerf's table, beside the runs on 40 GB (the
configuration files there say 1).  The lack of that kernel had been suspected of test rows before.
KempnerForge's nodes have four H200; that no switch joins them is assumed.  Constants and bands were
committed before any test row or row of CONFIRMATIONS was looked at.

Whether the software overlaps sums of gradients was tried as one more field, by code and scripts of
every source.  The residuals of "fit" rows did not become smaller, so it is not there.  It was
decided before the look at the third of CONFIRMATIONS.

In samples 1 to 3 and in confirm 1 to 3 two chips that share a sequence are described as replicas
with a half of it: nothing waits for their ring of keys, which is in one node.  Llama 3 at 131,072
tokens has its axis "context", since after its error was published.

Terms that "terms" gave, none with a fitted constant: casts of operands that do not overlap with
products; `half_width` in proportion to the rate, because what a product loses at its edges is not
faster in 8 bits; gathers of 8 bits; rings of keys; routed rows without buffers on their own axis.
"""

import csv
import dataclasses
from importlib import resources
from typing import Any

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.training.cost import flops_per_token
from sparse_dataflow.hardware.chips import CHIPS, GIGA, KNOWN, TERA, Chip
from sparse_dataflow.planner import efficiency
from sparse_dataflow.planner.efficiency import Efficiency
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.runs import families


def _table(name: str) -> csv.DictReader:
    text = (resources.files(__package__) / f"{name}.csv").read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


def _files(sample: str) -> tuple[str, ...]:
    return tuple(row["file"] for row in _table("sources") if row["sample"] == sample)


SOURCES = (*_files("1"), *_files("2"), *_files("3"))
DIAGNOSED = _files("terms")
"""Files of rows in no fit, by which terms of the model were chosen."""
CONFIRMATIONS = tuple(_files(f"confirm {number}") for number in range(1, 6))
"""Files of rows that no fit has seen, by sample.  The first and third are almost all on A100, the
others mostly on H100; the fit knows the software of all but nanotron.  The last two have 8-bit
products, long sequences and experts, which no fitted row has."""
_COUNTS = (
    *("data", "stage", "fsdp", "tensor", "island", "chunks", "zero"),
    *("accumulation", "gradient_bytes"),
)

FAMILIES = {
    **families.FAMILIES,
    # Squared ReLU, which costs what ReLU costs.
    "nemotron": {
        "norm": "layernorm",
        "positions": "rotary",
        "activation": "relu",
        "biases": (),
        "tied_embeddings": False,
    },
    "neox": {"positions": "rotary", "tied_embeddings": False},
}
"""Family -> fields of `ModelConfig`: those that this project trains, and those of other rows."""


COUNTED = {
    "tflops_model": (2, 3),
    "mfu": (2, 3),
    "tflops_executed": (2, 4),
    "tflops_causal": (1, 3),
    "tflops_6n": (0, 3),
}
"""Unit of a row -> the convention of its source: causal halves of attention, and forward passes in
a step, of which a backward pass counts two."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One published figure.

    Attributes:
      sequence: tokens per sequence.
      unit: "seconds" per step; "tokens_per_second" per chip; "mfu", percent of the peak in model
        FLOPs; or TFLOP/s per chip, counted as "tflops_model" (whole attention square),
        "tflops_executed" (also a recomputed forward pass), "tflops_causal" (half of attention) or
        "tflops_6n" (6 per parameter).
      number: "verified" or "recalled".
      plan_status: "verified", "recalled" or "assumed".
      split: "fit", "test", "terms" or "confirm".
      stack: software that ran it; one of efficiency.STACKS.
      assumed: fields that the source does not name.
      offload: "inputs" and "saved"; see the module.
      weights: dtype of the state.
      source: who measured it.
      attention: "flash 1" for FlashAttention 1, "flash 2" for its second version on Hopper.
    """

    name: str
    config: ModelConfig
    sequence: int
    chip: Chip
    plan: ParallelPlan
    value: float
    unit: str
    number: str
    plan_status: str
    split: str
    stack: str = "megatron"
    assumed: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    weights: str = "float32"
    source: str = ""
    attention: str = ""

    @property
    def key(self) -> str:
        """Key of the run's constants in `efficiency.EFFICIENCIES`."""
        return efficiency.key(self.chip.family, self.stack)

    @property
    def counted_flops(self) -> float:
        """FLOPs per step by the counting rule of the unit: 3 forward passes, or 4 if recomputed."""
        tokens = self.plan.batch * self.sequence
        flops = flops_per_token(self.config, self.sequence)
        halves, passes = COUNTED.get(self.unit, COUNTED["tflops_model"])
        # Logits are not recomputed (arXiv 2104.04473, appendix).
        blocks = flops.projections + halves * flops.attention
        return float(tokens * (passes / 3 * blocks + flops.head))

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        if self.unit == "seconds":
            return self.value
        if self.unit == "tokens_per_second":
            return float(self.plan.batch * self.sequence / (self.value * self.plan.chips))
        rate = self.value * TERA
        if self.unit == "mfu":
            rate = self.value / 100 * self.chip.rates("bfloat16")[0]
        return float(self.counted_flops / (self.plan.chips * rate))


FLASH_2_ON_HOPPER = efficiency.EFFICIENCIES["hopper/eager"].attention
"""Rate of FlashAttention 2 on H100: llm-foundry's, the only fitted one of long sequences."""


def with_kernel(row: Row, efficiency: Efficiency) -> Efficiency:
    """Returns the constants of a run: FlashAttention 1 has half the rate of the second version.

    arXiv 2307.08691, abstract: "around 2x speedup compared to FlashAttention".  The second version
    has no kernel for Hopper (arXiv 2407.08608: 35% of an H100); its rate there is that of fitted
    runs to 65,536 tokens.
    """
    if row.attention == "flash 1":
        return dataclasses.replace(efficiency, attention=efficiency.attention / 2)
    if row.attention == "flash 2" and row.chip.family.startswith("hopper"):
        rate = min(efficiency.attention, FLASH_2_ON_HOPPER)
        return dataclasses.replace(efficiency, attention=rate)
    return efficiency


def rows(source: str) -> list[Row]:
    """Returns the rows of a file of SOURCES or of a confirmation, in the order of the source."""
    return [_row({"source": source, **fields}) for fields in _table(source)]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A published scaling efficiency.

    Attributes:
      name: name of the study.
      scale: key of `runs.families.SIZES`.
      before: plan on few chips.
      after: plan on many chips.
      value: throughput per chip of `after`, in percent of that of `before`.
    """

    name: str
    scale: str
    chip: Chip
    before: ParallelPlan
    after: ParallelPlan
    value: float


def scalings() -> list[Scaling]:
    """Returns the scaling studies, with micro-batch 1, 1F1B, ZeRO 1 and full recomputation."""
    return [_scaling(fields) for fields in _table("scaling")]


def _scaling(fields):
    stage, tensor = int(fields["stage"]), int(fields["tensor"])

    def plan(end):
        fsdp = int(fields[f"chips_{end}"]) // (stage * tensor)
        return ParallelPlan(
            stage=stage,
            fsdp=fsdp,
            tensor=tensor,
            zero=1,
            accumulation=int(fields[f"batch_{end}"]) // fsdp,
            remat="block",
            gradient_bytes=2,
        )

    return Scaling(
        fields["name"],
        fields["scale"],
        CHIPS[fields["chip"]],
        plan("from"),
        plan("to"),
        float(fields["value"]),
    )


def _number(fields, name, default):
    """Returns a column that may be absent or empty, with the type of its default."""
    return type(default)(fields.get(name) or default)


def _row(fields):
    counts: dict[str, Any] = {name: int(fields[name]) for name in _COUNTS}
    micro_batch: Any = float(fields["micro_batch"])
    stack = "xla" if fields["chip"].startswith("tpu") else fields.get("stack", "megatron")
    plan = ParallelPlan(
        **counts,
        micro_batch=int(micro_batch) if micro_batch.is_integer() else micro_batch,
        tensor_overlaps=fields.get("tensor_overlaps", "1") == "1",
        schedule=fields.get("schedule") or ("interleaved" if counts["chunks"] > 1 else "1f1b"),
        remat=fields["remat"],
        sequence_parallel=fields["sequence_parallel"] == "1",
        fused_norms=fields.get("fused_norms", "1") == "1",
        fused_attention=fields["fused_attention"] == "1",
        context=_number(fields, "context", 1),
        key_exchange=fields.get("key_exchange") or "own",
        experts=fields.get("exchange") or "gather",
        expert=_number(fields, "expert", 0) or None,
        cast_bytes=_number(fields, "cast_bytes", 0),
        # Transformer Engine rounds the inputs of column-parallel products before it gathers them.
        narrow_gathers=bool(fields.get("cast_bytes")) and stack == "megatron",
        # Software of published runs caches the rounded weights of a step.
        weight_casts=counts["accumulation"],
    )
    layers, d_model, heads, d_ff, vocab, sequence = (
        int(fields[n]) for n in ("layers", "d_model", "heads", "d_ff", "vocab", "sequence")
    )
    config = ModelConfig(
        *(layers, d_model, heads, d_ff, vocab, sequence),
        compute_dtype="bfloat16",
        num_kv_heads=int(fields.get("kv_heads", heads)),
        head_dim=_number(fields, "head_dim", 0),
        experts=_number(fields, "experts", 0),
        top_k=_number(fields, "top_k", 1),
        expert_capacity=_number(fields, "capacity", 0.0),
        precision=fields.get("precision") or "compute_dtype",
        **FAMILIES[fields.get("family", "gpt3")],
    )
    chip = KNOWN[fields["chip"]]
    links = {"slow": fields.get("slow_gb_s"), "pair": fields.get("pair_gb_s")}
    rates: dict[str, Any] = {name: float(rate) * GIGA for name, rate in links.items() if rate}
    if rates:
        assert chip.network is not None
        chip = dataclasses.replace(chip, network=dataclasses.replace(chip.network, **rates))
    return Row(
        fields["name"],
        config,
        config.max_len,
        chip,
        plan,
        float(fields["value"]),
        unit=fields["unit"],
        number=fields["number"],
        plan_status=fields["layout"],
        split=fields["split"],
        stack=stack,
        assumed=tuple(fields.get("assumed", "").split()),
        offload=tuple(fields.get("offload", "").split()),
        weights=fields.get("weights", "float32"),
        source=fields["source"],
        attention=fields.get("attention", ""),
    )
