"""Items of the built-in tasks are correct and reproducible."""

import itertools
import json
import types

import numpy as np
import pytest

from sparse_dataflow.commands.models import tasks
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.evaluation.tasks import builtin, generated
from sparse_dataflow.evaluation.tasks.items import Item, read_items, sample_items
from sparse_dataflow.evaluation.tasks.text import WordFrequencies
from sparse_dataflow.files.errors import UserError

TEXT_TASKS = ("last_word", "continuation", "cloze")


def source(name, functions=12):
    """Returns a Python file whose functions differ in docstring, body and calls."""
    blocks = ["import os\n\n"]
    for i in range(functions):
        blocks.append(
            f'def work_{i}(value):\n    """Does the thing number {i}.\n\n    At length.\n    """\n'
            f"    total_{i} = value + {i}\n    helper_{i}(total_{i}, value)\n"
            f"    os.call_{i}(total_{i})\n    return total_{i} * {i} + value\n\n"
        )
    return Document(name, "\n".join(blocks))


@pytest.fixture(scope="module")
def python():
    train = [source(f"t{i}.py", 8 + i) for i in range(4)]
    return Corpus(builtin.PYTHON_CORPUS, train, [source("v0.py"), source("v1.py", 9)], "cd" * 32)


@pytest.fixture(params=sorted(set(builtin.BUILTIN_TASKS) - set(generated.RULES)))
def task(request, prose, python, tokenizer):
    """(name, corpus, items, examples, maximum tokens of an item) of each task of documents."""
    corpus = prose if request.param in TEXT_TASKS else python
    items, examples = builtin.make_items(request.param, corpus, tokenizer, 240, 30, seed=3)
    return request.param, corpus, items, examples, builtin.item_tokens(request.param, 240)


def without_spaces(text):
    return "".join(text.split())


def test_only_the_correct_choice_continues_the_context_in_the_document(task):
    name, corpus, items, examples, _ = task
    assert len(items) == 30 if name in TEXT_TASKS else len(items) >= 18
    for item, documents in itertools.chain(
        ((i, corpus.validation) for i in items), ((e, corpus.train) for e in examples)
    ):
        (document,) = (d for d in documents if d.id == item.document)
        text = without_spaces(document.text)
        passages = [without_spaces(item.context + choice) for choice in item.choices]
        if name == "docstring_body":
            # The context is only the first paragraph of the docstring.
            number = item.context.split()[-1].strip('."')
            assert f"total_{number}=value" in passages[item.answer]
            assert all(without_spaces(choice) in text for choice in item.choices)
        else:
            assert passages[item.answer] in text
        if name in ("cloze", "continuation", "call_name"):
            wrong = [w for i, w in enumerate(passages) if i != item.answer]
            # A short context can occur more than once.
            assert sum(w in text for w in wrong) <= 1
        assert len(set(item.choices)) == len(item.choices) == (1 if name == "last_word" else 4)


def test_items_fit_their_token_limit(task, tokenizer):
    name, _, items, examples, tokens = task
    for item in (*items, *examples):
        for choice in item.choices:
            length = len(tokenizer.encode(item.context + choice))
            # Context and choice can tokenise differently when joined.
            assert length <= tokens * 1.5 + 12, (name, length, tokens)


def test_the_same_seed_gives_the_same_items(task, tokenizer):
    name, corpus, items, examples, _ = task
    again = builtin.make_items(name, corpus, tokenizer, 240, 30, seed=3)
    assert again == (items, examples)
    assert builtin.make_items(name, corpus, tokenizer, 240, 30, seed=4)[0] != items
    assert {i.document for i in items}.isdisjoint(e.document for e in examples)
    assert {i.document for i in items} == {d.id for d in corpus.validation}


def test_answer_indices_cover_all_choices(task):
    name, _, items, _, _ = task
    answers = {item.answer for item in items}
    assert answers == ({0} if name == "last_word" else {0, 1, 2, 3})


def test_last_words_occur_in_the_context(prose, tokenizer):
    for item in builtin.make_items("last_word", prose, tokenizer, 240, 30, 0)[0]:
        assert item.choices[0].strip() in item.context


def test_choices_of_continuations_have_equal_length(prose, tokenizer):
    for item in builtin.make_items("continuation", prose, tokenizer, 240, 30, 0)[0]:
        lengths = [len(tokenizer.encode(choice)) for choice in item.choices]
        assert max(lengths) - min(lengths) <= 1
        assert len({choice[0] for choice in item.choices}) == 1


def test_similar_words_have_similar_frequency_and_the_same_case():
    words = [f"word{i}" for i in range(200)]
    text = " ".join(itertools.chain.from_iterable([w] * (i + 1) for i, w in enumerate(words)))
    frequencies = WordFrequencies([Document("d", text + " Word7 NEVER")])
    for i in (40, 100, 160):
        ranks = [int(w.removeprefix("word")) for w in frequencies.similar(f"word{i}")]
        assert len(ranks) > 10 and max(abs(r - i) for r in ranks) <= 13 and i not in ranks
    assert frequencies.similar("Word7") == []


