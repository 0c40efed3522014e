"""What every shipped experiment trains, and what --describe prints of it on a mesh, as text: a
changed default or rule shows up in review.

python tests/experiments/test_golden.py        writes the files anew
"""

import json
from pathlib import Path

import pytest

import experiments
from experiments import gpt13b_dense, gpt13b_sparse
from sparse_dataflow.commands import command_line, devices
from sparse_dataflow.core.config import settings
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.runs.run_config import RunConfig
from sparse_dataflow.runs.variants import variants

GOLDEN = Path(__file__).with_name("golden")
# File -> (experiment, is it sparse, its arguments, backend, device memory).
EXPERIMENTS = {
    "gpt13b_sparse": (gpt13b_sparse, True, [], "cpu", 16 * GIB),
    "gpt13b_dense": (gpt13b_dense, False, [], "cpu", 16 * GIB),
    "gpt13b_sparse_13b": (gpt13b_sparse, True, ["--scale=13b"], "gpu", 80 * GIB),
    "gpt13b_dense_13b": (gpt13b_dense, False, ["--scale=13b"], "gpu", 80 * GIB),
}


def settled(name, *more):
    experiment, sparse, arguments, backend, memory_bytes = EXPERIMENTS[name]
    [request] = command_line.arguments([name, *arguments, *more], experiment.SHARED, None)
    return request.config(backend, memory_bytes, sparse)


def resolved(name) -> str:
    """The settings that differ from their defaults, which --help=all lists, and the specs of each
    model's projections."""
    config = settled(name)
    defaults = {path: s.default for path, s in settings.by_path(RunConfig).items()}
    changes = {
        f"{part}.{setting}": value
        for part, fields in config.to_json().items()
        for setting, value in fields.items()
        if settings.text(value) != settings.text(defaults[f"{part}.{setting}"])
    }
    models = {v.name: v.model.to_json()["linears"] for v in variants(config)}
    return json.dumps({"settings": changes, "projections": models}, indent=1) + "\n"


def described(name) -> str:
    mesh = "data:2,fsdp:8,tensor:8" if name.endswith("13b") else "fsdp:4,tensor:2"
    config = settled(name, f"--mesh={mesh}")
    executor, models = devices.executor(config, described=0), variants(config)
    devices.check(executor, config, models)
    return devices.printed(executor, models) + "\n"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_array_lies_where_the_golden_text_says(name):
    path = GOLDEN / f"{name}.describe.txt"
    assert described(name) == path.read_text(), f"changed on purpose? python {__file__}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_resolved_config_is_the_golden_text(name):
    path = GOLDEN / f"{name}.json"
    assert resolved(name) == path.read_text(), f"changed on purpose? python {__file__}"


def test_there_is_a_golden_text_for_every_experiment():
    entry_points = {path.stem for path in Path(experiments.__path__[0]).glob("gpt13b_*.py")}
    assert entry_points <= set(EXPERIMENTS)
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(EXPERIMENTS)


if __name__ == "__main__":
    for each in EXPERIMENTS:
        (GOLDEN / f"{each}.json").write_text(resolved(each))
        (GOLDEN / f"{each}.describe.txt").write_text(described(each))
