"""Collectives from HLO text: programs with a known answer, shapes, traffic."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.compile import hlo

DTYPES = {"f32": 4, "bf16": 2, "s8": 1}
WIDTHS = {**DTYPES, "pred": 1, "u64": 8, "c64": 8, "c128": 16, "f8e4m3fn": 1, "token": 0}

MODULE = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%condition (state: (s32[], f32[8])) -> pred[] {{
  %state = (s32[], f32[8]{{0}}) parameter(0)
  %bound = s32[]{{:T(128)}} constant({rounds})
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}}

%unknown (state: (s32[], f32[8])) -> pred[] {{
  %state = (s32[], f32[8]{{0}}) parameter(0)
  ROOT %less = pred[] custom-call(%state), custom_call_target="who knows"
}}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %state = (s32[], f32[8]{{0}}) parameter(0)
  %x = {dtype}[{shard}]{{0:T(8,128)}} get-tuple-element(%state), index=1
  %kernel = f32[8] custom-call(%x), custom_call_target="mosaic", frontend_attributes={{kernel={{
"text": "at the margin (with, all-gather(%x)) {{"
}}}}
  %gathered = {dtype}[{whole}]{{0}} all-gather(%x), replica_groups={groups}, dimensions={{0}}
  ROOT %next = (s32[], f32[8]) tuple(%state, %kernel)
}}

%all-reduce-scatter.1 (x: f32[16]) -> f32[2] {{
  %x = f32[16]{{0}} parameter(0)
  ROOT %reduced = f32[16]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add
}}

ENTRY %main (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  %start = (s32[], f32[8]) tuple(%x)
  %fused = f32[2]{{0}} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %sent = (f32[16], f32[16], u32[]) collective-permute-start(%x), source_target_pairs={{{{0,1}}}}
  %alone = f32[16] all-reduce(%x), replica_groups={{{{0}},{{1}}}}, to_apply=%add
  ROOT %loop = (s32[], f32[8]) while(%start), {loop}
}}
"""


def groups(size, form):
    """Three replica groups of a size, in one of XLA's notations."""
    if form == "mesh":
        return f"mesh['data'=3,'fsdp'={size}] {{'fsdp'}}"
    if form == "iota":
        return f"[3,{size}]<=[{3 * size}]"
    lists = [",".join(str(g * size + i) for i in range(size)) for g in range(3)]
    return "{" + ",".join(f"{{{members}}}" for members in lists) + "}"


@given(
    st.integers(1, 500),
    st.integers(2, 64),
    st.sampled_from(["mesh", "iota", "list"]),
    st.integers(1, 10_000),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(["condition", "annotation", "scope"]),
)
def test_collectives_of_a_program(rounds, size, form, shard, dtype, source):
    unknown = "condition=%unknown, body=%body, "
    loop = {
        "condition": "condition=%condition, body=%body",
        "annotation": f'{unknown}backend_config={{"known_trip_count":{{"n":"{rounds}"}}}}',
        "scope": unknown + 'metadata={op_name="jit(step)/ticks/while"}',
    }[source]
    text = MODULE.format(
        rounds=rounds,
        dtype=dtype,
        shard=shard,
        whole=shard * size,
        groups=groups(size, form),
        loop=loop,
    )
    collectives = {c.kind: c for c in hlo.collectives(text, {"ticks": rounds})}
    assert set(collectives) == {"all-gather", "reduce-scatter", "collective-permute"}
    gather = hlo.Collective("all-gather", size, rounds, shard * size * DTYPES[dtype])
    assert collectives["all-gather"] == gather
    assert gather.moved == pytest.approx(rounds * (size - 1) * shard * DTYPES[dtype])
    assert collectives["reduce-scatter"] == hlo.Collective("reduce-scatter", size, 1, 64)
    assert collectives["collective-permute"] == hlo.Collective("collective-permute", 2, 1, 64)
    if source == "scope":
        with pytest.raises(ValueError, match="without a known trip count"):
            hlo.collectives(text)


@given(
    st.lists(
        st.tuples(st.sampled_from(list(WIDTHS)), st.lists(st.integers(0, 99), max_size=4)),
        max_size=5,
    )
)
def test_bytes_of_a_tuple_are_the_sum_over_its_arrays(arrays):
    shapes = [f"{dtype}[{','.join(map(str, dims))}]{{0:T(8,128)S(1)}}" for dtype, dims in arrays]
    expected = sum(WIDTHS[dtype] * math.prod(dims) for dtype, dims in arrays)
    assert hlo.array_bytes(f"({', '.join(shapes)})") == expected


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    moved = {kind: hlo.Collective(kind, 8, 3, 800).moved for kind in hlo.KINDS}
    assert moved["all-reduce"] == moved["all-gather"] + moved["reduce-scatter"] == 2 * 3 * 700
    assert moved["collective-permute"] == 3 * 800


