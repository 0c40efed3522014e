import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.splits import cut_in_two, is_held_out, split_for
from sparse_dataflow.files.errors import UserError

ids = st.lists(st.text(max_size=8), min_size=2, max_size=60, unique=True)


@given(st.text(max_size=20))
def test_the_hashed_rule_is_the_stated_one(name):
    first = hashlib.sha256(name.encode()).digest()[:8]
    assert is_held_out(name) == (int.from_bytes(first, "big") % 20 == 0)


def test_about_one_in_twenty_is_held_out():
    held_out = sum(is_held_out(f"document {i}") for i in range(20_000))
    assert 900 < held_out < 1100


@given(ids)
def test_every_document_lands_in_one_split_and_neither_is_empty(names):
    split = split_for(names)
    landed = [split.parts(Document(name, "text")) for name in names]
    assert all(len(parts) == 1 for parts in landed)
    assert {parts[0][0] for parts in landed} == {"train", "validation"}


@given(ids, st.randoms())
def test_the_split_does_not_depend_on_order(names, random):
    shuffled = random.sample(names, len(names))
    assert split_for(names) == split_for(shuffled)


def test_adding_documents_moves_none_of_the_others():
    def held_out(names):
        split = split_for(names)
        return {name for name in names if split.parts(Document(name, "x"))[0][0] == "validation"}

    few = [f"{i}.py" for i in range(200)]
    many = few + [f"more/{i}.py" for i in range(200)]
    assert held_out(few) == held_out(many) & set(few) != set()


@given(st.text(st.characters(codec="utf-8"), min_size=2, max_size=400))
def test_a_single_document_is_cut_without_loss(text):
    parts = dict(split_for(["only"]).parts(Document("only", text)))
    train, validation = parts["train"].text, parts["validation"].text
    assert train + validation == text
    assert train and validation
    limit = int(0.95 * len(text.encode()))
    assert len(train.encode()) <= limit
    if "\n" in text.encode()[:limit].decode(errors="ignore"):
        assert train.endswith("\n")
        assert "\n" not in text.encode()[len(train.encode()) : limit].decode(errors="ignore")


def test_nothing_to_split_is_refused():
    with pytest.raises(UserError, match="no text"):
        split_for([])
    with pytest.raises(UserError, match="too short"):
        cut_in_two(Document("one", "x"))
