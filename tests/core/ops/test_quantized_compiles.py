"""Products of 8-bit operands compile for an H100 and TPUs into products of 8-bit operands."""

import importlib.util
import re

import described_gpus
import described_tpus
import jax
import jax.numpy as jnp
import pytest

from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops import quantized
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul

pytest.importorskip("qwix", reason="quantised products need the extra quantized")
pytestmark = pytest.mark.usefixtures("optimized")

TOKENS, INPUTS, OUTPUTS = 2048, 1024, 4096
LAYOUT = make_layout("monarch", INPUTS, OUTPUTS, 128, 1 / 8)
CHIPS = {
    "h100": ("jax_cuda13_plugin", "make aot-gpu"),
    "v5e": ("libtpu", "make aot-tpu"),
    "v6e": ("libtpu", "make aot-tpu"),
}
"""Chip -> (module of its compiler, command that installs it)."""


def products(chip, precision, grouped):
    """Sorted dtypes of the operands of each product of a forward and backward pass."""
    module, command = CHIPS[chip]
    if not importlib.util.find_spec(module):
        pytest.skip(f"compiling for this chip needs {command}")

    def passes(x, weight, dy):
        product = lambda x, weight: (  # noqa: E731
            block_sparse_matmul(x, weight, LAYOUT, precision=precision)
            if grouped
            else quantized.matmul(x, weight, precision)
        )
        y, pullback = jax.vjp(product, x, weight)
        return y, *pullback(dy)

    weight = (LAYOUT.nnz, 128, 128) if grouped else (INPUTS, OUTPUTS)
    shapes = (TOKENS, INPUTS), weight, (TOKENS, OUTPUTS)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    if chip == "h100":
        text = described_gpus.compiled(passes, operands, kind=chip).as_text()
    else:
        text = described_tpus.compiled(
            passes, operands, described_tpus.described(chip)[0]
        ).as_text()
    dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    pairs = re.findall(r" (?:dot|convolution)\((%[\w.-]+), (%[\w.-]+)\)", text)
    return sorted(sorted(dtypes[operand] for operand in pair) for pair in pairs)


@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
@pytest.mark.parametrize(
    ("chip", "precision"), [("h100", "fp8"), ("h100", "int8"), ("v5e", "int8"), ("v6e", "int8"),
                            ("v6e", "fp8")],
)  # fmt: skip
def test_every_product_has_8_bit_operands(chip, precision, grouped):
    forward, backward = ["f8e4m3fn"] * 2, ["f8e4m3fn", "f8e5m2"]
    expected = {"fp8": [forward, backward, backward], "int8": [["s8", "s8"]] * 3}[precision]
    assert products(chip, precision, grouped) == expected
