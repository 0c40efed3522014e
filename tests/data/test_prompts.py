import dataclasses

import pytest

from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.prompts import held_out_prompts
from sparse_dataflow.data.tokenizer import train_tokenizer
from sparse_dataflow.files.errors import UserError


@pytest.fixture
def tokenizer(prose, tmp_path):
    return train_tokenizer(prose, 300, tmp_path)


def with_validation(prose, texts):
    documents = [Document(f"d{i}", text) for i, text in enumerate(texts)]
    return dataclasses.replace(prose, validation=documents)


def test_prompts_and_continuations_are_passages_of_held_out_documents(prose, tokenizer):
    texts = ["".join(f"line {i} of {n}\n" for i in range(200)) for n in range(6)]
    corpus = with_validation(prose, texts)
    prompts = held_out_prompts(corpus, tokenizer, 6, prompt_tokens=20)
    assert len(prompts) == 6
    for prompt in prompts:
        text = texts[int(prompt.document_id[1:])]
        at = text.index(prompt.prompt + prompt.continuation)
        assert at == 0 or text[at - 1] == "\n"
        assert len(prompt.prompt_ids) == 20
        assert tokenizer.decode(prompt.prompt_ids) == prompt.prompt
        ids = tokenizer.encode(text[at:])
        assert tokenizer.decode(ids[20:40]) == prompt.continuation


def test_prompts_use_as_many_documents_as_possible(prose, tokenizer):
    corpus = with_validation(prose, [f"{n} words and words\n" * 99 for n in range(5)])
    assert len({p.document_id for p in held_out_prompts(corpus, tokenizer, 5, 8)}) == 5
    again = held_out_prompts(corpus, tokenizer, 12, 8)
    assert len(again) == 12
    assert len({p.document_id for p in again}) == 5


def test_prompts_are_deterministic(prose, tokenizer):
    def ids(count):
        return [p.prompt_ids for p in held_out_prompts(prose, tokenizer, count, 8)]

    assert ids(4) == ids(4) == ids(6)[:4]


def test_short_documents_yield_fewer_prompts_or_an_error(prose, tokenizer):
    corpus = with_validation(prose, ["tiny", "a line of several words\n" * 30])
    prompts = held_out_prompts(corpus, tokenizer, 3, 8)
    assert {p.document_id for p in prompts} == {"d1"}
    with pytest.raises(UserError, match="shorter prompts"):
        held_out_prompts(corpus, tokenizer, 3, 10_000)
    assert held_out_prompts(corpus, tokenizer, 0, 8) == []
