"""The trainings of sparse_quality: planned to one budget, gone on with, and put into tables."""

import json
import types
from pathlib import Path

import jax
import numpy as np

from experiments import gpt_run, memory_check, recipes, step_plan
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.tokenizer import load_tokenizer
from sparse_dataflow.errors import UserError
from sparse_dataflow.execution.host_memory import keep_freed_memory
from sparse_dataflow.planning import hardware
from sparse_dataflow.training.loop import Trainer, advance_side_by_side
from sparse_dataflow.training.metrics import say
from sparse_dataflow.training.phases import refuse_unfit, run_flops
from sparse_dataflow.training.programs import compile_programs

BASELINE = "dense"
FLOOR = "static_random"


def run(values, groups, arms: dict[str, dict | None]) -> None:
    """Trains every arm, seed and budget that the flags name; see `sparse_quality`.

    Raises:
      UserError: in words, before the first step where it can be known then.
    """
    keep_freed_memory()
    asked = {flag.name: values[flag.name].value for group in groups for flag in group.flags}
    chip = hardware.detect(["float32" if values.dtype == "auto" else values.dtype])
    settings = _settings(asked, {}, 0)
    recipes.settle(settings, jax.default_backend(), chip.memory_bytes, sparse=True)
    asked |= {"scale": settings.scale, "dtype": settings.dtype}
    folder = Path(values.out)
    _refuse_other_settings(folder, asked)
    for arm in asked["arms"]:
        variant = _variant(asked, arms, arm, 0)
        refuse_unfit(variant.model, variant.evolution, values.steps)
        memory_check.refuse_too_large(settings, [variant], chip.memory_bytes)
    corpus = load_corpus(values.corpus, gpt_run.CACHE)
    vocabulary = recipes.vocab_size(settings)
    tokenizer = load_tokenizer(values.tokenizer, corpus, vocabulary, gpt_run.CACHE)
    results = []
    with gpt_run.stop_on_signals() as stop:
        for seed in range(values.seeds):
            steps = {}
            for equal in asked["equal"]:
                for arm in asked["arms"]:
                    where = folder / f"equal_{equal}" / arm / f"seed_{seed}"
                    result = _kept(where)
                    if result is None:
                        steps = steps or _steps(asked, arms, seed, corpus, tokenizer)
                        result = _train(
                            asked,
                            arms,
                            arm,
                            seed,
                            steps[equal][arm],
                            where,
                            corpus,
                            tokenizer,
                            stop,
                        )
                    if result is None:
                        say("stopped; the same command goes on")
                        return
                    results.append({"equal": equal, "arm": arm, "seed": seed, **result})
    (folder / "quality.json").write_text(json.dumps(results, indent=1) + "\n")
    text = tables(results)
    (folder / "quality.md").write_text(text)
    say(text)


def _settings(asked, changes, seed):
    defaults = {"twin": "no", "seed": seed, "minutes": 1.0, "pattern": "monarch", "rank": 0}
    defaults |= {"evolution": "static", "evolve_at": 0.0}
    return types.SimpleNamespace(**{**asked, **defaults, **changes})


def _variant(asked, arms, arm, seed, vocabulary=None):
    changes = arms[arm]
    names = [BASELINE if changes is None else "sparse"]
    return recipes.variants(_settings(asked, changes or {}, seed), names, vocabulary)[0]


def _data(asked, variant, seed, corpus, tokenizer):
    return gpt_run.training_data(_settings(asked, {}, seed), variant, corpus, tokenizer)


def _programs(variant, data):
    return compile_programs(variant.stages, variant.training, data, variant.evolution)


def _steps(asked, arms, seed, corpus, tokenizer):
    """{budget: {arm: steps}}; the budgets are those of the dense model's --steps."""
    names = list(dict.fromkeys((BASELINE, *asked["arms"])))
    variants = {arm: _variant(asked, arms, arm, seed, tokenizer.vocab_size) for arm in names}
    found = {"tokens": dict.fromkeys(names, asked["steps"])}
    flops = {arm: _flops_a_step(v.with_steps(asked["steps"])) for arm, v in variants.items()}
    found["flops"] = {
        arm: max(1, round(asked["steps"] * flops[BASELINE] / flops[arm])) for arm in names
    }
    if "seconds" in asked["equal"]:
        data = _data(asked, variants[BASELINE], seed, corpus, tokenizer)
        seconds = step_plan.step_seconds(variants, data, asked["steps"])
        found["seconds"] = {
            arm: max(1, round(asked["steps"] * seconds[BASELINE] / seconds[arm])) for arm in names
        }
    return found


