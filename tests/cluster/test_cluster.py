"""The index of this process, for every launcher."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.cluster import cluster
from sparse_dataflow.cluster.cluster import Membership, membership
from sparse_dataflow.files.errors import UserError

JAX = {"JAX_COORDINATOR_ADDRESS": "there:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "4501",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
}
JOBSET = {
    "JOBSET_COORDINATOR": "run-workers-0-0.run",
    "JOBSET_JOBS": "2",
    "JOBSET_PODS": "4",
    "JOBSET_JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "2",
}
GKE_TPU = {"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "2"}
MEGASCALE = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "z:8080",
}


def alone(environment, **more):
    return membership("", 0, -1, environment, **more)


def test_flags_come_before_variables_and_variables_before_launchers():
    assert alone({}) == Membership()
    assert alone(JAX) == Membership("there:1", 4, 3)
    assert membership("h:2", 2, 0, JAX) == Membership("h:2", 2, 0)
    assert alone(SLURM | JAX) == Membership("there:1", 4, 3)
    # A flag overrides one value; the launcher gives the others.
    mixed = membership("h:2", 0, -1, SLURM)
    assert mixed == Membership("h:2", 2, 1) and mixed.source == "flags, SLURM job 4501"
    assert membership("", 1, -1, SLURM) == Membership()


def test_missing_or_invalid_values_are_named():
    with pytest.raises(
        UserError, match=r"also needs parallel.coordinator, parallel.process \(or JAX_COORD"
    ):
        membership("", 2, -1, {})
    for name in ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"):
        with pytest.raises(UserError, match=f"{name}=one is not a whole number"):
            alone(JAX | {name: "one"})
    for environment, name in ((SLURM, "SLURM_PROCID"), (JOBSET, "JOB_COMPLETION_INDEX")):
        with pytest.raises(UserError, match=f"{name}=-1 is not a whole number"):
            alone(environment | {name: "-1"})
        with pytest.raises(UserError, match=r"process [0-9]+ of .*; it counts from 0"):
            alone(environment | {name: "99"})


@pytest.mark.parametrize(
    "environment, expected, source",
    [
        (SLURM, Membership("n07:61001", 2, 1), "SLURM job 4501"),
        (JOBSET, Membership("run-workers-0-0.run:8482", 8, 6), "JobSet"),
        (GKE_TPU, Membership("a:8482", 3, 2), "TPU variables"),
        (GKE_TPU | MEGASCALE, Membership("z:8482", 6, 5), "TPU variables"),
        (GKE_TPU | MEGASCALE | JOBSET, Membership("run-workers-0-0.run:8482", 8, 6), "JobSet"),
        (GKE_TPU | {"TPU_WORKER_HOSTNAMES": "a", "TPU_WORKER_ID": "0"}, Membership(), "TPU v"),
        ({n: v for n, v in SLURM.items() if n != "SLURM_STEP_NODELIST"}, Membership(), ""),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Membership(), "SLURM"),
    ],
)
def test_each_launcher_is_detected_and_named(environment, expected, source):
    me = alone(environment)
    assert me == expected and me.source.startswith(source) and bool(me.source) == bool(source)
    if me.processes > 1:
        assert source in me.describe() and me.coordinator in me.describe()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_process_number_alone_is_refused(processes):
    """It trained the whole run by itself."""
    with pytest.raises(UserError, match=r"parallel\.process=3 of one process"):
        membership("", processes, 3, {})
    assert membership("", processes, 0, {}) == Membership()


@given(st.integers(1, 5), st.integers(1, 6))
def test_the_pods_of_a_jobset_have_distinct_indexes(jobs, pods):
    indexes = set()
    for job in range(jobs):
        for pod in range(pods):
            indices = {"JOBSET_JOB_INDEX": str(job), "JOB_COMPLETION_INDEX": str(pod)}
            counts = {"JOBSET_JOBS": str(jobs), "JOBSET_PODS": str(pods)}
            me = alone(JOBSET | counts | indices)
            assert me.processes == jobs * pods
            indexes.add(me.process)
    assert indexes == set(range(jobs * pods))


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3]", "n1"),
        ("n[007,9-12],m1", "n007"),
        ("gpu[12]", "gpu12"),
        ("rack-a[3-4]-ib,rack-b1", "rack-a3-ib"),
    ],
)
def test_the_first_host_of_slurms_short_form(nodes, first):
    me = alone(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert me.coordinator == f"{first}:61001"


def test_gpus_are_shared_only_if_slurm_has_not_bound_them():
    four = SLURM | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    dealt = [alone(four | {"SLURM_LOCALID": str(n)}).devices for n in range(4)]
    assert dealt == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert alone(SLURM).devices is None
    assert alone(four | {"SLURM_GPUS_PER_TASK": "2"}).devices is None
    assert alone(four | {"SLURM_GPU_BIND": "closest"}).devices is None
    assert alone(four | {"CUDA_VISIBLE_DEVICES": ""}).devices is None
    # A node may have fewer tasks than the others; the second and third have two.
    uneven = four | {"SLURM_STEP_TASKS_PER_NODE": "4,2(x2),1", "SLURM_LOCALID": "1"}
    nodes = [alone(uneven | {"SLURM_NODEID": str(n)}).devices for n in range(4)]
    assert nodes == [(2, 3), (4, 5, 6, 7), (4, 5, 6, 7), None]
    with pytest.raises(UserError, match="3 tasks cannot share the 8 GPUs"):
        alone(four | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)"})


def test_a_tpu_vm_reads_its_metadata():
    old = {"agent-worker-number": "1", "worker-network-endpoints": "x:0:10.0.0.4,x:1:10.0.0.5"}
    assert alone({}, metadata=old.get) == Membership("10.0.0.4:8482", 2, 1)
    new = old | {"worker-network-endpoints": "t-w0,t-w1", "tpu-env": "ZONE: 'u'\nA_B: 'c'\n"}
    assert alone({}, metadata=new.get) == Membership("t-w0:8482", 2, 1)
    slices = "\n".join(f"{name}: '{value}'" for name, value in MEGASCALE.items())
    assert alone({}, metadata=(new | {"tpu-env": slices}).get) == Membership("z:8482", 4, 3)
    # Variables are enough; the metadata is not read.
    assert alone(GKE_TPU, metadata=None) == Membership("a:8482", 3, 2)
    assert alone({}, metadata=lambda name: None) == Membership()
    with pytest.raises(UserError, match=r"agent-worker-number is .two."):
        alone({}, metadata=(old | {"agent-worker-number": "two"}).get)


def test_a_machine_without_tpus_reads_no_metadata(monkeypatch):
    monkeypatch.setattr(cluster, "_read_metadata", lambda name: pytest.fail("read"))
    assert not cluster._on_a_tpu_vm() and alone({}) == Membership()


PROBE = """
import jax
from sparse_dataflow.cluster import cluster, processes
me = cluster.membership("", 0, -1)
print(me.describe())
with processes.joined(me, {}, 60, 60):
    print(jax.process_index(), jax.process_count(), jax.device_count())
"""


def test_two_slurm_tasks_become_one_runtime():
    started = []
    for number in range(2):
        variables = SLURM | {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_PROCID": str(number),
        }
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", PROBE],
                env=os.environ | variables | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for number, process in enumerate(started):
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        job = f"SLURM job {os.getpid()}"
        assert f"process {number} of 2 ({job}), coordinator localhost:6" in out
        assert out.splitlines()[-1] == f"{number} 2 2"
