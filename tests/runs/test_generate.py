"""A conversation goes on after what stops one text, and ends when it is asked to."""

import builtins
from types import SimpleNamespace

import pytest

from experiments import generate
from sparse_dataflow.data.tokenizer import gpt2_tokenizer
from sparse_dataflow.evaluation import generate as generation
from sparse_dataflow.runs import command_line, load_model

TOKENIZER = gpt2_tokenizer()


@pytest.fixture
def converse(monkeypatch, capsys):
    """converse(inputs, write) -> (exit status, stdout, stderr, the prompts): each input is a line
    or what `input` raises; `write(prompt, on_token)` stands for the model."""

    def converse(inputs, write):
        prompts, waiting = [], iter(inputs)
        model = SimpleNamespace(
            tokenizer=TOKENIZER, context=16, model=SimpleNamespace(vocab_size=TOKENIZER.vocab_size)
        )

        def answer(prompt):
            found = next(waiting)
            if not isinstance(found, str):
                raise found
            return found

        def generated(model, tokens, *, on_token, **options):
            prompts.append(TOKENIZER.decode(tokens[0]))
            write(prompts[-1], lambda text: on_token(0, text))

        monkeypatch.setattr(load_model, "load", lambda options: model)
        monkeypatch.setattr(generation, "generate", generated)
        monkeypatch.setattr(builtins, "input", answer)
        argv = ["generate", "--run=RUN", "--interactive"]
        with pytest.raises(SystemExit) as left:
            command_line.run(generate.main, generate.__doc__, options=generate.Options, argv=argv)
        return left.value.code, *capsys.readouterr(), prompts

    return converse


@pytest.mark.parametrize("end", [EOFError(), KeyboardInterrupt()])
def test_ctrl_c_stops_the_text_and_ends_at_the_prompt(converse, end):
    def write(prompt, tell):
        tell(" so far")
        if prompt == "one":
            raise KeyboardInterrupt
        tell(" and on")

    status, out, err, prompts = converse(["one", "two", end], write)
    assert (status, err, prompts) == (0, "", ["one", "two"])
    assert out == "one so far\ntwo so far and on\n\n"


def test_an_empty_line_begins_a_document(converse):
    *_, prompts = converse(["", EOFError()], lambda prompt, tell: tell("new"))
    assert prompts == [TOKENIZER.decode([TOKENIZER.eot_id])]


def test_a_line_that_is_too_long_is_named_and_the_next_is_continued(converse):
    status, out, err, prompts = converse(
        ["word " * 20, "of", EOFError()], lambda prompt, tell: tell(" it")
    )
    assert status == 0 and prompts == ["of"] and out == "of it\n\n"
    assert err.startswith("error: Prompt 1 has") and "in the context of 16" in err
