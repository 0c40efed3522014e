"""The Hopper kernels compile ahead of time for an H200 at 13B shapes."""

import described_gpus
import jax
import jax.numpy as jnp
import pytest
from simulated_hopper import targeted_gpu

from sparse_dataflow.chips.hopper import api as pallas_hopper
from sparse_dataflow.chips.hopper import mlp as hopper_mlp
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import Operands

pytest.importorskip(
    "jax_cuda13_plugin", reason="compiling for a GPU needs 'sparse_dataflow[cuda]': make aot-gpu"
)
pytestmark = [
    pytest.mark.usefixtures("optimized"),
    pytest.mark.slow,
    pytest.mark.skipif(
        jax.__version_info__ < pallas_hopper.NEEDED_JAX,
        reason=f"Mosaic GPU kernels need jax >= 0.11, not {jax.__version__}",
    ),
]

PROJECTIONS = {"qkv": (5120, 15360), "out": (5120, 5120), "in": (5120, 20480), "mlp": (20480, 5120)}
TOKENS, DENSITY = 2048, 1 / 8


@pytest.fixture
def compiled(monkeypatch, capfd):
    """compiled(function, arguments) -> (program, the assembler's report of each kernel)."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def compile_(function, arguments):
        capfd.readouterr()
        program = described_gpus.compiled(function, arguments)
        return program, "".join(capfd.readouterr())

    return compile_


def operands(layout, tokens=TOKENS, dtype=jnp.bfloat16):
    shapes = (
        (tokens, layout.in_features),
        (layout.nnz, layout.block, layout.block),
        (tokens, layout.out_features),
    )
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def products(x, values, dy, tables):
    """Return (y, dx, dvalues): three kernels."""
    y, pullback = jax.vjp(lambda x, v: pallas_hopper.block_sparse_matmul(x, v, tables), x, values)
    return y, *pullback(dy)


def kernels(program):
    return program.as_text().count('custom_call_target="mosaic_gpu')


def token_splits(layout, tokens=TOKENS):
    """Return the token splits of dW's last wave; more than one add a kernel."""
    x, values, _ = operands(layout, tokens)
    recorded = []

    def record(tables):
        recorded.append(pallas_hopper.default_tuning(x, values, tables).weight_gradient.splits)
        return 0

    with targeted_gpu():
        jax.eval_shape(record, layout.tables())
    return recorded[0]


def temporary_bytes(program):
    return program.memory_analysis().temp_size_in_bytes


def assert_registers_suffice(report):
    """Assert that at least one kernel was compiled, and that none spills registers.

    The report omits kernels that an earlier test compiled.
    """
    assert report.count("bytes spill stores") >= 1
    assert report.count("bytes spill stores") == report.count(
        " 0 bytes spill stores, 0 bytes spill loads"
    )


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize("projection", list(PROJECTIONS))
def test_all_three_products_compile_without_copies(compiled, projection, block):
    layout = make_layout("pixelfly", *PROJECTIONS[projection], block, DENSITY)
    program, report = compiled(products, [*operands(layout), layout.tables()])
    assert kernels(program) == 3 + (token_splits(layout) > 1)
    assert_registers_suffice(report)
    assert temporary_bytes(program) <= (2**20 if token_splits(layout) == 1 else 2**25)


