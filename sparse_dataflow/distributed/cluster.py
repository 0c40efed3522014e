"""Which process of which run this is, read off what its launcher left.

Flags come before JAX_* variables, and these before what a launcher says of itself: JobSet on
Kubernetes, GKE's TPU variables, SLURM, the metadata of a TPU VM.  The first that is there counts;
each of the three numbers may still be given by a flag or a variable.
"""

import dataclasses
import importlib.util
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparse_dataflow.files.errors import UserError

ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}
"""Variables that stand for a field of Membership that no flag gives; those of jax's own manual."""

PORT = 8482
"""Where process 0 listens if its launcher gives it a host of its own; jax's choice for TPUs."""

_METADATA_SECONDS = 3.0  # The server is on the machine itself: it answers at once, or is not there.
_UNSET = {"coordinator": "", "processes": 0, "process": -1}


@dataclasses.dataclass(frozen=True)
class Membership:
    """Which process of which run this is.

    Attributes:
      coordinator: host:port of process 0.
      processes: how many there are.
      process: this one's number, from 0.
      devices: which of the machine's GPUs are this process's, by number; None for all it sees.
      found: where that was read, in words; empty where nothing was there.
    """

    coordinator: str = ""
    processes: int = 1
    process: int = 0
    devices: tuple[int, ...] | None = None
    found: str = dataclasses.field(default="", compare=False)

    def describe(self) -> str:
        """One line, such as "process 1 of 4 (SLURM job 7), coordinator n1:61447"."""
        words = f"process {self.process} of {self.processes} ({self.found or 'alone'})"
        if self.processes > 1:
            words += f", coordinator {self.coordinator}"
        if self.devices is not None:
            words += f", GPUs {','.join(map(str, self.devices))}"
        return words


def membership(
    coordinator: str,
    processes: int,
    process: int,
    environment: Mapping[str, str] = os.environ,
    metadata: Callable[[str], str | None] | None = None,
) -> Membership:
    """From flags, else JAX_* variables, else the launcher, else alone.

    Args:
      coordinator: host:port; empty where not given.
      processes: 0 where not given; 1 is alone, whatever the environment says.
      process: -1 where not given.
      environment: variables; see the finders in this file for those that are read.
      metadata: an attribute of this TPU VM by its name, None where there is none; asked only where
        variables say nothing. None stands for the real server, on a machine with TPUs.

    Raises:
      UserError: what is given does not name a process; says what is missing or wrong.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    found: dict[str, Any] = {}
    sources = []
    for name, value in given.items():
        if value != _UNSET[name]:
            sources.append("flags")
        elif text := environment.get(ENVIRONMENT[name]):
            value = text if name == "coordinator" else _count(environment, ENVIRONMENT[name])
            sources.append("JAX_* variables")
        found[name] = value
    if found["processes"] == 1 and not found["coordinator"]:
        return Membership()
    missing = [name for name, value in found.items() if value == _UNSET[name]]
    launcher = _launched(environment, metadata) if missing else None
    if launcher is not None:
        found |= {name: getattr(launcher, name) for name in missing}
        sources.append(launcher.found)
        missing = []
    if found["processes"] in (0, 1) and not found["coordinator"]:
        return Membership(found=launcher.found if launcher else "")
    if missing:
        raise UserError(
            f"a run of several processes needs {', '.join(f'--{name}' for name in missing)} too "
            f"(or {', '.join(ENVIRONMENT[name] for name in missing)})."
        )
    devices = launcher.devices if launcher else None
    return Membership(**found, devices=devices, found=", ".join(dict.fromkeys(sources)))


def _launched(environment, metadata) -> Membership | None:
    """What the first launcher that is there says; a run of one process has no coordinator."""
    for finder in (_jobset, _tpu_variables, _slurm):
        if (me := finder(environment)) is not None:
            return me
    if metadata is None and environment.get("TPU_SKIP_MDS_QUERY") is None and _on_a_tpu_vm():
        metadata = _ask_metadata
    return None if metadata is None else _tpu_metadata(metadata)


def _jobset(environment):
    """Pods of a JobSet, whose manifest hands on what JobSet notes on each pod; see launch/gke.

    JOB_COMPLETION_INDEX is set by Kubernetes in every pod of an indexed job; the others are not
    set unless the manifest does.
    """
    if not environment.get("JOBSET_COORDINATOR"):
        return None
    pods, jobs = _count(environment, "JOBSET_PODS"), _count(environment, "JOBSET_JOBS")
    job = _count(environment, "JOBSET_JOB_INDEX")
    pod = _count(environment, "JOB_COMPLETION_INDEX")
    return _member(environment["JOBSET_COORDINATOR"], pods * jobs, job * pods + pod, "JobSet")


def _tpu_variables(environment):
    """What GKE puts into each pod that asks for TPUs."""
    hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if not hosts or not environment.get("TPU_WORKER_ID"):
        return None
    worker = _count(environment, "TPU_WORKER_ID")
    return _worker(hosts, worker, environment, "TPU variables")


def _worker(hosts, worker, environment, found):
    """One of a slice's hosts; MEGASCALE_* are there where there are several slices."""
    slices, number = 1, 0
    if environment.get("MEGASCALE_NUM_SLICES"):
        slices = _count(environment, "MEGASCALE_NUM_SLICES")
        number = _count(environment, "MEGASCALE_SLICE_ID")
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0] or hosts[0]
    return _member(first, slices * len(hosts), number * len(hosts) + worker, found)


