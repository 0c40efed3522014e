"""Relations of what a run writes about itself, and of what refuses it."""

import contextlib
import json
import math
import re
import shlex
import time

import numpy as np
from main_job import rows

import sparse_dataflow as sd
from sparse_dataflow.commands import command_line, run_folder
from sparse_dataflow.commands.request import NAMED
from sparse_dataflow.core.config import settings
from sparse_dataflow.data import cache
from sparse_dataflow.evaluation import run_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import plan_memory
from sparse_dataflow.runs.run_config import RunConfig
from storm.case import SHORT, TINY
from storm.relations import relation
from storm.world import World, check, need


def stores_blocks(config: RunConfig) -> bool:
    """Whether the flags of density and block say something; else the command line refuses them."""
    return bool(config.sparsity.projections) and config.sparsity.pattern != "dense"


def flags(world: World) -> list[str]:
    """Returns the flags of the case."""
    names = {path: name for name, (path, _) in NAMED.items() if path}
    words, config = ["--scale=pico"], world.config
    paths = {**TINY, **SHORT, **world.case.values}
    if config.model.supar:  # Whose rates the flag sets too.
        rates = ("learning_rate", "sparse_rate", "vector_rate")
        paths |= {f"training.{name}": getattr(config.training, name) for name in rates}
    for path in paths:
        section, _, name = path.partition(".")
        if section == "scene" or (
            path in TINY and section == "sparsity" and not stores_blocks(config)
        ):
            continue
        text = settings.text(getattr(getattr(config, section), name))
        words.append(f"--{names[path]}={text}" if path in names else f"--set={path}={text}")
    return words


MOST_SENTENCES = 3
MOST_SECONDS = 2.0


def check_words(error: BaseException) -> None:
    """Fails where a refusal is not one message for people."""
    text = str(error)
    check(0 < len(text) < 1500 and text.isprintable(), f"no message: {text[:300]!r}")
    sentences = len(re.findall(r"[.;?!] [A-Z]", text)) + 1
    # A run may violate several rows of the table of what goes with what.
    check(sentences <= MOST_SENTENCES or "legal" in text, f"{sentences} sentences: {text[:300]}")
    check("Traceback" not in text and " object at 0x" not in text, f"no words: {text[:300]}")


@relation(0)
def refusals_leave_nothing(world: World):
    """A run that is refused: one message, within two seconds beside its text, and no file."""
    need(world.refusal, "it runs")
    error, seconds = world.refusal
    check_words(error)
    check(not (world.folder / "run").exists(), f"the refused run left its folder: {error}")
    if seconds >= MOST_SECONDS:
        seconds -= _reading_seconds(world)
    check(seconds < MOST_SECONDS, f"refused after {seconds:.1f} s: {error}")


def _reading_seconds(world):
    """Returns what it takes to read the text of a run and to learn its tokenizer, which some
    refusals need."""
    cache.FOLDER = world.folder / "read anew"
    start = time.process_time()
    with contextlib.suppress(UserError):
        world.tokenizer()
    return time.process_time() - start


@relation(1)
def settings_survive_file_flags_and_call(world: World):
    """A config through its JSON file, through the flags, and through the call in its record."""
    config = world.config
    again = RunConfig.from_json(json.loads(json.dumps(config.to_json())))
    check(again == config, "config.json is another config")
    need(not config.run.init_from, "given weights")
    need(stores_blocks(config), "the block of the case is no flag")
    words = ["gpt13b_sparse", *flags(world)]
    try:
        [request] = command_line.arguments(words, tuple(NAMED), None)
    except UserError as error:
        check(world.refusal, f"the command line refuses what trains: {error}")
        need(False, "refused")
    parsed = request.config().to_json()
    parsed["model"]["remat"], parsed["training"]["micro_batches"] = (
        config.model.remat,
        config.training.micro_batches,
    )
    check(parsed == config.to_json(), f"the command line is another config: {shlex.join(words)}")
    call = run_folder.python_call(config)
    expression = call.removeprefix("sd.train(").removesuffix(")")
    spoken = eval(expression, {"sd": sd})
    # Where it ran is no part of the call.
    same = spoken == config.change(run__mirror=spoken.run.mirror)
    check(same, f"the call in the record is another config: {call}")


