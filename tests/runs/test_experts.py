"""What a mixture of experts does not have is refused in words, before the first step."""

import pytest
from jax.sharding import AbstractMesh

from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import LinearSpec, ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import CHIPS
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.models.adapters import with_adapters
from sparse_dataflow.parallel import mesh as meshes
from sparse_dataflow.parallel.relay.executor import RelayExecutor
from sparse_dataflow.parallel.sharded import Sharded
from sparse_dataflow.planning import search
from sparse_dataflow.sparsity.evolution import phase_specs

MODEL = ModelConfig(2, 32, 2, 64, vocab_size=64, max_len=16, experts=4, top_k=2)
SPARSE = LinearSpec("block_sparse", "monarch", density=0.25, block=8)
TRAINING = TrainingConfig(2, 8, 16)


def mesh(text):
    sizes = dict.fromkeys(meshes.AXES, 1) | {
        name: int(size) for name, size in (axis.split(":") for axis in text.split(","))
    }
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


@pytest.mark.parametrize("method", ["set", "rigl", "gradual", "sparse_to_dense"])
def test_layouts_of_experts_do_not_change(method):
    model = MODEL.with_linears(SPARSE)
    assert phase_specs(model, EvolutionConfig())[0].model == model
    with pytest.raises(UserError, match="legal with experts: static"):
        phase_specs(model, EvolutionConfig(method))


def test_adapters_of_experts_are_refused():
    with pytest.raises(UserError, match=r"training\.adapter_rank=2 with model\.experts=4"):
        with_adapters(MODEL, 2)


def test_relay_on_several_devices_is_refused():
    with pytest.raises(UserError, match=r"The relay on 2 devices with model\.experts=4"):
        RelayExecutor(mesh=mesh("data:2")).check(MODEL, TRAINING)
    RelayExecutor().check(MODEL, TRAINING)


def test_tensor_axis_has_dense_experts_alone():
    executor = Sharded(mesh("tensor:2"))
    executor.check(MODEL, TRAINING)
    executor.check(MODEL.with_linears(SPARSE, ["qkv", "attn_out"]), TRAINING)
    with pytest.raises(UserError, match="the 4 block-sparse experts; legal for this model: 1"):
        executor.check(MODEL.with_linears(SPARSE), TRAINING)


def test_sparse_form_is_refused(tmp_path):
    with pytest.raises(UserError, match="legal with experts: form=dense, or the run folder"):
        huggingface.write(tmp_path / "out", "sparse", MODEL, {}, {}, None, context=16, card="")


def test_search_for_plans_is_refused():
    request = search.Request(MODEL, 16, 8, CHIPS["a100-80gb"], 4)
    with pytest.raises(UserError, match="search for plans with model"):
        search.price(request)
