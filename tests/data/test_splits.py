import hashlib
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparse_dataflow.data.documents import Document, cut_in_two, is_held_out, split_for
from sparse_dataflow.files.errors import UserError

ids = st.lists(st.text(max_size=8), min_size=2, max_size=60, unique=True)


def documents(names, text="text of {}"):
    return [Document(name, text.format(name)) for name in names]


def assigned(split, rows):
    return {row.id: split.assign(row)[0][0] for row in rows}


@given(st.text(max_size=20))
def test_the_hash_rule_is_the_documented_rule(name):
    first = hashlib.sha256(name.encode()).digest()[:8]
    assert is_held_out(name) == (int.from_bytes(first, "big") % 20 == 0)


def test_about_one_in_twenty_is_held_out():
    held_out = sum(is_held_out(f"document {i}") for i in range(20_000))
    assert 900 < held_out < 1100


@given(ids)
def test_every_document_is_in_one_split_and_no_split_is_empty(names):
    rows = documents(names)
    split = split_for(rows)
    assert all(len(split.assign(row)) == 1 for row in rows)
    assert set(assigned(split, rows).values()) == {"train", "validation"}


@given(ids, st.randoms())
def test_the_split_does_not_depend_on_order(names, random):
    rows = documents(names, "text")[:5] + documents(names)
    shuffled = random.sample(rows, len(rows))
    assert assigned(split_for(rows), rows) == assigned(split_for(shuffled), rows)


def test_adding_documents_keeps_the_split_of_the_others():
    few = documents(f"{i}.py" for i in range(200))
    many = few + documents(f"more/{i}.py" for i in range(200))
    before, after = assigned(split_for(few), few), assigned(split_for(many), many)
    assert all(after[name] == split for name, split in before.items())
    assert {name for name, split in before.items() if split == "validation"} == {
        f"{i}.py" for i in range(200) if is_held_out(f"{i}.py")
    }


@example([("", "a"), ("", "a"), ("", "b"), ("ª\x97\x8a", "c")])
@given(st.lists(st.tuples(st.text(max_size=4), st.sampled_from("abcdefgh")), min_size=2))
def test_copies_of_a_text_are_in_one_split(pairs):
    rows = [Document(f"{number}{name}", text) for number, (name, text) in enumerate(pairs)]
    split = split_for(rows)
    if split.by_id:
        assert max(Counter(row.text for row in rows).values()) > len(rows) // 2 or len(rows) < 4
        return
    sides = [{row.text for row in rows if split.assign(row)[0][0] == side}
             for side in ("train", "validation")]  # fmt: skip
    assert not sides[0] & sides[1] and all(sides)


def test_about_one_in_twenty_texts_is_held_out_whatever_their_copies():
    rows = [Document(f"{number}", f"text {number % 4000}") for number in range(20_000)]
    split = split_for(rows)
    texts = {row.text for row in rows if split.holds_out(row)}
    assert 150 < len(texts) < 250


def test_a_corpus_of_one_text_many_times_is_split_by_id_and_says_so(caplog):
    rows = documents("abc", "the same")
    assert sorted(assigned(split_for(rows), rows).values()) == ["train", "train", "validation"]
    assert "held-out text is trained too" in caplog.text


def test_near_copies_are_counted(caplog):
    rows = [Document(f"{i}", f"Text, number {i}!") for i in range(200)]
    rows += [Document(f"near {i}", f"text\nnumber  {i}") for i in range(200)]
    split = split_for(rows)
    texts = {row.text.lower() for row in rows if split.holds_out(row)}
    assert 0 < split.near_copies <= len(texts)
    assert f"{split.near_copies} of {len(texts)} held-out documents differ" in caplog.text
    assert split_for(documents(map(str, range(200)))).near_copies == 0


@given(st.text(st.characters(codec="utf-8"), min_size=2, max_size=400))
def test_a_single_document_is_cut_without_loss(text):
    pieces = dict(split_for([Document("only", text)]).assign(Document("only", text)))
    train, validation = pieces["train"].text, pieces["validation"].text
    assert train + validation == text
    assert train and validation
    limit = int(0.95 * len(text.encode()))
    assert len(train.encode()) <= limit
    if "\n" in text.encode()[:limit].decode(errors="ignore"):
        assert train.endswith("\n")
        assert "\n" not in text.encode()[len(train.encode()) : limit].decode(errors="ignore")


def test_too_little_text_to_split_raises():
    with pytest.raises(UserError, match="no text"):
        split_for([])
    with pytest.raises(UserError, match="too short"):
        cut_in_two(Document("one", "x"))