def _flops_a_step(variant):
    total = run_flops(variant.model, variant.evolution, variant.training)
    return total / variant.training.steps


def _train(asked, arms, arm, seed, steps, where, corpus, tokenizer, stop):
    """The result of one training, from where it was left; None if `stop()` came before its end."""
    variant = _variant(asked, arms, arm, seed, tokenizer.vocab_size)
    variant = variant.with_steps(_steps_begun(where) or steps)
    refuse_unfit(variant.model, variant.evolution, variant.training.steps)
    data = _data(asked, variant, seed, corpus, tokenizer)
    programs = _programs(variant, data)
    where.mkdir(parents=True, exist_ok=True)
    (where / "steps.json").write_text(json.dumps(variant.training.steps) + "\n")
    every = max(1, variant.training.steps // gpt_run.EVALUATIONS_A_RUN)
    trainer = Trainer(
        arm[:6],
        where,
        variant.model,
        variant.training,
        data,
        programs,
        evolution=variant.evolution,
        eval_every=every,
        checkpoint_every=2 * every,
        keep=1,
    )
    say(f"{arm}, seed {seed}, {variant.training.steps} steps into {where}")
    try:
        for _ in advance_side_by_side([trainer], stop):
            pass
        if not trainer.finished:
            return None
        final = trainer.evaluate_finally()
    finally:
        trainer.close()
    result = {
        "bits_per_byte": final["bits_per_byte"],
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "flops": _flops_a_step(variant) * trainer.step,
    }
    (where / "result.json").write_text(json.dumps(result) + "\n")
    return result


def _steps_begun(where):
    """The steps that a training was begun with, which times measured anew do not change."""
    path = where / "steps.json"
    return json.loads(path.read_text()) if path.exists() else None


def _kept(where):
    path = where / "result.json"
    return json.loads(path.read_text()) if path.exists() else None


def _refuse_other_settings(folder, asked):
    """A folder holds trainings of one setting; arms, budgets and seeds may be added."""
    fixed = {k: v for k, v in asked.items() if k not in ("arms", "equal", "seeds", "out")}
    fixed = json.loads(json.dumps(fixed))
    path = folder / "settings.json"
    if path.exists():
        saved = json.loads(path.read_text())
        wrong = [f"--{k}={fixed.get(k)} (saved: {saved.get(k)})" for k in fixed
                 if saved.get(k) != fixed[k]]  # fmt: skip
        if wrong:
            raise UserError(f"{folder} holds trainings of other flags: {', '.join(wrong)}.")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fixed, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from error


def tables(results: list[dict]) -> str:
    """A Markdown table a budget: held-out bits per byte, mean and spread over seeds (half the
    range), against dense, and the part of the gap from static random to dense that is closed."""
    parts = []
    for equal in dict.fromkeys(r["equal"] for r in results):
        arms: dict[str, list[dict]] = {}
        for r in (r for r in results if r["equal"] == equal):
            arms.setdefault(r["arm"], []).append(r)
        mean = {a: float(np.mean([r["bits_per_byte"] for r in rs])) for a, rs in arms.items()}
        lines = [
            f"## Equal {equal}\n",
            "| arm | bits per byte | spread | to dense | gap closed | steps | FLOPs | seconds |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for arm in sorted(arms, key=mean.get):
            lines.append(_line(arm, arms[arm], mean))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(arm, of_arm, mean):
    bits = [r["bits_per_byte"] for r in of_arm]
    to_dense = closed = "-"
    if BASELINE in mean:
        to_dense = f"{mean[arm] / mean[BASELINE] - 1:+.2%}"
        gap = mean.get(FLOOR, 0.0) - mean[BASELINE]
        if gap > 0:  # Else there is nothing to close, as early in a training.
            closed = f"{(mean[FLOOR] - mean[arm]) / gap:.0%}"
    average = {name: np.mean([r[name] for r in of_arm]) for name in ("steps", "flops", "seconds")}
    return (
        f"| {arm} | {mean[arm]:.4f} | {(max(bits) - min(bits)) / 2:.4f} | {to_dense} | "
        f"{closed} | {average['steps']:.0f} | {average['flops']:.3g} | "
        f"{average['seconds']:.1f} |"
    )
