"""Task files of lm-eval that somebody else wrote are scored or refused, and run no code."""

import importlib.util
import os

import drawn
import pytest
import yaml
from drawn_inputs import DrawnInputs
from marks import some

from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.scoring import Counts
from sparse_dataflow.files.errors import UserError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the extra eval is not installed"
)

ROWS = [{"question": f"the {word}", "choices": [" of", " ab"], "answer": 1} for word in "abc"]
TASK = {
    "task": "mine",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
}
WRITING = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_new_tokens": 3},
    "metric_list": [{"metric": "exact_match"}],
    "filter_list": [{"name": "a", "filter": [{"function": "take_first"}]}],
}
VALUES = (
    *("{{missing}}", "{{ 1 / 0 }}", "{% for a in range(10**9) %}{% endfor %}", "{{ 'a' * 10**9 }}"),
    *("{{ ''.__class__ }}", "{% if %}", "question", "answer", "[]", "[[[", "9" * 5000, "a: {b"),
    *("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until", "test"),
    *("utils.run", "./utils", "utils", ["test", 1], {"metric": "acc"}, [{"metric": "./utils"}]),
    *([{"metric": "acc", "aggregation": "x"}], {"until": 5, "temperature": "x"}, -1, 10**9),
    *([{"function": "regex", "regex_pattern": "("}], "utils.yaml:a", "_shared", "mine.yaml"),
)  # fmt: skip
PIECES = (
    *("doc_to_text: !function utils.run", "process_docs: !%66unction utils.run", "include: pipe"),
    *("include: mine.yaml", "include: /dev/zero", "include: [missing, 1]", "include: _shared"),
    *("a: &a [*a]", "a: !!python/object/apply:os._exit [7]", "? [a]\n: b", "\t", "- a", "---\na:"),
    *("<<: {include: /dev/zero}", "a: 2001-99-99", "class: !function utils.Run", "group: mine"),
    *("num_fewshot: 2", "num_fewshot: x", "metadata: [1]", "description: '{{ x }}'", "repeats: -1"),
    "\n".join(["a0: &a0 [1, 1]", *(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]" for n in range(60))]),
    "deep: " + "[" * 900 + "]" * 900,
    "deep: " + "[" * 100_000,
)  # fmt: skip


def content(draw):
    """Bytes like those of a task file."""
    fields = TASK | (WRITING if draw.random() < 0.3 else {})
    names = [*fields, "fewshot_split", "process_docs", "use_prompt", "description", "metric_list"]
    for _ in range(draw.choice([0, 1, 1, 2])):
        fields = {**fields, draw.choice(names): draw.choice([*VALUES, drawn.value(draw, 1)])}
    if draw.random() < 0.1:
        fields = {name: fields[name] for name in fields if draw.random() < 0.8}
    text = yaml.safe_dump(fields, allow_unicode=True)
    if draw.random() < 0.4:
        text += draw.choice(PIECES) + "\n"
    encoded = text.encode(draw.choice(["utf-8"] * 9 + ["utf-16"]), errors="replace")
    return drawn.damaged(draw, encoded) if draw.random() < 0.2 else encoded


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """scored(path) scores the tasks of a file or folder."""
    import datasets

    from sparse_dataflow.evaluation import harness
    from sparse_dataflow.evaluation.tasks import lm_eval_tasks, task_border

    rows = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: {"test": rows})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lm_eval.utils.env", importlib.import_module("lm_eval.utils").env)
    task_border.bound_templates()
    tokenizer = Tokenizer.from_texts(["the question of abc"] * 9, 270)
    lm = harness.HarnessLM(
        tokenizer,
        64,
        lambda requests: ([(-float(sum(b)), False) for _, b in requests], Counts(len(requests))),
        lambda prompts, *_: ["a" * 40 + "x" * 40 + "!"] * len(prompts),
    )
    manager = lm_eval_tasks.TaskManager(include_path=tmp_path / "none", include_defaults=False)

    def scored(path):
        return harness.evaluate(lm, lm_eval_tasks.load_tasks(str(path), manager, ("own",)), None)

    return scored


@pytest.mark.slow
def test_a_foreign_task_of_lm_eval_is_scored_or_refused(scored, tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "utils.py").write_text("import os\nos._exit(7)\n")
    (folder / "_shared").write_text(yaml.safe_dump(TASK))
    os.mkfifo(folder / "pipe")
    counts = DrawnInputs("tasks of lm-eval")
    for _ in counts:
        data = content(counts.draw)
        (folder / "mine.yaml").write_bytes(data)
        with counts.one(data):
            scored(folder if counts.draw.random() < 0.2 else folder / "mine.yaml")


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_files_without_end_in_a_folder_of_tasks_are_left_out(scored, tmp_path, caplog, kind):
    folder, path = tmp_path / "tasks", tmp_path / "tasks" / "b.yaml"
    folder.mkdir()
    (folder / "a.yaml").write_text(yaml.safe_dump(TASK))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("a: 1\n" * 10**6)
    assert list(scored(folder)) == ["mine"]
    assert "b.yaml is no task file" in caplog.text
    with pytest.raises(UserError, match=r"no task file|cannot be loaded"):
        scored(path)


SEARCHES = {
    "filter": {"filter_list": [{"name": "a", "filter": [{"function": "regex"}]}]},
    "choice": {"filter_list": [{"name": "a", "filter": [{"function": "multi_choice_regex"}]}]},
    "metric": {"metric_list": [{"metric": "exact_match", "regexes_to_ignore": []}]},
}


@pytest.mark.parametrize("place", SEARCHES)
@pytest.mark.parametrize("pattern", some(["(?:.|.)*Z", "the", "(x+x+)+y"], "the", "(?:.|.)*Z"))
def test_an_expression_of_a_task_ends(scored, tmp_path, place, pattern):
    """As `re` finds, or refused."""
    fields = yaml.safe_load(yaml.safe_dump({**TASK, **WRITING, **SEARCHES[place]}))
    del fields["doc_to_choice"]
    if place == "metric":
        fields["metric_list"][0]["regexes_to_ignore"] = [pattern]
    else:
        fields["filter_list"][0]["filter"][0]["regex_pattern"] = pattern
        fields["filter_list"][0]["filter"].append({"function": "take_first"})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(fields))
    try:
        assert scored(tmp_path / "mine.yaml")
    except UserError as error:
        assert "(" in pattern and "seconds of processor time" in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset_kwargs": {"cache_dir": "~/.config/x"}}, "dataset_kwargs has cache_dir"),
        ({"dataset_kwargs": {"num_proc": 10**5}}, "dataset_kwargs has num_proc"),
        ({"repeats": 10**9}, "repeats has 1000000000"),
        ({"num_fewshot": 10**400}, "num_fewshot has 1000"),
        ({"metric_list": [{"metric": "accuracy", "hf_evaluate": True}]}, "accuracy is code"),
        ({"metric_list": [{"metric": "exact_match", "hf_evaluate": True}]}, "match is code"),
        ({"metric_list": [{"metric": ["acc"]}]}, "is code of its own"),
        ({f"field{n}": n for n in range(10**4)}, "has no fields field0, field1"),
    ],
)
def test_a_field_that_writes_fetches_or_counts_is_refused(scored, tmp_path, changes, words):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**TASK, **changes}))
    with pytest.raises(UserError, match=words):
        scored(tmp_path / "mine.yaml")
