"""Shipped compile plans: the planner's memory against the compiler's, the text of a plan, and what
is refused before anything is compiled.

python tests/commands/planning/test_compile_plan.py        writes the golden text anew
"""

import dataclasses
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from exit_status import exit_status
from shipped_plans import SHIPPED, plan_of, result

from experiments import compile_plan
from experiments.planning import verify
from sparse_dataflow.commands.planning import compile_report
from sparse_dataflow.commands.planning.options import named_model
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.compile import programs as compile
from sparse_dataflow.compile import topologies
from sparse_dataflow.hardware import chips
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner import plan_memory, search, settle_advice
from sparse_dataflow.runs.run_config import preset

GOLDEN = Path(__file__).with_name("compile_plan.txt")


def run(*arguments):
    return exit_status(compile_plan, *arguments)


def test_the_plans_that_must_pass_are_shipped():
    required = {"1t": "v5p:16x16x12", "175b": "v5p:8x8x16", "13b": "v5e:4x4"}
    plans = [plan_of(result(name)["plan"]) for name in SHIPPED]
    by_chips = {(p.scale, p.topology.name): p for p in plans}
    assert set(required.items()) <= set(by_chips)
    assert by_chips["13b", "v5e:4x4"].config.sparse_projections


@pytest.mark.parametrize("name", SHIPPED)
def test_the_planner_predicts_the_compilers_memory_and_is_never_far_below(name):
    shipped = result(name)
    plan = plan_of(shipped["plan"])
    assert plan.flags == shipped["plan"]
    assert shipped["verdict"] == compile_report.FITS
    assert shipped["seconds"]["processor"] < 2 * 300
    predicted, compiled = compile_report.predicted_bytes(plan), shipped["bytes"]
    assert set(predicted) == set(compiled)
    # Temporaries dominate a plan that leaves most of the chip free.
    unused = 0.05 * plan.topology.chip.memory_bytes
    low, high = plan_memory.ERROR
    assert sum(predicted.values()) < max(
        1.15 * sum(compiled.values()), sum(compiled.values()) + unused
    )
    assert (1 + low) * sum(predicted.values()) - unused < sum(compiled.values())
    assert sum(compiled.values()) < (1 + high) * sum(predicted.values())
    for category in ("parameters", "moments", "gradients", "activations"):
        assert predicted[category] == pytest.approx(compiled[category], rel=0.08), category
    allocated = shipped["memory_analysis"]
    results = allocated["output"] - allocated["alias"]
    sizes = [allocated[name] for name in ("argument", "temp", "generated_code")]
    assert sum(compiled.values()) == sum(sizes) + results


OF_A_RUN = tuple(f"13b_density-0-125_{name}" for name in ("h100-1", "v5e-8x8", "v5p-2x2x1"))


@pytest.mark.parametrize("name", [name for name in OF_A_RUN if name in SHIPPED])
def test_a_run_chooses_the_plan_that_the_compiler_confirmed(name):
    compiled = plan_of(result(name)["plan"])
    machine = Machine(compiled.topology.chip, compiled.topology.size)
    chosen = settling.settle(preset("13b", compute_dtype="bfloat16"), machine)
    assert compiled.config == dataclasses.replace(chosen.request.config, remat=chosen.plan.remat)
    names = ("mesh", "accumulation", "micro_batch", "remat", "zero")
    for field in names:
        assert getattr(compiled.parallel, field) == getattr(chosen.plan, field), field


def text():
    shipped = result("13b_density-0-125_v5e-4x4")
    return compile_report.report(plan_of(shipped["plan"]), shipped) + "\n"


