"""The relay against depth, batch and the whole executor, for the experiments `relay_*`."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.preflight import relay_plan
from sparse_dataflow.commands.request import Request
from sparse_dataflow.commands.training_data import corpus_of
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import MASKED, TrainingConfig
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.step_metrics import StepReport
from sparse_dataflow.core.training import cost
from sparse_dataflow.data import cache
from sparse_dataflow.data.batches import TrainBatches
from sparse_dataflow.data.masking import Masking
from sparse_dataflow.data.tokenizer import load_tokenizer
from sparse_dataflow.data.tokens import split_tokens
from sparse_dataflow.files import output
from sparse_dataflow.hardware import chips
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.relay import timeline
from sparse_dataflow.relay.host_state import fresh_state
from sparse_dataflow.relay.relay import Relay, RelayConfig
from sparse_dataflow.runs.parallel import STASHES
from sparse_dataflow.runs.run_config import SIZES, DataConfig
from sparse_dataflow.runs.variants import variant

from . import benchmark, paired, steps

NOT_MEASURED = "does not fit"
_UNMEASURED: dict[str, Any] = {"step_seconds": NOT_MEASURED}
_RELAY: dict[str, Any] = {"executor": "relay"}
_WHOLE: dict[str, Any] = {"executor": "whole"}
BERT_LARGE: dict[str, Any] = {"num_layers": 24, "d_model": 1024, "num_heads": 16, "d_ff": 4096}
BERT_VOCABULARY, BERT_SEQUENCE = 30522, 512
BERT_COLUMNS = (
    "executor", "stash", "batch", "micro_batches", "device_bytes", "planned_device_bytes",
    "step_seconds", "tokens_per_second", "over_whole", "over_whole_low", "over_whole_high",
    "hidden_transfer",
)  # fmt: skip
DEPTH_COLUMNS = (
    "layers", "compile_seconds", "device_bytes", "planned_device_bytes", "step_seconds",
    "tokens_per_second", "model_tflops", "hidden_transfer", "hidden_updates",
)  # fmt: skip
FIFTY_COLUMNS = (
    "device_bytes", "planned_device_bytes", "step_seconds", "tokens_per_second", "hidden_transfer",
    "hidden_updates",
)  # fmt: skip


_NARROW = {"state_dtype": "bfloat16"}
PLACEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32 moments": ({}, {}),
    "bfloat16 moments": (_NARROW, {}),
    "bfloat16 moments, copies of weights made at each fetch": (_NARROW, {"copies": False}),
    "bfloat16 moments, masters and moments in files": (_NARROW, {"files": True}),
}
"""Name -> (changes of the training, options of `relay_plan.estimate`), the fastest first."""


def depth(request: Request, options) -> None:
    """Trains a model of each depth through the relay; see `experiments.relay_depth`."""
    model, training, chip = _model_of(request)
    rows = []
    for layers in sorted(options.depths):
        deep = dataclasses.replace(model, num_layers=layers)
        config = RelayConfig("host", options.clipping)
        rows.append(_relayed(deep, training, config, chip, options.steps))
        print(_table(rows[-1:], DEPTH_COLUMNS).splitlines()[-1], flush=True)
    print(_table(rows, DEPTH_COLUMNS))
    measurement.keep(options.keep, f"relay_depth_{chip.name}", chip.name, [{"rows": rows}])


def bert_large(request: Request, options) -> None:
    """Compares the relay with the whole executor; see `experiments.relay_bert_large`.

    A model of 24 layers or more gets the shape of BERT-Large.
    """
    model, training, chip = _model_of(request)
    model = dataclasses.replace(model, bidirectional=True)
    training = dataclasses.replace(training, objective=MASKED)
    if model.num_layers >= BERT_LARGE["num_layers"]:
        model = dataclasses.replace(
            model, **BERT_LARGE, max_len=BERT_SEQUENCE, vocab_size=BERT_VOCABULARY
        )
    model = dataclasses.replace(model, remat="full")
    training = dataclasses.replace(training, sequence=min(model.max_len, BERT_SEQUENCE))
    if options.limit:
        name, rows = "relay_equal_memory", _with_largest_batches(model, training, chip, options)
    else:
        name, rows = "relay_bert_large", _with_equal_batches(model, training, chip, options)
    result = {"device_memory": options.limit, "rows": rows}
    measurement.keep(options.keep, f"{name}_{chip.name}", chip.name, [result])


def _with_equal_batches(model, training, chip: Chip, options) -> list[dict]:
    """Returns the rows of each batch of `options.batches`, of each stash beside `whole`."""
    rows = []
    for batch in sorted(options.batches):
        how = with_batch(training, batch, options.device_batch)
        for stash in STASHES:
            config = RelayConfig(stash, options.clipping)
            relay, whole = _relay(model, how, config, chip), _whole(model, how, chip)
            if isinstance(whole, Contender):
                rows += _in_turns(model, chip, [relay, whole], options.steps)
            else:
                rows += [*_in_turns(model, chip, [relay], options.steps), whole]
            del relay, whole
        print(_table(rows[-4:], BERT_COLUMNS), flush=True)
    return rows


def _with_largest_batches(model, training, chip: Chip, options) -> list[dict]:
    """Returns a row of each stash and of `whole`, each at its largest batch within the limit.

    `whole` runs its batch in one micro-batch.
    """
    contenders, rows = [], []
    for config in (*(RelayConfig(stash, options.clipping) for stash in STASHES), None):
        how, need = largest_batch(
            model, training, config, chip, options.limit, max(options.batches), options.device_batch
        )
        if how is None:
            about = _RELAY | {"stash": config.stash} if config else _WHOLE
            rows.append(about | {"batch": 1, "planned_device_bytes": need} | _UNMEASURED)
        elif config:
            contenders.append(_relay(model, how, config, chip))
        else:
            contenders.append(_compiled_whole(model, how, need))
    if contenders:
        rows = _in_turns(model, chip, contenders, options.steps) + rows
    print(_table(rows, BERT_COLUMNS), flush=True)
    return rows


def largest_batch(
    model: ModelConfig,
    training: TrainingConfig,
    config: RelayConfig | None,
    chip: Chip,
    limit: int,
    most: int,
    device_batch: int,
) -> tuple[TrainingConfig | None, int]:
    """Returns the training with the largest batch that a device holds by the plan, and its bytes.

    Args:
      config: of the relay; None for the whole executor, whose batch is one micro-batch.
      limit: bytes of the device.
      most: sequences of the largest batch.
      device_batch: sequences of the relay's micro-batches.

    Returns:
      (training, bytes); if no batch fits, (None, bytes of one sequence).
    """
    need = 0
    sizes = range(most, 0, -1)
    batches = [with_batch(training, size, device_batch if config else size) for size in sizes]
    for how in dict.fromkeys(batches):  # Several sizes may leave out the same sequences.
        if config:
            need = relay_plan.estimate(model, how, config, chip).device_total
        else:
            need = _whole_bytes(model, how, chip)
        if need <= limit:
            return how, need
    return None, need


def with_batch(training: TrainingConfig, batch: int, device_batch: int) -> TrainingConfig:
    """Returns the training in equal micro-batches of at least `device_batch` sequences.

    A smaller batch is one micro-batch.  Sequences that do not divide are left out.
    """
    micro_batches = max(1, batch // device_batch)
    batch = batch // micro_batches * micro_batches
    return dataclasses.replace(training, batch=batch, micro_batches=micro_batches)


def fifty_billion(options) -> None:
    """Plans, and trains where `options.run`; see `experiments.relay_50b`."""
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
    host_bytes = options.host_gb * chips.GIGA
    for name, model in (("dense", dense), ("sparse", sparse)):
        placement, plan = _placed(model, training, config, chip, host_bytes, options.host_cores)
        fits = {
            "fits_device": plan.device_total <= chip.capacity,
            "fits_host": plan.host_total <= host_bytes,
        }
        on_device, on_host = ("fits" if each else "does not fit" for each in fits.values())
        print(
            f"{name}: {cost.parameter_count(model):,} stored parameters, {placement}\n  "
            f"{plan.text()}\n  {on_device} a device of {options.device_gb:g} GB, "
            f"{on_host} a host of {options.host_gb:g} GB"
        )
        result[name] = dataclasses.asdict(plan) | fits | {"placement": placement}
        result[name]["step_seconds"] = plan.step_seconds
    if options.run:
        chip = hardware.detect(["float32"])
        result["run"] = _relayed(sparse, training, config, chip, options.steps)
        print(_table([result["run"]], FIFTY_COLUMNS))
    measurement.keep(options.keep, f"relay_50b_{chip.name}", chip.name, [result])


def _placed(model, training, config, chip: Chip, host_bytes: float, cores: int):
    """Returns (name, estimate) of the first of `PLACEMENTS` that fits a host, else the last."""
    plans = {
        name: relay_plan.estimate(
            model, dataclasses.replace(training, **changes), config, chip, cores=cores, **options
        )
        for name, (changes, options) in PLACEMENTS.items()
    }
    fitting = [name for name, plan in plans.items() if plan.host_total <= host_bytes]
    name = next(iter(fitting), [*plans][-1])
    return name, plans[name]


def _model_of(request: Request) -> tuple[ModelConfig, TrainingConfig, Chip]:
    """The model of a command line, which is dense where --density is 1.

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


