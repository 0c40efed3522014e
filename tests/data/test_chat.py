"""Chat templates render as those of transformers, and the answers of a conversation are found."""

import json
import pathlib

import numpy as np
import pytest
import tokenizers
from chat_templates import SPECIALS, TALKS, TEMPLATES

from sparse_dataflow.data.chat import ASSISTANT, ChatTemplate
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.examples import encode
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import tokenizer_files

SAVED = json.loads((pathlib.Path(__file__).parent / "chat_texts.json").read_text("utf-8"))["texts"]
each_template = pytest.mark.parametrize("name", TEMPLATES)


def template_of(name):
    return ChatTemplate(TEMPLATES[name], tuple(SPECIALS.items()))


def rendered(name):
    template = template_of(name)
    return [
        template.render(talk[:count], prompt)
        for talk in TALKS
        for count, prompt in ((len(talk), False), (1, True))
    ]


@each_template
def test_a_template_renders_as_transformers_does(name):
    assert rendered(name) == SAVED[name]


@each_template
def test_a_template_renders_as_the_installed_transformers_does(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    import make_chat_fixture

    assert rendered(name) == make_chat_fixture.rendered(TEMPLATES[name])


@each_template
@pytest.mark.parametrize("talk", TALKS)
def test_every_answer_is_found_or_counted(name, talk):
    template = template_of(name)
    result = template.answers(talk)
    assert "".join(text for text, _ in result.pieces) == template.render(talk)
    answers = [text for text, is_answer in result.pieces if is_answer]
    contents = [m["content"] for m in talk if m["role"] == ASSISTANT]
    assert len(answers) + result.changed == len(contents)
    if len(answers) == len(contents):
        assert all(content in answer for content, answer in zip(contents, answers))
    for answer in answers:  # No header and no message of a user is trained.
        assert not answer.startswith(("<|im_start|>", "<|start_header_id|>", "[INST]", "\n<|"))
        for mark in ("user", "header_id", "what is", "[INST]", "Human:", "### Instr"):
            assert mark not in answer


TAILS = {
    "chatml": "<|im_end|>\n",
    "chatml with a default system": "<|im_end|>\n",
    "headers": "<|eot_id|>",
    "headers, always one more": "<|eot_id|>",
    "inst": "</s>",
    "inst with spaces": " </s>",
    "turns": "<end_of_turn>\n",
    "generation tags": "<|im_end|>",
}


@pytest.mark.parametrize("name", TAILS)
def test_an_answer_ends_with_its_turn(name):
    answers = [text for text, is_answer in template_of(name).answers(TALKS[1]).pieces if is_answer]
    space = " " if name == "inst with spaces" else ""
    contents = [m["content"] for m in TALKS[1] if m["role"] == ASSISTANT]
    assert answers == [f"{space}{content}{TAILS[name]}" for content in contents]


def test_answers_after_another_prompt_are_counted():
    assert template_of("chatml").answers(TALKS[1]).unprompted == 0
    assert template_of("think in the prompt").answers(TALKS[1]).unprompted == 2


def test_a_template_that_always_needs_a_date_gets_a_fixed_one(caplog):
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}")
    assert template.render(TALKS[0]) == "2024-07-26"
    assert "asks for the date" in caplog.text
    tested = ChatTemplate("{% if strftime_now is defined %}now{% else %}never{% endif %}")
    assert tested.render(TALKS[0]) == "never"


def byte_level():
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    return engine, sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def characters(**replaced):
    """A tokenizer as Llama 2's: a space in front of a text, and bytes of unknown characters."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    engine.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return engine, []


def metaspace():
    """A tokenizer as Mistral's newer ones: a space in front of the first word alone."""
    engine, _ = characters()
    engine.normalizer = None
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    return engine, []


@pytest.fixture(scope="session", params=[byte_level, characters, metaspace])
def library(request):
    engine, alphabet = request.param()
    specials = [*SPECIALS.values(), "<unk>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
    fallback = [] if alphabet else [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=specials + fallback,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    texts = [message["content"] for talk in TALKS for message in talk]
    engine.train_from_iterator([*texts, "[INST] [/INST] assistant user"] * 9, trainer)
    fields = json.loads(engine.to_str())
    fields["added_tokens"] = [t for t in fields["added_tokens"] if "<0x" not in t["content"]]
    return tokenizers.Tokenizer.from_str(json.dumps(fields))


@pytest.mark.parametrize("talk", TALKS[:2])
@each_template
def test_the_ids_are_those_of_the_whole_conversation(library, tmp_path, name, talk):
    library.save(str(tmp_path / "tokenizer.json"))
    settings = {**SPECIALS, "chat_template": TEMPLATES[name]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    size = library.get_vocab_size()
    config = {"vocab_size": size, "eos_token_id": library.token_to_id("</s>")}
    tokenizer = tokenizer_files.read(tmp_path, config).tokenizer
    text = tokenizer.chat_template.render(talk)
    expected = library.encode(text, add_special_tokens=False).ids
    try:
        examples = encode([Document("d", json.dumps({"messages": talk}))], tokenizer)
    except UserError as error:
        pytest.fail(str(error))
    if examples.skipped:
        pytest.skip("the template writes no answer as it is")
    ids = [tokenizer.original_ids[number] for number in examples.tokens]
    end = library.token_to_id("</s>")
    assert ids == (expected if expected[-1] == end else [*expected, end])
    trained = np.array(ids)[examples.answers]
    contents = [m["content"] for m in talk if m["role"] == ASSISTANT]
    decoded = library.decode(trained.tolist(), skip_special_tokens=False)
    if "json" not in name:
        assert all(content in decoded for content in contents)
    assert (trained == end).sum() <= max(1, text.count("</s>"))
