"""Registers, spills and matrix instructions, from a kernel's PTX and the assembler's report."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.benchmarks.schedules import ptx

REPORT = """\
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}' for 'sm_90a'
ptxas info    : Function properties for {name}
    0 bytes stack frame, {stored} bytes spill stores, {loaded} bytes spill loads
ptxas info    : Used {registers} registers, used 16 barriers, 17 bytes smem
"""
TEXT = ".target sm_90a\n.entry {name}()\n  {instruction} {{%f1}}, %rd1;\n"
INSTRUCTIONS = {
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16": ("wgmma m64n256k16",),
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": ("mma m16n8k16",),
    "tcgen05.mma.cta_group::1.kind::f16": ("tcgen05",),
    "fma.rn.f32": (),
}


@given(
    st.sampled_from(sorted(INSTRUCTIONS)),
    st.integers(1, 255),
    st.integers(0, 999),
    st.integers(0, 999),
)
def test_a_report_is_read(instruction, registers, stored, loaded):
    report = REPORT.format(name="kernel", registers=registers, stored=stored, loaded=loaded)
    (found,) = ptx.read_report(TEXT.format(name="kernel", instruction=instruction), report)
    products = INSTRUCTIONS[instruction]
    assert found == ptx.Resources("kernel", registers, stored + loaded, products)


def test_text_without_a_kernel_has_no_resources():
    assert ptx.read_report(".target sm_80\n.global .b8 table[8];", "info : 64 bytes gmem") == []


def test_a_kernel_is_assembled(tmp_path):
    pytest.importorskip("jax_cuda13_plugin", reason="ptxas is part of the extra cuda")
    path = tmp_path / "kernel.ptx"
    path.write_text(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\n")
    (found,) = ptx.resources(path)
    assert (found.name, found.spills, found.products) == ("k", 0, ())
    path.write_text("no PTX\n.target sm_80\n")
    with pytest.raises(ptx.UserError, match=r"does not assemble kernel\.ptx"):
        ptx.resources(path)
