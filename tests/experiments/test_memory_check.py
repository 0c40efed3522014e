import dataclasses
import re

import pytest
from absl import flags as absl_flags

from experiments import command_line, flags, memory_check, recipes, step_bench
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.detect import GIB
from sparse_dataflow.planning import memory


def described(*arguments, backend="gpu", gib=None):
    values = absl_flags.FlagValues()
    flags.define(flags.GROUPS, values)
    command_line.parse(["toy", *arguments], flags.GROUPS, values)
    names = recipes.settle(values, backend, gib and gib * GIB, sparse=True)
    return values, recipes.variants(values, names)


def test_the_twins_share_a_steps_own_memory_but_not_their_states():
    _, (sparse, dense) = described("--scale=nano")
    both = memory_check.needed_bytes([sparse, dense])
    alone = [memory_check.needed_bytes([v]) for v in (sparse, dense)]
    assert max(alone) < both < sum(alone)
    training = dense.training
    assert alone[1] == memory.training_bytes(dense.model, training.batch, training.sequence).total


@pytest.mark.parametrize("gib", [1, 8, 40, 80, 300])
@pytest.mark.parametrize("scale", ["mini", "1.3b", "13b", "175b"])
@pytest.mark.parametrize("twin", ["yes", "no"])
def test_what_is_advised_is_not_refused(scale, gib, twin):
    asked = [f"--scale={scale}", f"--twin={twin}"]
    values, variants = described(*asked)
    if memory_check.needed_bytes(variants) <= gib * GIB * memory.USABLE:
        memory_check.refuse_too_large(values, variants, gib * GIB)
        return
    with pytest.raises(UserError, match=rf"--scale={scale} needs .* has {gib};") as refused:
        memory_check.refuse_too_large(values, variants, gib * GIB)
    assert values.scale == scale
    advised = re.findall(r"--\w+=[\w.]*\w", str(refused.value).split(";")[1])
    assert advised
    given = {flag.partition("=")[0]: flag for flag in [*asked, *advised]}
    memory_check.refuse_too_large(*described(*given.values()), gib * GIB)


def test_what_fits_is_left_as_it_is():
    _, variants = described("--scale=nano", "--remat=dots", "--accumulation=2")
    assert memory_check.fitting(variants, 100 * GIB) == ("dots", 2)
    assert memory_check.fitting(variants, GIB // 100) is None


def test_nothing_is_refused_where_the_memory_is_not_known():
    memory_check.refuse_too_large(*described("--scale=1t"), None)


@pytest.mark.parametrize("gib", [16, 80, 139])
def test_the_scale_that_auto_chooses_has_flags_that_fit(gib):
    values, variants = described(gib=gib)
    assert values.scale != "nano"
    assert memory_check.fitting(variants, gib * GIB)


def test_two_states_that_fit_only_one_by_one_are_measured_one_by_one():
    _, (dense,) = described("--scale=13b", "--twin=no", "--batch=1", "--remat=full")
    training = dataclasses.replace(dense.training, state_dtype="bfloat16")
    models = [dataclasses.replace(dense.model, linears=()), dense.model]
    assert not step_bench.fit_together(models, training, 139 * GIB)
    assert all(step_bench.fit_together([model], training, 139 * GIB) for model in models)
    assert step_bench.fit_together(models, training, 200 * GIB)
    assert step_bench.fit_together(models, training, None)


def test_a_dense_13b_on_an_h200_is_advised_a_state_in_bfloat16():
    flags_of_13b = ("--scale=13b", "--batch=1", "--remat=full", "--sparse_projections=none")
    values, variants = described(*flags_of_13b, "--twin=no")
    with pytest.raises(UserError, match=r"fits with --state_dtype=bfloat16 --remat=full"):
        memory_check.refuse_too_large(values, variants, 139 * GIB)
