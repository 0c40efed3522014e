"""A larger model begins with the function of the given weights."""

import dataclasses

import jax
import numpy as np
import pytest
from make_fixture import BYTES
from marks import some
from models import DENSE, DEPTH, SPARSE, begun, begun_with_equal_logits

from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.starting_point import refuse_other_model
from sparse_dataflow.runs.families import FAMILIES

IDS = np.random.default_rng(0).integers(0, BYTES.vocab_size, (2, 16), np.int32)
LLAMA = dataclasses.replace(DENSE, **FAMILIES["llama"], num_kv_heads=2)
STORED = LinearSpec("block_sparse", "monarch", density=0.5, block=8)
MIXTURE = {"experts": 4, "top_k": 2}


MIXTURES = {
    "gpt": (DENSE, MIXTURE),
    "llama": (LLAMA, MIXTURE),
    "prototypes": (DENSE, {"experts": 6, "top_k": 3, "prototypes": 2}),
    "shared expert": (LLAMA, MIXTURE | {"shared_expert": True}),
    "supar": (dataclasses.replace(DENSE, parametrization="supar"), MIXTURE),
}


@pytest.mark.parametrize(("old", "fields"), some(MIXTURES, "shared expert"))
def test_a_mixture_begins_with_the_function_of_a_dense_model(old, fields):
    state = begun_with_equal_logits(old, dataclasses.replace(old, **fields), IDS)
    router = np.asarray(state.params["blocks"]["experts"]["router"])
    assert router.shape == (2, 32, fields["experts"])
    assert np.isclose(router.std(), 1 / np.sqrt(32), rtol=0.2)


@pytest.mark.parametrize(
    "old", some({"uniform": SPARSE, "by depth, low rank, hadamard": DEPTH}, "uniform")
)
def test_stored_blocks_become_dense_experts(old):
    dense_mlp = {name: spec for name, spec in old.linears if not name.startswith("mlp")}
    begun_with_equal_logits(old, dataclasses.replace(old, linears=dense_mlp, **MIXTURE), IDS)


def test_stored_blocks_stay_in_experts_of_the_same_layout():
    new = dataclasses.replace(SPARSE, shared_expert=True, **MIXTURE)
    state = begun_with_equal_logits(SPARSE, new, IDS)
    assert state.params["blocks"]["experts"]["mlp_in"]["values"].shape[:2] == (2, 4)


@pytest.mark.slow
def test_the_first_loss_of_a_mixture_is_that_of_the_dense_model():
    new = dataclasses.replace(DENSE, **MIXTURE)
    start, state = begun(DENSE, new)
    weights = np.ones((2, 15), np.float32)
    losses = [
        float(whole.loss(config, weights_of(config, params, {}), Batch.from_windows(IDS, weights)))
        for config, params in ((DENSE, start.params), (new, state.params))
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (DENSE, {"experts": 4}, "model.top_k=1 multiplies .* legal: model.top_k of 2 or more"),
        (DENSE, MIXTURE | {"raw_gates": True}, "legal: model.raw_gates=no, model.shared_gate=no"),
        (
            DENSE,
            MIXTURE | {"linears": {"mlp_in": STORED}},
            "mlp_in of the experts is block-sparse at density 0.5 .* legal: dense experts",
        ),
        (
            SPARSE,
            MIXTURE | {"linears": {"mlp_in": dataclasses.replace(STORED, density=0.25)}},
            "does not have these blocks",
        ),
    ],
)
def test_a_mixture_of_another_function_is_refused(old, new, message):
    with pytest.raises(UserError, match=message):
        refuse_other_model(old, dataclasses.replace(old, **new))
    with pytest.raises(UserError, match=message):
        begun(old, dataclasses.replace(old, **new))


def test_the_command_line_names_the_larger_shape(tmp_path):
    from models import export

    export(tmp_path / "model", "dense", DENSE)
    changes = {"run.init_from": str(tmp_path / "model"), "model.experts": 4, "model.top_k": 2}
    config = Request(changes=changes).config(sparse=False)
    assert config.without_auto().model == dataclasses.replace(DENSE, **MIXTURE)
    assert jax.tree.leaves(config.model.linears) == []
