"""The study of equal served and training FLOPs."""

import json

import jax
import numpy as np
import pytest
from exit_status import exit_status

from experiments import serving_cost
from experiments.studies.serving_cost import (
    arms,
    cost_picture,
    decoding,
    law,
    pruning,
    runs,
    training,
)
from experiments.studies.serving_cost.arms import ARMS, Arm
from experiments.studies.serving_cost.text import Text
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError

NARROW = ModelConfig(
    2, 24, 2, 96, vocab_size=40, max_len=32, norm="rmsnorm", activation="relu", biases=()
)
OF_FLOPS = ["narrow", *(n for n, arm in ARMS.items() if arm.pruned and arm.equal == "flops")]


def study(*flags):
    return exit_status(serving_cost, *flags)


@pytest.mark.parametrize("name", OF_FLOPS)
def test_an_arm_is_served_and_trained_for_the_flops_of_the_narrow_model(name):
    course = arms.course(NARROW, ARMS[name], 2000, training.CHUNK, 32)
    served = cost.flops_per_token(arms.served_model(NARROW, ARMS[name]), 32, training=False)
    narrow = cost.flops_per_token(NARROW, 32, training=False)
    assert served.total == pytest.approx(narrow.total, rel=1e-9)
    assert course.flops == pytest.approx(2000 * 32 * 32 * 3 * narrow.total, rel=0.01)


def test_pruning_keeps_to_its_fractions_of_the_training_flops():
    course = arms.course(NARROW, ARMS["pruned_4"], 2000, training.CHUNK, 32)
    dense, final = arms.shape(NARROW, ARMS["pruned_4"]), course.cuts[-1]
    first, budget = course.cuts[0].step, course.flops
    before = first * 1024 * cost.flops_per_token(dense, 32).total
    after = (course.steps - final.step) * 1024 * cost.flops_per_token(NARROW, 32).total
    assert len(course.cuts) == 10
    assert before / budget == pytest.approx(0.25 + 0.05, abs=0.05)
    assert after / budget == pytest.approx(0.25, abs=0.02)
    assert final.density == arms.served_density(NARROW, ARMS["pruned_4"])


def test_the_same_number_of_the_best_blocks_stays_in_each_layer():
    rng, arm = np.random.default_rng(0), Arm(width=2, pruned=("mlp_in",), block=4)
    kernel = rng.normal(size=(2, 8, 16)).astype(np.float32)
    kernel[:, :4, 4:8] *= 100
    blocks = {"mlp_in": {"kernel": kernel}}
    scores = pruning.block_scores(arm, blocks, [], rng)
    masks = pruning.with_blocks({"blocks": {"mlp_in": {"kernel": 1.0}}}, arm, scores, 0.25)
    mask = np.asarray(masks["blocks"]["mlp_in"]["kernel"])
    assert (mask.reshape(2, -1).mean(1) == 0.25).all()
    assert (mask[:, :4, 4:8] == 1).all()
    assert pruning.kept_shares(masks, arm) == {"mlp_in": 0.25}


@pytest.mark.slow
@pytest.mark.parametrize("keep", arms.KEEP)
def test_cut_weights_stay_cut_and_the_loss_is_the_served_one(keep):
    text = Text(
        {
            name: np.tile(np.arange(40, dtype=np.uint8), 400)
            for name in ("train", "tuning", "held_out")
        },
        "",
        "",
    )
    model = ModelConfig(
        2, 8, 2, 16, vocab_size=40, max_len=8, norm="rmsnorm", activation="relu", biases=()
    )
    arm = Arm(width=2, hidden=2, pruned=arms.ALL, keep=keep, stages=2)
    recipe = training.Recipe("muon", 1e-2, 1.0, "linear", 0.05, 4)
    result, _ = training.train(model, arm, recipe, 100, 0, text)
    density = arms.served_density(model, arm)
    assert len(result["cuts"]) == 2
    assert all(abs(share - density) < 0.05 for share in result["kept"].values())
    assert result["held_out"] < np.log2(40)
    assert np.isfinite(result["tuning"])


def test_the_law_recovers_planted_constants():
    planted = law.Law(1.2, 30.0, 0.4, 50.0, 0.35)
    weights, tokens = map(np.ravel, np.meshgrid([1e4, 2e4, 4e4], [1e6, 4e6, 2e7]))
    fitted = law.fit(weights, tokens, planted.loss(weights, tokens))
    assert fitted.alpha == pytest.approx(0.4, rel=1e-3)
    assert fitted.beta == pytest.approx(0.35, rel=1e-3)
    far = np.array([8e4]), np.array([1e8])
    assert abs(law.errors(fitted, *far, planted.loss(*far))[0]) < 1e-4