class Contender(NamedTuple):
    """A compiled training step, and what is known of it.

    Attributes:
      training: batch, micro-batches and sequence.
      step: trains one step.
      planned: fields of its row that are known before it runs.
      measured: returns the fields that are known after it ran.
    """

    training: TrainingConfig
    step: Callable[[], StepReport]
    planned: dict[str, Any]
    measured: Callable[[], dict[str, Any]]


def _relay(model, training, config: RelayConfig, chip: Chip) -> Contender:
    """Compiles the relay.

    Device memory is the most bytes of arrays that were alive on the device when a program was
    started, with that program's results and temporaries.

    Raises:
      UserError: host memory is too small.
    """
    plan = relay_plan.estimate(model, training, config, chip)
    relay_plan.refuse_small_host(plan)
    start = time.perf_counter()
    run = Relay(model, training, config, changing=False)
    compiled = time.perf_counter() - start
    state = fresh_state(model, training)
    batch = _batch(model, training)
    state = state._replace(rest=stacks.with_groups(state.rest))
    most = 0
    working = {
        name: max(_working_bytes(getattr(group, name)) for group in run.programs)
        for name in run.programs[0]._fields
    }

    def step():
        nonlocal state
        before = _live_bytes()

        def observe(program):
            nonlocal most
            most = max(most, _live_bytes() - before + working[program])

        run.observe = observe
        state, report = run.train_step(state, batch, steps.LEARNING_RATE)
        return report

    def measured():
        spans = run.timeline.spans
        return {
            "device_bytes": most,
            "hidden_transfer": timeline.hidden_share(spans),
            "hidden_updates": timeline.hidden_share(spans, ("update",)),
            **{f"{kind}_seconds": timeline.seconds(spans, kind) for kind in timeline.KINDS},
        }

    planned = _RELAY | {
        "stash": config.stash,
        "compile_seconds": compiled,
        "planned_device_bytes": plan.device_total,
        "planned_host_bytes": plan.host_total,
    }
    return Contender(training, step, planned, measured)


