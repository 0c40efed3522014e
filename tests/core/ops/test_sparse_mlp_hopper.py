"""The sparse MLP's Hopper kernels beyond the shared suite."""

import jax
import pytest
from mlp_operands import draw_operands
from simulated_hopper import targeted_gpu

from sparse_dataflow.chips.hopper.api import NEEDED_JAX
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops.sparse_mlp import mlp_op as api

pytestmark = [
    pytest.mark.skipif(
        jax.__version_info__ < NEEDED_JAX,
        reason=f"Mosaic GPU kernels need jax >= 0.11, not {jax.__version__}",
    ),
]


def test_six_kernels_and_one_saved_activation():
    layouts = make_layout("cyclic", 256, 512, 64, 0.5), make_layout("cyclic", 512, 256, 64, 0.5)
    operands, dy = draw_operands(layouts, (8,), "bfloat16")
    tables = [layout.tables() for layout in layouts]

    def forward(*operands):
        mlp = lambda *o: api.sparse_mlp(*o, *tables, implementation="pallas_hopper")  # noqa: E731
        return jax.vjp(mlp, *operands)

    with targeted_gpu():
        program = jax.make_jaxpr(lambda dy, *o: forward(*o)[1](dy))(dy, *operands)
        _, pullback = jax.eval_shape(forward, *operands)
    assert str(program).count("mpmd_map[") == 6
    saved_shapes = [array.shape for array in jax.tree.leaves(pullback)]
    assert saved_shapes.count((8, 512)) == 1
