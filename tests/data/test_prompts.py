import dataclasses

import pytest

from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.prompts import heldout_prompts
from sparse_dataflow.data.tokenizer import train_tokenizer
from sparse_dataflow.files.errors import UserError


@pytest.fixture
def tokenizer(prose, tmp_path):
    return train_tokenizer(prose, 300, tmp_path)


def with_validation(prose, texts):
    documents = [Document(f"d{i}", text) for i, text in enumerate(texts)]
    return dataclasses.replace(prose, validation=documents)


def test_prompts_are_stretches_of_held_out_documents_with_what_follows(prose, tokenizer):
    texts = ["".join(f"line {i} of {n}\n" for i in range(200)) for n in range(6)]
    corpus = with_validation(prose, texts)
    prompts = heldout_prompts(corpus, tokenizer, 6, prompt_tokens=20, continuation_tokens=30)
    assert len(prompts) == 6
    for prompt in prompts:
        text = texts[int(prompt.document_id[1:])]
        at = text.index(prompt.prompt + prompt.continuation)
        assert at == 0 or text[at - 1] == "\n"
        assert (prompt.prompt_ids.shape, prompt.continuation_ids.shape) == ((20,), (30,))
        assert tokenizer.decode(prompt.prompt_ids) == prompt.prompt
        assert tokenizer.decode(prompt.continuation_ids) == prompt.continuation


def test_prompts_come_from_different_documents_while_there_are_any(prose, tokenizer):
    corpus = with_validation(prose, [f"{n} words and words\n" * 99 for n in range(5)])
    assert len({p.document_id for p in heldout_prompts(corpus, tokenizer, 5, 8)}) == 5
    again = heldout_prompts(corpus, tokenizer, 12, 8)
    assert len(again) == 12
    assert len({p.document_id for p in again}) == 5


def test_prompts_are_the_same_every_time(prose, tokenizer):
    def ids(count):
        return [p.prompt_ids.tolist() for p in heldout_prompts(prose, tokenizer, count, 8)]

    assert ids(4) == ids(4) == ids(6)[:4]


def test_short_documents_give_fewer_prompts_or_words(prose, tokenizer):
    corpus = with_validation(prose, ["tiny", "a line of several words\n" * 30])
    found = heldout_prompts(corpus, tokenizer, 3, 8)
    assert {p.document_id for p in found} == {"d1"}
    with pytest.raises(UserError, match="shorter prompts"):
        heldout_prompts(corpus, tokenizer, 3, 10_000)
    assert heldout_prompts(corpus, tokenizer, 0, 8) == []
