"""The quality study: its tables, its arms, and when they turn dense."""

import dataclasses

import pytest

from experiments import sparse_quality
from experiments.studies import quality
from experiments.studies.study import Study
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.phases import Variant, run_flops
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer, gpt2_tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect
from sparse_dataflow.planner.memory import matrix_count
from sparse_dataflow.runs.equal_cost import stored_parameters
from sparse_dataflow.runs.run_config import SIZES, preset


def result(arm, bits, equal="tokens", seed=0):
    return {"equal": equal, "arm": arm, "seed": seed, "bits_per_byte": bits, "steps": 9,
            "flops": 1e9, "seconds": 2.0}  # fmt: skip


def test_tables_say_mean_spread_and_the_gap_that_is_closed():
    results = [result("dense", 2.0), result("dense", 2.2, seed=1), result("static_random", 2.5)]
    results += [result("rigl", 2.15), result("rigl", 2.25, seed=1), result("dense", 2.0, "flops")]
    first, second = quality.tables(results, ["dense"]).split("## Equal FLOPs")
    lines = [line for line in first.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[1:]] == ["| dense", "| rigl", "| static_random"]
    assert "| 2.1000 | 0.1000 | - | 100% |" in lines[1]
    assert "| 2.2000 | 0.0500 | +4.76% ± 2.38% | 75% |" in lines[2]
    assert "| 2.5000 | - | +19.05% |" in lines[3] and "| 0% |" in lines[3]
    assert "Lowest: dense; of those that end sparse: rigl." in first
    assert "| 2.0000 |" in second and "that end sparse: none was trained." in second


@pytest.fixture(scope="module")
def arms():
    """Name -> model of every arm at the scale pico."""
    config = preset("pico").change(sparsity__block=8, training__steps=1000)
    tokenizer = Tokenizer(gpt2_tokenizer().tokens[:256], (), config.model.vocab_size)
    study = Study(config, Corpus("none", [], [], ""), tokenizer, detect.detect([]))
    return {name: quality._variant(study, arm) for name, arm in sparse_quality.ARMS.items()}


def test_every_arm_is_a_model_that_can_be_trained(arms):
    assert arms["dense"].name == "dense" and not arms["dense"].model.sparse_projections
    for name, variant in arms.items():
        model = variant.model
        is_dense = not model.weight_words
        assert variant.name == ("dense" if is_dense else "sparse")
        assert (variant.name == "dense") == (
            name in ("dense", "small", "inherited", "moe_equal_flops", "moe_equal_parameters")
        )
        assert variant.phases[-1].steps >= 1


def test_the_small_teacher_has_a_quarter_of_the_projections(arms):
    small, dense = (matrix_count(arms[name].model) for name in ("small", "dense"))
    assert 4 * small == dense
    inherited = arms["inherited"]
    assert inherited.model == arms["dense"].model and inherited.training.teacher_first == 0.3


def test_arms_are_relative_to_the_width(arms):
    assert arms["low_rank"].model.linear("qkv").rank == 128 // 16
    assert arms["hadamard"].model.linear("qkv").hadamard == 128


def test_mixtures_have_the_flops_and_the_parameters_that_they_are_named_after(arms):
    flops = {
        name: cost.flops_per_token(variant.model, variant.training.sequence).total
        for name, variant in arms.items()
    }
    assert flops["moe_equal_flops"] == pytest.approx(flops["static_monarch"], rel=0.03)
    assert flops["moe_sparse"] == pytest.approx(flops["static_monarch"], rel=0.03)
    stored = {name: stored_parameters(variant.model) for name, variant in arms.items()}
    assert stored["moe_equal_parameters"] == stored["dense"]
    assert stored["moe_sparse"] > 2 * stored["static_monarch"]


def test_default_arms_hold_those_that_tables_compare_with():
    default = sparse_quality.Options().arms
    assert set(default) < set(sparse_quality.ARMS)
    assert {quality.BASELINE, quality.FLOOR} < set(default)


def test_arms_of_unequal_layers(arms):
    for name in ("depth_rising", "depth_falling"):
        assert sorted(arms[name].model.density_by_depth) == [0.5, 1.5]


@pytest.mark.parametrize(("rank", "first"), [(0, ()), (8, ()), (0, ("qkv", "attn_out"))])
@pytest.mark.parametrize("share", [0.5, 0.7])
@pytest.mark.parametrize("scale", ["pico", "3m", "nano"])
def test_a_switch_by_flops_leaves_that_share_of_the_dense_trainings(scale, share, rank, first):
    size, training = SIZES[scale], TrainingConfig(steps=1000, batch=8, sequence=64)
    model = size.with_linears(LinearSpec("block_sparse", "random", 0.125, 8, rank))
    evolution = EvolutionConfig("sparse_to_dense", first=first)
    dense = Variant("dense", size, training)
    at = quality.switch_at(dense, Variant("sparse", model, training, evolution), share)
    spent = run_flops(model, dataclasses.replace(evolution, at=at), training)
    assert spent == pytest.approx(share * run_flops(size, EvolutionConfig(), training), rel=2e-3)


@pytest.mark.parametrize(
    ("density", "first", "share"),
    [(0.75, (), 0.5), (0.125, ("qkv", "attn_out"), 0.9), (0.125, (), 0.1)],
)
def test_a_share_of_flops_that_no_switch_leaves_is_refused(density, first, share):
    size, training = SIZES["3m"], TrainingConfig(steps=1000, batch=8, sequence=64)
    model = size.with_linears(LinearSpec("block_sparse", "random", density, 8))
    sparse = Variant("sparse", model, training, EvolutionConfig("sparse_to_dense", first=first))
    with pytest.raises(UserError, match=f"spends {share:.0%} .*; legal: above .* and below"):
        quality.switch_at(Variant("dense", size, training), sparse, share)


def test_an_arm_that_learns_from_another_needs_it_and_counts_its_forward_passes(arms):
    options = sparse_quality.Options(arms=("distilled",), out="nowhere")
    with pytest.raises(UserError, match="learns from dense; name that one as well"):
        quality.study_quality(None, sparse_quality.ARMS, options)
    student, plain, dense = (arms[name] for name in ("distilled", "static_monarch", "dense"))
    alone, with_teacher = quality._flops_a_step(plain, None), quality._flops_a_step(student, dense)
    assert with_teacher - alone == pytest.approx(quality._flops_a_step(dense, None) / 3)
