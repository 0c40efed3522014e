"""The config that a checkpoint compares; one that is older than a setting has its default."""

import dataclasses

import numpy as np
import pytest
from small_models import DENSE

from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.config.projections import PRECISIONS, LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training.saved_state import completed, identity
from sparse_dataflow.files.errors import UserError

PARTS = {
    "model": DENSE,
    "training": TrainingConfig(),
    "evolution": EvolutionConfig(),
}
STATE = {"weight": np.arange(3.0, dtype=np.float32)}


def identity_with(**parts):
    return identity(**PARTS | parts, tokenizer_hash="")


def model_with(**fields):
    return {"model": dataclasses.replace(PARTS["model"], **fields)}


def save(folder, config):
    with Checkpoints(folder, config=config) as checkpoints:
        checkpoints.save(1, STATE, {})


def restored(folder, config):
    with Checkpoints(folder, config=config, completed=completed) as checkpoints:
        return checkpoints.restore(STATE)


@pytest.mark.parametrize("guided", [False, True])
def test_a_checkpoint_with_a_removed_setting_fits_where_it_had_no_effect(guided, tmp_path):
    older = identity_with()
    older["model"]["guided"] = guided
    save(tmp_path, older)
    if guided:
        with pytest.raises(UserError, match=r"under another config: model\.guided is"):
            restored(tmp_path, identity_with())
    else:
        assert restored(tmp_path, identity_with()) is not None


@pytest.mark.parametrize(
    ("part", "name", "other"),
    [
        ("model", "window", 3),
        ("model", "biases", ("qkv",)),
        ("training", "final_rate", 0.0),
        ("evolution", "omitted", 0.25),
    ],
)
def test_a_checkpoint_older_than_a_setting_fits_its_default_alone(part, name, other, tmp_path):
    older = identity_with()
    del older[part][name]
    save(tmp_path, older)
    assert restored(tmp_path, identity_with()) is not None
    changed = {part: dataclasses.replace(PARTS[part], **{name: other})}
    with pytest.raises(UserError, match=f"was made under another config: {part}.{name} is"):
        restored(tmp_path, identity_with(**changed))


@pytest.mark.parametrize(
    ("name", "other", "reader"),
    [("adapter_alpha", 8.0, {"adapter_rank": 4}), ("teacher_weight", 0.25, {"teacher": "runs/a"})],
)
def test_a_setting_that_nothing_reads_may_be_another(name, other, reader, tmp_path):
    """As that of a dense twin, which has no teacher."""
    whole = lambda **fields: identity_with(training=TrainingConfig(**fields))  # noqa: E731
    assert whole(**{name: other}) == whole()
    assert whole(**{name: other}, **reader) != whole(**reader)
    older = whole()
    del older["training"][name]
    save(tmp_path, older)
    assert restored(tmp_path, whole(**{name: other})) is not None


def test_a_checkpoint_older_than_a_field_of_its_linears_fits_its_default_alone(tmp_path):
    linears = {"mlp_in": LinearSpec("block_sparse", density=0.5, block=8)}
    older = identity_with(**model_with(linears=linears))
    del older["model"]["linears"]["mlp_in"]["hadamard"]
    save(tmp_path, older)
    assert restored(tmp_path, identity_with(**model_with(linears=linears))) is not None
    mixed = {"mlp_in": dataclasses.replace(linears["mlp_in"], hadamard=8)}
    with pytest.raises(UserError, match=r"model.linears.mlp_in.hadamard is 0 there and 8 here"):
        restored(tmp_path, identity_with(**model_with(linears=mixed)))


def test_a_whole_number_equals_the_same_number_as_a_float(tmp_path):
    older = identity_with()
    del older["model"]["rotary_base"]
    save(tmp_path, older)
    assert restored(tmp_path, identity_with(**model_with(rotary_base=10000))) is not None


def test_the_remat_of_a_checkpoint_may_be_another():
    assert identity_with(**model_with(remat="full")) == identity_with()


@pytest.mark.parametrize("before, now", [(8, 4), (1, 2), (16, 1)])
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"evolution": EvolutionConfig("set")},
        {"training": TrainingConfig(batch=16, optimizer="muon", skip_spikes=6.0)},
    ],
)
def test_micro_batches_that_change_rounding_alone_may_change(tmp_path, parts, before, now):
    training = parts.get("training", TrainingConfig(batch=16))
    parts = [
        parts | {"training": dataclasses.replace(training, micro_batches=n)} for n in (before, now)
    ]
    older = identity_with(**parts[0])
    older["training"]["micro_batches"] = before  # As versions wrote it that compared it.
    save(tmp_path, older)
    assert restored(tmp_path, identity_with(**parts[1])) is not None


@pytest.mark.parametrize(
    "bound",
    [
        model_with(experts=4),
        model_with(precision=PRECISIONS[1]),
        {"evolution": EvolutionConfig("rigl")},
    ],
)
def test_micro_batches_that_change_results_are_kept(tmp_path, bound):
    parts = [bound | {"training": TrainingConfig(batch=16, micro_batches=n)} for n in (8, 4)]
    save(tmp_path, identity_with(**parts[0]))
    assert restored(tmp_path, identity_with(**parts[0])) is not None
    with pytest.raises(UserError, match=r"training\.micro_batches is 8"):
        restored(tmp_path, identity_with(**parts[1]))


@pytest.mark.parametrize("name", ["experts", "precision", "method"])
@pytest.mark.parametrize("value", [None, [], {}, "x"])
def test_a_damaged_identity_is_compared_and_not_trusted(name, value):
    damaged = identity_with()
    damaged["evolution" if name == "method" else "model"][name] = value
    assert completed(damaged) != completed(identity_with())
