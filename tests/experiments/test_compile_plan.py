"""Shipped compile plans: the planner's memory against the compiler's, the text of a plan, and what
is refused before anything is compiled.

python tests/experiments/test_compile_plan.py        writes the golden text anew
"""

import dataclasses
import sys
from pathlib import Path

import pytest
from absl import flags as absl_flags

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from shipped_plans import SHIPPED, plan_of, result

from experiments import (
    compile_plan,
    compile_report,
    flags,
    layout_verify,
    planner_flags,
)
from sparse_dataflow.aot import compile, topologies
from sparse_dataflow.hardware import chips
from sparse_dataflow.planning import nearest, search

GOLDEN = Path(__file__).with_name("golden") / "compile_plan.txt"


def run(*arguments):
    values = absl_flags.FlagValues()
    argv = ["program", *arguments]
    with pytest.raises(SystemExit) as left:
        flags.run(compile_plan.main, compile_plan.__doc__, compile_plan.GROUPS, argv, values)
    return left.value.code


def test_the_plans_that_must_pass_are_shipped():
    asked = {"1t": "v5p:16x16x12", "175b": "v5p:8x8x16", "13b": "v5e:4x4"}
    plans = [plan_of(result(name)["plan"]) for name in SHIPPED]
    found = {(p.scale, p.topology.name): p for p in plans}
    assert set(asked.items()) <= set(found)
    assert found["13b", "v5e:4x4"].config.sparse_projections


@pytest.mark.parametrize("name", SHIPPED)
def test_the_planner_predicts_the_compilers_memory_within_a_tenth(name):
    found = result(name)
    plan = plan_of(found["plan"])
    assert plan.flags == found["plan"]
    assert found["verdict"] == compile_report.FITS
    assert found["seconds"]["processor"] < 2 * 300
    predicted, compiled = compile_report.predicted(plan), found["bytes"]
    assert set(predicted) == set(compiled)
    assert sum(predicted.values()) == pytest.approx(sum(compiled.values()), rel=0.1)
    for category in ("parameters", "moments", "gradients"):
        assert predicted[category] == pytest.approx(compiled[category], rel=0.1), category
    allocated = found["memory_analysis"]
    parts = allocated["argument"] + allocated["temp"] + allocated["generated_code"]
    assert sum(compiled.values()) == parts + allocated["output"] - allocated["alias"]


def text():
    found = result("13b_density-0-125_v5e-4x4")
    return compile_report.told(plan_of(found["plan"]), found) + "\n"


def test_text_of_a_plan():
    assert text() == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology=v5e:3x3"], "--topology=v5e:3x3 is unknown; legal: v5e:1x1"),
        (["--topology=a100:8"], "h200:1 to h200:8"),
        (["--topology=v5e:4x4", "--mesh=fsdp:5"], "legal: sizes whose product is 16"),
        (["--topology=v5e:4x4", "--mesh=fdsp:16"], "did you mean fsdp?"),
        (["--topology=v5e:4x4", "--mesh=fsdp:16", "--batch=24"], "legal: multiples of 16"),
        (["--topology=h200:8", "--slices=2"], "legal: --slices=1"),
        (["--scale=1t", "--topology=v5e:4x4"], "No layout fits: the smallest needs"),
        (["--density=0.1", "--block=96"], "--block=96 does not divide"),
    ],
)
def test_words_before_anything_is_compiled(arguments, words, capsys):
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_without_the_compiler_the_way_to_it_is_named(monkeypatch, capsys):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda module: None)
    assert run("--topology=v5e:4x4", "--density=0.125", "--mesh=fsdp:16", "--batch=16") == 2
    assert "make aot-tpu" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_answered_with_the_nearest_that_does(monkeypatch, capsys):
    asked = "--scale=13b --topology=v5p:2x2x2 --mesh=fsdp:8 --batch=64 --remat=none"
    monkeypatch.setattr(topologies, "refusal", lambda topology: "")
    tried = []

    def verdict(plan):
        tried.append(plan)
        size = 40 * 2**30 if plan.layout.remat == "full" else 200 * 2**30
        fits = compile_report.FITS if plan.layout.remat == "full" else compile_report.TOO_LARGE
        common = {"memory_bytes": 95 * 10**9, "needed_bytes": size, "verdict": fits}
        return common | {"said": "Ran out of memory."}

    monkeypatch.setattr(compile_report, "verdict", verdict)
    assert run(*asked.split(), "--tries=5") == 1
    said = capsys.readouterr().out
    assert "the compiler: Ran out of memory." in said
    assert "The nearest plan that fits" in said and "--remat=full" in said
    layouts = [plan.layout for plan in tried]
    changes = [nearest.changes(layouts[0], layout) for layout in layouts]
    assert changes[0] == 0 and changes == sorted(changes) and layouts[-1].remat == "full"


def test_a_search_says_what_was_compiled_and_what_was_not(monkeypatch):
    config = planner_flags.model("1.3b")
    request = search.Request(config, 2048, 512, chips.named("tpu-v5e"), 16)
    layouts = nearest.fitting(request, None)[:3]
    said = layout_verify.verified("1.3b", request, layouts, 0)
    assert said == ["not compiled: --verify=0 asks for none"] * 3
    elsewhere = dataclasses.replace(request, chip=chips.named("mi250x"))
    assert "no compiler here knows" in layout_verify.verified("1.3b", elsewhere, layouts, 1)[0]
    monkeypatch.setattr(topologies, "refusal", lambda topology: "not installed: make aot-tpu")
    assert "make aot-tpu" in layout_verify.verified("1.3b", request, layouts, 1)[0]
    monkeypatch.setattr(topologies, "refusal", lambda topology: "")
    verdicts = iter(["fits", "does not fit"])
    monkeypatch.setattr(
        compile_report,
        "verdict",
        lambda plan: {"verdict": next(verdicts), "needed_bytes": 2**30},
    )
    said = layout_verify.verified("1.3b", request, layouts[:2], 1)
    assert said == ["fits, 1.0 GiB", "does not fit, 1.0 GiB"]
    clock = iter([0.0, 1.0, 100.0, 100.0])
    monkeypatch.setattr(layout_verify.time, "monotonic", lambda: next(clock))
    verdicts = iter(["fits"])
    said = layout_verify.verified("1.3b", request, layouts, 1)
    assert said[0].startswith("fits") and "minutes are over" in said[1] == said[2]


def test_what_the_compiler_says_of_memory_is_read():
    said = (
        "RESOURCE_EXHAUSTED: E1000: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (1.57T) exceeds available HBM (95.73G).\nmore"
    )
    found = compile._out_of_memory(RuntimeError(said))
    assert isinstance(found, compile.DoesNotFit)
    assert found.needed == int(1.57 * 2**40) and "\n" not in str(found)
    other = RuntimeError("INVALID_ARGUMENT: no such thing")
    assert compile._out_of_memory(other) is other


if __name__ == "__main__":
    GOLDEN.write_text(text())
