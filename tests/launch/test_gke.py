"""Manifests equal the golden ones, fit the schema, and are understood by `cluster.membership`."""

import json
import pathlib
import re
import subprocess
import sys

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from sparse_dataflow.cluster.cluster import membership

GOLDEN = pathlib.Path(__file__).parent / "golden"
RENDER = ROOT / "launch" / "gke" / "render.py"
SCHEMA = json.loads((GOLDEN.parent / "jobset.schema.json").read_text(encoding="utf-8"))
COMMON = ("--name=mine", "--image=IMAGE", "--claim=runs")
TPU = ("--platform=tpu", "--accelerator=tpu-v5p-slice", "--topology=4x4x4", *COMMON)
GPU = ("--platform=gpu", "--accelerator=nvidia-h100-80gb", "--nodes=4", *COMMON)
TRAIN = ("gpt13b_sparse", "--scale=13b", "--corpus=hf:allenai/c4/en")
CASES = {
    "tpu": (*TPU, *TRAIN),
    "tpu_slices": (*TPU, "--slices=2", *TRAIN, "--mesh=data:2,fsdp:64"),
    "gpu": (*GPU, *TRAIN),
}


def render(*arguments):
    return subprocess.run(
        [sys.executable, RENDER, *arguments], capture_output=True, text=True, timeout=600
    )


def rendered(*arguments):
    sys.path.insert(0, str(RENDER.parent))
    try:
        import render as module
    finally:
        sys.path.pop(0)
    return module.render(list(arguments))


@pytest.mark.parametrize("case", CASES)
def test_manifests_equal_the_golden_ones_and_fit_the_schema(case):
    done = render(*CASES[case])
    assert done.returncode == 0, done.stderr
    jsonschema.validate(yaml.safe_load(done.stdout), SCHEMA)
    assert done.stdout == (GOLDEN / f"{case}.yaml").read_text(encoding="utf-8")


@settings(max_examples=25)
@given(
    st.sampled_from(["2x4", "4x4", "2x2x4", "4x4x8"]),
    st.integers(1, 4),
    st.text("abc '\"{}$\\:#\n%-", max_size=12),
)
def test_any_arguments_arrive_and_pods_find_their_process_number(topology, slices, words):
    text = rendered(*TPU, f"--topology={topology}", f"--slices={slices}", "gpt13b_dense", words)
    manifest = yaml.safe_load(text)
    jsonschema.validate(manifest, SCHEMA)
    job = manifest["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]["containers"][0]
    assert pod["command"][1:] == ["launch/start_or_resume.sh", "/runs/mine", "gpt13b_dense", words]
    assert (ROOT / pod["command"][1]).exists()
    fixed = {entry["name"]: entry.get("value") for entry in pod["env"]}
    pods = job["template"]["spec"]["completions"]
    process_numbers = set()
    for replica in range(job["replicas"]):
        for index in range(pods):
            # JobSet: <set>-<job>-<job index>-<pod index>.<subdomain, which is the set's name>
            pod_variables = {
                "JOBSET_COORDINATOR": "mine-workers-0-0.mine",
                "JOBSET_JOB_INDEX": str(replica),
                "JOB_COMPLETION_INDEX": str(index),
            }
            assert {name for name, value in fixed.items() if not value} <= pod_variables.keys()
            member = membership("", 0, -1, {k: v for k, v in fixed.items() if v} | pod_variables)
            process_numbers.add(member.process)
            assert member.processes == job["replicas"] * pods
    assert len(process_numbers) == job["replicas"] * pods


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((*TPU, "--topology=4x4x4x4", *TRAIN), "legal: chips such as 4x4 or 4x4x4"),
        ((*TPU, "--topology=1x1x1", *TRAIN), "has 1 chips, and a host of tpu-v5p-slice has 4"),
        ((*TPU, "--accelerator=tpu-v2", *TRAIN), "legal: tpu-v4-podslice, "),
        ((*TPU, "--nodes=3", *TRAIN), "for TPUs --topology sets the hosts"),
        ((*GPU, "--topology=2x2", *TRAIN), "are for --platform=tpu"),
        ((*GPU, "--name=Mine", *TRAIN), "is not a Kubernetes name"),
        ((*GPU, "--claim=a b", *TRAIN), "is not a Kubernetes name"),
        ((*GPU, "--nodes=0", *TRAIN), "1 or more of --slices, --nodes"),
        (GPU, "give an experiment"),
        (TRAIN, "the following arguments are required: --platform"),
    ],
)
def test_illegal_options_are_refused(arguments, words):
    done = render(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and "Traceback" not in done.stderr


def test_the_schema_refuses_unknown_fields():
    manifest = yaml.safe_load((GOLDEN / "gpu.yaml").read_text())
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["paralellism"] = 1
    with pytest.raises(jsonschema.ValidationError, match="paralellism"):
        jsonschema.validate(manifest, SCHEMA)


def test_the_page_shows_commands_that_render(tmp_path):
    page = (ROOT / "launch" / "gke.md").read_text(encoding="utf-8").replace("\\\n", " ")
    shown = re.findall(r"^python launch/gke/render\.py (.*?) \|", page, re.M)
    assert len(shown) >= 2
    for command in shown:
        jsonschema.validate(yaml.safe_load(rendered(*command.split())), SCHEMA)


if __name__ == "__main__":
    for name, arguments in CASES.items():
        (GOLDEN / f"{name}.yaml").write_text(render(*arguments).stdout, encoding="utf-8")
