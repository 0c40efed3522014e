"""States to save and helpers of the checkpoint tests."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse_dataflow
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints

ROOT = Path(sparse_dataflow.__file__).parents[1]
CONFIG = {"model": {"d_model": 64, "heads": (2, 4)}, "optimizer": {"learning_rate": 1e-3}}


def small_state(step: int) -> dict:
    """Returns a state whose every bit follows from the step."""
    draw = np.random.default_rng(step)
    return {
        "w": jnp.asarray(draw.normal(size=(32, 8)), jnp.float32),
        "half": jnp.asarray(draw.normal(size=40), jnp.bfloat16),
        "table": jnp.asarray(draw.integers(-(2**31), 2**31, 30), jnp.int32),
        "key": jax.random.key_data(jax.random.key(step)),
        "step": jnp.int32(step),
    }


def full_state() -> dict:
    params = {
        "block": [{"kernel": jax.random.normal(jax.random.key(1), (3, 16, 8))}, None],
        "odd": jnp.array([-0.0, 1e-40, 1e18], jnp.float32),
        "half": jax.lax.bitcast_convert_type(jnp.arange(2**13, dtype=jnp.uint16), jnp.bfloat16),
        "none_stored": jnp.zeros((0, 4)),
    }
    optimizer = optax.adamw(1e-3)
    moments = optimizer.init(params)
    _, moments = optimizer.update(jax.tree.map(jnp.ones_like, params), moments, params)
    return {
        "params": params,
        "optimizer": moments,
        "table": jnp.array([[2**31 - 1, -(2**31)], [0, 7]], jnp.int32),
        "mask": jnp.array([True, False]),
        "key_data": jax.random.key_data(jax.random.key(5)),
        "keys": jax.random.split(jax.random.key(6), 3),
        "rbg": jax.random.key(7, impl="rbg"),
        "step": jnp.int32(11),
        "host": np.arange(3, dtype=np.int64),
    }


def abstract(state):
    return jax.tree.map(
        lambda leaf: (
            leaf if isinstance(leaf, np.ndarray) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        ),
        state,
    )


def assert_same_bits(state, expected):
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
        assert isinstance(leaf, jax.Array) == isinstance(other, jax.Array)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


def saved(folder, steps, **options):
    checkpoints = Checkpoints(folder, config=CONFIG, **options)
    for step in steps:
        assert checkpoints.save(step, small_state(step), {"position": step})
    checkpoints.wait()
    return checkpoints


def restored_step(folder, **options) -> int:
    """Restores the newest checkpoint in a new object, checks every bit and returns its step."""
    checkpoints = Checkpoints(folder, config=CONFIG, **options)
    state, extra = checkpoints.restore(abstract(small_state(0)))
    step = int(state["step"])
    assert extra["position"] == step
    assert_same_bits(state, small_state(step))
    return step


def in_new_process(code: str, *arguments, **environment) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}", "JAX_PLATFORMS": "cpu"}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
