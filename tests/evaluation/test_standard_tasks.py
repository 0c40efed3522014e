"""Tasks of lm-eval by name, with fake data or without a network."""

import importlib.util
import json
import math

import pytest
from marks import some

from sparse_dataflow.files.errors import UserError

CHOICE = """
include: _shared
task: mine
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
"""
WRITING = """
include: _shared
task: writing
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_new_tokens: 3}
metric_list:
  - metric: exact_match
filter_list:
  - name: whole
    filter: [{function: take_first}]
  - name: letter
    filter: [{function: regex, regex_pattern: "([a-h])"}, {function: take_first}]
"""

METRICS = {
    "wikitext": ["word_perplexity", "bits_per_byte", "byte_perplexity"],
    "nq_open": ["exact_match, remove_whitespace"],
    "lambada_openai": ["acc", "perplexity"],
    **{name: ["acc"] for name in ("winogrande", "boolq")},
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the extra eval is not installed"
)


@pytest.fixture(scope="module")
def manager(harness, lm_eval_tasks):
    with harness.quiet():
        return lm_eval_tasks.task_manager([*lm_eval_tasks.STANDARD, "nq_open"])


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["hellaswag", "mine"], {"hellaswag", "mine", "writing"}),
        (["mine.yaml"], {"mine", "writing"}),
        (["mine", "a_group"], None),
    ],
)
def test_only_folders_of_the_named_tasks_are_read(lm_eval_tasks, folder, monkeypatch, names, files):
    """lm-eval's index of all tasks takes many seconds."""
    make, defaults = lm_eval_tasks.TaskManager, []

    def manager(include_path, include_defaults=True):
        defaults.append(include_defaults)
        return make(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval_tasks, "TaskManager", manager)
    tasks = lm_eval_tasks.task_manager(names, [folder]).all_subtasks
    assert defaults == [files is None]
    assert files is None or set(tasks) == files


@pytest.mark.parametrize("shots", some([0, 1], 1))
def test_standard_tasks_run_with_all_request_types(
    harness, lm_eval_tasks, trained, manager, monkeypatch, shots
):
    from standard_tasks import load_dataset

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    names = [*lm_eval_tasks.STANDARD, "nq_open"]
    if shots:
        names.remove("wikitext")  # scores whole texts, so it has no examples
    tasks = {}
    for name in names:
        tasks |= lm_eval_tasks.load_tasks(name, manager, ())
    assert list(tasks) == names
    kinds = {task.OUTPUT_TYPE for task in tasks.values()}
    rolling = set() if shots else {"loglikelihood_rolling"}
    assert kinds == {"loglikelihood", "multiple_choice", "generate_until"} | rolling
    lm = harness.harness_lm(trained("sparse"))
    for name, scores in harness.evaluate(lm, tasks, shots).items():
        assert list(scores) == METRICS.get(name, ["acc", "acc_norm"])
        for metric, score in scores.items():
            assert score.items == 2 and math.isfinite(score.value) and score.value >= 0
            assert score.lower_is_better == (name == "wikitext" or metric == "perplexity")
    assert lm.counts.requests >= 2 * len(names)


def test_without_network_the_error_names_the_builtin_tasks(lm_eval_tasks, manager, monkeypatch):
    def unreachable(path, **kwargs):
        raise ConnectionError(f"Couldn't reach {path!r} on the Hub\nand more\nlines")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    for name in lm_eval_tasks.STANDARD:
        with pytest.raises(UserError) as error:
            lm_eval_tasks.load_tasks(name, manager, ("cloze", "last_word"))
        message = str(error.value)
        assert f"data of the task {name} cannot be downloaded" in message and "\n" not in message
        assert "The tasks cloze, last_word need no network." in message and "lines" not in message


def shared(folder):
    """The fields of a task that say where its rows are."""
    kwargs = {"data_files": {"test": str(folder / "rows.jsonl")}}
    return {"dataset_path": "json", "test_split": "test", "dataset_kwargs": kwargs}


@pytest.fixture
def folder(tmp_path):
    """A folder with two tasks of lm-eval and a file that both include."""
    rows = [{"question": f"the {word}", "choices": [" of", " ab"], "answer": 1} for word in "abc"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "_shared").write_text(json.dumps(shared(tmp_path)))
    (tmp_path / "mine.yaml").write_text(CHOICE)
    (tmp_path / "writing.yaml").write_text(WRITING)
    return tmp_path


def test_yaml_files_and_folders_with_all_metrics(harness, lm_eval_tasks, trained, folder, manager):
    one = lm_eval_tasks.load_tasks(str(folder / "mine.yaml"), manager, ())
    tasks = lm_eval_tasks.load_tasks(str(folder), manager, ())
    assert (list(one), list(tasks)) == (["mine"], ["mine", "writing"])
    included = lm_eval_tasks.TaskManager(include_path=[folder], include_defaults=False)
    assert list(lm_eval_tasks.load_tasks("writing", included, ())) == ["writing"]
    lm = harness.harness_lm(trained("sparse"))
    scores = harness.evaluate(lm, tasks, 0)
    assert list(scores["mine"]) == ["acc", "acc_norm"]
    assert list(scores["writing"]) == ["exact_match, whole", "exact_match, letter"]
    for score in (*scores["mine"].values(), *scores["writing"].values()):
        assert score.items == 3 and score.value == score.values.mean()


