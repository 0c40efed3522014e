"""Prints the manifest of a run as a JobSet, on TPUs or GPUs of a Kubernetes cluster.

    python launch/gke/render.py --platform=tpu --accelerator=tpu-v5p-slice --topology=4x4x4 \
        --name=mine --image=IMAGE --claim=CLAIM gpt13b_sparse --scale=13b | kubectl apply -f -

The words after the options are an experiment and its flags.  See gke.md.
"""

import argparse
import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

TEMPLATE = Path(__file__).with_name("jobset.yaml.jinja")
CHIPS_A_HOST = {
    "tpu-v4-podslice": 4,
    "tpu-v5-lite-podslice": 4,
    "tpu-v5p-slice": 4,
    "tpu-v6e-slice": 4,
}
"""Of node pools of several hosts, by their label cloud.google.com/gke-tpu-accelerator (GKE's page
"TPUs in GKE": machine types ct4p-hightpu-4t, ct5lp-hightpu-4t, ct5p-hightpu-4t, ct6e-standard-4t).
"""

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")  # Room for JobSet's own endings, of 63.


def context(values: argparse.Namespace, words: Sequence[str], command: Sequence[str]) -> dict:
    """What the template asks for.

    Args:
      values: the options.
      words: an experiment and its flags.
      command: the whole command line, for the manifest's first line.

    Raises:
      ValueError: the options contradict each other or name nothing that GKE has.
    """
    for option in ("name", "claim"):
        if not _NAME.fullmatch(getattr(values, option)):
            raise ValueError(
                f"--{option}={getattr(values, option)} is no Kubernetes name; legal: up to 32 of "
                "a-z, 0-9 and '-', from a letter to a letter or digit."
            )
    found = {
        "platform": values.platform,
        "name": values.name,
        "image": values.image,
        "claim": values.claim,
        "restarts": values.restarts,
        "grace": values.grace,
        "command": "Made by: " + shlex.join(command).encode("unicode_escape").decode(),
        "words": ["sh", "launch/start_or_resume.sh", f"/runs/{values.name}", *words],
    }
    if values.platform == "tpu":
        return found | _tpu(values)
    if values.topology or values.slices != 1:
        raise ValueError("--topology and --slices are for --platform=tpu; --nodes counts machines.")
    return found | {
        "exclusive": False,
        "jobs": 1,
        "pods": values.nodes,
        "chips": values.gpus,
        "resource": "nvidia.com/gpu",
        "selector": {"cloud.google.com/gke-accelerator": values.accelerator},
    }


def _tpu(values):
    if values.accelerator not in CHIPS_A_HOST:
        raise ValueError(
            f"--accelerator={values.accelerator} is unknown; legal: {', '.join(CHIPS_A_HOST)}."
        )
    if not re.fullmatch(r"\d+x\d+(x\d+)?", values.topology):
        raise ValueError(f"--topology={values.topology} is none; write 4x4 or 4x4x4.")
    chips, each = math.prod(map(int, values.topology.split("x"))), CHIPS_A_HOST[values.accelerator]
    if not chips or chips % each:
        raise ValueError(
            f"--topology={values.topology} has {chips} chips, and a host of "
            f"{values.accelerator} has {each}; legal: a multiple of {each}."
        )
    if values.nodes != 1:
        raise ValueError("--nodes is for --platform=gpu; the topology says how many hosts.")
    return {
        "exclusive": values.slices > 1,
        "jobs": values.slices,
        "pods": chips // each,
        "chips": each,
        "resource": "google.com/tpu",
        "selector": {
            "cloud.google.com/gke-tpu-accelerator": values.accelerator,
            "cloud.google.com/gke-tpu-topology": values.topology,
        },
    }


def render(argv: Sequence[str]) -> str:
    """The manifest, YAML.

    Args:
      argv: options, an experiment, its flags.

    Raises:
      ValueError: see `context`.
      SystemExit: an option is unknown or missing; argparse says which.
    """
    parser = argparse.ArgumentParser(
        usage="python launch/gke/render.py --NAME=VALUE ... EXPERIMENT [--FLAG=VALUE ...]",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--platform", choices=("tpu", "gpu"), required=True)
    add("--name", required=True, help="of the JobSet, and of its folder in the volume")
    add("--image", required=True, help="of launch/docker, in a registry that the cluster reads")
    add("--claim", required=True, help="PersistentVolumeClaim that many pods may write")
    add("--accelerator", required=True, help=f"{', '.join(CHIPS_A_HOST)}, or nvidia-h100-80gb ...")
    add("--topology", default="", help="chips of a TPU slice, as in 4x4x4")
    add("--slices", type=int, default=1, help="TPU slices (default 1)")
    add("--nodes", type=int, default=1, help="GPU machines (default 1)")
    add("--gpus", type=int, default=8, help="GPUs of a machine (default 8)")
    add("--restarts", type=int, default=20, help="starts after the first (default 20)")
    add("--grace", type=int, default=300, help="seconds to save in (default 300)")
    begin = next((i for i, word in enumerate(argv) if word[:2] != "--" and word != "-h"), len(argv))
    values = parser.parse_args(argv[:begin])
    if begin == len(argv) or min(values.slices, values.nodes, values.gpus) < 1:
        parser.error("give an experiment, and 1 or more of --slices, --nodes and --gpus")
    command = ["python", "launch/gke/render.py", *argv]
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(context(values, argv[begin:], command))


def main() -> int:
    """Renders the command line; returns the exit status."""
    try:
        print(render(sys.argv[1:]), end="")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
