"""jax that does not start: a sentence and status 2, whatever variable or device is to blame."""

import os
import subprocess
import sys

import pytest
from marks import some

from sparse_dataflow.files.errors import UserError, in_words
from sparse_dataflow.hardware import detect

VARIABLES = [
    "JAX_PLATFORMS=cuda",
    "JAX_PLATFORMS=tpu",
    "JAX_PLATFORMS=bogus",
    "JAX_ENABLE_X64=garbage",
    "JAX_NUM_CPU_DEVICES=0",
    "JAX_DEFAULT_MATMUL_PRECISION=bogus",
    "XLA_FLAGS=--xla_force_host_platform_device_count=0",
    "XLA_FLAGS=garbage",
    "XLA_FLAGS=--xla_bogus=1",
]


@pytest.mark.slow
@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_of_jax_that_names_what_is_not_there_is_refused(variable, tmp_path):
    name, _, value = variable.partition("=")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.gpt13b_sparse", "--scale=pico", "--describe"],
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
    )
    [*_, last] = done.stderr.splitlines()
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert last.startswith("error: ") and (value in last or name in last.upper()), last


BACKENDS = """
import jax
from jax._src import xla_bridge
def fail(*_, **__): raise {error}
xla_bridge._init_backend = fail
from sparse_dataflow.files.errors import in_words
try:
    jax.devices()
except Exception as error:
    print(in_words(error))
"""


@pytest.mark.parametrize(
    "text",
    some(
        [
            "ABORTED: The TPU is already in use by process with pid 7.",
            "INTERNAL: no supported devices found for platform CUDA",
            "FAILED_PRECONDITION: No visible GPU devices.",
            "Unable to load cuSPARSE. Is it installed?",
        ],
        "INTERNAL: no supported devices found for platform CUDA",
    ),
)
def test_a_device_that_does_not_open_is_told_in_words(text):
    program = BACKENDS.format(error=f"RuntimeError({text!r})")
    variables = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True
    )
    assert "jax does not start here" in done.stdout, (done.stdout, done.stderr)
    assert text.rstrip(".") in done.stdout and len(done.stdout.splitlines()) == 1


def test_other_errors_are_not_taken_for_a_start_of_jax():
    import jax.numpy as jnp

    with pytest.raises(TypeError) as raised:
        jnp.zeros(3) @ jnp.zeros(4)
    assert in_words(raised.value) == ""


@pytest.mark.parametrize(
    "flags", ["", "--xla_force_host_platform_device_count=8", "--xla_cpu_enable_fast_math=false"]
)
def test_legal_flags_of_xla_pass(flags):
    detect.check_xla_flags({**os.environ, "XLA_FLAGS": flags})


@pytest.mark.parametrize("flags", ["nothing", "--xla_bogus", "--xla_gpu_autotune_level=x", "\x1b"])
def test_illegal_flags_of_xla_are_refused(flags):
    with pytest.raises(UserError, match="is not legal"):
        detect.check_xla_flags({**os.environ, "XLA_FLAGS": flags})