def test_splitting_the_last_wave_does_not_copy_the_gradient(compiled):
    layout = make_layout("pixelfly", *PROJECTIONS["qkv"], 128, DENSITY)
    tokens = 16384
    x, values, dy = operands(layout, tokens)
    arguments = [x, dy, layout.tables()]

    def gradient(x, dy, tables):
        return pallas_hopper.weight_gradient(x, dy, tables, values=values)

    program, report = compiled(gradient, arguments)
    assert kernels(program) == 2
    assert_registers_suffice(report)
    last = 2 * (layout.nnz // 2 % 132)  # Blocks of the last wave, two a program.
    sums = last * layout.block**2 * 4
    gradient_bytes = layout.nnz * layout.block**2 * 2
    assert (
        temporary_bytes(program)
        <= (token_splits(layout, tokens) + 1) * sums + gradient_bytes + 2**20
    )


def test_the_fused_product_saves_only_two_activations(compiled):
    layout = make_layout("pixelfly", *PROJECTIONS["in"], 128, DENSITY)
    bias = jax.ShapeDtypeStruct((layout.out_features,), jnp.float32)

    def fused(x, values, dy, tables, bias):
        y, pullback = jax.vjp(
            lambda x, v, b: pallas_hopper.block_sparse_matmul(
                x, v, tables, bias=b, activation="gelu"
            ),
            x,
            values,
            bias,
        )
        return y, *pullback(dy)

    program, report = compiled(fused, [*operands(layout), layout.tables(), bias])
    assert kernels(program) == 3 + (token_splits(layout) > 1)
    assert_registers_suffice(report)
    preactivation = TOKENS * layout.out_features * 2
    assert temporary_bytes(program) <= 2 * preactivation + 2**20


@pytest.mark.parametrize("block", [128, 64])
def test_epilogues_need_no_second_kernel(compiled, block):
    """A product with a bias, and dx multiplied by the preceding GELU's derivative."""
    layout = make_layout("pixelfly", *PROJECTIONS["mlp"], block, DENSITY)
    bias = jax.ShapeDtypeStruct((layout.out_features,), jnp.float32)
    x, values, dy = operands(layout)

    def forward(x, values, dy, tables, bias):
        return pallas_hopper.block_sparse_matmul(x, values, tables, bias=bias)

    def backward(z, values, dy, tables):
        return pallas_hopper.input_gradient(dy, values, tables, activation="gelu", preactivation=z)

    for function, arguments in [(forward, [bias]), (backward, [])]:
        program, report = compiled(function, [x, values, dy, layout.tables(), *arguments])
        assert kernels(program) == 1
        assert_registers_suffice(report)
        assert temporary_bytes(program) <= 2**20


@pytest.mark.parametrize(("block", "density"), [(32, 1 / 8), (256, 1 / 10)])
@pytest.mark.parametrize("tokens", [2048, 1000])
def test_other_blocks_and_tokens_compile(compiled, block, density, tokens):
    layout = make_layout("pixelfly", *PROJECTIONS["out"], block, density)
    program, report = compiled(products, [*operands(layout, tokens), layout.tables()])
    assert kernels(program) == 3
    assert_registers_suffice(report)


@pytest.mark.parametrize("block", [128, 64, 32])
def test_float32_compiles(compiled, block):
    layout = make_layout("monarch", *PROJECTIONS["out"], block, DENSITY)
    program, report = compiled(products, [*operands(layout, dtype=jnp.float32), layout.tables()])
    assert kernels(program) == 3 + (token_splits(layout) > 1)
    assert_registers_suffice(report)


def test_the_mlp_is_six_kernels_and_saves_at_most_three_activations(compiled):
    layouts = [make_layout("pixelfly", *PROJECTIONS[name], 128, DENSITY) for name in ("in", "mlp")]
    (x, values_in, _), (_, values_out, dy) = map(operands, layouts)
    bias = jax.ShapeDtypeStruct((layouts[0].out_features,), jnp.float32)

    def mlp(x, values_in, bias, values_out, dy, *tables):
        y, pullback = jax.vjp(
            lambda *o: hopper_mlp.run_sparse_mlp(Operands(*o, *tables)),
            x,
            values_in,
            bias,
            values_out,
        )
        return y, *pullback(dy)

    arguments = [x, values_in, bias, values_out, dy, *(layout.tables() for layout in layouts)]
    program, report = compiled(mlp, arguments)
    assert kernels(program) == 6 + sum(token_splits(layout) > 1 for layout in layouts)
    assert_registers_suffice(report)
    assert temporary_bytes(program) <= 3 * TOKENS * layouts[0].out_features * 2 + 2**20


def test_concrete_tables_compile(compiled):
    layout = make_layout("random", *PROJECTIONS["out"], 64, DENSITY)
    tables = layout.tables()
    program, _ = compiled(lambda *o: products(*o, tables), operands(layout))
    assert kernels(program) == 3
