"""Finds out which process of which run this is, from flags, variables or the launcher.

Flags come before JAX_* variables, and these before the launchers: JobSet on Kubernetes, GKE's TPU
variables, SLURM, the metadata of a TPU VM. The first launcher that is present counts. A flag or
variable may still override each of the three values.
"""

import dataclasses
import importlib.util
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject

ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}
"""Variables of jax's manual for fields of Membership that no flag gives."""

PORT = 8482
"""Port of process 0 if its launcher gives it a whole host; jax's choice for TPUs."""

_MOST_DIGITS = 18
_METADATA_SECONDS = 3.0  # The server is local: it answers at once or does not exist.
_UNSET = {"coordinator": "", "processes": 0, "process": -1}


@dataclasses.dataclass(frozen=True)
class Membership:
    """Position of this process in its run.

    Attributes:
      coordinator: host:port of process 0.
      process: index of this process, from 0.
      devices: indices of the host's GPUs that this process uses; None for all visible ones.
      source: where this was read, for messages; empty for a process without a launcher.
    """

    coordinator: str = ""
    processes: int = 1
    process: int = 0
    devices: tuple[int, ...] | None = None
    source: str = dataclasses.field(default="", compare=False)

    def describe(self) -> str:
        """Returns a line such as "process 1 of 4 (SLURM job 7), coordinator n1:61447"."""
        words = f"process {self.process} of {self.processes} ({self.source or 'alone'})"
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
    """Returns the membership from flags, else JAX_* variables, else the launcher, else alone.

    Args:
      coordinator: host:port; empty if not given.
      processes: number of processes; 0 if not given; 1 ignores the environment.
      process: index; -1 if not given.
      environment: variables; see the launcher functions in this file for those that are read.
      metadata: name of a TPU VM attribute -> its value or None; called only if no variable helps.
        None stands for the real metadata server, on a machine with TPUs.

    Raises:
      UserError: the values do not identify a process; says which is missing or wrong.
    """
    flags = {"coordinator": coordinator, "processes": processes, "process": process}
    values: JsonObject = {}
    sources = []
    for name, value in flags.items():
        if value != _UNSET[name]:
            sources.append("flags")
        elif text := environment.get(ENVIRONMENT[name]):
            value = text if name == "coordinator" else _count(environment, ENVIRONMENT[name])
            sources.append("JAX_* variables")
        values[name] = value
    # Asked for by name: a launcher with several tasks must not make this process wait for the
    # others.
    if values["processes"] == 1 and not values["coordinator"]:
        _refuse_later_process(process)
        return Membership()
    # A launcher only fills in what neither flags nor variables say, because a run may use part of
    # what a scheduler gave it.
    missing = [name for name, value in values.items() if value == _UNSET[name]]
    launcher = _launcher_membership(environment, metadata) if missing else None
    if launcher is not None:
        values |= {name: getattr(launcher, name) for name in missing}
        sources.append(launcher.source)
        missing = []
    if values["processes"] in (0, 1) and not values["coordinator"]:
        _refuse_later_process(process)
        return Membership(source=launcher.source if launcher else "")
    if missing:
        settings = ", ".join(f"parallel.{name}" for name in missing)
        variables = ", ".join(ENVIRONMENT[name] for name in missing)
        raise UserError(f"A run of several processes also needs {settings} (or {variables}).")
    if not 0 <= values["process"] < values["processes"]:
        raise UserError(
            f"Process {values['process']} of {values['processes']} ({', '.join(sources)}): "
            "processes count from 0."
        )
    devices = launcher.devices if launcher else None
    return Membership(**values, devices=devices, source=", ".join(dict.fromkeys(sources)))


def _refuse_later_process(process):
    if process > 0:
        raise UserError(
            f"parallel.process={process} of one process; a run of several also needs "
            "parallel.coordinator and parallel.processes."
        )


def token(environment: Mapping[str, str] = os.environ) -> str:
    """Returns what the processes of one run share and others do not: SPARSE_DATAFLOW_TOKEN, else
    the SLURM job and step, else ""; a job's number is no secret, but tells runs apart."""
    if text := environment.get("SPARSE_DATAFLOW_TOKEN"):
        return text
    numbers = [environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return "SLURM " + ".".join(numbers) if all(numbers) else ""


def _launcher_membership(environment, metadata) -> Membership | None:
    """Returns the membership of the first launcher present; one process has no coordinator."""
    for finder in (_jobset, _tpu_variables, _slurm):
        if (me := finder(environment)) is not None:
            return me
    if metadata is None and environment.get("TPU_SKIP_MDS_QUERY") is None and _on_a_tpu_vm():
        metadata = _read_metadata
    return None if metadata is None else _tpu_metadata(metadata)


def _jobset(environment):
    """A pod of a JobSet, whose manifest passes on JobSet's annotations; see launch/gke.

    Kubernetes sets JOB_COMPLETION_INDEX in every pod of an indexed job; the manifest must set the
    other variables.
    """
    if not environment.get("JOBSET_COORDINATOR"):
        return None
    pods, jobs = _count(environment, "JOBSET_PODS"), _count(environment, "JOBSET_JOBS")
    job = _count(environment, "JOBSET_JOB_INDEX")
    pod = _count(environment, "JOB_COMPLETION_INDEX")
    return _member(environment["JOBSET_COORDINATOR"], pods * jobs, job * pods + pod, "JobSet")


def _tpu_variables(environment):
    """A pod with TPUs on GKE."""
    hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if not hosts or not environment.get("TPU_WORKER_ID"):
        return None
    worker = _count(environment, "TPU_WORKER_ID")
    return _worker(hosts, worker, environment, "TPU variables")


def _worker(hosts, worker, environment, source):
    """A host of a TPU slice; MEGASCALE_* variables describe several slices."""
    slices, number = 1, 0
    if environment.get("MEGASCALE_NUM_SLICES"):
        slices = _count(environment, "MEGASCALE_NUM_SLICES")
        number = _count(environment, "MEGASCALE_SLICE_ID")
    # Of several slices, process 0 is in the first one; a slice's own list has its own hosts only.
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0] or hosts[0]
    return _member(first, slices * len(hosts), number * len(hosts) + worker, source)


