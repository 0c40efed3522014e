"""Prints the JobSet manifest of a run on TPUs or GPUs of a Kubernetes cluster.

    python launch/gke/render.py --platform=tpu --accelerator=tpu-v5p-slice --topology=4x4x4 \\
        --name=mine --image=IMAGE --claim=CLAIM gpt13b_sparse --scale=13b \\
        --corpus=hf:allenai/c4/en --set data.tokenizer=gpt2 --steps=17500 \\
        | kubectl apply -f -   # needs a cluster, v5p:64

After the options come the name of an experiment and its flags. See gke.md.
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
CHIPS_PER_HOST = {
    "tpu-v4-podslice": 4,
    "tpu-v5-lite-podslice": 4,
    "tpu-v5p-slice": 4,
    "tpu-v6e-slice": 4,
}
"""Chips per host of multi-host node pools, by their label cloud.google.com/gke-tpu-accelerator.

Source: GKE's page "TPUs in GKE", machine types ct4p-hightpu-4t, ct5lp-hightpu-4t, ct5p-hightpu-4t
and ct6e-standard-4t.
"""

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")  # Legal: 63 characters with JobSet's suffix.


def context(values: argparse.Namespace, words: Sequence[str], command: Sequence[str]) -> dict:
    """Returns the variables of the template.

    Args:
      values: parsed options.
      words: name of an experiment and its flags.
      command: full command line, for the first line of the manifest.

    Raises:
      ValueError: an option is illegal, or two options contradict each other.
    """
    for option in ("name", "claim"):
        if not _NAME.fullmatch(getattr(values, option)):
            raise ValueError(
                f"--{option}={getattr(values, option)} is not a Kubernetes name; legal: at most 32 "
                "of a-z, 0-9 and '-', first a letter, last a letter or digit."
            )
    common = {
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
        return common | _tpu(values)
    if values.topology or values.slices != 1:
        raise ValueError("--topology and --slices are for --platform=tpu; for GPUs use --nodes.")
    return common | {
        "exclusive": False,
        "jobs": 1,
        "pods": values.nodes,
        "chips": values.gpus,
        "resource": "nvidia.com/gpu",
        "selector": {"cloud.google.com/gke-accelerator": values.accelerator},
    }


def _tpu(values):
    if values.accelerator not in CHIPS_PER_HOST:
        raise ValueError(
            f"--accelerator={values.accelerator} is unknown; legal: {', '.join(CHIPS_PER_HOST)}."
        )
    if not re.fullmatch(r"\d+x\d+(x\d+)?", values.topology):
        raise ValueError(
            f"--topology={values.topology} is illegal; legal: chips such as 4x4 or 4x4x4."
        )
    chips = math.prod(map(int, values.topology.split("x")))
    per_host = CHIPS_PER_HOST[values.accelerator]
    if not chips or chips % per_host:
        raise ValueError(
            f"--topology={values.topology} has {chips} chips, and a host of "
            f"{values.accelerator} has {per_host}; legal: a multiple of {per_host}."
        )
    if values.nodes != 1:
        raise ValueError("--nodes is for --platform=gpu; for TPUs --topology sets the hosts.")
    return {
        "exclusive": values.slices > 1,
        "jobs": values.slices,
        "pods": chips // per_host,
        "chips": per_host,
        "resource": "google.com/tpu",
        "selector": {
            "cloud.google.com/gke-tpu-accelerator": values.accelerator,
            "cloud.google.com/gke-tpu-topology": values.topology,
        },
    }


def render(argv: Sequence[str]) -> str:
    """Returns the manifest as YAML.

    Args:
      argv: options, name of an experiment, its flags.

    Raises:
      ValueError: see `context`.
      SystemExit: an option is unknown or missing; argparse prints which.
    """
    parser = argparse.ArgumentParser(
        usage="python launch/gke/render.py --NAME=VALUE ... EXPERIMENT [--FLAG=VALUE ...]",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--platform", choices=("tpu", "gpu"), required=True)
    add("--name", required=True, help="name of the JobSet and of its folder in the volume")
    add("--image", required=True, help="image of launch/docker in a registry of the cluster")
    add("--claim", required=True, help="ReadWriteMany PersistentVolumeClaim")
    add(
        "--accelerator", required=True, help=f"{', '.join(CHIPS_PER_HOST)}, or nvidia-h100-80gb ..."
    )
    add("--topology", default="", help="chips of a TPU slice, as in 4x4x4")
    add("--slices", type=int, default=1, help="TPU slices (default 1)")
    add("--nodes", type=int, default=1, help="GPU machines (default 1)")
    add("--gpus", type=int, default=8, help="GPUs per machine (default 8)")
    add("--restarts", type=int, default=20, help="largest number of restarts (default 20)")
    add("--grace", type=int, default=300, help="seconds to save after a signal (default 300)")
    split = next((i for i, word in enumerate(argv) if word[:2] != "--" and word != "-h"), len(argv))
    values = parser.parse_args(argv[:split])
    if split == len(argv) or min(values.slices, values.nodes, values.gpus) < 1:
        parser.error("give an experiment, and 1 or more of --slices, --nodes and --gpus")
    command = ["python", "launch/gke/render.py", *argv]
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(context(values, argv[split:], command))


def main() -> int:
    """Prints the manifest of the command line; returns the exit status."""
    try:
        print(render(sys.argv[1:]), end="")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