def test_documents_contribute_equal_numbers_of_items():
    def build(document, rng):
        yield from (Item(f"{document.id} {i}", ("x",), 0, document.id) for i in range(100))

    documents = [Document(f"d{i}", "text") for i in range(10)]
    items = sample_items(documents, build, 25, seed=0)
    counts = np.unique([item.document for item in items], return_counts=True)[1]
    assert len(items) == 25 and len(counts) == 10 and counts.max() - counts.min() <= 1
    assert len(sample_items(documents[:1], build, 500, seed=0)) == 100


VALID = {"context": "a b", "choices": [" c", " d"], "answer": 1}


def test_items_are_read_from_json_lines(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text(f"{json.dumps(VALID)}\n\n{json.dumps(VALID | {'document': 'x'})}\n")
    assert read_items(path) == [
        Item("a b", (" c", " d"), 1, "1"),
        Item("a b", (" c", " d"), 1, "x"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["line 2", "not JSON"]),
        ("[]", ["line 2", "not a JSON object"]),
        (json.dumps({"context": "a"}), ["line 2", "lacks choices and answer", "list of texts"]),
        (json.dumps(VALID | {"context": 1}), ["line 2", "context must be a text"]),
        (json.dumps(VALID | {"choices": []}), ["choices must be a list of texts"]),
        (json.dumps(VALID | {"answer": 2}), ["answer must be the index"]),
        (json.dumps(VALID | {"answer": "1"}), ["answer must be the index"]),
    ],
)
def test_an_invalid_line_raises_with_file_and_line(tmp_path, line, words):
    path = tmp_path / "task.jsonl"
    path.write_text(f"{json.dumps(VALID)}\n{line}\n")
    with pytest.raises(UserError) as error:
        read_items(path)
    assert all(word in str(error.value) for word in ["task.jsonl", *words]), error.value


def bigbench(tmp_path, examples, **fields):
    path = tmp_path / "task.json"
    path.write_text(json.dumps({"name": "a", "examples": examples, **fields}, indent=2))
    return path


def test_choices_of_bigbench_are_scored_by_its_words(tmp_path):
    examples = [{"input": "Is it?", "target_scores": {"yes": 0, "no": 1}}]
    path = bigbench(tmp_path, examples)
    listed = "Q: Is it?\n  choice: yes\n  choice: no\nA: "
    swapped = "Q: Is it?\n  choice: no\n  choice: yes\nA: "
    assert read_items(path) in ([Item(text, ("yes", "no"), 1, "1")] for text in (listed, swapped))
    path = bigbench(
        tmp_path, examples, append_choices_to_input=False, example_output_prefix="\nAnswer:"
    )
    assert read_items(path) == [Item("Q: Is it?\nAnswer:", ("yes", "no"), 1, "1")]


def test_words_of_a_bigbench_task_are_those_of_its_file(tmp_path):
    examples = [{"input": "Is it?", "target_scores": {"yes": 1}}]
    path = bigbench(
        tmp_path, examples, task_prefix="Say yes.", choice_prefix="\n- ", example_input_prefix="\n"
    )
    assert read_items(path) == [Item("Say yes.\nIs it?\n- yes\nA: ", ("yes",), 0, "1")]


def test_targets_of_bigbench_are_generated(tmp_path, caplog):
    examples = [{"input": "2+2=", "target": ["4", "four"]}, {"input": "1+1=", "target": "2"}]
    items = read_items(bigbench(tmp_path, examples, example_input_prefix=""))
    assert items == [Item("2+2=\nA: ", ("4",), 0, "1"), Item("1+1=\nA: ", ("2",), 0, "2")]
    assert "1 questions have several targets, of which the first counts" in caplog.text


def test_files_of_bigbench_have_the_names_of_their_folders(tmp_path):
    paths = []
    for folder in ("riddles", "stories"):
        (tmp_path / folder).mkdir()
        paths.append(bigbench(tmp_path / folder, [{"input": "1+1=", "target": "2"}]))
    listed = ",".join(map(str, paths))
    options = types.SimpleNamespace(tasks=listed, trust_tasks=True, num_fewshot=(0,))
    by_name = tasks.named(options, builtin.PYTHON_CORPUS)
    assert [list(group) for group in by_name.values()] == [["riddles"], ["stories"]]


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"target": "a"}, "example 1, lacks context"),
        ({"input": 3, "target": "a"}, "example 1, lacks context"),
        ({"input": "a"}, "example 1: choices must be a list of texts"),
        ({"input": "a", "target_scores": {"": 1}}, "example 1: choices must be a list of texts"),
        ({"input": "a", "target_scores": {"b": "c", "d": 1}}, "example 1: answer must be"),
        ({"input": "a", "target_scores": {"b": 0, "d": 0}}, "example 1: answer must be"),
        ("a", "example 1, lacks context"),
    ],
)
def test_a_damaged_question_of_bigbench_is_one_sentence(tmp_path, example, words):
    with pytest.raises(UserError, match=words):
        read_items(bigbench(tmp_path, [example]))


def test_a_missing_or_empty_file_raises(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_items(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        read_items(tmp_path / "empty.jsonl")
