"""What every shipped experiment trains, and what --describe says of it on a mesh, as text: a
changed default or rule shows up in review.

python tests/experiments/test_golden.py        writes the files anew
"""

import json
from pathlib import Path

import pytest
from absl import flags as absl_flags

from experiments import command_line, devices, flags, gpt13b_dense, recipes
from sparse_dataflow.hardware.detect import GIB

GOLDEN = Path(__file__).with_name("golden")
# File -> (is it sparse, its flags, arguments, backend, device memory).
EXPERIMENTS = {
    "gpt13b_sparse": (True, flags.GROUPS, [], "cpu", 16 * GIB),
    "gpt13b_dense": (False, gpt13b_dense.GROUPS, [], "cpu", 16 * GIB),
    "gpt13b_sparse_13b": (True, flags.GROUPS, ["--scale=13b"], "gpu", 80 * GIB),
    "gpt13b_dense_13b": (False, gpt13b_dense.GROUPS, ["--scale=13b"], "gpu", 80 * GIB),
}


def settled(name, *more):
    """(flags, names of the variants)."""
    sparse, groups, arguments, backend, memory_bytes = EXPERIMENTS[name]
    values = absl_flags.FlagValues()
    flags.define(groups, values)
    command_line.parse([name, *arguments, *more], groups, values)
    return values, recipes.settle(values, backend, memory_bytes, sparse)


def resolved(name) -> str:
    groups = EXPERIMENTS[name][1]
    values, names = settled(name)
    variants = {v.name: v.to_json() for v in recipes.variants(values, names)}
    for variant in variants.values():
        variant["training"]["steps"] = "as many as fit into --minutes"
    config = {"flags": flags.as_dict(values, groups), "variants": variants}
    return json.dumps(config, indent=1) + "\n"


def described(name) -> str:
    mesh = "data:2,fsdp:8,tensor:8" if name.endswith("13b") else "fsdp:4,tensor:2"
    values, names = settled(name, f"--mesh={mesh}", "--describe")
    executor, variants = devices.executor(values), recipes.variants(values, names)
    devices.check(executor, values, variants, None)
    return devices.printed(executor, variants) + "\n"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_array_lies_where_the_golden_text_says(name):
    path = GOLDEN / f"{name}.describe.txt"
    assert described(name) == path.read_text(), f"changed on purpose? python {__file__}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_is_trained_is_the_golden_text(name):
    path = GOLDEN / f"{name}.json"
    assert resolved(name) == path.read_text(), f"changed on purpose? python {__file__}"


def test_there_is_a_golden_text_for_every_experiment():
    entry_points = {path.stem for path in Path(flags.__file__).parent.glob("gpt13b_*.py")}
    assert entry_points <= set(EXPERIMENTS)
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(EXPERIMENTS)


if __name__ == "__main__":
    for each in EXPERIMENTS:
        (GOLDEN / f"{each}.json").write_text(resolved(each))
        (GOLDEN / f"{each}.describe.txt").write_text(described(each))
