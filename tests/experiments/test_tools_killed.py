"""Kills of export, evaluate and generate: what they write is whole or absent; they run again."""

import json
import random
import re
import signal
import time

import pytest
from fault_records import TOOL_KILLS, Record

import sparse_dataflow as sd

STATUS = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 75, "SIGINT": 130}


def killed(job, draw, pattern, last, *arguments, **options):
    """A run of an experiment that a signal ends at a random file operation on a pattern, or that
    had come to its end before; returns whether it was ended."""
    name = draw.choice(sorted(STATUS))
    event = (pattern, draw.randint(1, last), name)
    run = job.start(*arguments, events=[event], **options)
    status = run.wait()
    assert status in (0, STATUS[name]), (event, status, run.text)
    assert "Traceback" not in run.stderr, (event, run.stderr)
    return status != 0


def note(record, ended):
    """Records that an experiment that was killed so often ended as it would have."""
    assert ended
    record.note(f"-9, 75 or 130, {ended} times; whole or absent", None, None, None, True)


def kills(pytestconfig):
    return pytestconfig.getoption("--kills") // 5


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_an_export_is_whole_or_absent(job, undisturbed, tmp_path, pytestconfig, form):
    record = Record(TOOL_KILLS["export"])
    draw, out, ended = random.Random(form), tmp_path / "out", 0
    flags = (f"--run={undisturbed}", f"--to={out}", f"--form={form}")
    for number in range(kills(pytestconfig)):
        pattern = draw.choice([re.escape(str(tmp_path)), r"checkpoints|config\.json|tokenizer"])
        ended += killed(job, draw, pattern, 12, *flags, experiment="export")
        if out.exists():
            sd.load(out)
            out.rename(tmp_path / f"whole {number}")
    done = job.run(*flags, experiment="export")
    assert done.returncode == 0, done.stderr
    sd.load(out)
    # A kill leaves a hidden folder, whose name says what it is.
    others = {path.name for path in tmp_path.iterdir()} - {"out"}
    assert all(re.fullmatch(r"whole \d+|\.out\.[0-9a-f]+\.partial", name) for name in others), (
        others
    )
    note(record, ended)


@pytest.mark.nightly
def test_an_evaluation_is_whole_or_absent(job, copy, tmp_path, pytestconfig):
    pytest.importorskip("lm_eval")
    record = Record(TOOL_KILLS["evaluate"])
    draw, ended, before = random.Random(0), 0, {}
    flags = (f"--run={copy}", "--tasks=last_word", "--items=10", "--num_fewshot=0")
    for _ in range(kills(pytestconfig)):
        pattern = draw.choice([r"evaluation\.json", r"report\.", re.escape(str(copy))])
        ended += killed(job, draw, pattern, 4, *flags, experiment="evaluate")
        for name in ("evaluation.json", "report.json", "run.json", "config.json"):
            if (copy / name).exists():
                before[name] = json.loads((copy / name).read_text())
            assert name not in before or (copy / name).exists()
        assert (copy / "report.html").read_text().rstrip().endswith("</html>")
    done = job.run(*flags, experiment="evaluate")
    assert done.returncode == 0 and (copy / "evaluation.json").exists(), done.stderr
    assert job.resume(copy).returncode == 0
    note(record, ended)


@pytest.mark.nightly
def test_generated_lines_are_whole(job, undisturbed, tmp_path, pytestconfig):
    record = Record(TOOL_KILLS["generate"])
    draw, ended = random.Random(0), 0
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the of\nand to\n" * 20)
    flags = (f"--run={undisturbed}", f"--prompts={prompts}", "--batch=2", "--max_new_tokens=4")
    for _ in range(kills(pytestconfig)):
        name, lines = draw.choice(sorted(STATUS)), draw.randint(1, 30)
        run = job.start(*flags, experiment="generate")
        while run.returncode is None and run.stdout.count("\n") < lines:
            time.sleep(0.02)
        run.signal(getattr(signal, name))
        status = run.wait()
        assert status in (0, STATUS[name]) and "Traceback" not in run.stderr, run.stderr
        ended += status != 0
        assert all("text" in json.loads(line) for line in run.stdout.splitlines())
    note(record, ended)
