"""Collectives read from a compiled program's text: drawn programs, and what was really compiled."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.aot import hlo

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
  %x = {dtype}[{part}]{{0:T(8,128)}} get-tuple-element(%state), index=1
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
    """Three groups of a size, in one of the ways in which XLA writes them."""
    if form == "mesh":
        return f"mesh['data'=3,'fsdp'={size}] {{'fsdp'}}"
    if form == "iota":
        return f"[3,{size}]<=[{3 * size}]"
    listed = [",".join(str(g * size + i) for i in range(size)) for g in range(3)]
    return "{" + ",".join(f"{{{one}}}" for one in listed) + "}"


@given(
    st.integers(1, 500),
    st.integers(2, 64),
    st.sampled_from(["mesh", "iota", "list"]),
    st.integers(1, 10_000),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(["condition", "noted", "told"]),
)
def test_drawn_programs_are_counted_by_hand(rounds, size, form, part, dtype, known):
    unknown = "condition=%unknown, body=%body, "
    loop = {
        "condition": "condition=%condition, body=%body",
        "noted": f'{unknown}backend_config={{"known_trip_count":{{"n":"{rounds}"}}}}',
        "told": unknown + 'metadata={op_name="jit(step)/ticks/while"}',
    }[known]
    text = MODULE.format(
        rounds=rounds,
        dtype=dtype,
        part=part,
        whole=part * size,
        groups=groups(size, form),
        loop=loop,
    )
    found = {c.kind: c for c in hlo.collectives(text, {"ticks": rounds})}
    assert set(found) == {"all-gather", "reduce-scatter", "collective-permute"}
    gather = hlo.Collective("all-gather", size, rounds, part * size * DTYPES[dtype])
    assert found["all-gather"] == gather
    assert gather.moved == pytest.approx(rounds * (size - 1) * part * DTYPES[dtype])
    assert found["reduce-scatter"] == hlo.Collective("reduce-scatter", size, 1, 64)
    assert found["collective-permute"] == hlo.Collective("collective-permute", 2, 1, 64)
    totals = hlo.by_kind(found.values())
    assert sum(t["moved"] for t in totals.values()) == sum(c.moved for c in found.values())
    if known == "told":
        with pytest.raises(ValueError, match="length is not known"):
            hlo.collectives(text)


@given(
    st.lists(
        st.tuples(st.sampled_from(list(WIDTHS)), st.lists(st.integers(0, 99), max_size=4)),
        max_size=5,
    )
)
def test_bytes_of_a_tuple_are_those_of_its_arrays(arrays):
    shapes = [f"{dtype}[{','.join(map(str, dims))}]{{0:T(8,128)S(1)}}" for dtype, dims in arrays]
    expected = sum(WIDTHS[dtype] * math.prod(dims) for dtype, dims in arrays)
    assert hlo.array_bytes(f"({', '.join(shapes)})") == expected


def test_an_all_reduce_sends_what_a_scatter_and_a_gather_send():
    moved = {kind: hlo.Collective(kind, 8, 3, 800).moved for kind in hlo.KINDS}
    assert moved["all-reduce"] == moved["all-gather"] + moved["reduce-scatter"] == 2 * 3 * 700
    assert moved["collective-permute"] == 3 * 800
