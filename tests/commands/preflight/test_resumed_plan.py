"""The plan of a run that goes on on other devices."""

import jax
import pytest

from sparse_dataflow.commands import run_folder
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect
from sparse_dataflow.runs.run_config import preset


def config_of(batch, micro_batches, mesh, **changes):
    return preset("pico").change(
        sparsity__block=16, training__steps=9, training__batch=batch, run__twin=False,
        training__micro_batches=micro_batches, parallel__mesh=mesh, **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    "batch, micro_batches, devices, fits",
    [(8, 8, 2, 4), (8, 2, 8, 1), (12, 6, 4, 3), (16, 4, 4, 4)],
)
def test_micro_batches_that_do_not_fit_are_chosen_again(
    monkeypatch, batch, micro_batches, devices, fits
):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(jax, "local_device_count", lambda: devices)
    monkeypatch.setattr(settling.devices, "check", lambda *_: None)
    monkeypatch.setattr(settling.devices, "executor", lambda *_: None)
    config = config_of(batch, micro_batches, f"data:{devices}")
    chip = detect.detect(["float32"])
    settled = settling.settled(config, chip, free_micro_batches=True)
    assert 1 <= settled.training.micro_batches <= fits
    assert batch % (devices * settled.training.micro_batches) == 0
    if batch % (devices * micro_batches):
        with pytest.raises(UserError, match="another number of chips, or a new run with --batch="):
            settling.settled(config, chip)
    else:
        assert settled.training.micro_batches == micro_batches


@pytest.mark.parametrize(
    "changes, free",
    [
        ({}, True),
        ({"evolution__method": "set"}, True),
        ({"evolution__method": "rigl"}, False),
        ({"model__experts": 2, "sparsity__projections": ()}, False),
    ],
)
def test_a_resumed_run_keeps_micro_batches_that_change_results(tmp_path, changes, free):
    saved, now = (config_of(8, n, "auto", **changes) for n in (4, 2))
    assert (run_folder.MICRO_BATCHES not in run_folder.fixed_paths(saved)) == free
    if free:
        run_folder.refuse_other_config(tmp_path, saved, now)
    else:
        with pytest.raises(UserError, match=r"training\.micro_batches is 4 there and 2 here"):
            run_folder.refuse_other_config(tmp_path, saved, now)
