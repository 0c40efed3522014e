"""Items of the own tasks are right by the document that they are from, and always the same."""

import itertools
import json

import numpy as np
import pytest

from sparse_dataflow.data.corpora import Corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.evaluation.tasks import own
from sparse_dataflow.evaluation.tasks.items import Item, gather, read_items
from sparse_dataflow.evaluation.tasks.text import WordFrequencies
from sparse_dataflow.files.errors import UserError

TEXT_TASKS = ("last_word", "continuation", "cloze")


def source(name, functions=12):
    """A Python file whose functions differ in docstring, body and calls."""
    parts = ["import os\n\n"]
    for i in range(functions):
        parts.append(
            f'def work_{i}(value):\n    """Does the thing number {i}.\n\n    At length.\n    """\n'
            f"    total_{i} = value + {i}\n    helper_{i}(total_{i}, value)\n"
            f"    os.call_{i}(total_{i})\n    return total_{i} * {i} + value\n\n"
        )
    return Document(name, "\n".join(parts))


@pytest.fixture(scope="module")
def python():
    train = [source(f"t{i}.py", 8 + i) for i in range(4)]
    return Corpus(own.PYTHON, train, [source("v0.py"), source("v1.py", 9)], "cd" * 32)


@pytest.fixture(params=own.OWN)
def made(request, prose, python, tokenizer):
    """(name, corpus, items, examples, tokens of an item) of each task."""
    corpus = prose if request.param in TEXT_TASKS else python
    items, examples = own.make(request.param, corpus, tokenizer, 240, 30, seed=3)
    return request.param, corpus, items, examples, own.item_tokens(request.param, 240)


def squeezed(text):
    """Without spaces, which a dedented body has lost."""
    return "".join(text.split())


def test_the_right_answer_stands_in_the_document_and_the_others_do_not(made):
    name, corpus, items, examples, _ = made
    assert len(items) == 30 if name in TEXT_TASKS else len(items) >= 18
    for item, documents in itertools.chain(
        ((i, corpus.validation) for i in items), ((e, corpus.train) for e in examples)
    ):
        (document,) = (d for d in documents if d.id == item.document)
        text = squeezed(document.text)
        whole = [squeezed(item.context + choice) for choice in item.choices]
        if name == "docstring_body":
            # What follows the first paragraph of the docstring is left out.
            number = item.context.split()[-1].strip('."')
            assert f"total_{number}=value" in whole[item.answer]
            assert all(squeezed(choice) in text for choice in item.choices)
        else:
            assert whole[item.answer] in text
        if name in ("cloze", "continuation", "call_name"):
            wrong = [w for i, w in enumerate(whole) if i != item.answer]
            # A short context may go on in more ways than one, so most and not all.
            assert sum(w in text for w in wrong) <= 1
        assert len(set(item.choices)) == len(item.choices) == (1 if name == "last_word" else 4)


def test_items_fit_their_tokens(made, tokenizer):
    name, _, items, examples, tokens = made
    for item in (*items, *examples):
        for choice in item.choices:
            length = len(tokenizer.encode(item.context + choice))
            # A choice is a word or a cut of tokens that may be cut otherwise behind the context.
            assert length <= tokens * 1.5 + 12, (name, length, tokens)


def test_the_same_seed_gives_the_same_items(made, tokenizer):
    name, corpus, items, examples, _ = made
    again = own.make(name, corpus, tokenizer, 240, 30, seed=3)
    assert again == (items, examples)
    assert own.make(name, corpus, tokenizer, 240, 30, seed=4)[0] != items
    assert {i.document for i in items}.isdisjoint(e.document for e in examples)
    assert {i.document for i in items} == {d.id for d in corpus.validation}


def test_answers_stand_at_every_place(made):
    name, _, items, _, _ = made
    places = {item.answer for item in items}
    assert places == ({0} if name == "last_word" else {0, 1, 2, 3})


def test_last_words_were_seen(prose, tokenizer):
    for item in own.make("last_word", prose, tokenizer, 240, 30, 0)[0]:
        assert item.choices[0].strip() in item.context


def test_choices_of_continuations_are_as_long(prose, tokenizer):
    for item in own.make("continuation", prose, tokenizer, 240, 30, 0)[0]:
        lengths = [len(tokenizer.encode(choice)) for choice in item.choices]
        assert max(lengths) - min(lengths) <= 1
        assert len({choice[0] for choice in item.choices}) == 1


def test_distractors_are_as_frequent():
    words = [f"word{i}" for i in range(200)]
    text = " ".join(itertools.chain.from_iterable([w] * (i + 1) for i, w in enumerate(words)))
    frequencies = WordFrequencies([Document("d", text + " Word7 NEVER")])
    for i in (40, 100, 160):
        ranks = [int(w.removeprefix("word")) for w in frequencies.alike(f"word{i}")]
        assert len(ranks) > 10 and max(abs(r - i) for r in ranks) <= 13 and i not in ranks
    assert frequencies.alike("Word7") == []  # The only word with a capital first letter.


def test_documents_take_turns():
    def build(document, rng):
        yield from (Item(f"{document.id} {i}", ("x",), 0, document.id) for i in range(100))

    documents = [Document(f"d{i}", "text") for i in range(10)]
    found = gather(documents, build, 25, seed=0)
    counts = np.unique([item.document for item in found], return_counts=True)[1]
    assert len(found) == 25 and len(counts) == 10 and counts.max() - counts.min() <= 1
    assert len(gather(documents[:1], build, 500, seed=0)) == 100


GOOD = {"context": "a b", "choices": [" c", " d"], "answer": 1}


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD | {'document': 'x'})}\n")
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
        (json.dumps(GOOD | {"context": 1}), ["line 2", "context must be a text"]),
        (json.dumps(GOOD | {"choices": []}), ["choices must be a list of texts"]),
        (json.dumps(GOOD | {"answer": 2}), ["answer must be the index"]),
        (json.dumps(GOOD | {"answer": "1"}), ["answer must be the index"]),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path, line, words):
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(UserError) as refused:
        read_items(path)
    assert all(word in str(refused.value) for word in ["mine.jsonl", *words]), refused.value


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_items(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no item"):
        read_items(tmp_path / "empty.jsonl")
