"""Prompts with answers: lines of JSON, chat templates, tokens, and the loss mask of every row."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.data.answers import AnswerBatches, AnswerEvalBatches, AnswerRows
from sparse_dataflow.data.chat import ChatTemplate, checked_example
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.examples import EncodedExamples, as_text, encode, pieces
from sparse_dataflow.data.tokenizer import Tokenizer, byte_tokenizer
from sparse_dataflow.files.errors import UserError

BYTES = byte_tokenizer(257)
END = BYTES.eot_id
CHATML = ChatTemplate(
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    (("eos_token", "<|end|>"),),
)
CHAT = Tokenizer(BYTES.tokens, (), 257, chat_template=CHATML)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"},
]


def document(**record):
    return Document("file:1", checked_example(record))


def ids(text):
    return BYTES.encode(text).tolist()


def test_without_a_template_the_answer_follows_the_prompt():
    encoded = encode([document(prompt="1+1=", answer="2")], BYTES)
    assert encoded.tokens.tolist() == [*ids("1+1=2"), END]
    assert encoded.answers.tolist() == [False] * 4 + [True, True]


@pytest.mark.parametrize("answer", ["2", "two", "é"])
def test_the_first_token_of_a_text_is_not_trained(answer):
    """Nothing comes before it, and the token before it in a row is of another example."""
    answers_alone = ChatTemplate(
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer(BYTES.tokens, (), 257, chat_template=answers_alone)
    talks = [document(prompt="hi", answer=text) for text in (answer, "other")]
    encoded = encode(talks, tokenizer)
    assert encoded.answers[encoded.starts[:-1]].tolist() == [False, False]
    assert encoded.answers.sum() >= len(ids(answer)) + len(ids("other")) - 2


def test_a_template_renders_every_turn_and_answers_end_with_their_end():
    rendered = pieces(document(messages=TALK), CHAT)
    assert rendered.pieces == [
        ("<|user|>hi<|end|>\n<|assistant|>", False),
        ("hello<|end|>\n", True),
        ("<|user|>bye<|end|>\n<|assistant|>", False),
        ("see you<|end|>\n", True),
    ]
    encoded = encode([document(messages=TALK)], CHAT)
    answers = encoded.tokens[encoded.answers].tolist()
    newline = ids("\n")
    assert encoded.tokens[-1] == END and not encoded.answers[-1]  # It divides packed examples.
    assert answers == [*ids("hello"), END, *newline, *ids("see you"), END, *newline]
    both = document(prompt="hi", answer="hello"), document(messages=TALK[:2])
    assert pieces(both[0], CHAT) == pieces(both[1], CHAT)


def test_an_answer_that_the_template_rewrites_later_is_not_trained():
    """Templates of reasoning models drop the thoughts of earlier turns."""
    forgets = ChatTemplate(
        "{% for m in messages %}[{{ m.content if loop.last or m.role == 'user' else '' }}]"
        "{% endfor %}"
    )
    rendered = forgets.answers(TALK)
    assert rendered.changed == 1
    assert [text for text, is_answer in rendered.pieces if is_answer] == ["[see you]"]
    assert "".join(text for text, _ in rendered.pieces) == forgets.render(TALK)


def test_tags_of_generation_and_loop_controls_are_read():
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert template.render([{"role": "system", "content": "no"}, *TALK[:2]]) == "hihello"


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('no system role') }}",
        "{% for m in %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[9].content.x }}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_named(text):
    bad = Tokenizer(BYTES.tokens, (), 257, chat_template=ChatTemplate(text))
    with pytest.raises(UserError, match=r"file:1: The chat template cannot render this: .+"):
        pieces(document(messages=TALK), bad)


def test_messages_need_a_template():
    with pytest.raises(UserError, match=r'file:1 has "messages", .* has no chat template; legal'):
        pieces(document(messages=TALK), BYTES)


def test_a_tokenizer_keeps_its_template(tmp_path):
    CHAT.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json") == CHAT
    assert CHAT.content_hash != BYTES.content_hash


def reference(examples, size, end, pack):
    """Rows as lists of (token, whether its loss counts), built one token at a time."""
    rows = []
    for tokens, answers in examples:
        row = list(zip(tokens, answers))[:size]
        if not any(answer for _, answer in row):
            rows.append(None)  # Ends the packing of the row before.
            continue
        room = pack and rows and rows[-1] is not None and len(rows[-1]) + len(tokens) <= size
        if room:
            rows[-1] += row
        else:
            rows.append(row)
    return [row + [(end, False)] * (size - len(row)) for row in rows if row is not None]


drawn_examples = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=9),
    min_size=1,
    max_size=8,
)


def encoded_of(drawn):
    pairs = [([t for t, _ in e], [False, *(a for _, a in e[1:])]) for e in drawn]
    starts = np.cumsum([0, *(len(tokens) for tokens, _ in pairs)])
    flat = [np.concatenate([pair[i] for pair in pairs]) for i in (0, 1)]
    return pairs, EncodedExamples(flat[0].astype("i4"), flat[1].astype(bool), starts, 0, 0)


@given(drawn_examples, st.integers(1, 12), st.booleans())
def test_rows_and_the_loss_mask_are_those_of_a_reference(drawn, length, pack):
    pairs, encoded = encoded_of(drawn)
    rows = AnswerRows.of(encoded, length, END, pack)
    expected = reference(pairs, length + 1, END, pack)
    assert len(rows) == len(expected)
    for row, expected_row in zip((rows[i] for i in range(len(rows))), expected):
        assert [*row.tokens, row.targets[-1]] == [token for token, _ in expected_row]
        assert row.token_weights.tolist() == [float(answer) for _, answer in expected_row[1:]]
    too_long = [len(tokens) > length + 1 for tokens, _ in pairs]
    empty = [not any(answers[: length + 1]) for _, answers in pairs]
    assert rows.skipped == sum(empty)
    assert rows.truncated == sum(a and not b for a, b in zip(too_long, empty))


@settings(max_examples=15)
@given(drawn_examples, st.integers(1, 12), st.integers(1, 4))
def test_a_batch_weighs_every_answer_token_equally_and_adds_up_to_one(drawn, length, batch):
    _, encoded = encoded_of(drawn)
    rows = AnswerRows.of(encoded, length, END, False)
    if not len(rows):
        with pytest.raises(UserError, match="no example with an answer within"):
            AnswerBatches(rows, batch, length)
        with pytest.raises(UserError, match="No held-out example has an answer"):
            AnswerEvalBatches(rows, batch, length)
        return
    batches = AnswerBatches(rows, batch, length, seed=3)
    whole = batches[5]
    np.testing.assert_allclose(whole.token_weights.sum(), 1, rtol=1e-6)
    assert len(np.unique(whole.token_weights[whole.token_weights > 0])) == 1
    local_batches = [AnswerBatches(rows, batch, length, 3, (row,))[5] for row in range(batch)]
    for name, array in whole.rows.items():
        joined = np.concatenate([local.rows[name] for local in local_batches])
        np.testing.assert_array_equal(joined, array)
    held_out = AnswerEvalBatches(rows, batch, length)
    counted = sum(b.token_weights.sum() for b in held_out)
    assert (
        counted
        == held_out.total_tokens
        == sum(rows[i].token_weights.sum() for i in range(len(rows)))
    )
    assert len(held_out.examples) == held_out.total_tokens
    one_byte_each = np.ones(300, np.int32)
    assert held_out.total_bytes(one_byte_each) == held_out.total_tokens


def test_an_end_of_text_inside_an_example_forbids_packing():
    encoded = encode([document(messages=TALK)], CHAT)
    with pytest.raises(UserError, match=r"legal: model.mask_documents=no, one example a row"):
        AnswerRows.of(encoded, 99, END, True)
    assert len(AnswerRows.of(encoded, 99, END, False)) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2, is not JSON"),
        ("[]", 'line 2, has neither "prompt" and "answer" nor "messages"'),
        ('{"text": "a"}', 'line 2, has neither "prompt" and "answer" nor "messages"'),
        ('{"prompt": "a"}', 'line 2, has no field "answer" with a string in it'),
        ('{"prompt": "a", "answer": 3}', 'line 2, has no field "answer" with a string in it'),
        ('{"prompt": "a", "answer": " "}', "line 2, has an empty answer"),
        ('{"prompt": "", "answer": "b"}', "line 2, has an empty prompt"),
        ('{"messages": []}', 'line 2, has no message of the role "assistant"'),
        ('{"messages": ["a"]}', 'line 2, needs "messages", a list of'),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "line 2, has an empty answer"),
        ('{"prompt": "\\ud800", "answer": "b"}', "line 2, has an unpaired surrogate"),
    ],
)
def test_a_line_that_is_no_example_is_named_by_its_number(tmp_path, line, words):
    path = tmp_path / "qa.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n" + line + "\n")
    with pytest.raises(UserError, match=words):
        load_corpus(str(path), tmp_path / "cache", examples=True)


def test_examples_of_files_are_split_and_shown_as_text(tmp_path):
    path = tmp_path / "qa.jsonl"
    lines = [json.dumps({"prompt": f"{n}?", "answer": "ä" * n, "id": n}) for n in range(1, 40)]
    path.write_text("\n".join(lines) + "\n")
    corpus = load_corpus(str(path), tmp_path / "cache", examples=True)
    assert len(corpus.train) + len(corpus.validation) == 39 and len(corpus.validation)
    text = as_text(corpus, BYTES)
    assert sorted(d.text for split in (text.train, text.validation) for d in split) == sorted(
        f"{n}?" + "ä" * n for n in range(1, 40)
    )
    with pytest.raises(UserError, match=r"data.loss=answers"):
        load_corpus(str(path), tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "words"),
    [('{"prompt": "a", "answer": "b"}\n', "has one example; legal: two"), ("\n", "is empty")],
)
def test_a_file_needs_two_examples(tmp_path, content, words):
    (tmp_path / "qa.jsonl").write_text(content)
    with pytest.raises(UserError, match=words):
        load_corpus(str(tmp_path / "qa.jsonl"), tmp_path / "cache", examples=True)


def test_a_corpus_without_files_holds_no_examples(tmp_path):
    with pytest.raises(UserError, match=r"legal: a file or folder of .jsonl"):
        load_corpus("python_stdlib", tmp_path / "cache", examples=True)
