"""Writes the report of a finished run."""

import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np

from sparse_dataflow.commands import vocabularies
from sparse_dataflow.commands.models import evaluation_report
from sparse_dataflow.commands.preflight import executor_plan
from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.messages import say, say_result
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.loop import Trainer
from sparse_dataflow.data.prompts import held_out_prompts
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.generate import generate_tokens
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring import goodput
from sparse_dataflow.monitoring.metrics import read_metrics
from sparse_dataflow.relay import timeline
from sparse_dataflow.reporting.page import headline
from sparse_dataflow.reporting.report import PAGE, write_report
from sparse_dataflow.reporting.report_data import (
    Continuation,
    LayoutData,
    ProfileData,
    ReportData,
    VariantData,
)

CONTINUATIONS = 10
KERNELS_SHOWN = 15


def write(
    folder: Path,
    record: RunRecord,
    trainers: list[Trainer],
    corpus,
    tokenizer,
    chip,
    seconds: dict,
) -> str:
    """Writes report.json and report.html of a finished run; returns its losses in a sentence.

    Args:
      record: the run's record.
      trainers: finished trainers, one per variant.
      seconds: result of `goodput.seconds_by_category`.

    Raises:
      UserError: the files cannot be written; the run itself is intact.
    """
    continuations, token_seconds = _continuations(trainers, corpus, tokenizer)
    variants = [
        _variant(folder, trainer, chip, token_seconds.get(trainer.name)) for trainer in trainers
    ]
    sparse = [p.model for t in trainers for p in t.phases if p.model.sparse_projections]
    # A model that got sparser in phases is judged by its last phase.
    model = (sparse or [trainers[0].model])[-1]
    sequence = trainers[0].training.sequence
    dense_flops = cost.flops_per_token(dataclasses.replace(model, linears=()), sequence)
    by_name = {v.name: v.flops_per_token for v in variants}
    # Of a model that changes, the mean over its steps.
    ceiling = None
    if sparse and "sparse" in by_name:
        ceiling = by_name.get("dense", dense_flops.total) / by_name["sparse"]
    data = ReportData(
        title=record.experiment,
        command=record.replay,
        date=record.date,
        machine=record.machine,
        versions=dict(record.versions),
        corpus=f"{corpus.name} ({corpus.content_hash[:12]})",
        tokenizer=f"{tokenizer.vocab_size} tokens ({tokenizer.content_hash[:12]})",
        code=record.code_in_words,
        host=record.host,
        seed=record.seed,
        notes=_notes(trainers, variants) + vocabularies.notes(record),
        variants=variants,
        layouts=_layouts(trainers, model),
        flop_ceiling=ceiling,
        projection_share=dense_flops.projection_share,
        continuations=continuations,
        evaluation=evaluation_report.read(folder, record),
        goodput=seconds,
        profile=_profile(folder),
    )
    try:
        storage.replace(folder / "report.json", json.dumps(data.to_json()).encode() + b"\n")
    except OSError as error:
        raise UserError(
            f"The report cannot be written to {folder} ({error.strerror or error}). The run is "
            f"intact; free some space, then use --resume={folder}."
        ) from error
    write_report(data, folder / PAGE)
    if len(variants) > 1:
        say_result(headline(sorted(variants, key=lambda v: v.name)))
    losses = (
        f"{v.name} {v.bits_per_byte:.4f}{_spread(v.history)} after {v.tokens:,} tokens"
        for v in variants
    )
    tokens = " of hidden tokens" * trainers[0].training.hides_tokens
    return f"held-out bits per byte{tokens}: {', '.join(losses)}"


def _spread(history):
    """Returns the error of the last held-out loss in words; "" where it is unknown."""
    value = _final(history).get("bits_per_byte_error")
    return f" ± {value:.4f}" if value else ""


