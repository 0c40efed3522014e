"""The plan of activations of a run: chosen under a limit, checked, refused."""

import dataclasses
import re

import jax
import pytest
from jax.sharding import AbstractMesh

from sparse_dataflow.commands import devices
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.core.config import remat as texts
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import machines
from sparse_dataflow.hardware.chips import CHIPS
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner import plan_memory, remat
from sparse_dataflow.runs.parallel import ParallelConfig
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants

GIB = 2**30
CHIP = CHIPS["gb200"]  # Its link to the host is fast, so that blocks are offloaded.
CONFIG = preset("1.3b").change(
    run__twin="no", model__compute_dtype="bfloat16", training__batch=8, training__micro_batches=1
)


def settled(limit, executor=SINGLE_DEVICE, chip=CHIP, **changes):
    config = CONFIG.change(parallel__memory_limit=limit, **changes)
    return settling.settled_remat(config, chip, executor)


def all_costs(executor=SINGLE_DEVICE, chip=CHIP):
    return settling.run_costs(variants(CONFIG), chip, executor)


def test_without_a_limit_nothing_is_planned():
    assert settling.settled_remat(CONFIG, CHIP, SINGLE_DEVICE) is CONFIG


@pytest.mark.parametrize("kind", ["none", "keep", "full"])
def test_a_plan_of_equal_blocks_has_the_bytes_of_the_memory_plan(kind):
    [v] = variants(CONFIG.change(model__remat=kind))
    planned = plan_memory.training_bytes(v.model, v.training).total
    assert remat.uniform(all_costs(), kind).device_bytes == pytest.approx(planned)


def test_the_plan_is_within_the_limit_and_is_printed(capsys):
    costs = all_costs()
    keep, least = (remat.uniform(costs, kind).device_bytes for kind in ("none", "full"))
    limit = f"{(keep + least) / 2 / GIB:.3f}GiB"
    config = settled(limit)
    assert config.model.remat not in ("none", "full")
    printed = capsys.readouterr().err
    assert f"model.remat={config.model.remat}" in printed and "extra ms a step" in printed
    [v] = variants(config)
    assert plan_memory.training_bytes(v.model, v.training).total <= (keep + least) / 2
    # The plan is kept where the run resumes, and checked.
    again = dict(model__remat=config.model.remat)
    assert settled(limit, **again) == config
    with pytest.raises(UserError, match=r"needs [\d.]+GiB .*, above parallel.memory_limit=1GiB"):
        settled("1GiB", **again)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_chosen_plan_passes_its_own_check(share):
    """Also where a pattern occurs once, which is one loop."""
    config = CONFIG.change(model__num_layers=5)
    costs = settling.run_costs(variants(config), CHIP, SINGLE_DEVICE)
    keep, least = (remat.uniform(costs, kind).device_bytes for kind in ("none", "full"))
    limit = str(int(least + share * (keep - least)))
    chosen = settled(limit, model__num_layers=5)
    assert settled(limit, model__num_layers=5, model__remat=chosen.model.remat) == chosen


