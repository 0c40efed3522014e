"""The kernels of a block's passes compile ahead of time, and move what they must and no more."""

import dataclasses

import described_gpus
import jax
import jax.numpy as jnp
import pytest

from sparse_dataflow.compile import hlo, topologies
from sparse_dataflow.compile.programs import compile_step
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.ops.bias_activation.bias_activation_op import bias_activation
from sparse_dataflow.core.ops.residual_norm.residual_norm_op import Norm, Operands, residual_norm
from sparse_dataflow.runs.run_config import SIZES

pytest.importorskip(
    "jax_cuda13_plugin", reason="compiling for a GPU needs 'sparse_dataflow[cuda]': make aot-gpu"
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

TOKENS, WIDTH, HIDDEN = 4096, 5120, 20480


def moved(function, arguments, kind):
    """Returns {kernel: bytes} of a function and its gradients."""

    def both(operands, cotangents):
        outputs, pull = jax.vjp(function, *operands)
        return outputs, pull(cotangents)

    text = described_gpus.compiled(both, arguments, kind=kind).as_text()
    kernels = [kernel for kernel in hlo.kernels(text) if kernel.target.startswith("triton:")]
    assert not any(kernel.multiplies for kernel in kernels)
    return {kernel.target.removeprefix("triton:"): kernel.bytes for kernel in kernels}, text


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize("kind", ["h100", "a100"])
@pytest.mark.parametrize("centred", [True, False])
def test_residual_and_norm_are_one_pass_each_way(kind, centred):
    wide, narrow = struct(TOKENS, WIDTH), struct(WIDTH)
    operands = Operands(wide, wide, narrow, narrow, narrow if centred else None)
    norm = Norm(centred, 1e-5)
    kernels, _ = moved(lambda o: residual_norm(norm, o), ((operands,), (wide, wide)), kind)
    size = 2 * TOKENS * WIDTH
    assert kernels.keys() == {"residual_norm", "residual_norm_gradient"}
    assert kernels["residual_norm"] <= 1.01 * 4 * size
    assert kernels["residual_norm_gradient"] <= 1.06 * 4 * size


@pytest.mark.parametrize("kind", ["h100", "a100"])
@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_bias_and_activation_are_one_pass_each_way(kind, name):
    wide, bias = struct(TOKENS, HIDDEN), struct(HIDDEN)
    kernels, _ = moved(
        lambda x, bias: bias_activation(x, bias, name), ((wide, bias), wide), kind
    )  # fmt: skip
    size = 2 * TOKENS * HIDDEN
    assert kernels.keys() == {"bias_activation", "bias_activation_gradient"}
    assert kernels["bias_activation"] <= 1.01 * 2 * size
    assert kernels["bias_activation_gradient"] <= 1.01 * 3 * size


@pytest.mark.nightly
@pytest.mark.parametrize(("density", "least"), [(1 / 8, 0.06), (1.0, 0.03)])
def test_both_kernels_lower_the_bytes_of_a_13b_layer(density, least):
    training = TrainingConfig(steps=1, batch=2, sequence=2048, state_dtype="bfloat16")

    def bytes_of(layers):
        model = dataclasses.replace(
            SIZES["13b"], num_layers=layers, remat="full", compute_dtype="bfloat16"
        )
        if density < 1:
            model = model.with_linears(LinearSpec("block_sparse", "monarch", density, 128))
        [device] = topologies.gpu_devices("h100")
        step = compile_step(model, training, SINGLE_DEVICE, device)
        return sum(kernel.bytes * kernel.times for kernel in hlo.kernels(step.program.as_text()))

    with dispatch.without("residual_norm", "bias_activation"):
        before = bytes_of(4) - bytes_of(2)
    assert bytes_of(4) - bytes_of(2) <= (1 - least) * before