GPU_MODULE = """\
HloModule jit_product, is_scheduled=true

%gathered (x: bf16[64,256], at: s32[32]) -> bf16[32,256] {{
  %x = bf16[64,256]{{1,0}} parameter(0)
  %at = s32[32]{{0}} parameter(1)
  ROOT %rows = bf16[32,256]{{1,0}} gather(%x, %at), slice_sizes={{1,256}}
}}

%updated (all: bf16[64,256], new: bf16[8,256], i: s32[]) -> bf16[64,256] {{
  %all = bf16[64,256]{{1,0}} parameter(0)
  %new = bf16[8,256]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %update = bf16[64,256]{{1,0}} dynamic-update-slice(%all, %new, %i, %i)
}}

%condition (state: (s32[], bf16[64,256])) -> pred[] {{
  %state = (s32[], bf16[64,256]{{1,0}}) parameter(0)
  ROOT %less = pred[] custom-call(%state), custom_call_target="unread"
}}

%body (state: (s32[], bf16[64,256])) -> (s32[], bf16[64,256]) {{
  %state = (s32[], bf16[64,256]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %all = bf16[64,256]{{1,0}} get-tuple-element(%state), index=1
  %new = bf16[8,256]{{1,0}} constant({{...}})
  %update = bf16[64,256]{{1,0}} fusion(%all, %new, %i), kind=kLoop, calls=%updated
  ROOT %next = (s32[], bf16[64,256]{{1,0}}) tuple(%i, %update)
}}

ENTRY %main (x: bf16[64,256], w: bf16[256,16], at: s32[32]) -> bf16[32,16] {{
  %x = bf16[64,256]{{1,0}} parameter(0)
  %w = bf16[256,16]{{1,0}} parameter(1)
  %at = s32[32]{{0}} parameter(2)
  %rows = bf16[32,256]{{1,0}} fusion(%x, %at), kind=kLoop, calls=%gathered
  %start = (s32[], bf16[64,256]{{1,0}}) tuple(%at, %x)
  %loop = (s32[], bf16[64,256]{{1,0}}) while(%start), condition=%condition, body=%body{trips}
  ROOT %y = (bf16[32,16]{{1,0}}, s8[4096]{{0}}) custom-call(%rows, %w), custom_call_target="__cublas$gemm"
}}
"""  # noqa: E501
TRIPS = ', backend_config={{"known_trip_count":{{"n":"{}"}}}}'


@given(st.integers(1, 99))
def test_kernels_count_by_loop_and_move_what_they_touch(trips):
    text = GPU_MODULE.format(trips=TRIPS.format(trips))
    found = {k.name: (k.times, k.bytes, k.multiplies) for k in hlo.kernels(text)}
    rows, new = 2 * 32 * 256, 2 * 8 * 256
    assert found["rows"] == (1, 2 * rows + 4 * 32, False)  # The rows that are taken, twice.
    assert found["update"] == (trips, 2 * new + 4, False)  # Not the array that is updated.
    assert found["y"] == (1, rows + 2 * 256 * 16 + 2 * 32 * 16, True)  # Not the workspace.


def test_kernels_in_a_loop_of_unknown_length_are_refused():
    with pytest.raises(ValueError, match="trip count"):
        hlo.kernels(GPU_MODULE.format(trips=""))


FUSION = """\
HloModule jit_fused, is_scheduled=true

%fused (all: f32[{rows},{width}], new: f32[8,{width}], i: s32[8]) -> f32[{rows},{width}] {{
  %all = f32[{rows},{width}]{{1,0}} parameter(0)
  %new = f32[8,{width}]{{1,0}} parameter(1)
  %i = s32[8]{{0}} parameter(2)
  {body}
}}

ENTRY %main (x: f32[{rows},{width}], u: f32[8,{width}], i: s32[8]) -> f32[{rows},{width}] {{
  %x = f32[{rows},{width}]{{1,0}} parameter(0)
  %u = f32[8,{width}]{{1,0}} parameter(1)
  %i = s32[8]{{0}} parameter(2)
  ROOT %y = f32[{result}]{{0}} fusion(%x, %u, %i), kind=kInput, calls=%fused
}}
"""


@given(st.integers(9, 99), st.integers(1, 99))
def test_a_scatter_moves_the_rows_that_it_adds_to(rows, width):
    body = f"ROOT %sum = f32[{rows},{width}]{{1,0}} scatter(%all, %i, %new), to_apply=%add"
    text = FUSION.format(rows=rows, width=width, result=f"{rows},{width}", body=body)
    [kernel] = hlo.kernels(text)
    assert kernel.bytes == 4 * (3 * 8 * width + 8)  # Reads and writes the rows, reads the new ones.


