"""The Triton kernels compile ahead of time for an A100, an L4 and a B200 at 13B shapes."""

import described_gpus
import jax
import jax.numpy as jnp
import pytest

from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul

pytest.importorskip(
    "jax_cuda13_plugin", reason="compiling for a GPU needs 'sparse_dataflow[cuda]': make aot-gpu"
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

SHAPE, TOKENS, DENSITY = (5120, 20480), 2048, 1 / 8


@pytest.mark.parametrize(
    ("kind", "block"), [("a100", 128), ("l4", 128), ("a100", 64), ("b200", 64)]
)
def test_changing_layouts_are_three_kernels_without_gathers_or_temporaries(kind, block):
    layout = make_layout("pixelfly", *SHAPE, block, DENSITY)
    shapes = (TOKENS, SHAPE[0]), (layout.nnz, block, block), (TOKENS, SHAPE[1])
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def products(x, values, dy, tables):
        y, pullback = jax.vjp(lambda *o: block_sparse_matmul(*o, tables), x, values)
        return y, *pullback(dy)

    program = described_gpus.compiled(products, [*operands, layout.tables()], kind=kind)
    text = program.as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    assert " gather(" not in text and " dot(" not in text
    assert program.memory_analysis().temp_size_in_bytes <= 2**16