def _variant(folder, trainer, chip, token_seconds):
    training, model = trainer.training, trainer.model
    history = read_metrics(folder / trainer.name / "metrics.jsonl")
    train = [row for row in history if row["kind"] == "train"]
    evaluation = _final(history)
    tokens_a_step = training.batch * training.sequence
    phase_seconds = _step_seconds(trainer, train, tokens_a_step)
    step_seconds = float(np.dot(phase_seconds, [p.steps for p in trainer.phases]) / trainer.step)
    flops = trainer.flops / trainer.tokens
    phases = [phase.model for phase in trainer.phases]
    sizes = executor_plan.memory_of(phases, training, trainer.executor, chip)
    spans = trainer.timeline
    return VariantData(
        name=trainer.name,
        loss=evaluation["loss"],
        bits_per_byte=evaluation["bits_per_byte"],
        stored_parameters=cost.parameter_count(model),
        training_bytes=sum(sizes.values()),
        tokens_per_second=tokens_a_step / step_seconds,
        step_seconds=step_seconds,
        flops_per_token=flops,
        steps=trainer.step,
        tokens=trainer.tokens,
        train_seconds=trainer.seconds,
        mfu=cost.mfu(
            flops,
            tokens_a_step / step_seconds,
            chip,
            model.compute_dtype,
            devices=trainer.executor.devices,
        ),
        weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state.merged)),
        token_seconds=token_seconds,
        history=history,
        section_seconds=_section_seconds(spans, phase_seconds[-1]),
        memory=sizes,
        timeline=[list(span) for span in spans],
        hidden=timeline.hidden_share(spans) if spans else None,
    )


def _final(history):
    """Returns the row of the last evaluation after the last step."""
    return [row for row in history if row["kind"] == "final"][-1]


def _section_seconds(spans, step_seconds):
    """Returns section -> seconds of the relay's timeline; empty without one."""
    if not spans:
        return {}
    by_section = {
        name: timeline.seconds([s for s in spans if s.section.startswith(kind)], "compute")
        for name, kind in (("embed", "embed"), ("blocks", "block"), ("head and loss", "head"))
    }
    return {**by_section, "other": max(0.0, step_seconds - sum(by_section.values()))}


def _step_seconds(trainer, train, tokens_a_step):
    """Returns the median seconds of a step, one per phase.

    A phase whose metrics were lost gets the mean of the clock that checkpoints save.
    """
    medians = []
    for phase in trainer.phases:
        rows = [row for row in train if phase.start < row["step"] <= phase.stop]
        seconds = [tokens_a_step / row["tokens_per_second"] for row in rows]
        medians.append(float(np.median(seconds or [trainer.seconds / trainer.step])))
    return medians


def _evolution_notes(trainers, variants):
    """Yields a sentence per trainer whose layouts or model changed."""
    for t, variant in zip(trainers, variants, strict=True):
        if t.evolution.method == "static":
            continue
        changes = [row for row in variant.history if row["kind"] == "evolution"]
        seconds = sum(row["update_seconds"] for row in changes)
        starts = ", ".join(
            f"{cost.parameter_count(phase.model):,} parameters from step {phase.start + 1}"
            for phase in t.phases
        )
        yield (
            f"{t.name}: {t.evolution.method}, {starts}; {len(changes)} changes took {seconds:.1f} "
            f"of {t.seconds:.1f} seconds. Its FLOPs and step are the mean over all steps, its "
            "memory the largest of any phase."
        )


def _teacher_notes(trainers):
    return [
        f"{t.name} learned from {t.training.teacher}, with weight {t.training.teacher_weight:g}: "
        f"forward passes of the teacher are {t.teacher_flops / t.flops:.0%} of its FLOPs."
        for t in trainers
        if t.training.teacher
    ]


def _notes(trainers, variants):
    return [
        f"{t.name}: {t.model.num_layers} layers of width {t.model.d_model}, sequences of "
        f"{t.training.sequence} tokens, {t.training.batch} per step, "
        f"{t.training.optimizer} with a peak learning rate of "
        f"{t.training.learning_rate:g} ({_block_rate(t)}"
        f"embeddings, biases and norms x {t.training.vector_rate:g}), {t.model.compute_dtype}."
        for t in trainers
    ] + [
        *_evolution_notes(trainers, variants),
        *_mixture_notes(variants),
        *_narrow_notes(variants),
        *_teacher_notes(trainers),
        *_masked_notes(variants),
        "Held-out documents are chosen by a hash of their text, about one in twenty, unless "
        "data.validation names them.",
        *_executor_notes(trainers[0].executor),
    ]


def _block_rate(trainer):
    """Returns the rate of blocks, for a sentence; "" for a model that is dense in all phases."""
    sparse = any(phase.model.sparse_projections for phase in trainer.phases)
    return (
        f"sparse blocks, where their density is 1/8, x {trainer.training.sparse_rate:g}, "
        if sparse
        else ""
    )


