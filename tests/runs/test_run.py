import pytest

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs import run_config as run
from sparse_dataflow.runs.run_config import RunConfig, preset


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"training__sequence": 65},
            ["training.sequence=65", "64 positions", "model.positions=rotary"],
        ),
        (
            {"training__batch": 12, "training__micro_batches": 5},
            ["training.batch=12", "training.micro_batches=5", "1, 2, 3, 4, 6, 12"],
        ),
        (
            {
                "parallel__executor": "relay",
                "parallel__server_dir": "x",
                "evolution__method": "gradual",
            },
            ["gradual", "parallel.server_dir", "static, set, rigl"],
        ),
    ],
)
def test_parts_that_contradict_each_other_are_refused(changes, words):
    with pytest.raises(UserError) as refused:
        preset("pico").change(**changes)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_huge_batch_lists_a_few_divisors():
    with pytest.raises(UserError) as refused:
        preset("pico").change(training__batch=1_000_000_007, training__micro_batches=2)
    assert len(str(refused.value)) < 200


def test_the_model_of_a_run_stores_densely_as_sparsity_says_what_is_stored():
    sparse = preset("pico").model.with_linears(LinearSpec("block_sparse", density=0.5, block=16))
    with pytest.raises(UserError, match="sparsity"):
        RunConfig(sparse)


def test_variants_follow_projections_and_twin():
    config = preset("pico")
    assert config.variants == ("sparse", "dense")
    assert config.change(run__twin=False).variants == ("sparse",)
    assert config.change(run__twin="narrow").variants == ("sparse", "dense", "narrow")
    assert config.dense().variants == ("dense",)
    assert preset("13b").variants == ("sparse",)


def test_a_narrow_twin_begins_with_no_weights():
    with pytest.raises(UserError, match=r"init_from with run\.twin=narrow, .* with it: none"):
        preset("pico").change(run__twin="narrow", run__init_from="folder")


def test_an_unknown_scale_names_the_legal_ones():
    with pytest.raises(UserError, match="legal: pico, 3m"):
        preset("nana")


def test_supar_has_rates_of_its_own():
    config = run.supar(preset("3m"))
    assert config.model.supar
    assert config.training.learning_rate == run.SUPAR_LEARNING_RATE
    assert config.training.batch == preset("3m").training.batch


@pytest.mark.parametrize("scale", run.SIZES)
def test_a_config_prints_what_differs_from_its_defaults_as_python_that_makes_it_again(scale):
    config = preset(scale).change(training__steps=7)
    classes = {type(field).__name__: type(field) for field in vars(config).values()}
    assert (
        eval(repr(config), {"RunConfig": RunConfig, "LinearSpec": LinearSpec, **classes}) == config
    )
    assert "steps=7" in repr(config) and "clip" not in repr(config)
    assert repr(LinearSpec("dense", rank=2)) == "LinearSpec(rank=2)"
