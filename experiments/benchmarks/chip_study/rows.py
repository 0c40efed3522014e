"""The rows of a study, in order of importance; each returns its result as JSON."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.step import make_eval_step
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.runs.run_config import SIZES, preset
from sparse_dataflow.runs.variants import variant

from .. import decoding, paired
from . import kernel_times, models, text
from .models import Case, Sizes, States
from .program_pool import Lower, ProgramPool

UNROLLED = {"model.remat": "none"}
"""Settings of the policy that recomputes nothing: a GPU then unrolls the layers."""

PASSES = ("residual_norm", "bias_activation")
"""Ops of `core.ops` whose kernels replace passes inside layers."""

POLICIES = {
    "dense": Case(False),
    "sparse": Case(True),
    "sparse, kept": Case(True, {"model.remat": "keep"}),
    "sparse, unrolled": Case(True, UNROLLED),
    "dense, unrolled": Case(False, UNROLLED),
}

KERNELS = {
    f"{name}, {text}": Case(name == "sparse", without=without)
    for name in ("dense", "sparse")
    for text, without in (
        ("no kernel", PASSES),
        *((f"kernel of {op}", tuple(other for other in PASSES if other != op)) for op in PASSES),
        ("all kernels", ()),
    )
}

HEADLINE = {name: POLICIES[name] for name in ("dense", "sparse", "sparse, unrolled")}

PROFILED_RUNS, DECODED_TOKENS, CACHED_TOKENS = 3, 32, 128
PEAK, WARM_UP_STEPS = 3e-4, 20
QUEUED = 8
"""Steps between two waits for the device, so that the host is never far ahead."""

SETTLE_SECONDS = 15.0
"""Seconds that a training takes besides its own."""


@dataclasses.dataclass
class Study:
    """What rows measure with.

    Attributes:
      chip: the chip of this process.
      deadline: on the clock of `time.monotonic`.
      text: file of text; "" for Python sources.
    """

    chip: Chip
    sizes: Sizes
    pool: ProgramPool
    deadline: float
    text: str = ""

    def left(self) -> float:
        """Returns the seconds until the deadline."""
        return self.deadline - time.monotonic()


class Skipped(Exception):
    """A row has nothing that it can measure here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
      name: identifier.
      title: what it measures.
      least: seconds below which it is not started.
      programs: programs that it needs, by name, which are compiled before anything is timed.
      measure: returns its result.
    """

    name: str
    title: str
    least: float
    programs: Callable[[Sizes, Chip], Mapping[str, Lower]]
    measure: Callable[[Study], dict[str, Any]]


def sentence(error: BaseException) -> str:
    """Returns an error in one sentence."""
    return f"{type(error).__name__}: {first_line(error)}"[:300]


# Row 0


def _rate_programs(sizes, chip):
    del chip
    floats = jax.ShapeDtypeStruct((sizes.copied // 4,), jnp.float32)
    matrix = jax.ShapeDtypeStruct((sizes.product, sizes.product), sizes.dtype)
    return {
        "copy": lambda: jax.jit(lambda x: x + 1).lower(floats),
        "product": lambda: jax.jit(jnp.matmul).lower(matrix, matrix),
    }


def rates(study: Study) -> dict[str, Any]:
    """Measures what the device reads and writes a second, and the FLOP/s of a large product."""
    sizes = study.sizes
    copy, product = (study.pool.get(name) for name in ("copy", "product"))
    x = jnp.zeros(sizes.copied // 4, jnp.float32)
    # Random numbers, because a product of zeros draws less power and runs faster.
    keys = jax.random.split(jax.random.key(0))
    shape = (sizes.product, sizes.product)
    a, b = (jax.random.normal(key, shape, sizes.dtype) for key in keys)
    runs = {"copy": lambda: copy(x), "product": lambda: product(a, b)}
    seconds = paired.paired_seconds(runs, sizes.rounds, enough=0.05 * (sizes.product > 1024))
    medians = {name: float(np.median(each)) for name, each in seconds.items()}
    return {
        "copied_bytes": 2 * sizes.copied,
        "copy_tb_per_second": 2e-12 * sizes.copied / medians["copy"],
        "product": sizes.product,
        "product_tflops": 2e-12 * sizes.product**3 / medians["product"],
    }


# Rows 1 and 3


def _slope_programs(cases, sizes, chip):
    del chip
    return _available(cases, lambda name, case: models.step_programs(
        sizes, name, case, sizes.few, sizes.many
    ))  # fmt: skip


def _kernel_programs(sizes, chip):
    return {} if dispatch.on(platforms.HOST) else _slope_programs(KERNELS, sizes, chip)


def pass_kernels(study: Study) -> dict[str, Any]:
    """Runs `slopes` of KERNELS.

    Raises:
      Skipped: this is a CPU, or no case can run.
    """
    if dispatch.on(platforms.HOST):
        raise Skipped("These kernels run on GPUs; this is a CPU.")
    return slopes(KERNELS, study)


def _available(cases, programs):
    """Returns the programs of the cases whose settings exist here."""
    result: dict[str, Lower] = {}
    for name, case in cases.items():
        try:
            result |= programs(name, case)
        except UserError:
            pass  # `slopes` says which.
    return result


def slopes(cases: Mapping[str, Case], study: Study) -> dict[str, Any]:
    """Times steps of few and of many layers in turn; their difference is the time of layers.

    Raises:
      Skipped: no case can run.
    """
    sizes, states = study.sizes, States(study.sizes)
    runs: dict[tuple[str, int], Callable] = {}
    rows: dict[str, dict] = {}
    problems: dict[str, str] = {}
    for name, case in cases.items():
        try:
            case_runs = {}
            for layers in (sizes.few, sizes.many):
                case.model(sizes, layers)
                program = study.pool.get(case.name(name, layers))
                case_runs[name, layers] = states.run(case, layers, program)
                jax.block_until_ready(case_runs[name, layers]())
            runs |= case_runs
            rows[name] = {"step_bytes": paired.program_bytes(program)}
        except Exception as error:
            problems[name] = sentence(error)
    if not runs:
        raise Skipped("; ".join(f"{name}: {text}" for name, text in problems.items()))
    seconds = paired.paired_seconds(runs, sizes.rounds)
    whole: dict[str, np.ndarray] = {}
    depth = SIZES[sizes.scale].num_layers
    for name, row in rows.items():
        few, many = (seconds[name, layers] for layers in (sizes.few, sizes.many))
        layer = (many - few) / (sizes.many - sizes.few)
        whole[name] = many + (depth - sizes.many) * layer
        low, median, high = 1e3 * np.percentile(layer, [25, 50, 75])
        row |= {"layer_ms": median, "layer_ms_low": low, "layer_ms_high": high}
        row |= {f"step_ms_{sizes.few}_layers": 1e3 * float(np.median(few))}
        row |= {f"step_ms_{sizes.many}_layers": 1e3 * float(np.median(many))}
        row[f"estimated_step_ms_{depth}_layers"] = 1e3 * float(np.median(whole[name]))
    first = next(iter(whole))  # A dense model, wherever one runs.
    for name, row in rows.items():
        row |= paired.paired_ratio(whole[first], whole[name], "estimated_ratio")
    return {
        "scale": sizes.scale, "batch": sizes.batch, "sequence": sizes.sequence,
        "layers": [sizes.few, sizes.many], "ratios_to": first, "rows": rows,
        "not_measured": problems,
    }  # fmt: skip


# Row 2


def _profile_programs(sizes, chip):
    del chip
    return _available(
        POLICIES, lambda name, case: models.step_programs(sizes, name, case, sizes.few)
    )


def profiles(study: Study) -> dict[str, Any]:
    """Traces steps of few layers: kernels with their times, bytes and rates."""
    sizes, states = study.sizes, States(study.sizes)
    tables, problems = {}, {}
    for name, case in POLICIES.items():
        try:
            case.model(sizes, sizes.few)
            program = study.pool.get(case.name(name, sizes.few))
            run = states.run(case, sizes.few, program)
            jax.block_until_ready(run())
            traced = kernel_times.traced(run, PROFILED_RUNS)
            tables[name] = kernel_times.table(traced, PROFILED_RUNS, program.as_text() or "")
        except Exception as error:
            problems[name] = sentence(error)
    if not tables:
        raise Skipped("; ".join(problems.values()))
    return {"layers": sizes.few, "programs": tables, "not_measured": problems}


# Row 4


def _decoding_models(sizes):
    config = preset(sizes.decoded, compute_dtype=sizes.dtype).change(
        sparsity__density=models.DENSITY, sparsity__block=sizes.block
    )
    return {name: variant(config, name).model for name in ("dense", "sparse")}


def _decode_programs(sizes, chip):
    del chip
    return {
        f"decode {name}": functools.partial(
            decoding.lowered, model, 1, CACHED_TOKENS, DECODED_TOKENS
        )
        for name, model in _decoding_models(sizes).items()
    }


def decoded(study: Study) -> dict[str, Any]:
    """Times and traces tokens that are written from a cache."""
    tables: dict[str, dict] = {}
    programs, runs = {}, {}
    for name, model in _decoding_models(study.sizes).items():
        programs[name] = program = study.pool.get(f"decode {name}")
        weights = kv_cache.random_weights(model, 0)
        runs[name] = decoding.running(program, model, weights, 1, CACHED_TOKENS, DECODED_TOKENS)
        jax.block_until_ready(runs[name]())
    seconds = paired.paired_seconds(runs, study.sizes.rounds)
    for name, run in runs.items():
        traced = kernel_times.traced(run, 1)
        table = kernel_times.table(traced, DECODED_TOKENS, programs[name].as_text() or "")
        token = float(np.median(seconds[name])) / DECODED_TOKENS
        tables[name] = {"token_ms": 1e3 * token, **table}
    ratio = paired.paired_ratio(seconds["dense"], seconds["sparse"])
    return {"scale": study.sizes.decoded, "tokens": DECODED_TOKENS, **ratio, "programs": tables}


# Row 5


def _training_programs(sizes, chip):
    del chip
    training = models.trained_training(sizes)

    def lowered_loss(model):
        state, rest, batch, _ = models.step_shapes(model, training)
        batch = jax.eval_shape(Batch.weighted, batch)
        return jax.jit(make_eval_step(model)).lower(state.params, rest, batch)

    programs: dict[str, Lower] = {}
    for name, model in models.trained_models(sizes).items():
        programs[f"train {name}"] = functools.partial(models.lowered_step, model, training)
        programs[f"loss {name}"] = functools.partial(lowered_loss, model)
    return programs


def trainings(study: Study) -> dict[str, Any]:
    """Trains models on text for equal times; the held-out loss every few seconds."""
    sizes, training = study.sizes, models.trained_training(study.sizes)
    corpus = text.load_text(study.text, sizes.text_bytes)
    by_name = models.trained_models(sizes)
    each = (study.left() - SETTLE_SECONDS) / len(by_name) if study.left() < math.inf else math.inf
    seconds = max(min(sizes.train_seconds, each), 0.1 * sizes.train_seconds)
    rows, problems = {}, {}
    for name, model in by_name.items():
        step, loss = (study.pool.get(f"{kind} {name}") for kind in ("train", "loss"))
        try:
            rows[name] = _trained(model, training, step, loss, corpus, seconds, sizes.loss_seconds)
        except Exception as error:
            problems[name] = sentence(error)
    return {
        "scale": sizes.trained, "batch": training.batch, "sequence": training.sequence,
        "seconds": seconds, "text": corpus.origin, "rows": rows, "not_measured": problems,
    }  # fmt: skip


def _trained(model, training, step, loss, corpus, seconds, every):
    """Trains one model; the time of its losses does not count."""
    state, rest = models.fresh_state(model, training)
    windows = corpus.held_out_rows(training.batch, training.sequence)
    held_out = Batch.from_windows(windows).weighted()
    rng, spent, steps, losses = np.random.default_rng(0), 0.0, 0, []

    def measure():
        nats = loss(state.params, rest, held_out)["loss"].number()
        losses.append({"seconds": spent, "steps": steps, "bits_per_byte": nats / math.log(2)})

    measure()
    while spent < seconds:
        due = min(seconds, every * len(losses))
        start = time.perf_counter()
        while (now := spent + time.perf_counter() - start) < due:
            # The rate falls to a tenth over the time, as a schedule over steps would.
            share = 1 - 0.9 * min(1.0, now / seconds)
            rate = np.float32(PEAK * share * min(1.0, (steps + 1) / WARM_UP_STEPS))
            batch = Batch.from_windows(corpus.batch(rng, training.batch, training.sequence))
            state, report = step(state, rest, batch, rate)
            steps += 1
            if steps % QUEUED == 0:
                jax.block_until_ready(report.loss)
        jax.block_until_ready(state.step)
        spent += time.perf_counter() - start
        measure()
    return {
        "d_model": model.d_model, "num_heads": model.num_heads,
        "parameters": cost.parameter_count(model),
        "flops_per_token": cost.flops_per_token(model, training.sequence).total,
        "steps": steps, "step_ms": 1e3 * spent / steps,
        "tokens_per_second": steps * training.batch * training.sequence / spent,
        "losses": losses,
    }  # fmt: skip


# Row 6


def _whole_programs(sizes, chip):
    return {} if _too_small(sizes, chip) else _available(
        HEADLINE,
        lambda name, case: models.step_programs(sizes, name, case, SIZES[sizes.scale].num_layers),
    )  # fmt: skip


def _too_small(sizes, chip):
    """Returns whether the dense step of the whole scale does not fit the chip."""
    model, training = HEADLINE["dense"].model(sizes), models.step_training(sizes)
    plan = plan_memory.training_bytes(model, training, chip.name != "cpu")
    return chip.memory_bytes is not None and plan.total > chip.memory_bytes * memory.USABLE


def headline(study: Study) -> dict[str, Any]:
    """Times the whole step, a model after the other.

    Raises:
      Skipped: the dense step does not fit the chip.
    """
    sizes = study.sizes
    if _too_small(sizes, study.chip):
        raise Skipped(f"The dense step of {sizes.scale} needs more memory than this chip has.")
    depth = SIZES[sizes.scale].num_layers
    rows: dict[str, dict] = {}
    problems: dict[str, str] = {}
    for name, case in HEADLINE.items():
        try:
            model = case.model(sizes)
            program = study.pool.get(case.name(name, depth))
            run = States(sizes).run(case, depth, program)
            seconds = paired.paired_seconds({name: run}, sizes.rounds)[name]
        except Exception as error:
            problems[name] = sentence(error)
            continue
        tokens = sizes.batch * sizes.sequence / float(np.median(seconds))
        flops = cost.flops_per_token(model, sizes.sequence).total
        rows[name] = {
            "step_ms": 1e3 * float(np.median(seconds)),
            "step_ms_of_rounds": [1e3 * float(each) for each in seconds],
            "tokens_per_second": tokens,
            "mfu": cost.mfu(flops, tokens, study.chip, model.compute_dtype, devices=1),
            "step_bytes": paired.program_bytes(program),
        }
    if "dense" in rows:
        for row in rows.values():
            row["ratio"] = rows["dense"]["step_ms"] / row["step_ms"]
    return {"scale": sizes.scale, "batch": sizes.batch, "rows": rows, "not_measured": problems}


ROWS = (
    Row("rates", "Copy bandwidth and a large product", 10, _rate_programs, rates),
    Row(
        "policies",
        "Time of a layer of the step, dense and sparse, by what is kept",
        45,
        functools.partial(_slope_programs, POLICIES),
        functools.partial(slopes, POLICIES),
    ),
    Row("profile", "Kernels of the step of a few layers", 40, _profile_programs, profiles),
    Row(
        "kernels",
        "Time of a layer of the step, with each kernel of its passes",
        60,
        _kernel_programs,
        pass_kernels,
    ),
    Row("decoding", "Kernels of generated tokens", 30, _decode_programs, decoded),
    Row(
        "training",
        "Held-out loss by seconds of training: dense, narrow and sparse",
        3 * Sizes().train_seconds + SETTLE_SECONDS,
        _training_programs,
        trainings,
    ),
    Row("headline", "The whole step", 60, _whole_programs, headline),
)
