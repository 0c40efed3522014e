"""Variables of launchers and of jax: a process of a run, or a refusal."""

import drawn
from drawn_inputs import DrawnInputs

from sparse_dataflow.cluster import cluster

NUMBERS = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JOBSET_PODS", "JOBSET_JOBS", "JOBSET_JOB_INDEX",
           "JOB_COMPLETION_INDEX", "TPU_WORKER_ID", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID",
           "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID",
           "SLURM_NODEID")  # fmt: skip
TEXTS = ("JAX_COORDINATOR_ADDRESS", "JOBSET_COORDINATOR", "TPU_WORKER_HOSTNAMES",
         "MEGASCALE_COORDINATOR_ADDRESS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE",
         "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_STEP_ID",
         "SPARSE_DATAFLOW_TOKEN")  # fmt: skip
LEGAL = (
    "host",
    "host:80",
    "n[001-004,7]",
    "a,b",
    "2(x3)",
    "0,1,2,3",
    "none",
    "[::1]:80",
    "n[",
    "n[]",
)


def environment(draw):
    """Variables of one or several launchers, mostly legal."""
    prefixes = draw.sample(["JAX", "JOB", "TPU", "MEGASCALE", "SLURM", "CUDA", "SPARSE"], 3)
    variables = {}
    for name in NUMBERS + TEXTS:
        if name.startswith(tuple(prefixes)) and draw.random() < 0.9:
            legal = LEGAL if name in TEXTS else ("0", "1", "2", "4")
            odd = (drawn.text(draw), "", "-1", "9" * 5000, "١", "1_0", " 1", "0x1", "1e3")
            variables[name] = draw.choice(legal if draw.random() < 0.9 else odd)
    return variables


def test_variables_name_a_process_or_are_refused():
    counts = DrawnInputs("variables of launchers and jax")
    for _ in counts:
        variables = environment(counts.draw)
        attributes = {
            "agent-worker-number": counts.draw.choice(["0", "1", "x", None]),
            "worker-network-endpoints": counts.draw.choice(["a,b", "x:y:a", "", None]),
            "tpu-env": counts.draw.choice(
                [None, "MEGASCALE_NUM_SLICES: '2'", drawn.text(counts.draw)]
            ),
        }
        with counts.one(variables):
            me = cluster.membership("", 0, -1, variables, attributes.get)
            assert 0 <= me.process < me.processes and me.describe()
            assert isinstance(cluster.token(variables), str)
