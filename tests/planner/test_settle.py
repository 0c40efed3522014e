"""Plans settled before a run: for machines that people have, with settings that they give."""

import dataclasses
import math
import re

import pytest
from marks import some

from sparse_dataflow.commands.preflight.settling import settle
from sparse_dataflow.core.executors.mesh_axes import parse_mesh
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import machines
from sparse_dataflow.hardware.chips import GIB, Chip
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner import memory, search
from sparse_dataflow.planner.search import ROOMY
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants

SPARSE = preset("13b", compute_dtype="bfloat16")
DENSE = SPARSE.dense()
EIGHT = ("h100", "h100:8", "a100:8", "h200", "v4-8", "v5p-8", "v5e-64", "v5p-64", "v6e-64")
MACHINES = (*EIGHT, "h100:2", "mi300x:8", "mi250x:8")


def on(name, config=SPARSE, **changes):
    return settle(config.change(**changes), machines.parse(name))


@pytest.mark.parametrize("name", some(MACHINES, "v5p-64", "v5e-64", "h100:8", "mi250x:8"))
def test_the_13b_gets_a_plan_with_room_that_its_executor_accepts(name):
    result = on(name)
    config = result.config
    assert result.share <= ROOMY and not result.tight
    assert config.training.batch % config.training.micro_batches == 0
    assert config.model.remat in ("none", "keep", "full")
    sizes = parse_mesh(config.parallel.mesh, result.machine.count)
    assert math.prod(sizes.values()) == result.machine.count
    assert result.plan.batch == config.training.batch


@pytest.mark.parametrize("name", ["h100", "h100:8", "v5e-64"])
def test_no_other_plan_with_room_is_faster(name):
    """A plain search over all meshes, micro-batches and kinds of remat with ZeRO 3."""
    result = on(name)
    best = float(result.request.seconds(result.plan))
    space = dict(search.space(result.request)) | {
        "zero": (3,), "stage": (1,), "chunks": (1,), "schedule": ("gpipe",),
        "micro_batch": tuple(2**n for n in range(11)),
    }  # fmt: skip
    priced = search.price(result.request, space)
    [(_, speed)] = priced.ranked(1, ROOMY)
    assert best == pytest.approx(1024 * 2048 / result.machine.count / speed)


@pytest.mark.parametrize(
    "name", some(["h100", "h100:8", "v5p-8", "v5e-64", "a100:8"], "h100", "v5e-64", "a100:8")
)
def test_a_settled_config_settles_to_itself(name):
    """A resumed run gets the plan of its start; the mesh is planned anew."""
    first = on(name).config
    again = settle(first.change(parallel__mesh="auto"), machines.parse(name)).config
    assert again == first


def test_what_the_user_gives_is_kept():
    result = on("h100:8", training__micro_batches=32, model__remat="full")
    assert (result.config.training.micro_batches, result.config.model.remat) == (32, "full")
    assert set(result.chosen) == {"parallel.mesh"}
    result = on("h100:8", parallel__mesh="fsdp:2,tensor:4")
    assert result.config.parallel.mesh == "fsdp:2,tensor:4"
    assert set(result.chosen) == {"model.remat", "training.micro_batches"}
    mixed = on("h100", model__remat="full:20,none:20")
    assert mixed.config.model.remat == "full:20,none:20" and not mixed.tight