GROUP = """
group: {name}
task: [mine, short]
aggregate_metric_list:
  - {{metric: acc, aggregation: mean, weight_by_size: {weighted}}}
"""


@pytest.mark.parametrize("weighted", [True, False])
def test_groups_of_a_file_a_folder_and_an_index_are_aggregated(
    harness, lm_eval_tasks, trained, folder, manager, weighted
):
    (folder / "writing.yaml").unlink()
    short = json.dumps({"question": "x", "choices": ["y", "z"], "answer": 0})
    (folder / "short.jsonl").write_text(short + "\n")
    shared = (folder / "_shared").read_text().replace("rows.jsonl", "short.jsonl")
    (folder / "_short").write_text(shared)
    task = CHOICE.replace("task: mine", "task: short").replace("_shared", "_short")
    (folder / "short.yaml").write_text(task)
    (folder / "both.yaml").write_text(GROUP.format(name="both", weighted=weighted))
    included = lm_eval_tasks.TaskManager(include_path=[folder], include_defaults=False)
    names = ["mine", "short", "both"]
    for name in (folder / "both.yaml", folder):
        assert list(lm_eval_tasks.load_tasks(str(name), manager, ())) == names
    tasks = lm_eval_tasks.load_tasks("both", included, ())
    assert list(tasks) == names
    scores = harness.evaluate(harness.harness_lm(trained("sparse")), tasks, 0)
    assert list(scores["both"]) == ["acc"]
    (mine, one, both) = (scores[name]["acc"] for name in names)
    assert (mine.items, one.items, both.items) == (3, 1, 4)
    expected = (3 * mine.value + one.value) / 4 if weighted else (mine.value + one.value) / 2
    assert both.value == pytest.approx(expected) and not both.lower_is_better
    if weighted:
        assert both.values.tolist() == [*mine.values, *one.values]


