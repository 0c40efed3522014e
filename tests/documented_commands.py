"""Commands of the documentation and the tests that run them."""

import ast
import json
import re

from places import ROOT

PAGES = sorted(page for where in ("", "docs/**/", "launch/") for page in ROOT.glob(f"{where}*.md"))

E = "tests/experiments/"
S = E + "benchmarks/schedules/"
RUN = {
    "experiments.block_bench": E + "test_benches.py::test_block_bench",
    "experiments.chip_report": E + "test_benches.py::test_this_cpu_is_measured",
    "experiments.compile_plan": "tests/compile/test_plans_compile.py::test_a_shipped_plan",
    "experiments.coordinate_check": E + "test_small_studies.py::test_coordinate_check",
    "experiments.dense_end": E + "test_small_studies.py::test_a_training_with_a_dense_end",
    "experiments.density_search": E + "test_small_studies.py::test_densities_are_chosen",
    "experiments.omit_features": E + "test_small_studies.py::test_features_are_omitted",
    "experiments.decode_bench": E + "test_benches.py::test_decode_bench",
    "experiments.evaluate": E + "test_evaluate.py::test_a_run_and_its_twin",
    "experiments.export": E + "test_exchange_runs.py::test_a_run_writes_exports_and_is_begun_from",
    "experiments.generate": E + "test_exchange_runs.py::test_lines_are_continued_until",
    "experiments.gpt13b_dense": E + "test_main_job.py::test_the_dense_experiment_alone",
    "experiments.gpt13b_sparse": E + "conftest.py::undisturbed",
    "experiments.growth": E + "test_growth.py::test_a_point_is_measured_once",
    "experiments.interplay": E + "test_benches.py::test_interplay_of_a_chip",
    "experiments.iso_flop": E + "test_iso_flop.py::test_a_small_study_goes_on",
    "experiments.kernel_bench": E + "test_benches.py::test_kernel_bench",
    "experiments.layout_search": E + "test_planner_experiments.py::test_layout_search_prints",
    "experiments.pipeline_bubble": E + "test_small_studies.py::test_pipeline_bubble",
    "experiments.planner_truth": E + "test_planner_experiments.py::test_truth_prints",
    "experiments.predict_check": E + "test_benches.py::test_a_tiny_step_is_predicted",
    "experiments.block_cost": E + "test_block_cost.py::test_a_small_study_goes_on",
    "experiments.prune": E + "test_prune.py::test_a_file_is_pruned",
    "experiments.prune_memory": E + "test_prune_memory.py::test_a_small_model_is_drawn",
    "experiments.relay_50b": E + "test_relay_experiments.py::test_fifty_billion_are_planned",
    "experiments.relay_bert_large": E + "test_relay_experiments.py::test_bert_large_compares",
    "experiments.relay_depth": E + "test_relay_experiments.py::test_depth_costs_no_memory",
    "experiments.scaling_study": E + "test_planner_experiments.py::test_scaling_names",
    "experiments.schedule_bench": S + "test_compiles.py::test_cycles",
    "experiments.scoring_bench": E + "test_benches.py::test_scoring_bench",
    "experiments.serving_cost": E + "test_serving_cost.py::test_a_small_study_goes_on",
    "experiments.shape_search": E + "test_shape_search.py::test_candidates_are_trained",
    "experiments.side_memory": E + "test_side_memory.py::test_bytes_and_seconds",
    "experiments.sparse_quality": E + "test_sparse_quality.py::test_a_small_comparison",
    "experiments.sparse_scaling_law": E + "test_scaling_law_runs.py::test_a_small_grid",
    "experiments.stage_bench": E + "test_benches.py::test_stage_bench",
    "experiments.structure_search": E + "test_structure_search.py::test_a_small_study_goes_on",
    "experiments.task_table": E + "test_task_table.py::test_models_of_a_run_in_one_table",
    "experiments.step_bench": E + "test_benches.py::test_step_bench",
    "examples/plain_optax.py": "tests/layers/test_frameworks.py::test_the_example_of_a_framework",
    "examples/linen_layer.py": "tests/layers/test_frameworks.py::test_the_example_of_a_framework",
    "examples/own_training_loop.py": "tests/examples/test_examples.py::test_the_loop_of",
    "examples/compare_pruning.py": "tests/examples/test_compare_pruning.py::test_shapes_are",
    "examples/preference_tuning.py": "tests/examples/test_preference_tuning.py::test_margins",
    "examples/prune_a_llama.py": "tests/examples/test_prune_a_llama.py::test_a_llama_is",
    "DIR/run_in_jax.py": "tests/interchange/test_program_form.py::test_a_python_without",
    "DIR/run_in_torch.py": "tests/interchange/test_torch_reader.py::test_",
    "examples/sparsify_mlp.py": "tests/examples/test_examples.py::test_the_mlp_is_trained",
    "experiments.watch": "tests/commands/test_watch.py::test_the_experiment_serves",
    "mine.py": E + "test_small_studies.py::test_a_pattern_in_a_file_of_your_own",
    "sparse_dataflow.commands.lm_eval": "tests/evaluation/test_lm_eval.py::test_lm_eval_scores",
    "docs/draw_pictures.py": "tests/test_documentation.py::test_the_pictures_are_drawn",
    "docs/build_site.py": "tests/test_documentation.py::test_the_site_is_whole",
    "launch/find_python.sh": "tests/launch/test_find_python.py::test_the_newest_wins",
    "launch/gke/render.py": "tests/launch/test_gke.py::test_the_page_shows_commands_that_render",
    "launch/local.py": E + "test_small_studies.py::test_two_processes_are_launched",
    "launch/make_env.sh": "tests/launch/test_make_env.py::test_it_is_created_once",
    "launch/tpu_vm.sh": "tests/launch/test_scripts.py::test_a_tpu_vm_is_set_up",
    "tests/experiments/fault_records.py": E + "test_fault_records.py::test_a_test_that_fails",
    "tests/experiments/test_golden.py": E + "test_golden.py::test_",
    "tests/launch/test_gke.py": "tests/launch/test_gke.py::test_manifests_equal_the_golden_ones",
    "build": "tests/test_wheel.py::wheel",
    "venv": "tests/launch/test_make_env.py::test_it_is_created_once",
    "make bench-schedule": S + "test_compiles.py::test_cycles",
    "make bench-schedule-gpu": S + "test_gpu_compiles.py::test_kernels",
    "make bench": E + "test_benches.py::test_step_bench",
    "make chip-report": E + "test_benches.py::test_this_cpu_is_measured",
    "make docs": "tests/test_documentation.py::test_the_site_is_whole",
    "make real": "tests/interchange/test_gguf.py::test_an_export_is_read_back",
    "make faults": E + "test_faults.py::test_kills",
    "make storm": "tests/storm/test_storm.py::test_drawn_cases_have_no_fault",
    "make mutants": "tests/mutation/test_fault_list.py::test_a_fault_still_applies",
}
"""Module, script or make target -> FILE::PREFIX of the test or fixture that runs it."""