def test_blocks_of_different_remat_take_the_mean_of_their_memory():
    given = {"training__micro_batches": 256, "parallel__mesh": "data:1"}
    alone, mixed = (on("h200", model__remat=r, **given) for r in ("full", "full:20,none:20"))
    none = on("h200", model__remat="none", **given)
    assert mixed.chip_bytes == pytest.approx((alone.chip_bytes + none.chip_bytes) / 2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("h100", {"sparsity__projections": ()}, r"needs \d+ GiB on one h100 .* on h100:4"),
        ("rtx-4090", {}, r"20 of its 22 GiB are usable; it fits on rtx-4090:2"),
        ("h100:6", {}, r"No plan on 6 h100 divides a batch of 1024 .* a new run with --batch=\d+"),
        ("h100", {"training__micro_batches": 1, "model__remat": "none"},
         "it fits with --set training.micro_batches=auto --set model.remat=auto"),
        ("h100:8", {"training__micro_batches": 1024, "parallel__mesh": "fsdp:8"},
         "divides a batch of 1024 .* in 1024 micro"),
        ("h100:8", {"parallel__mesh": "context:8", "training__sequence": 1000},
         "context:8 with tensor:1 does not divide 1000 tokens .* multiple of 16 tokens"),
        ("h100:3", {"parallel__mesh": "tensor:3"}, "tensor:3 does not divide .* legal for this"),
        ("h100:8", {"parallel__mesh": "fsdp:4"}, "legal: sizes whose product is 8"),
        ("rtx-4090", {"parallel__executor": "relay"}, "it fits with --batch=.*stash=host"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_sentence_with_what_would(name, changes, words):
    with pytest.raises(UserError, match=words) as refused:
        on(name, **changes)
    assert str(refused.value).count(". ") == 0 and len(str(refused.value)) < 400


def test_the_batch_and_the_machine_that_a_refusal_names_have_plans():
    with pytest.raises(UserError) as refused:
        on("h100:6")
    batch = int(re.search(r"--batch=(\d+)", str(refused.value))[1])
    assert on("h100:6", training__batch=batch).config.training.batch == batch
    with pytest.raises(UserError) as refused:
        on("h100", DENSE)
    assert not on(re.search(r"fits on (\S+?)[.;, ]", f"{refused.value} ")[1], DENSE).tight


def test_a_density_that_fits_is_named():
    with pytest.raises(UserError, match=r"with --density=0\.25") as refused:
        on("h100", sparsity__density=0.5, training__batch=8)
    assert "h100:2" in str(refused.value)
    assert not on("h100", sparsity__density=0.25, training__batch=8).tight


def test_the_relay_counts_moments_in_their_dtype():
    wide, narrow = (
        on("rtx-4090", parallel__executor="relay", training__batch=16, training__state_dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    states = [each.relay.host["masters and moments"] for each in (wide, narrow)]
    assert states[0] / states[1] == pytest.approx(12 / 8)


def test_the_relay_gets_micro_batches_that_fit_its_device():
    result = on("rtx-4090", parallel__executor="relay", training__batch=16)
    assert result.relay.device_total <= ROOMY * 0.9 * 24e9
    assert result.config.model.remat == "none" and result.config.training.micro_batches >= 1
    over = on("h100:8", parallel__executor="relay", training__batch=64)
    assert over.config.parallel.mesh == "data:8"


@pytest.mark.parametrize(
    "changes",
    some(
        {"experts": ({"model__experts": 8},), "all blocks": ({"sparsity__density": 1.0},)},
        "experts",
    ),
)
def test_experts_and_all_blocks_have_plans_on_eight_gpus(changes):
    assert not on("h100:8", **changes).tight


def test_twins_that_train_in_turn_need_the_states_of_both():
    alone, both = (on("h100", training__batch=1, sparsity__density=1 / 8, run__twin=t,
                      training__state_dtype="bfloat16", model__num_layers=10)
                   for t in ("no", "yes"))  # fmt: skip
    [dense] = [v.model for v in variants(both.config) if v.name == "dense"]
    resident = cost.parameter_count(dense) * (4 + 2 * 2)
    assert both.chip_bytes > alone.chip_bytes + 0.99 * resident


def test_stages_are_chosen_where_they_are_clearly_faster():
    """Dense 175B, as Megatron-LM trains it (arXiv 2104.04473): stages between nodes."""
    dense = preset("175b", compute_dtype="bfloat16").dense()
    sizes = parse_mesh(on("h100:1024", dense).config.parallel.mesh, 1024)
    assert sizes["stage"] > 1
    for changes in (
        {"model__mask_documents": True},
        {"parallel__executor": "whole"},
        {"parallel__sub_batches": 2, "training__batch": 1536},
    ):
        other = on("h100:1024", dense, **changes).config
        assert parse_mesh(other.parallel.mesh, 1024)["stage"] == 1
    assert parse_mesh(on("h100:8").config.parallel.mesh, 8)["stage"] == 1


def test_a_pipeline_that_is_asked_for_has_stages():
    config = on("h100:8", parallel__executor="pipeline").config
    assert parse_mesh(config.parallel.mesh, 8)["stage"] > 1
    given = on("h100:8", parallel__mesh="stage:2,fsdp:4", parallel__schedule="interleaved:2")
    assert given.plan.chunks == 2 and given.config.training.micro_batches % 2 == 0


def host(gib, count=1):
    return Machine(Chip("cpu", memory_bytes=int(gib * GIB)), count, host=True)


@pytest.mark.parametrize("scale", ["pico", "3m", "nano", "micro"])
def test_small_scales_on_a_cpu_stay_whole(scale):
    config = settle(preset(scale), host(16)).config
    assert (config.training.micro_batches, config.model.remat) == (1, "none")
    assert config == preset(scale).without_auto()


def test_a_cpu_with_too_little_memory_takes_as_few_micro_batches_as_fit():
    config = preset("mini").change(run__twin="no", training__batch=64)
    need = settle(config.change(training__micro_batches=1, model__remat="none"), host(64))
    tight = settle(config, host(need.chip_bytes * 0.6 / 0.9 / GIB)).config
    assert (tight.training.micro_batches, tight.model.remat) != (1, "none")


def test_many_devices_of_a_host_are_one_fsdp_axis():
    result = settle(preset("pico"), host(16, count=4))
    assert result.config.parallel.mesh == "fsdp:4"


def test_an_unknown_accelerator_is_planned_by_its_memory_alone():
    known = Machine(Chip("MI455X", memory_bytes=64 * GIB), 1)
    result = settle(SPARSE, known)
    assert not result.tight and result.config.training.micro_batches > 1


def test_adapters_on_a_mesh_need_no_state_of_the_frozen_weights():
    result = on("h100:8")
    rank = dataclasses.replace(result.request.config.linear("qkv"), rank=8)
    adapted = result.request.config.with_linears(rank)
    request = dataclasses.replace(result.request, config=adapted, adapters=True, trained=())
    alone = dataclasses.replace(request, adapters=False)
    trained, sizes = memory.term_count(adapted), request.memory(result.plan)
    assert sizes.moments == 2 * 4 * trained
    assert sizes.total < alone.memory(result.plan).total


@pytest.mark.parametrize("scale", ["pico", "3m", "125m", "350m", "1.3b", "6.7b", "22b"])
def test_every_scale_has_a_legal_block_of_its_own(scale):
    assert variants(preset(scale))