def test_a_chip_without_a_known_host_link_offloads_nothing(capsys):
    costs = all_costs()
    least = [remat.uniform(costs, kind).device_bytes for kind in ("offload", "full")]
    assert settled(str(int(sum(least)) // 2)).model.remat == "offload"
    alone = dataclasses.replace(CHIP, host_bandwidth=None)
    assert "offload" not in settled(str(int(least[1]) + GIB), chip=alone).model.remat
    assert "no block is offloaded" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["offload", "full", "offload+full:12", "none:8,offload:16"])
def test_a_predicted_step_has_the_copies_and_recomputation_of_the_plan(text):
    def seconds(remat_text, chip):
        config = CONFIG.change(model__remat=remat_text)
        result = settling.settle(config, Machine(chip, 1, host=jax.default_backend() == "cpu"))
        return result.request.seconds(result.plan)

    slow = dataclasses.replace(CHIP, host_bandwidth=CHIP.host_bandwidth / 10)
    loops = texts.loops(text, CONFIG.model.num_layers)
    for chip in (CHIP, slow):
        added = remat.estimate(all_costs(chip=chip), loops).seconds
        assert seconds(text, chip) - seconds("none", chip) == pytest.approx(added)
    assert (seconds(text, slow) > seconds(text, CHIP)) == ("offload" in text)


def test_a_mesh_shards_what_is_planned():
    sizes = {"data": 1, "stage": 1, "fsdp": 8, "tensor": 1}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    sharded = all_costs(Sharded(mesh))[0]
    assert sharded.saved["full"] == pytest.approx(all_costs()[0].saved["full"] / 8)
    assert sharded.fixed < all_costs()[0].fixed / 2
    assert sharded.offloaded > 0 and sharded.recompute["full"] > sharded.recompute["keep"] > 0


def test_a_limit_that_nothing_meets_names_one_that_is_met():
    with pytest.raises(UserError, match="nearest feasible limit") as refused:
        settled("1GiB")
    settled(re.search(r"limit, ([\d.]+GiB)", str(refused.value))[1])


@pytest.mark.parametrize(("share", "remat"), [(0.87, "auto"), (0.97, "full")])
@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__executor": "relay"},
        {"parallel__mesh": "stage:2,fsdp:2,tensor:2"},
        {"parallel__mesh": "stage:2,feature:2,context:2"},
    ],
)
def test_blocks_that_are_alike_keep_to_a_limit(changes, share, remat):
    machine = machines.parse("h200:8")
    whole = CONFIG.change(**changes, training__batch=32, training__micro_batches=2)
    most = settling.settle(whole.change(model__remat="none"), machine).chip_bytes
    limit = f"{share * most / GIB:.3f}GiB"
    free = whole.change(training__micro_batches=0, model__remat=remat, parallel__memory_limit=limit)
    result = settling.settled_within_limit(free, machine)
    assert result.chip_bytes <= share * most * 1.001 and result.config.model.remat != "auto"
    assert not settling.chooses_each_block(result.config.parallel, 8)
    executor = devices.executor(result.config, 8)
    assert settling.settled_remat(result.config, CHIP, executor) is result.config
    with pytest.raises(UserError, match=r"memory_limit=1MiB: .*needs"):
        settling.settled_within_limit(free.change(parallel__memory_limit="1MiB"), machine)


def test_the_relay_of_a_cpu_keeps_to_a_limit_too():
    machine = dataclasses.replace(machines.parse("h200:1"), host=True)
    config = CONFIG.change(parallel__executor="relay", training__micro_batches=0)
    most = settling.settle(config, machine).chip_bytes
    assert (
        settling.settled_within_limit(
            config.change(parallel__memory_limit=str(int(0.7 * most))), machine
        ).chip_bytes
        <= 0.7 * most
    )
    with pytest.raises(UserError, match=r"memory_limit=9MiB: the relay needs .*; legal: as much"):
        settling.settled_within_limit(config.change(parallel__memory_limit="9MiB"), machine)


@pytest.mark.parametrize(("text", "size"), [("16GiB", 2**34), ("1.5MiB", 3 * 2**19), ("9e9", 9e9)])
def test_limits_are_bytes_in_several_units(text, size):
    assert ParallelConfig(memory_limit=text).memory_limit_bytes == size


@pytest.mark.parametrize("text", ["0GiB", "16GB", "-1GiB", "many", "1e99", "16 GiB"])
def test_limits_that_are_no_bytes_are_refused(text):
    with pytest.raises(UserError, match=r"legal: bytes from 1 .* 16GiB, 512MiB or 16e9"):
        ParallelConfig(memory_limit=text)


def test_blocks_of_different_remat_have_the_mean_memory_of_their_kinds():
    [v] = variants(CONFIG)
    sizes = {
        text: plan_memory.training_bytes(
            dataclasses.replace(v.model, remat=text), v.training
        ).activations
        for text in ("none", "full", "offload", "full+none:12", "offload+full:12")
    }
    assert sizes["offload"] == 0
    assert sizes["full+none:12"] == (sizes["full"] + sizes["none"]) / 2
    assert sizes["offload+full:12"] == sizes["full"] / 2
