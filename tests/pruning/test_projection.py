"""The damping of a projection is chosen by the error on held-out tokens."""

import numpy as np
import pytest
import threadpoolctl
from marks import some

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pruning import projection, refit, second_order
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.moments import Moments
from sparse_dataflow.pruning.projection import DAMPINGS, Target
from sparse_dataflow.pruning.refit import Problem


def drawn(rank, noise, tokens=80, ins=24, outs=16):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, rank)) @ rng.standard_normal((rank, ins)) + 0.3
    kernel = rng.standard_normal((ins, outs))
    y = x @ kernel + noise * rng.standard_normal((tokens, outs))
    return (x[:60], y[:60]), (x[60:], y[60:]), kernel


@pytest.mark.parametrize("rank", some([4, 12, 24], 12))
@pytest.mark.parametrize("noise", [0.0, 3.0])
@pytest.mark.parametrize("shape", some(["1", "4", "1x8"], "1x8"))
def test_no_neighbour_of_the_damping_has_less_held_out_error(rank, noise, shape):
    fit, held_out, kernel = drawn(rank, noise)
    groups = Groups.parse(shape)
    target = Target(groups, groups.count(kernel.shape, 0.5))
    result = projection.prune(Moments.of(*fit), Moments.of(*held_out), kernel, target)

    def error(damping):
        problem = Problem.of(Moments.of(*fit), kernel, damping)
        chosen = second_order.select(
            second_order.costs(problem, groups, target.stay), groups, target.stay
        )
        weights = refit.refit(problem, second_order.expanded(chosen, groups), groups.cols)
        return np.square(held_out[0] @ weights - held_out[1]).sum()

    place = DAMPINGS.index(result.damping)
    for neighbour in DAMPINGS[max(0, place - 1) : place + 2]:
        assert error(result.damping) <= error(neighbour) * (1 + 1e-6)


def test_half_of_an_odd_number_of_groups_is_refused():
    with pytest.raises(UserError, match=r"Density 0\.5 has no equal number of groups of 16x16"):
        Groups.parse("16").count((48, 32), None)


def test_low_rank_inputs_do_not_ruin_the_fit():
    """Inputs of rank 3, as after an embedding of few symbols: half of the weights suffice."""
    fit, held_out, kernel = drawn(3, 0.0)
    target = Target(Groups(1, 1), 12, rounds=4)
    result = projection.prune(Moments.of(*fit), Moments.of(*held_out), kernel, target)
    assert result.error < 1e-3
    assert (result.kernel[~result.mask] == 0).all()


def test_a_transform_of_the_inputs_is_pruned_in_its_own_features():
    fit, held_out, kernel = drawn(24, 0.0, tokens=400)
    moments = Moments.of(*fit), Moments.of(*held_out)
    signs = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    mixing = np.kron(np.eye(6), signs)
    target = Target(Groups(4, 4), 3, rounds=2, hadamard=4)
    result = projection.prune(*moments, kernel, target)
    mixed = mixing @ result.kernel
    mask = second_order.expanded(result.mask, target.groups)
    np.testing.assert_allclose(mixed[~mask], 0, atol=1e-5)
    plain = projection.prune(
        Moments.of(fit[0] @ mixing, fit[1]),
        Moments.of(held_out[0] @ mixing, held_out[1]),
        mixing @ kernel,
        Target(Groups(4, 4), 3, rounds=2),
    )
    np.testing.assert_allclose(mixed, plain.kernel, atol=1e-3)


def test_products_of_small_matrices_have_one_thread(monkeypatch):
    """Threads of a BLAS that wait for each other took 40 times the time on a busy machine."""
    threads, chosen_groups = set(), projection.chosen_groups

    def observed(*given):
        pools = threadpoolctl.threadpool_info()
        threads.update(pool["num_threads"] for pool in pools if pool["user_api"] == "blas")
        return chosen_groups(*given)

    monkeypatch.setattr(projection, "chosen_groups", observed)
    fit, held_out, kernel = drawn(24, 0.0, tokens=400)
    with threadpoolctl.threadpool_limits(2):
        projection.prune(
            Moments.of(*fit), Moments.of(*held_out), kernel, Target(Groups(1, 1), 12, rounds=1)
        )
    assert threads == {1}
