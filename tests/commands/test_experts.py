"""What a mixture of experts does not have is refused with a message, before the first step."""

import dataclasses

import pytest
from jax.sharding import AbstractMesh

from sparse_dataflow.commands import devices
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.layouts.evolution import phase_specs
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.relay.relay_executor import RelayExecutor
from sparse_dataflow.runs.adapted_model import with_adapters
from sparse_dataflow.runs.parallel import ParallelConfig
from sparse_dataflow.runs.run_config import RunConfig

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


def test_tokens_do_not_travel_to_experts_that_the_axis_context_cuts():
    with pytest.raises(UserError, match=r"axis context cuts .*; legal: .*experts=gather"):
        Sharded(mesh("fsdp:2,context:2"), exchange=True).check(MODEL, TRAINING)
    Sharded(mesh("fsdp:2,context:2")).check(MODEL, TRAINING)
    RelayExecutor(mesh=mesh("data:2")).check(MODEL, TRAINING)


def test_a_tensor_axis_that_divides_groups_of_experts_unequally_is_refused():
    Sharded(mesh("tensor:2")).check(MODEL.with_linears(SPARSE), TRAINING)
    model = dataclasses.replace(MODEL, num_heads=4, d_model=48, d_ff=96)
    six_groups = dataclasses.replace(SPARSE, density=1 / 6)
    model = model.with_linears(six_groups, ["mlp_in", "mlp_out"])
    with pytest.raises(UserError, match="tensor:4 divides the groups of stored blocks of mlp_"):
        Sharded(mesh("tensor:4")).check(model, TRAINING)


def test_a_tensor_axis_may_divide_shuffled_groups_unequally_where_monarch_keeps_them_whole():
    model = dataclasses.replace(MODEL, num_heads=8, d_model=64, d_ff=96)
    for pattern in ("monarch", "shuffle"):
        spec = dataclasses.replace(SPARSE, pattern=pattern, density=1 / 4)
        sharded = model.with_linears(spec, ["mlp_in", "mlp_out"])
        if pattern == "monarch":
            Sharded(mesh("tensor:4")).check(sharded, TRAINING)
        else:
            with pytest.raises(UserError, match=r"of mlp_out unequally; .*: the pattern mon"):
                Sharded(mesh("tensor:4")).check(sharded, TRAINING)


@pytest.mark.parametrize(
    ("text", "zero", "words"),
    [
        ("fsdp:4", 2, "legal: parallel.zero=3, or parallel.experts=gather"),
        ("fsdp:3", 3, "does not divide the 4 experts; legal for this model: 1, 2, 4"),
    ],
)
def test_devices_that_cannot_share_experts_are_refused(text, zero, words):
    with pytest.raises(UserError, match=words):
        Sharded(mesh(text), zero, exchange=True).check(MODEL, TRAINING)
    Sharded(mesh("fsdp:2"), exchange=True).check(MODEL, TRAINING)


def test_tokens_travel_to_experts_of_a_mesh_alone():
    parallel = ParallelConfig(experts="exchange", executor="relay")
    config = RunConfig(MODEL, training=TRAINING, parallel=parallel)
    with pytest.raises(UserError, match=r"legal: parallel\.experts=gather, or another executor"):
        devices.executor(config)
    dense = dataclasses.replace(MODEL, experts=0, top_k=1)
    with pytest.raises(UserError, match=r"experts=exchange sends tokens .* with model\.experts"):
        RunConfig(dense, training=TRAINING, parallel=ParallelConfig(experts="exchange"))


def test_sparse_form_is_refused(tmp_path):
    with pytest.raises(UserError, match="legal with experts: form=dense, or the run folder"):
        huggingface.write(tmp_path / "out", "sparse", MODEL, {}, None, context=16, card="")
