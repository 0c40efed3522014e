"""Rows of a chip report: which experiment measures what, in how much time, and its figures.

Rows are in order of importance: the row that answers, the products, the step, then the rest.
"""

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sparse_dataflow.core.training import cost
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.runs.run_config import LAPTOP_SCALES, RECIPES, SIZES, preset

from .. import joules
from .chip_data import ANSWER, ChipFacts, Measure

DENSITY = 0.125
ROUNDS = 5
TARGETS = {"cpu": "nano"}
"""Platform -> scale of `--scale=auto`; 13b elsewhere."""

SECONDS = {
    ANSWER: (60, 150),
    "products_grouped": (60, 100),
    "products_tables": (90, 130),
    "step": (90, 200),
    "decode": (60, 90),
    "relay": (60, 100),
    "products_irregular": (90, 100),
    "peers": (60, 60),
}
"""Row -> seconds that it may take on a CPU, and on an accelerator, whose compilers are slower."""

SMALL_MEMORY = 24 * GIB
"""Device memory below which rows take fewer sequences."""

NO_BFLOAT16 = 8.0
"""NVIDIA compute capability below which products of bfloat16 have no tensor cores."""

Measures = Callable[[dict[str, Any]], list[Measure]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement in a process of its own.

    Attributes:
      name: identifier, the name of the row's folder.
      title: what it measures.
      command: argument vector; --keep=FOLDER is appended.
      seconds: time after which it is stopped, unless much time is left.
      measures: result file of the experiment -> figures.
      environment: additional environment variables.
    """

    name: str
    title: str
    command: tuple[str, ...]
    seconds: float
    measures: Measures
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def target(chip: ChipFacts, scale: str) -> str:
    """Returns the scale of a report; "auto" is 13b on an accelerator and nano on a CPU."""
    return TARGETS.get(chip.platform, "13b") if scale == "auto" else scale


def rows(chip: ChipFacts, scale: str) -> list[Row]:
    """Returns the rows of a chip, in order of importance.

    Args:
      scale: named size of the block and the products.
    """
    cpu = chip.platform == "cpu"
    dtype = _dtype(chip)
    few = chip.memory_bytes is not None and chip.memory_bytes < SMALL_MEMORY
    batch = RECIPES[scale].batch if scale in LAPTOP_SCALES else 2 if few else 8
    tokens = 1024 if cpu else 4096 if few else 8192
    step_scale, step_batch = step_size(chip, scale)
    small = scale if cost.parameter_count(SIZES[scale]) < 1e9 else "1.3b"

    def row(name: str, title: str, command: list[str], measures: Measures, **variables: str) -> Row:
        argv = (sys.executable, "-m", "sparse_dataflow", *command)
        seconds = SECONDS[name][0 if cpu else 1]
        return Row(name, title, argv, seconds, measures, variables)

    def model(name: str, batch: int) -> list[str]:
        return [
            f"--scale={name}", f"--block={block_side(chip, name)}", f"--density={DENSITY:g}",
            f"--batch={batch}", "--set", f"model.compute_dtype={dtype}",
        ]  # fmt: skip

    def products(patterns: str, implementations: str, products: str) -> list[str]:
        return [
            "kernel_bench", f"--shapes={scale}", f"--tokens={tokens}", f"--densities={DENSITY:g}",
            f"--blocks={block_side(chip, scale)}", f"--dtype={dtype}", f"--rounds={ROUNDS}",
            f"--patterns={patterns}", f"--implementations={implementations}",
            f"--products={products}",
        ]  # fmt: skip

    rounds = f"--rounds={ROUNDS}"
    # Where kernels run, xla is several times slower and its rows would take the time of others.
    kernels = "pallas_hopper,pallas_triton"
    others = "xla,xla_static" if cpu else f"{kernels},pallas_tpu,xla"
    irregular = kernels if dtype == "bfloat16" and chip.capability else others
    three = "forward,input_gradient,weight_gradient"
    saving = [] if step_scale in LAPTOP_SCALES else [
        "--set", "model.remat=full", "--set", "training.state_dtype=bfloat16"
    ]  # fmt: skip
    result = [
        row(ANSWER, f"One {scale} block, forward and backward",
            ["block_bench", *model(scale, batch), rounds],
            paired(f"{scale} block", "block_ms", "flop_ratio")),
        row("products_grouped", f"Three products of each {scale} projection, grouped",
            products("monarch", "grouped", three), summed_products),
        row("products_tables", f"Three products of each {scale} projection, index tables",
            products("monarch", irregular, three), summed_products),
        row("step", f"Training step of {step_scale}, the largest that fits up to {scale}",
            ["step_bench", *model(step_scale, step_batch), *saving, rounds],
            paired(f"{step_scale} training step", "step_ms", "flop_ceiling")),
        row("decode", f"Generated token of {small}",
            ["decode_bench", *model(small, 1), rounds],
            paired(f"{small} generated token", "token_ms", "byte_ceiling")),
        row("relay", f"Relay of {small}, four blocks: share of transfers behind compute",
            ["relay_depth", *model(small, 8), "--set", "training.micro_batches=4", "--depths=4",
             "--clipping=eager", "--steps=2"], overlap),
        row("products_irregular", f"Three products of each {scale} projection, random layout",
            products("random", irregular, three), summed_products),
    ]  # fmt: skip
    if importlib.util.find_spec("torch"):
        # PyTorch needs the device memory that jax would reserve.
        free = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if chip.platform == "gpu" else {}
        command = [*products("monarch", "grouped", "forward"), "--peers"]
        title = f"Forward product of each {scale} projection, other libraries"
        result.append(row("peers", title, command, summed_products, **free))
    return result


def block_side(chip: ChipFacts, scale: str) -> int:
    """Returns the largest block, up to 64 on a CPU and 128 elsewhere, that divides a scale's width
    into a multiple of 1 / density blocks."""
    width, largest = SIZES[scale].d_model, 64 if chip.platform == "cpu" else 128
    sides = (largest >> power for power in range(largest.bit_length()))
    return next(side for side in sides if width % (side / DENSITY) == 0)


def step_size(chip: ChipFacts, scale: str) -> tuple[str, int]:
    """Returns the largest scale up to `scale` whose dense training step fits the chip, and its
    batch: at most 8 sequences, or the recipe's at a laptop scale.

    Above the laptop scales a step has full remat and its state is bfloat16.
    """
    names = [name for name in SIZES if name not in LAPTOP_SCALES]
    for name in reversed(names[: names.index(scale) + 1] if scale in names else []):
        for batch in (8, 4, 2, 1):
            config = (
                preset(name, compute_dtype=_dtype(chip))
                .change(
                    model__remat="full", training__state_dtype="bfloat16", training__batch=batch
                )
                .without_auto()
            )
            fused = chip.platform != "cpu"
            plan = plan_memory.training_bytes(config.model, config.training, fused)
            if plan.total <= (chip.memory_bytes or math.inf) * memory.USABLE:
                return name, batch
    name = scale if scale in LAPTOP_SCALES else LAPTOP_SCALES[-1]
    return name, RECIPES[name].batch


def _dtype(chip: ChipFacts) -> str:
    old = chip.capability and float(chip.capability) < NO_BFLOAT16
    return "float32" if chip.platform == "cpu" or old else "bfloat16"


def paired(label: str, milliseconds: str, bound: str) -> Measures:
    """Returns the reader of a comparison of the dense with the sparse model.

    Args:
      label: name of the comparison.
      milliseconds: field of a model's time.
      bound: field of the largest possible ratio.
    """

    def measures(result: dict[str, Any]) -> list[Measure]:
        texts = []
        for name in ("dense", "sparse"):
            row = result["rows"][name]
            notes = [] if row.get("mfu") is None else [f"MFU {row['mfu']:.0%}"]
            notes += [f"remat {row['remat']}"] if "remat" in row else []
            notes += [text] if (text := joules.text(row)) else []
            note = f" ({', '.join(notes)})" if notes else ""
            texts.append(f"{name} {row[milliseconds]:.4g} ms{note}")
        shape = f"batch {result['batch']}, {result['dtype']}, block {result['block']}"
        text = f"{', '.join(texts)}; {shape}"
        low, high = result["ratio_low"], result["ratio_high"]
        return [Measure(label, result["ratio"], low, high, result[bound], text)]

    return measures


def summed_products(result: dict[str, Any]) -> list[Measure]:
    """Returns a measure per pattern and implementation of `kernel_bench`: the dense over the sparse
    time of all its products together."""
    cases: dict[tuple[str, str], list[dict]] = {}
    for row in result["rows"]:
        cases.setdefault((row["pattern"], row["implementation"]), []).append(row)
    most = max(map(len, cases.values()), default=0)
    measures = []
    for (pattern, implementation), rows in cases.items():
        dense, sparse = _milliseconds(rows)
        by_product = []
        for product in dict.fromkeys(row["product"] for row in rows):
            slow, fast = _milliseconds([row for row in rows if row["product"] == product])
            by_product.append(f"{product.replace('_', ' ')} {slow / fast:.2f}x")
        missing = f"; {most - len(rows)} products missing" if len(rows) < most else ""
        text = (
            f"{len(rows)} products: dense {dense:.4g} ms, sparse {sparse:.4g} ms; "
            f"{', '.join(by_product)}{missing}"
        )
        bound = 1 / rows[0]["density"]
        measures.append(
            Measure(
                f"products, {pattern}, {implementation}", dense / sparse, bound=bound, text=text
            )
        )
    return measures


def _milliseconds(rows: list[dict]) -> tuple[float, float]:
    return sum(row["dense_ms"] for row in rows), sum(row["sparse_ms"] for row in rows)


def overlap(result: dict[str, Any]) -> list[Measure]:
    """Returns the shares of transfers and updates of `relay_depth` that compute hides."""
    row = result["rows"][-1]
    shares = {"transfers": row["hidden_transfer"], "updates": row["hidden_updates"]}
    text = ", ".join(
        f"{share:.0%} of {name}" for name, share in shares.items() if share is not None
    )
    step = f"{row['layers']} blocks, a step of {row['step_seconds']:.3g} s"
    return [Measure(f"hidden behind compute: {text or 'nothing moved'}", text=step)]
