"""The relay against depth, batch and the whole executor, for the experiments `relay_*`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from sparse_dataflow.config.model import LinearSpec, ModelConfig
from sparse_dataflow.config.presets import SIZES
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.hardware import chips
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.parallel.relay.relay import RelayConfig
from sparse_dataflow.planning import memory, relay
from sparse_dataflow.runs import measurement
from sparse_dataflow.runs.benchmarks import benchmark
from sparse_dataflow.runs.benchmarks.options import RelayOptions
from sparse_dataflow.runs.benchmarks.relay_measure import relayed, table, whole
from sparse_dataflow.runs.request import Request
from sparse_dataflow.training.variants import variant

BERT_LARGE: dict[str, Any] = {"num_layers": 24, "d_model": 1024, "num_heads": 16, "d_ff": 4096}
BERT_VOCABULARY, BERT_SEQUENCE = 30522, 512
BERT_COLUMNS = (
    "executor", "stash", "batch", "device_bytes", "planned_device_bytes", "step_seconds",
    "tokens_per_second", "hidden_transfer",
)  # fmt: skip
DEPTH_COLUMNS = (
    "layers", "compile_seconds", "device_bytes", "planned_device_bytes", "step_seconds",
    "tokens_per_second", "model_tflops", "hidden_transfer", "hidden_updates",
)  # fmt: skip
FIFTY_COLUMNS = (
    "device_bytes", "planned_device_bytes", "step_seconds", "tokens_per_second", "hidden_transfer",
    "hidden_updates",
)  # fmt: skip


def models_of(request: Request) -> tuple[ModelConfig, TrainingConfig, Chip]:
    """(model, training, chip) of a command line; the model is dense where --density is 1.

    Without --scale the model is pico on a CPU, with blocks of 16, and 1.3b on an accelerator.
    """
    if request.scale == "auto":
        on_cpu = {"scale": "pico", "block": 16}
        cpu = jax.default_backend() == "cpu"
        request = request.with_defaults(on_cpu if cpu else {"scale": "1.3b"})
    sparse = request.changes.get("sparsity.density", 0) != 1
    config, chip = benchmark.config_here(request, sparse)
    first = variant(config, config.variants[0]).with_steps(1)
    return first.model, first.training, chip


def depth(request: Request, depths: Sequence[int], options: RelayOptions) -> None:
    """Trains a model of each depth through the relay; see `experiments.relay_depth`.

    Args:
      request: the model but for its depth, and its training.
      depths: numbers of blocks.
      options: how it is measured.
    """
    model, training, chip = models_of(request)
    rows = []
    for layers in sorted(depths):
        deep = dataclasses.replace(model, num_layers=layers)
        config = RelayConfig("host", options.clipping)
        rows.append(relayed(deep, training, config, chip, options.steps))
        print(table(rows[-1:], DEPTH_COLUMNS).splitlines()[-1], flush=True)
    print(table(rows, DEPTH_COLUMNS))
    measurement.keep(options.keep, f"relay_depth_{chip.name}", chip.name, {"rows": rows})


def bert_large(
    request: Request, batches: Sequence[int], device_batch: int, options: RelayOptions
) -> None:
    """Compares the relay with the whole executor; see `experiments.relay_bert_large`.

    Args:
      request: the model, which is BERT-Large's where it has 24 layers or more.
      batches: sequences in a step.
      device_batch: sequences in a micro-batch.
      options: how it is measured.
    """
    model, training, chip = models_of(request)
    if model.num_layers >= BERT_LARGE["num_layers"]:
        model = dataclasses.replace(
            model, **BERT_LARGE, max_len=BERT_SEQUENCE, vocab_size=BERT_VOCABULARY
        )
    model = dataclasses.replace(model, remat="full")
    rows = []
    for batch in sorted(batches):
        micro_batches = max(1, batch // device_batch)
        how = dataclasses.replace(
            training,
            batch=batch // micro_batches * micro_batches,
            micro_batches=micro_batches,
            sequence=min(model.max_len, BERT_SEQUENCE),
        )
        for stash in ("device", "host"):
            row = relayed(model, how, RelayConfig(stash, options.clipping), chip, options.steps)
            rows.append(row | {"stash": stash})
        rows.append(whole(model, how, chip, options.steps) | {"batch": batch})
        print(table(rows[-3:], BERT_COLUMNS), flush=True)
    measurement.keep(options.keep, f"relay_bert_large_{chip.name}", chip.name, {"rows": rows})


def fifty_billion(options) -> None:
    """Plans, and trains where `options.run`; see `experiments.relay_50b`.

    Args:
      options: of the experiment.
    """
    if options.shape == "50b":
        dense = ModelConfig(62, 8192, 64, 4 * 8192, 50257, 2048, compute_dtype="bfloat16")
    else:
        dense = SIZES[options.shape]
    block = 128 if options.shape == "50b" else 16
    sparse = dense.with_linears(LinearSpec("block_sparse", "monarch", options.density, block))
    training = TrainingConfig(
        1, options.batch, min(2048, dense.max_len), options.micro_batches, learning_rate=1e-4
    )
    chip = dataclasses.replace(
        chips.CHIPS[options.chip], memory_bytes=int(options.device_gb * chips.GIGA)
    )
    config, result = RelayConfig("host", "eager"), {}
    for name, model in (("dense", dense), ("sparse", sparse)):
        plan = relay.estimate(
            model,
            training.batch,
            training.sequence,
            training.micro_batches,
            stash=config.stash,
            clipping=config.clipping,
            chip=chip,
            host_bandwidth=chip.host_bandwidth,
            fused_attention=True,
        )
        fits_device = plan.device_total <= chip.capacity
        fits_host = plan.host_total <= options.host_gb * chips.GIGA
        print(
            f"{name}: {memory.parameter_count(model):,} stored parameters\n  {plan.text()}\n  "
            f"{'fits' if fits_device else 'does not fit'} a device of {options.device_gb:g} GB, "
            f"{'fits' if fits_host else 'does not fit'} a host of {options.host_gb:g} GB"
        )
        result[name] = {
            **dataclasses.asdict(plan), "fits_device": fits_device, "fits_host": fits_host
        }  # fmt: skip
    if options.run:
        chip = hardware.detect(["float32"])
        result["run"] = relayed(sparse, training, config, chip, options.steps)
        print(table([result["run"]], FIFTY_COLUMNS))
    measurement.keep(options.keep, f"relay_50b_{chip.name}", chip.name, result)
