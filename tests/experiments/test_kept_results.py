"""Kept results can be repeated elsewhere: their commands name no place of one machine."""

import json
import re
from pathlib import Path

import pytest

import experiments

RESULTS = Path(experiments.__path__[0]) / "results"
ABSOLUTE = re.compile(r"(?:^|[\s=:,'\"])(?:/|~/|[A-Z]:\\)\w")
"""Where an absolute path begins in a command; an address such as s3://bucket has none."""


def commands(value):
    """The texts under `command` and `commands` in JSON values."""
    if isinstance(value, list):
        return [text for item in value for text in commands(item)]
    if not isinstance(value, dict):
        return []
    inner = [text for item in value.values() for text in commands(item)]
    texts = [value.get("command"), *(value.get("commands") or [])]
    return inner + [text for text in texts if isinstance(text, str)]


def test_commands_of_kept_results_name_no_absolute_path():
    files = sorted(RESULTS.rglob("*.json"))
    by_file = {path: commands(json.loads(path.read_text())) for path in files}
    assert sum(map(bool, by_file.values())) > 40
    absolute = {path: [t for t in texts if ABSOLUTE.search(t)] for path, texts in by_file.items()}
    assert {path: texts for path, texts in absolute.items() if texts} == {}


@pytest.mark.parametrize("text", ["a --out=/work/x", "/bin/x", "cd ~/runs", r"a C:\runs"])
def test_an_absolute_path_is_found(text):
    assert ABSOLUTE.search(text)


@pytest.mark.parametrize("text", ["a --out=runs/x", "--corpus=s3://bucket/x", "1/8", "a/b --n=1"])
def test_other_texts_are_legal(text):
    assert not ABSOLUTE.search(text)


README_ROWS = {
    "Training step of 13B": ("step_bench_h200_13b", "step_ms"),
    "Training step (`nano`)": ("step_bench_amd-epyc-2-cores_nano", "step_ms"),
    "Time per generated token (`mini`)": (
        "decode_bench_intel-r-xeon-r-processor-2-cores_mini_batch1",
        "token_ms",
    ),
}


@pytest.mark.parametrize("label", README_ROWS)
def test_a_time_in_the_readme_is_that_of_its_kept_file(label):
    name, field = README_ROWS[label]
    kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    [row] = [line for line in readme.splitlines() if line.startswith(f"| {label}")]
    times = [round(kept["rows"][model][field]) for model in ("dense", "sparse")]
    assert [int(t.replace(",", "")) for t in re.findall(r"([\d,]+) ms", row)] == times
    assert re.findall(r"\((\d+\.\d)x\)", row) == [f"{kept['ratio']:.1f}"]


def test_the_readme_has_the_speed_of_a_real_model_from_its_kept_file():
    kept = json.loads((RESULTS / "real_models/speed_smollm2.json").read_text(encoding="utf-8"))
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    [row] = [
        line for line in readme.splitlines() if line.startswith("| Tokens a second of SmolLM2")
    ]
    forms = "ours, bfloat16", "ours, half, bfloat16"
    ratios = [f"{kept['rows'][form]['speed_over_f16']:.2f}" for form in forms]
    assert re.findall(r"\b(\d\.\d\d)\b", row) == ratios
