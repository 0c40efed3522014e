"""Relations of commands, in this process: they say what the functions say, or refuse in words."""

import contextlib
import importlib
import io
import json
import math
import re

import numpy as np

import sparse_dataflow as sd
from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.training_data import SAMPLE_WINDOWS
from sparse_dataflow.files.errors import UserError
from storm.relations import relation
from storm.relations.pages import check_words, flags
from storm.world import World, check, need


def called(name: str, *words: str) -> tuple[int, str, str]:
    """Calls an experiment as `python -m experiments.NAME WORDS`.

    Returns:
      Its exit status, output and standard error.
    """
    module = importlib.import_module(f"experiments.{name}")
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            command_line.run_main(
                module.main,
                module.__doc__,
                shared=getattr(module, "SHARED", ()),
                options=getattr(module, "Options", None),
                defaults=getattr(module, "DEFAULTS", {}),
                argv=[name, *words],
            )
        except SystemExit as ended:
            status = ended.code or 0
    return status, out.getvalue(), error.getvalue()


@relation(2)
def a_config_is_described_and_planned(world: World):
    """--describe and --chips of the case: its arrays and a plan, or a refusal."""
    need(not world.config.run.init_from, "given weights")
    words = flags(world)
    with world.devices():
        status, out, error = called("gpt13b_sparse", *words, "--describe")
    check(status in (0, 2), f"--describe ends with {status}: {error[-300:]}")
    if status:
        check_words(UserError(error.strip().splitlines()[-1]))
        check(world.refusal, f"--describe refuses what trains: {error[-300:]}")
    else:
        check("chips" in out, f"--describe prints {out[:100]!r}")
    others = [w for w in words if not w.startswith(("--mesh", "--executor", "--set=parallel."))]
    status, out, error = called("gpt13b_sparse", *others, "--chips=h100:8")
    check(status in (0, 2), f"--chips ends with {status}: {error[-300:]}")
    if status:
        check_words(UserError(error.strip().splitlines()[-1]))
    check("nan" not in re.findall(r"[a-z]+", out.lower()), f"the plan has nan: {out[:300]}")


@relation(4)
def export_and_save_write_the_same(world: World):
    """The command `export`, and `sd.save`: the same arrays."""
    run = world.run
    form = world.draw("form").choice(["dense", "sparse"])
    by_command, other = world.folder / "by command", world.folder / "by function"
    with world.devices(1):
        status, _, error = called(
            "export", f"--run={run.folder}", f"--to={by_command}", f"--form={form}"
        )
    try:
        sd.save(world.model, other, form)
    except UserError as refused:
        check(status == 2, f"export ends with {status} where sd.save refuses: {refused}")
        check(not by_command.exists(), "the refused export left its folder")
        return
    check(status == 0, f"export ends with {status} where sd.save writes: {error[-300:]}")
    for path in sorted(other.iterdir()):
        if path.suffix in (".safetensors", ".json"):
            same = (by_command / path.name).read_bytes() == path.read_bytes()
            check(same, f"{path.name} of export has other bytes than that of sd.save")


@relation(4)
def command_and_function_generate_the_same(world: World):
    """The command `generate`, and `sd.generate`: the same text."""
    run, model, draw = world.run, world.model, world.draw("generate")
    logits = world.logits(model, world.tokens())
    need(np.all(np.isfinite(logits)) and model.tokenizer.has_text, "the model diverged")
    prompt = world.places.texts("folder")[0][:12]
    temperature, seed = draw.choice([0.0, 1.0]), draw.randrange(9)
    words = [f"--run={run.folder}", f"--prompt={prompt}", "--max_new_tokens=5"]
    words += [f"--temperature={temperature}", f"--seed={seed}"]
    with world.devices(1):
        status, out, error = called("generate", *words)
    options = {"max_new_tokens": 5, "temperature": temperature, "seed": [seed]}
    try:
        [continuation] = sd.generate(model, [prompt], **options)
    except UserError as refused:
        check(status == 2, f"generate ends with {status} where sd.generate refuses: {refused}")
        return
    check(status == 0, f"generate ends with {status}: {error[-300:]}")
    whole = f"{prompt}{continuation.text}"
    check(whole.strip() in out, f"generate prints {out!r}, sd.generate writes {whole!r}")


@relation(12)
def evaluate_and_the_run_agree(world: World):
    """The command `evaluate`: the loss of the last row, the same in a second call."""
    run = world.run
    need(not world.config.data.loss == "answers" and world.scene.choice % 3 == 0, "seldom")
    corpus = world.corpus()
    need(not corpus.mixture, "a mixture")
    letters = sum(len(document.text) for document in corpus.validation)
    need(
        letters < SAMPLE_WINDOWS * world.config.training.sequence, "the last row may be of a sample"
    )
    words = [f"--run={run.folder}", "--tasks=copying,cloze", "--items=6", "--num_fewshot=0"]
    results = []
    for _ in range(2):
        with world.devices(1):
            status, _, error = called("evaluate", *words)
        check(status in (0, 2), f"evaluate ends with {status}: {error[-300:]}")
        if status:
            check_words(UserError(error.strip().splitlines()[-1]))
            need(False, f"refused: {error[-200:]}")
        results.append(json.loads((run.folder / "evaluation.json").read_text())["rows"])
    check(json.dumps(results[0]) == json.dumps(results[1]), "two evaluations differ")
    variant = run.config.variants[0]
    final = [row for row in run.metrics() if row["kind"] == "final"][-1]
    need(math.isfinite(final["loss"]), "the model diverged")
    value = results[0][0]["models"][variant]["value"]
    near = math.isclose(value, final["loss"], rel_tol=1e-3)
    check(near, f"evaluate says {value}, the last row of the log {final['loss']}")
