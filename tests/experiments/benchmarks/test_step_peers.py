"""The dense step in torch is our own: the same numbers, the same FLOPs, the same losses."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest
from small_models import DENSE as MODEL

from experiments.benchmarks import paired, step_peers, steps
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import plan_memory

with_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the extra peers is not installed"
)

# Clipping is at work.
TRAINING = TrainingConfig(
    steps=9, batch=4, sequence=12, clip=0.3, weight_decay=0.1, vector_rate=3.0
)
TOKENS = np.random.default_rng(0).integers(40, size=(4, 13), dtype=np.int32)


def losses(run, steps=4):
    return [float(run().loss) for _ in range(steps)]


@with_torch
@pytest.mark.parametrize(
    "model, training, rtol",
    [
        ({}, {}, 1e-5),
        ({"norm": "rmsnorm", "activation": "relu", "remat": "full"}, {"micro_batches": 2}, 1e-5),
        ({"remat": "keep"}, {}, 1e-5),
        ({"compute_dtype": "bfloat16"}, {}, 0.03),
        ({"compute_dtype": "bfloat16"}, {"state_dtype": "bfloat16"}, 0.03),
    ],
)
def test_its_losses_are_ours(monkeypatch, model, training, rtol):
    monkeypatch.setattr(steps, "LEARNING_RATE", 0.01)
    model = dataclasses.replace(MODEL, **model)
    training = dataclasses.replace(TRAINING, **training)
    ours = steps.compiled_step(model, training, TOKENS)
    peer = step_peers.torch_step(model, training, TOKENS, 0.01, compiled=False)
    mine, theirs = losses(ours.run), losses(peer.run)
    assert mine[-1] < mine[0] - 0.05
    assert theirs[0] == pytest.approx(mine[0], rel=min(rtol, 1e-3))
    # Adam divides by the root of a square, and so enlarges what bfloat16 leaves.
    np.testing.assert_allclose(theirs, mine, rtol=rtol)


@with_torch
def test_it_trains_as_many_numbers_with_as_many_flops():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    step = step_peers.torch_step(MODEL, TRAINING, TOKENS, 0.01, compiled=False)
    assert step.stored_parameters == cost.parameter_count(MODEL)
    assert step.state_bytes == plan_memory.training_bytes(MODEL, TRAINING).state
    # torch 2.14 counts no FLOPs of fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        step.run()
    flops = cost.flops_per_token(MODEL, 12)
    tokens = TRAINING.batch * TRAINING.sequence
    whole = flops.total + flops.attention  # The masked half as well.
    assert counted.get_total_flops() == pytest.approx(tokens * whole, rel=1e-6)


@with_torch
def test_what_does_not_run_here_is_left_out(monkeypatch, capsys):
    import torch

    def none(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(step_peers, "_compiled", none)
    peer = step_peers.maker(MODEL, TRAINING, TOKENS, 0.01)
    assert step_peers.attempt(step_peers.NAME, peer[step_peers.NAME]) is None
    said = capsys.readouterr().out
    assert "torch_compile is left out" in said and "XLA_PYTHON_CLIENT_PREALLOCATE=false" in said


def test_our_own_refusals_are_not_swallowed():
    def refused():
        raise UserError("no")

    with pytest.raises(UserError):
        step_peers.attempt("dense", refused)


@pytest.mark.parametrize(
    "model, training, words",
    [
        (MODEL.with_linears(LinearSpec("block_sparse", density=0.25, block=16)), {}, "dense"),
        (dataclasses.replace(MODEL, positions="rotary"), {}, "learned positions"),
        (MODEL, {"state_dtype": "bfloat16"}, "computes in bfloat16"),
    ],
)
def test_what_has_no_peer_is_told(monkeypatch, capsys, model, training, words):
    training = dataclasses.replace(TRAINING, **training)
    monkeypatch.setattr(step_peers.importlib.util, "find_spec", lambda name: object())
    assert step_peers.maker(model, training, TOKENS, 0.01) == {}
    assert words in capsys.readouterr().out


def test_without_torch_the_benchmark_says_so_and_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(step_peers.importlib.util, "find_spec", lambda name: None)
    assert step_peers.maker(MODEL, TRAINING, TOKENS, 0.01) == {}
    assert "torch_compile is left out: torch is not installed" in capsys.readouterr().out
    step_peers.release()


def test_a_peer_is_compared_with_both():
    seconds = {"dense": np.array([2.0, 2.0]), "sparse": np.array([1.0, 1.0])}
    assert step_peers.compared(seconds) == {}
    seconds["torch_compile"] = np.array([3.0, 3.0])
    assert step_peers.compared(seconds) == {
        "torch_compile": {"over_dense": 1.5, "over_sparse": 3.0}
    }


def test_a_report_of_torch_is_waited_for_as_an_array():
    waited = []
    report = step_peers.Report(step_peers.Pending(2.5, lambda: waited.append(True)))
    assert float(jax.block_until_ready(report).loss) == 2.5 and waited
    run = {"peer": lambda: report}
    assert paired.paired_seconds(run, 1)["peer"].shape == (1,)