def _batch(model: ModelConfig, training: TrainingConfig) -> Batch:
    """Returns a batch of random tokens; for a masked training one of text with hidden tokens."""
    if not training.hides_tokens:
        return Batch.from_windows(steps.random_tokens(model, training))
    corpus = corpus_of(DataConfig())
    learned = load_tokenizer("bpe", corpus, model.vocab_size - 1, cache.FOLDER)
    tokenizer = dataclasses.replace(learned, vocab_size=model.vocab_size)
    tokens = split_tokens(corpus, "train", tokenizer, cache.FOLDER).tokens
    shape, masking = (training.batch, training.sequence), Masking.of(training, tokenizer)
    return TrainBatches(tokens, *shape, training.seed, masking=masking)[0]


def _relayed(model, training, config: RelayConfig, chip: Chip, count: int) -> dict:
    """One row of the relay alone; its device memory is the runtime's own peak if it reports one."""
    (row,) = _in_turns(model, chip, [_relay(model, training, config, chip)], count)
    return row | {"device_bytes": _peak_bytes() or row["device_bytes"]}


def _whole(model, training, chip: Chip) -> Contender | dict:
    """Compiles the whole executor; a row that says NOT_MEASURED where the device is too small."""
    plan = _whole_bytes(model, training, chip)
    if chip.memory_bytes is not None and plan > chip.memory_bytes * memory.USABLE:
        return _WHOLE | {"batch": training.batch, "planned_device_bytes": plan} | _UNMEASURED
    return _compiled_whole(model, training, plan)