def _profile(folder):
    """Returns the trace of the run; None where it has none."""
    if not (folder / goodput.FOLDER).is_dir():
        return None
    operations = goodput.traced_kernels(folder)
    longest = [[k.name, k.seconds, k.count] for k in operations[:KERNELS_SHOWN]]
    return ProfileData(longest, sum(k.seconds for k in operations))


def _masked_notes(variants):
    for variant in variants:
        if (accuracy := _final(variant.history).get("accuracy")) is not None:
            yield (
                f"{variant.name} says {accuracy:.1%} of the hidden tokens of held-out text. Its "
                "losses are of these tokens, from both sides: those of next tokens are another "
                "quantity."
            )


def _mixture_notes(variants):
    for variant in variants:
        bits = [
            f"{name.partition('/')[2]} {value:.3f}"
            for name, value in _final(variant.history).items()
            if name.startswith("bits_per_byte/")
        ]
        if bits:
            yield f"{variant.name}: held-out bits per byte by corpus: {', '.join(bits)}."


def _narrow_notes(variants):
    """Yields what the comparison with a narrower dense model can show at the run's length."""
    by_name = {variant.name: variant for variant in variants}
    if {"narrow", "sparse"} <= set(by_name):
        sparse = by_name["sparse"]
        yield (
            f"The sparse model read {sparse.tokens / sparse.stored_parameters:.2g} tokens for each "
            "stored parameter. A run of few tokens shows speed and memory, not quality."
        )


def _executor_notes(executor):
    if executor != SINGLE_DEVICE:
        yield f"The model was trained by {executor.describe()}, and generated no continuations."


def _layouts(trainers, model):
    """Returns the trained layouts; for a model that ended dense, its last sparse ones."""
    trained = [t for t in trainers if t.model == model]
    layouts = model_layouts.layouts(model)
    if trained:
        layouts = stacks.layouts_of(model, trained[0].state.rest)
    rows = []
    for projection, layers in layouts.items():
        for number, layout in enumerate(layers):
            rows.append(
                LayoutData(
                    projection=projection,
                    layer=number,
                    in_blocks=layout.in_blocks,
                    out_blocks=layout.out_blocks,
                    block=layout.block,
                    mask=np.stack([layout.rows, layout.cols], axis=1).tolist(),
                    fan_in=int(layout.fan_in.max()),
                    fan_out=int(layout.fan_out.max()),
                    balanced=layout.balanced,
                )
            )
    return rows


def _continuations(trainers, corpus, tokenizer):
    """Returns continuations of held-out prompts, and model name -> median seconds of a step.

    There are none if the models are on several devices or predict hidden tokens.  What else forbids
    them is said, as the run has ended: documents or sequences are too short, for example.
    """
    if any(t.executor != SINGLE_DEVICE or t.model.bidirectional for t in trainers):
        return [], {}
    sequence = trainers[0].training.sequence
    written, seconds = {}, {}
    try:
        if sequence < 2:
            raise UserError("a sequence of 1 token has no room for a prompt and its continuation.")
        prompts = held_out_prompts(corpus, tokenizer, CONTINUATIONS, min(32, sequence // 2))
        for t in trainers:
            ids = [prompt.prompt_ids for prompt in prompts]
            written[t.name], seconds[t.name] = _continued(t, ids)
    except UserError as error:
        say(f"no continuations in the report: {error}")
        return [], {}
    continuations = [
        Continuation(
            prompt.prompt,
            prompt.continuation,
            {n: tokenizer.decode_after(prompt.prompt_ids, rows[i]) for n, rows in written.items()},
        )
        for i, prompt in enumerate(prompts)
    ]
    return continuations, seconds


def _continued(trainer, prompts):
    """Returns int [prompts, tokens], the greedy continuations, as long as the prompts if the
    context has room, and the median seconds of a step; None if all steps compiled."""
    model = dataclasses.replace(trainer.model, precision=PRECISIONS[0])
    weights = kv_cache.prepare(model, trainer.state.merged)
    longest, context = max(map(len, prompts)), trainer.training.sequence
    count = min(longest, context - longest)
    steps, clock = [], []
    for step in generate_tokens(model, weights, prompts, count, context):
        steps.append(step)
        clock.append(time.perf_counter())
    # The first step reads the prompts, and the second one compiles.
    seconds = np.diff(clock[1:])
    return np.transpose(steps), float(np.median(seconds)) if len(seconds) else None