@given(st.integers(9, 99), st.integers(1, 99))
def test_an_update_within_a_sum_reads_the_whole_array(rows, width):
    body = (
        f"%updated = f32[{rows},{width}]{{1,0}} dynamic-update-slice(%all, %new, %i, %i)\n"
        f"  ROOT %sum = f32[{width}]{{0}} reduce(%updated), dimensions={{0}}, to_apply=%add"
    )
    text = FUSION.format(rows=rows, width=width, result=f"{width}", body=body)
    [kernel] = hlo.kernels(text)
    assert kernel.bytes == 4 * (rows * width + 8 * width + 8 + width)


TPU_MODULE = """\
HloModule jit_step, is_scheduled=true

%moved (x: bf16[{rows},3,128]) -> bf16[3,{rows},128] {{
  %x = bf16[{rows},3,128]{{2,0,1:T(8,128)(2,1)}} parameter(0)
  ROOT %t = bf16[3,{rows},128]{{2,1,0:T(8,128)(2,1)}} transpose(%x), dimensions={{1,0,2}}
}}

%one_part (x: bf16[{rows},3,128], w: bf16[128,128]) -> f32[1,{rows},128] {{
  %x = bf16[{rows},3,128]{{2,0,1:T(8,128)(2,1)}} parameter(0)
  %w = bf16[128,128]{{1,0:T(8,128)(2,1)S(1)}} parameter(1)
  %inner = bf16[3,{rows},128]{{2,1,0:T(8,128)(2,1)}} fusion(%x), kind=kLoop, calls=%moved
  %part = bf16[1,{rows},128]{{2,1,0:T(8,128)(2,1)}} slice(%inner), slice={{[0:1], [0:{rows}], [0:128]}}
  ROOT %y = f32[1,{rows},128]{{2,1,0:T(8,128)}} convolution(%part, %w), dim_labels=0bf_io->0bf
}}

ENTRY %main (x: bf16[{rows},3,128], w: bf16[128,128]) -> f32[1,{rows},128] {{
  %x = bf16[{rows},3,128]{{2,0,1:T(8,128)(2,1)}} parameter(0)
  %w = bf16[128,128]{{1,0:T(8,128)(2,1)}} parameter(1)
  %buffer = bf16[{rows},128]{{1,0:T(8,128)}} custom-call(), custom_call_target="AllocateBuffer"
  %start = (bf16[128,128]{{1,0:T(8,128)(2,1)S(1)}}, bf16[128,128]{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) copy-start(%w)
  %near = bf16[128,128]{{1,0:T(8,128)(2,1)S(1)}} copy-done(%start)
  %product = f32[1,{rows},128]{{2,1,0:T(8,128){at}}} fusion(%x, %near), kind=kOutput, calls=%one_part, metadata={{op_name="jit(step)/mlp/dot"}}, backend_config={{"estimated_cycles":"{cycles}"}}
  %half = ((f32[1,{rows},128]{{2,1,0:T(8,128){at}}}), f32[1,8,128]{{2,1,0:T(8,128)S(1)}}, s32[]{{:S(2)}}) slice-start(%product), slice={{[0:1], [0:8], [0:128]}}
  %taken = f32[1,8,128]{{2,1,0:T(8,128)S(1)}} slice-done(%half)
  ROOT %normed = f32[1,{rows},128]{{2,1,0:T(8,128)}} custom-call(%product, %taken), custom_call_target="tpu_custom_call", metadata={{op_name="jit(step)/norm/pallas_call"}}
}}
"""  # noqa: E501


@given(st.integers(1, 99), st.integers(1, 10**9))
def test_a_tpu_moves_what_is_in_its_main_memory(eights, cycles):
    rows = 8 * eights
    text = TPU_MODULE.format(rows=rows, cycles=cycles, at="")
    got = {k.name: (k.target, k.bytes, k.cycles, k.scope) for k in hlo.kernels(text)}
    part, result = 2 * rows * 128, 4 * rows * 128
    assert got == {
        # The copy to vector memory belongs to the product that reads it.
        "start": ("copy-start", 2 * 128 * 128, 0, "jit(step)/mlp/dot"),
        # A third of x, although a fusion within the product moves all of it.
        "product": ("convolution", part + result, cycles, "jit(step)/mlp/dot"),
        "half": ("slice-start", 4 * 8 * 128, 0, "jit(step)/norm/pallas_call"),
        "normed": ("tpu:normed", 2 * result, 0, "jit(step)/norm/pallas_call"),
    }