def test_too_few_runs_for_a_law_are_refused():
    with pytest.raises(ValueError, match="five runs"):
        law.fit([1e4] * 5, [1e6, 2e6, 3e6, 4e6, 5e6], [3.0, 2.9, 2.8, 2.7, 2.6])


@pytest.mark.slow
def test_a_small_study_goes_on(tmp_path, capsys):
    small = (
        "--width=8", "--hidden=16", "--sequence=16", "--batch=2", "--lengths=1", "--trials=2",
        f"--out={tmp_path}",
    )  # fmt: skip
    assert study(*small, "--seeds=1", "--arms=narrow") == 0
    first = (tmp_path / runs.LINES).read_text()
    assert study(*small, "--seeds=2", "--arms=narrow,pruned_2") == 0
    assert (tmp_path / runs.LINES).read_text().startswith(first)
    result = json.loads((tmp_path / "serving_cost.json").read_text())
    by_arm = {row["arm"]: row for row in result["rows"]}
    assert len(by_arm["narrow"]["losses"]) == len(by_arm["pruned_2"]["losses"]) == 2
    assert by_arm["pruned_2"]["to_narrow"]["low"] < by_arm["pruned_2"]["to_narrow"]["high"]
    assert (tmp_path / "serving_cost.png").exists()
    assert not (tmp_path / "serving_cost_picture.png").exists()
    assert study(*small, "--vocabulary=30") == 2
    assert "other settings" in capsys.readouterr().err
    jax.clear_caches()


def test_a_shape_that_no_block_divides_is_refused():
    with pytest.raises(UserError, match="no multiple of 16"):
        arms.shape(NARROW, Arm(width=1.5, pruned=arms.ALL, block=16))


def test_blocks_of_experts_are_cut_like_those_of_one_mlp():
    rng, arm = np.random.default_rng(0), Arm(experts=3, pruned=("mlp_in",), block=4)
    kernel = rng.normal(size=(2, 3, 8, 16)).astype(np.float32)
    kernel[:, 1, :4, 4:8] *= 100
    masks = {"blocks": {"qkv": {"kernel": 1.0}, "experts": {"mlp_in": {"kernel": 1.0}}}}
    blocks = {"experts": {"mlp_in": {"kernel": kernel}}}
    scores = pruning.block_scores(arm, blocks, [], rng)
    cut = pruning.with_blocks(masks, arm, scores, 0.25)
    mask = np.asarray(cut["blocks"]["experts"]["mlp_in"]["kernel"])
    assert mask.shape == kernel.shape and (mask.reshape(2, -1).mean(1) == 0.25).all()
    assert (mask[:, 1, :4, 4:8] == 1).all()
    assert masks["blocks"]["experts"]["mlp_in"]["kernel"] == 1.0
    assert pruning.kept_shares(cut, arm) == {"mlp_in": 0.25}


def planned(arm, loss, length=160):
    served = arms.served_model(NARROW, ARMS[arm])
    return {
        "arm": arm, "optimizer": "muon", "schedule": "linear", "length": length, "mean": loss,
        "losses": {0: loss, 1: loss + 0.02}, "flops": 1e9 * length,
        "served_flops": sum(arms.served_sections(served).values()),
    }  # fmt: skip


def test_the_picture_has_each_cost_of_the_arms_that_were_trained(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        cost_picture, "save_panels", lambda path, panels, title: drawn.extend(panels)
    )
    rows = [planned("narrow", 2.4), planned("experts_8", 2.2), planned("narrow", 2.7, length=40)]
    decoded = [{"arm": "experts_8", "batch": 1, "over_narrow": 1.3}]
    assert cost_picture.draw(NARROW, rows, decoded, tmp_path / "picture.png")
    training, served, memory, seconds = (panel.curves for panel in drawn)
    assert list(training["narrow dense"].x) == [40, 160]
    assert training["8 experts"].high == [2.22]
    assert served["8 experts"].x[0] > served["narrow dense"].x[0] == 32.64
    # By hand: eight times the MLP of the narrow model, two layers of two weights of 24 x 96.
    more = 4 * (7 * 2 * 2 * 24 * 96 + 2 * 24 * 8) / 1e3
    assert memory["8 experts"].x[0] - memory["narrow dense"].x[0] == pytest.approx(more)
    assert {name: curve.x for name, curve in seconds.items()} == {"8 experts": [1.3]}
    assert not cost_picture.draw(NARROW, rows[:1], decoded, tmp_path / "picture.png")


@pytest.mark.parametrize("content", ["", "[]", '{"rows": [{}]}', '{"rows": [{"arm": "mine"}]}'])
def test_a_damaged_measurement_of_decoding_is_named(tmp_path, content):
    assert decoding.read(tmp_path) == []
    (tmp_path / "decoding.json").write_text(content)
    with pytest.raises(UserError, match=r"decoding\.json .*remove it"):
        decoding.read(tmp_path)