def test_text_of_a_plan():
    assert text() == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology=v5e:3x3"], "--topology=v5e:3x3 is unknown; legal: v5e:1x1"),
        (["--topology=v100:8"], "h200:1 to h200:8"),
        (["--topology=v5e:4x4", "--mesh=fsdp:5"], "legal: sizes whose product is 16"),
        (["--topology=v5e:4x4", "--mesh=fdsp:16"], "did you mean fsdp?"),
        (["--topology=v5e:4x4", "--mesh=fsdp:16", "--batch=24"], "legal: multiples of 16"),
        (["--topology=h200:8", "--slices=2"], "legal: --slices=1"),
        (["--scale=1t", "--topology=v5e:4x4"], "No parallel plan fits: the smallest needs"),
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
    flags = "--scale=13b --topology=v5p:2x2x2 --mesh=fsdp:8 --batch=64 --remat=none"
    monkeypatch.setattr(topologies, "missing_compiler", lambda topology: "")
    tried = []

    def verdict(plan):
        tried.append(plan.parallel)
        assert plan.config.remat == plan.parallel.remat
        size = 40 * 2**30 if plan.parallel.remat == "full" else 200 * 2**30
        fits = compile_report.FITS if plan.parallel.remat == "full" else compile_report.TOO_LARGE
        common = {"memory_bytes": 95 * 10**9, "needed_bytes": size, "verdict": fits}
        return common | {"said": "Ran out of memory."}

    monkeypatch.setattr(compile_report, "verdict", verdict)
    assert run(*flags.split(), "--tries=5") == 1
    out = capsys.readouterr().out
    assert "the compiler: Ran out of memory." in out
    assert "The nearest plan that fits" in out and "--remat=full" in out
    changes = [settle_advice.changes(tried[0], plan) for plan in tried]
    assert changes[0] == 0 and changes == sorted(changes) and tried[-1].remat == "full"


def test_the_flags_of_a_plan_describe_it():
    flags = "--scale=13b --density=0.5 --topology=v5p:2x2x2 --mesh=stage:4,fsdp:2 --batch=16"
    plan = plan_of(f"{flags} --accumulation=4 --schedule=interleaved:2 --zero=2 --slices=1")
    assert plan_of(plan.flags) == plan
    assert (plan.parallel.chunks, plan.parallel.stage) == (2, 4)


def test_a_search_names_what_was_compiled_and_what_was_not(monkeypatch):
    request = search.Request(named_model("1.3b"), 2048, 512, chips.lookup("tpu-v5e"), 16)
    plans = settle_advice.fitting_plans(request, None)[:3]
    words = verify.verdicts("1.3b", request, plans, 0)
    assert words == ["not compiled: --verify=0 asks for none"] * 3
    elsewhere = dataclasses.replace(request, chip=chips.lookup("mi250x"))
    assert "no compiler here knows" in verify.verdicts("1.3b", elsewhere, plans, 1)[0]
    monkeypatch.setattr(topologies, "missing_compiler", lambda _: "not installed: make aot-tpu")
    assert "make aot-tpu" in verify.verdicts("1.3b", request, plans, 1)[0]
    monkeypatch.setattr(topologies, "missing_compiler", lambda topology: "")
    results = iter(["fits", "does not fit"])
    monkeypatch.setattr(
        compile_report,
        "verdict",
        lambda plan: {"verdict": next(results), "needed_bytes": 2**30},
    )
    words = verify.verdicts("1.3b", request, plans[:2], 1)
    assert words == ["fits, 1.0 GiB", "does not fit, 1.0 GiB"]
    clock = iter([0.0, 1.0, 100.0, 100.0])
    monkeypatch.setattr(verify.time, "monotonic", lambda: next(clock))
    results = iter(["fits"])
    words = verify.verdicts("1.3b", request, plans, 1)
    assert words[0].startswith("fits") and "minutes are over" in words[1] == words[2]


def test_the_compilers_words_on_memory_are_read():
    words = (
        "RESOURCE_EXHAUSTED: E1000: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (1.57T) exceeds available HBM (95.73G).\nmore"
    )
    error = compile._out_of_memory(RuntimeError(words))
    assert isinstance(error, compile.DoesNotFit)
    assert error.needed == int(1.57 * 2**40) and "\n" not in str(error)
    other = RuntimeError("INVALID_ARGUMENT: no such thing")
    assert compile._out_of_memory(other) is other


if __name__ == "__main__":
    GOLDEN.write_text(text())