def test_task_files_that_cannot_be_used_are_named(lm_eval_tasks, manager, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # datasets looks for JSON in all of the working directory.

    def refusal(name):
        with pytest.raises(UserError) as error:
            lm_eval_tasks.load_tasks(str(name), manager, ("cloze",))
        return str(error.value)

    assert "no task file" in refusal(tmp_path / "missing.yaml")
    assert "has no YAML file" in refusal(tmp_path)
    (tmp_path / "bad.yaml").write_text("dataset_path: [")
    assert "bad.yaml is no task file" in refusal(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_text("task: mine\ndataset_path: json\nunsafe_code: true")
    assert "cannot be loaded" in refusal(tmp_path / "bad.yaml")


def test_a_tasks_own_number_of_examples_wins_over_the_default(lm_eval_tasks, folder, manager):
    from sparse_dataflow.commands.models.tasks import DEFAULT_SHOTS, Task

    for own, expected in ((2, (None,)), (0, (None,)), ("", DEFAULT_SHOTS)):
        line = "" if own == "" else f"num_fewshot: {own}\n"
        (folder / "mine.yaml").write_text(CHOICE + line)
        [task] = lm_eval_tasks.load_tasks(str(folder / "mine.yaml"), manager, ()).values()
        project_task = Task.from_lm_eval(task)
        assert project_task.own_shots == (None if own == "" else own)
        assert project_task.shots(()) == expected
        assert project_task.shots((1,)) == ((0,) if own == 0 else (1,))


def test_the_own_examples_are_in_the_prompts(harness, lm_eval_tasks, trained, folder, manager):
    (folder / "mine.yaml").write_text(CHOICE + "num_fewshot: 2\nfewshot_split: test\n")
    tasks = lm_eval_tasks.load_tasks(str(folder / "mine.yaml"), manager, ())
    lm = harness.harness_lm(trained("sparse"))
    own, asked = (harness.evaluate(lm, tasks, shots)["mine"]["acc"] for shots in (None, 2))
    assert list(own.values) == list(asked.values)
    with pytest.raises(
        UserError, match="mine has rows for 2 examples in a prompt, and 3 are asked"
    ):
        harness.evaluate(lm, tasks, 3)


def test_a_task_without_rows_is_refused(harness, lm_eval_tasks, trained, folder, manager):
    tasks = lm_eval_tasks.load_tasks(str(folder / "mine.yaml"), manager, ())
    [task] = tasks.values()
    task.dataset["test"] = task.dataset["test"].select([])
    with pytest.raises(UserError, match="The task mine has no rows"):
        harness.evaluate(harness.harness_lm(trained("sparse")), tasks, 0)


CODE = "process_docs: !function utils.run\n"
SPELLINGS = {
    "plain": CODE,
    "verbatim": CODE.replace("!function", "!<!function>"),
    "escaped": CODE.replace("!function", "!%66unction"),
    "utf-16": CODE,
    "metric": "metric_list: [{metric: ./utils, aggregation: mean, higher_is_better: true}]\n",
    "metric of a folder": "metric_list: [{metric: utils, aggregation: mean}]\n",
}


@pytest.mark.parametrize(
    ("where", "spelling"),
    [(where, "plain") for where in ("file", "included", "elsewhere", "folder", "include_path")]
    + [("file", spelling) for spelling in SPELLINGS if spelling != "plain"],
)
def test_a_task_file_that_runs_code_is_refused_unless_trusted(
    lm_eval_tasks, folder, monkeypatch, tmp_path_factory, where, spelling
):
    monkeypatch.chdir(folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (folder / "utils").mkdir()
    for place in (folder, folder / "utils", elsewhere):
        (place / "utils.py").write_text("raise SystemExit('it ran')\n")
    path = {"included": folder / "_shared", "elsewhere": elsewhere / "_shared"}.get(
        where, folder / "mine.yaml"
    )
    rows = "".join(f"{name}: {json.dumps(value)}\n" for name, value in shared(folder).items())
    encoding = "utf-16" if spelling == "utf-16" else "utf-8"
    text = rows if path.name == "_shared" else CHOICE
    path.write_text(text + SPELLINGS[spelling], encoding=encoding)
    if where == "elsewhere":
        (folder / "mine.yaml").write_text(CHOICE.replace("_shared", str(path)))
    (folder / "writing.yaml").unlink()
    folders = [folder] if where == "include_path" else []
    manager = lm_eval_tasks.task_manager(["mine" if folders else "mine.yaml"], folders)
    name = {"folder": str(folder), "include_path": "mine"}.get(where, str(folder / "mine.yaml"))
    reason = "outside of its folder" if where == "elsewhere" else "code of its own"
    with pytest.raises(UserError, match=rf" {reason}.* add --trust_tasks"):
        lm_eval_tasks.load_tasks(name, manager, ())


def test_a_trusted_task_file_runs_code(lm_eval_tasks, folder, manager):
    (folder / "utils.py").write_text("def run(rows): return rows.select([0])\n")
    (folder / "mine.yaml").write_text(CHOICE + CODE)
    tasks = lm_eval_tasks.load_tasks(str(folder / "mine.yaml"), manager, (), trusted=True)
    assert len(list(tasks["mine"].eval_docs)) == 1


def test_templates_of_tasks_run_in_a_sandbox(harness, lm_eval_tasks):
    import lm_eval.utils

    from sparse_dataflow.evaluation.tasks import task_border

    task_border.bound_templates()
    assert lm_eval.utils.apply_template("{{question}} {{x|regex_replace('a', 'b')}}",
                                        {"question": "q", "x": "a"}) == "q b"  # fmt: skip
    for text in ("{{ ''.__class__.__mro__ }}", "{% for i in range(10**6) %}{% endfor %}"):
        with pytest.raises(Exception, match=r"unsafe|range"):
            lm_eval.utils.apply_template(text, {})


TEMPLATES = {
    "no such field": ("doc_to_target", "{{missing}}"),
    "no such choice": ("doc_to_target", "9"),
    "no choices": ("doc_to_choice", "[]"),
    "no end": ("doc_to_text", "{% for i in range(99999) %}{% for i in range(99999) %}"
               "{% endfor %}{% endfor %}"),
    "no template": ("doc_to_text", "{% if %}"),
    "no text": ("output_type", "loglikelihood"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_that_do_not_fit_the_rows_are_refused(
    harness, lm_eval_tasks, trained, folder, manager, kind
):
    from sparse_dataflow.evaluation.tasks import task_border

    task_border.bound_templates()
    name, template = TEMPLATES[kind]
    line = f"{name}: {json.dumps(template)}\n"
    (folder / "mine.yaml").write_text(
        "".join(line if each.startswith(name) else f"{each}\n" for each in CHOICE.splitlines())
    )
    with pytest.raises(UserError, match=r"cannot be (loaded|used|scored)|no text"):
        tasks = lm_eval_tasks.load_tasks(str(folder / "mine.yaml"), manager, ())
        harness.evaluate(harness.harness_lm(trained("sparse")), tasks, 0)


def test_an_error_of_the_model_is_none_of_the_task(harness, lm_eval_tasks, tokenizer, folder):
    def scorer(requests):
        raise ZeroDivisionError

    tasks = lm_eval_tasks.load_tasks(
        str(folder / "mine.yaml"), lm_eval_tasks.task_manager(["piqa"]), ()
    )
    with pytest.raises(ZeroDivisionError):
        harness.evaluate(harness.HarnessLM(tokenizer, 32, scorer), tasks, 0)