def _slurm(environment):
    """A task of a SLURM job step; the batch script and an interactive shell are no tasks."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if not all(environment.get(name) for name in needed):
        return None
    job, tasks = _count(environment, needed[0]), _count(environment, needed[2])
    # Above the ephemeral ports (Linux: up to 60999), a different port per job.
    port = 61000 + job % 4500
    host = _first_host(environment["SLURM_STEP_NODELIST"])
    me = _member(host, tasks, _count(environment, needed[3]), f"SLURM job {job}", port)
    return dataclasses.replace(me, devices=_slurm_devices(environment))


def _first_host(nodes: str) -> str:
    """Returns "n001" for "n[001-004,7],m1", SLURM's short form of a list of hosts."""
    first = re.match(r"([^,\[]*)(?:\[([^],-]*)[^]]*\]([^,]*))?", nodes)
    return "".join(text or "" for text in first.groups()) if first else nodes


def _slurm_devices(environment):
    """Returns an equal share of the node's GPUs if every task sees all of them.

    With --gpus-per-task or --gpu-bind, SLURM binds GPUs to tasks itself.
    """
    count = _tasks_of_a_node(environment)
    seen = len([gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu])
    bound = environment.get("SLURM_GPUS_PER_TASK") or environment.get("SLURM_GPU_BIND", "none")
    if count == 1 or not seen or bound != "none" or not environment.get("SLURM_LOCALID"):
        return None
    if seen % count:
        raise UserError(
            f"{count} tasks cannot share the {seen} GPUs of a node equally; legal: "
            "--ntasks-per-node=1, or a divisor of the number of GPUs."
        )
    each, place = seen // count, _count(environment, "SLURM_LOCALID")
    return tuple(range(place * each, (place + 1) * each))


def _tasks_of_a_node(environment):
    """Returns 2 for node 3 of "4(x3),2", SLURM's short form of the tasks of each node."""
    node = _count(environment, "SLURM_NODEID") if environment.get("SLURM_NODEID") else 0
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    for tasks, nodes in runs:
        # The nodes are not listed one by one: a variable from elsewhere may name any number.
        node -= int(nodes or 1)
        if node < 0:
            return int(tasks)
    return 1


def _tpu_metadata(read):
    """A host of a slice of TPU VMs; the metadata lists all, as "host" or "name:id:host"."""
    number, listed = read("agent-worker-number"), read("worker-network-endpoints")
    if number is None or not listed:
        return None
    if not (number.strip().isascii() and number.strip().isdecimal()) or len(number) > _MOST_DIGITS:
        raise UserError(
            f"This TPU VM's agent-worker-number is {number[:40]!r}; legal: a whole number."
        )
    hosts = [worker.split(":")[-1].strip() for worker in listed.split(",")]
    settings = dict(re.findall(r"^(MEGASCALE_\w+): *'?([^'\n]*)'?$", read("tpu-env") or "", re.M))
    return _worker(hosts, int(number), settings, "TPU metadata")


def _on_a_tpu_vm() -> bool:
    if importlib.util.find_spec("libtpu") is None:
        return False
    return Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()


def _read_metadata(name: str) -> str | None:
    """Reads an attribute from the metadata server of a Google Cloud machine."""
    # The address of metadata.google.internal: no DNS query, and nothing leaves the machine.
    url = f"http://169.254.169.254/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as response:
            return response.read(1 << 20).decode("utf-8", "replace")
    except (OSError, urllib.error.URLError):
        return None


def _member(host, processes, process, source, port=PORT) -> Membership:
    if not 0 <= process < processes:
        raise UserError(f"{source} names process {process} of {processes}; it counts from 0.")
    address = host if ":" in host else f"{host}:{port}"
    return Membership(address if processes > 1 else "", processes, process, source=source)


def _count(environment, name) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdecimal()) or len(text) > _MOST_DIGITS:
        raise UserError(f"{name}={text[:60]} is not a whole number of up to {_MOST_DIGITS} digits.")
    return int(text)