TARGETS_OF_CI = [
    target
    for name in ("run", "nightly")
    for target in re.findall(
        r"^ *(?:part )?make ([a-z-]+)", (ROOT / ".ci" / name).read_text(), re.M
    )
]
NOT_RUN = ("clean", "format", "lock")
"""Targets that delete or rewrite files, or need the network; only their recipes are read."""


def join_continued_lines(text):
    """Joins lines that end with a backslash with the next line."""
    return re.sub(r" *\\\n *", " ", text)


def fenced_commands(page):
    """Yields the lines of fenced blocks without a language."""
    text = join_continued_lines(page.read_text(encoding="utf-8"))
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if not language:
            yield from (line.strip() for line in block.splitlines() if line.strip())


def inline_commands(page):
    """Yields the commands between backticks."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for span in re.findall(r"`([^`]+)`", text.replace("\n", " ")):
        # Cluster commands within a sentence need no comment.
        if re.match(r"(python|sparse-dataflow(?= [a-z])|make|sh|\.ci/run)( |$)", span):
            yield span


def split_commands(line):
    """Returns (commands joined by | or &&, comment) of a line."""
    commands, _, comment = line.partition(" #")
    return [c.strip() for c in re.split(r" (?:\||&&) ", commands)], comment


def docstring_commands():
    """Yields (file, command) of the docstrings of experiments, which --help prints, and of launch/.

    The comment "# needs ..." of a command stays; other words after two spaces are left out.
    """
    for path in [*sorted((ROOT / "experiments").glob("*.py")), ROOT / "launch/gke/render.py"]:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for line in join_continued_lines(text).splitlines():
            if re.match(r"    ([A-Z_]+=\S+ )*python ", line):
                command, _, needs = line.partition("# needs")
                command = re.split(r"  ", command.strip())[0]
                yield path, f"{command}   # needs{needs}" if needs else command


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def notebook_commands(path):
    """Yields the commands of a notebook's cells, with the values of its parameters."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    values = {}
    exec(sources[0], values)
    for source in sources:
        for line in re.findall(r"^!(.*)$", source, re.M):
            line = line.replace("{sys.executable}", "python")
            yield re.sub(r"\{(\w+)\}", lambda name: str(values[name[1]]), line)


def make_commands():
    """Yields the commands of the Makefile without its variables."""
    text = join_continued_lines((ROOT / "Makefile").read_text(encoding="utf-8"))
    for words in re.findall(r"/(python -m experiments\..*)", text):
        yield re.sub(r" *\$\(\w+\)", "", words)


def documented():
    """Yields (where, line) of every command of pages, help texts, notebooks and the Makefile."""
    for page in PAGES:
        for line in [*fenced_commands(page), *inline_commands(page)]:
            yield page, line
    yield from docstring_commands()
    for notebook in NOTEBOOKS:
        for line in notebook_commands(notebook):
            yield notebook, line
    for line in make_commands():
        yield ROOT / "Makefile", line


LINES = sorted({(str(path.relative_to(ROOT)), line) for path, line in documented()})
"""(file, line) of every printed command; tests of commands take them from here."""