@relation(1)
def report_has_the_numbers_of_the_log(world: World):
    """report.json, recomputed from metrics.jsonl and the config."""
    run = world.run
    report = json.loads((run.folder / "report.json").read_text())
    record = run_files.read_record(run.folder, run_files.read_config(run.folder))
    for variant in report["variants"]:
        log = rows(run.folder, variant["name"])
        final = [row for row in log if row["kind"] == "final"][-1]
        train = [row for row in log if row["kind"] == "train"]
        name = variant["name"]
        check(variant["loss"] == final["loss"], f"{name}: another loss in the report")
        check(variant["bits_per_byte"] == final["bits_per_byte"], f"{name}: other bits a byte")
        check(variant["steps"] == record.steps[name] == final["step"], f"{name}: other steps")
        check(len(train) == variant["steps"], f"{name}: {len(train)} rows of steps")
        training = world.config.training
        tokens = variant["steps"] * training.batch * training.sequence
        check(
            variant["tokens"] == tokens == final["tokens"],
            f"{name}: {variant['tokens']} tokens, {final['tokens']} in the log, {tokens} by the "
            "config",
        )
        check(
            sum(variant["memory"].values()) == variant["training_bytes"],
            f"{name}: the bytes of the report do not add up",
        )
        error = final.get("bits_per_byte_error")
        if error is not None:
            check(
                math.isnan(final["loss"]) or 0 <= error < 4 * final["bits_per_byte"],
                f"{name}: {final['bits_per_byte']} ± {error}",
            )
    html = (run.folder / "report.html").read_text(encoding="utf-8")
    for variant in report["variants"]:
        if np.isfinite(variant["bits_per_byte"]):
            check(f"{variant['bits_per_byte']:.3f}"[:5] in html, "the page has other numbers")


@relation(2)
def last_evaluation_is_the_loss_of_the_saved_model(world: World):
    """The final row, recomputed from the saved model in other batches."""
    from sparse_dataflow.commands.models import evaluate
    from sparse_dataflow.commands.training_data import SAMPLE_WINDOWS, corpus_tokens
    from sparse_dataflow.evaluation import scoring

    run, config = world.run, world.config
    need(config.run.evaluate in ("part", "all"))
    model = world.model
    answers = config.data.loss == "answers"
    corpus = world.corpus()
    need(not corpus.mixture, "a mixture")
    _, held_out = corpus_tokens(corpus, model, answers)
    forward, limits = scoring.single_device_forward(model), scoring.batch_limits(model)
    losses = evaluate.held_out_scores(model, forward, limits, held_out, answers).losses
    count = len(held_out) if config.training.hides_tokens else len(losses)
    sampled = count > SAMPLE_WINDOWS * config.training.sequence
    need(config.run.evaluate == "all" or not sampled, "the last row is of a sample")
    variant = run.config.variants[0]
    final = [row for row in rows(run.folder, variant) if row["kind"] == "final"][-1]
    need(math.isfinite(final["loss"]), "the model diverged")
    narrow = config.model.compute_dtype != "float32" or config.model.quantized
    check(
        math.isclose(losses.mean(), final["loss"], rel_tol=2e-2 if narrow else 1e-4),
        f"the last row has the loss {final['loss']:.6f}, the saved model {losses.mean():.6f} over "
        f"{len(losses)} tokens",
    )
    windows = len(losses) // config.training.sequence
    need(not answers and windows >= 2 * config.training.batch, "few windows")
    sums = losses[: windows * config.training.sequence].reshape(windows, -1).sum(1)
    nats_a_token = float(sums.std(ddof=1)) * math.sqrt(windows) / len(losses)
    error = nats_a_token * final["bits_per_byte"] / final["loss"]
    reported = final["bits_per_byte_error"]
    check(
        reported <= MOST_ERROR * error,
        f"the last row has ± {reported:.4g} bits a byte, and {windows} windows ± {error:.4g}",
    )


@relation(1)
def memory_is_within_the_band_of_its_estimate(world: World):
    """The bytes of the compiled step are within the range of the plan, wider at a tiny scale."""
    run, config = world.run, world.config
    need(config.parallel.executor != "relay" and world.case.devices() == 1, "several programs")
    report = json.loads((run.folder / "report.json").read_text())
    low, high = plan_memory.ERROR
    planned = report["variants"][0]["training_bytes"]
    sizes_of_steps = []
    for compiled in world.programs["run"]:
        if not hasattr(compiled.train_step, "memory_analysis"):
            need(False, "no analysis")
        sizes = compiled.train_step.memory_analysis()
        sizes_of_steps.append(
            sizes.argument_size_in_bytes
            + sizes.output_size_in_bytes
            - sizes.alias_size_in_bytes
            + sizes.temp_size_in_bytes
        )
    # What the estimate leaves out, such as batches and scalars, counts at this scale.
    least, most = (1 + low) / SMALL_SCALE, (1 + high) * SMALL_SCALE
    check(
        least * planned <= max(sizes_of_steps) <= most * planned,
        f"{planned:,} bytes are planned, and the compiler takes {max(sizes_of_steps):,}",
    )


MOST_ERROR = 4.0
"""Largest ratio of a reported error to that of single windows: batches are few, so that theirs
varies."""

SMALL_SCALE = 2.0
"""Factor by which the band of an estimate is wider for a model of a few thousand parameters."""
