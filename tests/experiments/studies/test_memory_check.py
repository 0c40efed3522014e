import re

import pytest
from marks import some

from experiments.studies import memory_check
from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.request import NAMED
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.runs.variants import variants


def described(*arguments, backend="gpu", gib=None):
    [request] = command_line.arguments(["toy", *arguments], tuple(NAMED), None)
    config = request.config(backend, gib and gib * GIB)
    return config, variants(config)


def test_the_twins_share_a_steps_own_memory_but_not_their_states():
    _, (sparse, dense) = described("--scale=nano")
    both = memory_check.needed_bytes([sparse, dense])
    alone = [memory_check.needed_bytes([v]) for v in (sparse, dense)]
    assert max(alone) < both < sum(alone)
    training = dense.training
    assert alone[1] == plan_memory.training_bytes(dense.model, training).total


@pytest.mark.parametrize("gib", some([1, 8, 40, 80, 300], 8, 80))
@pytest.mark.parametrize("scale", some(["mini", "1.3b", "13b", "175b"], "1.3b", "13b"))
@pytest.mark.parametrize("twin", some(["yes", "no"], "yes"))
def test_what_is_advised_is_not_refused(scale, gib, twin):
    asked = [f"--scale={scale}", f"--twin={twin}"]
    config, models = described(*asked)
    if memory_check.needed_bytes(models) <= gib * GIB * memory.USABLE:
        memory_check.refuse_too_large(config, models, gib * GIB)
        return
    with pytest.raises(UserError, match=rf"--scale={scale} needs .* has {gib};") as refused:
        memory_check.refuse_too_large(config, models, gib * GIB)
    assert config.run.scale == scale
    advised = re.findall(r"--(?:set [\w.]+|\w+)=[\w.]*\w", str(refused.value).split(";")[1])
    assert advised
    given = {flag.partition("=")[0]: flag.replace(" ", "=") for flag in [*asked, *advised]}
    memory_check.refuse_too_large(*described(*given.values()), gib * GIB)


def test_what_fits_is_left_as_it_is():
    _, models = described(
        "--scale=nano", "--set=model.remat=keep", "--set=training.micro_batches=2"
    )
    assert memory_check.fitting(models, 100 * GIB) == ("keep", 2)
    assert memory_check.fitting(models, GIB // 100) is None


def test_nothing_is_refused_where_the_memory_is_not_known():
    memory_check.refuse_too_large(*described("--scale=1t"), None)


@pytest.mark.parametrize("gib", [16, 80, 139])
def test_the_scale_that_auto_chooses_has_flags_that_fit(gib):
    config, models = described(gib=gib)
    assert config.run.scale != "nano"
    assert memory_check.fitting(models, gib * GIB)


def test_a_dense_13b_on_an_h200_is_advised_a_state_in_bfloat16():
    flags_of_13b = (
        "--scale=13b",
        "--batch=1",
        "--set=model.remat=full",
        "--set=sparsity.projections=none",
    )
    config, models = described(*flags_of_13b, "--twin=no")
    with pytest.raises(
        UserError, match=r"fits with --set training.state_dtype=bfloat16 --set model.remat=full"
    ):
        memory_check.refuse_too_large(config, models, 139 * GIB)