def _whole_bytes(model, training, chip: Chip) -> int:
    """Returns the bytes on the device by the plan."""
    fused = memory.runs_fused(model, chip, chip.name not in chips.KNOWN)
    return plan_memory.training_bytes(model, training, fused).total


def _compiled_whole(model, training, plan: int) -> Contender:
    step = steps.compiled_step(model, training, _batch(model, training))
    planned = {"planned_device_bytes": plan, "compile_seconds": step.compile_seconds}
    measured = {"device_bytes": step.step_bytes}
    return Contender(training, step.run, _WHOLE | planned, lambda: measured)


def _in_turns(model, chip: Chip, contenders: Sequence[Contender], count: int) -> list[dict]:
    """Returns a row for each contender, after one untimed step each.

    They step in turns, so that all see the same load of the machine. Rows but the last have the
    ratio of their seconds a token to those of the last, by rounds.
    """
    losses: list[list[float]] = [[float(each.step().loss)] for each in contenders]
    seconds: list[list[float]] = [[] for _ in contenders]
    for _ in range(count):
        for number, each in enumerate(contenders):
            start = time.perf_counter()
            losses[number].append(float(each.step().loss))
            seconds[number].append(time.perf_counter() - start)
    tokens = [each.training.batch * each.training.sequence for each in contenders]
    a_token = [np.array(each) / size for each, size in zip(seconds, tokens, strict=True)]
    rows = []
    for number, each in enumerate(contenders):
        median = float(np.median(seconds[number]))
        speed = tokens[number] / median
        flops = cost.flops_per_token(model, each.training.sequence).total
        row = each.planned | {
            "layers": model.num_layers,
            "batch": each.training.batch,
            "micro_batches": each.training.micro_batches,
            "stored_parameters": cost.parameter_count(model),
            "step_seconds": median,
            "tokens_per_second": speed,
            "model_tflops": flops * speed / 1e12,
            "mfu": cost.mfu(flops, speed, chip, model.compute_dtype, devices=1),
            "losses": losses[number],
        }
        if number + 1 < len(contenders):
            name = f"over_{contenders[-1].planned['executor']}"
            row |= paired.paired_ratio(a_token[number], a_token[-1], name)
        rows.append(row | each.measured())
    return rows


def _table(rows: list[dict], columns: tuple[str, ...]) -> str:
    cells = [[_cell(row.get(name, "")) for name in columns] for row in rows]
    return output.aligned([columns, *cells], left=0)


def _cell(value):
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _working_bytes(program):
    """Returns the bytes of a program's results and temporaries, which are no arguments."""
    analysis = program.memory_analysis()
    sizes = analysis.temp_size_in_bytes, analysis.output_size_in_bytes
    return sum(sizes) - analysis.alias_size_in_bytes


def _live_bytes():
    return sum(a.nbytes for a in jax.live_arrays() if a.sharding.memory_kind == "device")


def _peak_bytes():
    """Of the process so far; None where the backend does not tell."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")
