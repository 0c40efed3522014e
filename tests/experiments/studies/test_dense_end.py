"""The dense training that equals one with a dense end."""

import math

import pytest

from experiments import dense_end as experiment
from experiments.studies import dense_end
from sparse_dataflow.runs.run_config import preset


@pytest.mark.parametrize(
    ("bits", "steps"),
    [(2.3, 800), (2.4, (600 * 800) ** 0.5), (2.25, (800 * 1000) ** 0.5), (2.5, 600), (2.2, 1000)],
)
def test_lengths_are_interpolated_between_the_ends_of_dense_trainings(bits, steps):
    assert dense_end.dense_steps({1000: 2.2, 600: 2.5, 800: 2.3}, bits) == pytest.approx(steps)


def test_a_loss_that_no_length_has_is_a_bound():
    ends = {600: 2.5, 1000: 2.2}
    assert dense_end.dense_steps(ends, 2.1) == math.inf
    assert dense_end.dense_steps(ends, 2.6) == 0
    assert dense_end.dense_steps({600: 2.5}, 2.5) == 600


def _run(arm, number, steps, bits, seconds, seed=0):
    return {
        **{"optimizer": "adamw", "arm": arm, "number": number, "seed": seed, "steps": steps},
        **{"bits_per_byte": bits, "seconds": seconds},
    }


def test_speed_ups_are_dense_seconds_over_those_of_the_arm():
    results = [
        _run("dense", 0.5, 500, 2.5, 50.0),
        *(_run("dense", 1.0, 1000, 2.3 + d, 110.0, d) for d in (-0.1, 0.1)),
        _run("mlp_half", 0.7, 1000, 2.5, 40.0),
        _run("mlp_half", 0.9, 1000, 2.6, 40.0),
        _run("all_eighth", 0.9, 1000, 2.1, 25.0),
    ]
    cells = [("dense", 0.5, 6.0), ("mlp_half", 0.7, 4.0), ("mlp_half", 0.9, 3.0)]
    cells += [("all_eighth", 0.9, 2.0)]
    names = ("arm", "number", "seconds")
    estimates = [{"optimizer": "adamw", **dict(zip(names, cell))} for cell in cells]
    text = dense_end.table(results, estimates, "h200:8", "1.3b")
    assert "| dense | 1 | 1000 | 2.3000 | 0.1000 |  |  |  |" in text
    # 500 dense steps of 0.1 s equal 1000 of 0.04 s here, or of 2/3 of a dense step's seconds there.
    assert "| mlp_half | 0.7 | 1000 | 2.5000 | - | 0.50 | 1.25 | 0.75 |" in text
    assert "| mlp_half | 0.9 | 1000 | 2.6000 | - | below 0.50 | below 1.25 | below 1.00 |" in text
    assert "| all_eighth | 0.9 | 1000 | 2.1000 | - | above 1.00 | above 4.00 | above 3.00 |" in text


def test_estimates_fall_with_the_density_and_the_sparse_share():
    options, config = experiment.Options(estimate="125m", chips="h200"), preset("pico")
    seconds = {
        (cell.arm, cell.number): dense_end.estimated_seconds(config, experiment.ARMS, cell, options)
        for cell in dense_end.cells_of(options)
        if cell.optimizer == "adamw"
    }
    assert seconds["dense", 1.0] > seconds["mlp_half", 0.7] > seconds["mlp_half", 0.9]
    assert seconds["mlp_half", 0.9] > seconds["mlp_eighth", 0.9] > seconds["all_eighth", 0.9]