def _slurm(environment):
    """A task of a job step; the batch script itself and an interactive shell are none."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if not all(environment.get(name) for name in needed):
        return None
    job, tasks = _count(environment, needed[0]), _count(environment, needed[2])
    # Above the ports that systems hand out themselves (Linux: to 60999), another one a job.
    port = 61000 + job % 4500
    host = _first_host(environment["SLURM_STEP_NODELIST"])
    me = _member(host, tasks, _count(environment, needed[3]), f"SLURM job {job}", port)
    return dataclasses.replace(me, devices=_slurm_devices(environment))


def _first_host(nodes: str) -> str:
    """n001 of "n[001-004,7],m1", SLURM's short form of a list of hosts."""
    first = re.match(r"([^,\[]*)(?:\[([^],-]*)[^]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in first.groups()) if first else nodes


def _slurm_devices(environment):
    """An equal part of the node's GPUs where its tasks all see all of them.

    SLURM binds GPUs to tasks itself with --gpus-per-task or --gpu-bind.
    """
    tasks = re.fullmatch(r"(\d+)(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    count = int(tasks[1]) if tasks else 1
    seen = len([gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu])
    bound = environment.get("SLURM_GPUS_PER_TASK") or environment.get("SLURM_GPU_BIND", "none")
    if count == 1 or not seen or bound != "none" or not environment.get("SLURM_LOCALID"):
        return None
    if seen % count:
        raise UserError(
            f"{count} tasks on a node with {seen} GPUs cannot have equal parts of them; legal: "
            "--ntasks-per-node=1, or a divisor of the GPUs."
        )
    each, place = seen // count, _count(environment, "SLURM_LOCALID")
    return tuple(range(place * each, (place + 1) * each))


def _tpu_metadata(ask):
    """A slice of TPU VMs, each of which is told of all: "host" or "name:id:host", by commas."""
    number, listed = ask("agent-worker-number"), ask("worker-network-endpoints")
    if number is None or not listed:
        return None
    if not number.strip().isdecimal():
        raise UserError(f"this TPU VM's agent-worker-number, {number[:40]!r}, is no number.")
    hosts = [worker.split(":")[-1].strip() for worker in listed.split(",")]
    settings = dict(re.findall(r"^(MEGASCALE_\w+): *'?([^'\n]*)'?$", ask("tpu-env") or "", re.M))
    return _worker(hosts, int(number), settings, "TPU metadata")


def _on_a_tpu_vm() -> bool:
    if importlib.util.find_spec("libtpu") is None:
        return False
    return Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()


def _ask_metadata(name: str) -> str | None:
    """An attribute of this machine, from the server that every Google Cloud machine has."""
    # The address of metadata.google.internal: no name is looked up, and nothing leaves the machine.
    url = f"http://169.254.169.254/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as answer:
            return answer.read(1 << 20).decode("utf-8", "replace")
    except (OSError, urllib.error.URLError):
        return None


def _member(host, processes, process, found, port=PORT) -> Membership:
    if not 0 <= process < processes:
        raise UserError(f"{found} names process {process} of {processes}; it counts from 0.")
    address = host if ":" in host else f"{host}:{port}"
    return Membership(address if processes > 1 else "", processes, process, found=found)


def _count(environment, name) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"{name}={text} is not a whole number.")
    return int(text)
