"""If one process cannot write, the save fails on all processes, and the next save succeeds."""

import subprocess
import sys

import pytest
from checkpoint_states import ROOT
from ports import free_port

MEMBER = """
import errno, pathlib, resource, sys, time
import jax, numpy as np
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.core.checkpoint import named_arrays
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints

number, port, how, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4])
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(
    f"127.0.0.1:{port}", 2, number, cluster_detection_method="deactivate"
)
storage.WAITS = (0.0,) * 5
mesh = jax.sharding.Mesh(jax.devices(), "data")
where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
draw = np.random.default_rng(0)

def state(step):
    values = draw.normal(size=(2000, 8)).astype(np.float32) + step
    return {"w": jax.make_array_from_callback(values.shape, where, lambda at: values[at])}

checkpoints = Checkpoints(folder, config={})
checkpoints.save(1, state(1), {})
checkpoints.wait()
handler, whole = checkpoints._orbax._handler, checkpoints._orbax._handler.finalize

def broken(*arguments, **options):
    handler.finalize = whole
    raise OSError(errno.EIO, "Input/output error")

client = named_arrays._client

def slow():  # Reads failures late, so that process 0 has failed by then.
    time.sleep(1)
    return client()

limits = resource.getrlimit(resource.RLIMIT_FSIZE)
if how == "first" and number == 0:
    handler.finalize = broken
if how == "first" and number == 1:
    named_arrays._client = slow
if how == "worker" and number == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
checkpoints.save(2, state(2), {})
try:
    checkpoints.wait()
    print("WRITTEN")
except UserError as error:
    print("ERROR", error)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
checkpoints.save(3, state(3), {})
checkpoints.wait()
print("STEPS", checkpoints.steps(), flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"), [("first", "Input/output error"), ("worker", "File too large")]
)
def test_every_process_raises_the_failure_of_one(tmp_path, how, words):
    port = str(free_port())
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(number), port, how, str(tmp_path / "run")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [member.communicate(timeout=600)[0] for member in members]
    finally:
        for member in members:
            member.kill()
    assert [member.returncode for member in members] == [0, 0], outputs
    for text in outputs:
        assert "ERROR The checkpoint of step 2 could not be written" in text, text
        assert words in text and "STEPS [1, 3]" in text, text
