"""A conversation goes on after what stops one text, and ends when it is asked to."""

import builtins
import json
import re
from types import SimpleNamespace

import jax
import pytest

import sparse_dataflow as sd
from experiments import generate
from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.models import load_model
from sparse_dataflow.commands.models.generate import Writer, read_prompts, write_file
from sparse_dataflow.data.tokenizer import gpt2_tokenizer
from sparse_dataflow.evaluation import generate as generation
from sparse_dataflow.files.errors import UserError

TOKENIZER = gpt2_tokenizer()


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Most models here have no parameters to prepare."""
    monkeypatch.setattr(Writer, "prepared", lambda writer: writer.weights)


@pytest.fixture
def converse(monkeypatch, capsys):
    """converse(inputs, write) -> (exit status, stdout, stderr, the prompts): each input is a line
    or what `input` raises; `write(prompt, on_token)` stands for the model."""

    def converse(inputs, write):
        prompts, seeds, waiting = [], [], iter(inputs)
        model = SimpleNamespace(
            tokenizer=TOKENIZER, context=16, model=SimpleNamespace(vocab_size=TOKENIZER.vocab_size)
        )

        def answer(prompt):
            found = next(waiting)
            if not isinstance(found, str):
                raise found
            return found

        def generated(model, tokens, *, on_token, seed, **options):
            prompts.append(TOKENIZER.decode(tokens[0]))
            seeds.extend(seed)
            stopped_by = write(prompts[-1], lambda text: on_token(0, text)) or "length"
            return [generation.Continuation("", [], stopped_by)]

        monkeypatch.setattr(load_model, "load", lambda options, mesh="": model)
        monkeypatch.setattr(generation, "generate", generated)
        monkeypatch.setattr(builtins, "input", answer)
        argv = ["generate", "--run=RUN", "--interactive", "--seed=3"]
        with pytest.raises(SystemExit) as left:
            command_line.run_main(
                generate.main, generate.__doc__, options=generate.Options, argv=argv
            )
        lines = [text for text in inputs if isinstance(text, str)]
        assert seeds == [3 + lines.index(prompt) for prompt in prompts if prompt in lines]
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--run=RUN", "--activation_sparsity=1"], "--activation_sparsity=1 is not legal"),
        (["--run=RUN", "--activation_sparsity=0.4,qkv:0.5"], "sparsity=0.4,qkv:0.5 is not legal"),
        (["--run=RUN", "--activation_sparsity=qkv:0.4,qkv:0.5"], "qkv:0.5 is not legal"),
        (["--run=RUN", "--activation_sparsity=qkv:half"], "=qkv:half is not legal: it must be"),
        (["--run=RUN", "--activation_sparsity=0.4"], "RUN is a Hugging Face directory; legal"),
    ],
)
def test_activation_sparsity_is_refused_without_a_run(monkeypatch, capsys, flags, message):
    model = SimpleNamespace(record=None, folder="RUN")
    monkeypatch.setattr(load_model, "load", lambda options, mesh="": model)
    with pytest.raises(SystemExit) as left:
        argv = ["generate", *flags]
        command_line.run_main(generate.main, generate.__doc__, options=generate.Options, argv=argv)
    assert left.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_experts_in_host_memory_write_the_same_text_and_the_traffic_is_said(monkeypatch, capsys):
    shape = {"d_model": 32, "num_heads": 2, "d_ff": 64, "experts": 4, "top_k": 2}
    config = sd.preset("pico").change(sparsity__block=8, sparsity__density=0.5)
    config = config.change(**{f"model__{name}": value for name, value in shape.items()})
    model = sd.init(config, jax.random.key(0))
    monkeypatch.setattr(load_model, "load", lambda options, mesh="": model)
    texts = []
    for slots in (0, 3):
        options = generate.Options(run="RUN", prompt="ab", max_new_tokens=3, expert_slots=slots)
        generate.main(options)
        texts.append(capsys.readouterr())
    assert texts[0].out == texts[1].out and not texts[0].err
    assert re.fullmatch(
        r"experts in host memory: ([\d.]+) of ([\d.]+) MB of weights on the device\n"
        r"prompts: [\d.]+ MB fetched for 2 tokens\n"
        r"writing: [\d.]+ MB fetched a token; \d+% of the chosen experts were on the device, "
        r"\d+% of the others were fetched ahead; \d+ of \d+ fetched experts were not chosen\n",
        texts[1].err,
    ), texts[1].err


def test_slots_of_experts_do_not_go_with_zeros(capsys):
    with pytest.raises(SystemExit) as left:
        argv = ["generate", "--expert_slots=2", "--run=RUN", "--activation_sparsity=0.4"]
        command_line.run_main(generate.main, generate.__doc__, options=generate.Options, argv=argv)
    assert left.value.code == 2
    assert "--expert_slots does not go with --activation_sparsity" in capsys.readouterr().err


def test_an_empty_line_begins_a_document(converse):
    *_, prompts = converse(["", EOFError()], lambda prompt, tell: tell("new"))
    assert prompts == [TOKENIZER.decode([TOKENIZER.eot_id])]


def test_a_line_that_is_too_long_is_named_and_the_next_is_continued(converse):
    status, out, err, prompts = converse(
        ["word " * 20, "of", EOFError()], lambda prompt, tell: tell(" it")
    )
    assert status == 0 and prompts == ["of"] and out == "of it\n\n"
    assert err.startswith("error: Prompt 1 has") and "in the context of 16" in err


def test_a_full_context_is_said(converse):
    def write(prompt, tell):
        tell(" on")
        return "context"

    _, out, err, _ = converse(["one", EOFError()], write)
    assert out == "one on\n\n" and err == "(The context of 16 tokens is full.)\n"


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_a_file_of_prompts_is_continued_in_batches(monkeypatch, capsys, tmp_path, batch):
    sizes = []

    def generated(model, tokens, *, seed, **options):
        sizes.append(len(tokens))
        texts = [f"{TOKENIZER.decode(ids)} {s}" for ids, s in zip(tokens, seed, strict=True)]
        return [generation.Continuation(text, [], "length") for text in texts]

    model = SimpleNamespace(
        tokenizer=TOKENIZER, context=16, model=SimpleNamespace(vocab_size=TOKENIZER.vocab_size)
    )
    monkeypatch.setattr(load_model, "load", lambda options, mesh="": model)
    monkeypatch.setattr(generation, "generate", generated)
    (tmp_path / "prompts.jsonl").write_text('"one\\ntwo"\n\n{"prompt": "é"}\n')
    options = generate.Options(
        prompts=str(tmp_path / "prompts.jsonl"), samples=3, temperature=1.0, batch=batch, seed=5
    )
    generate.main(options)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(sizes) == 6 and max(sizes) == min(batch, 6)
    assert [(line["prompt"], line["sample"]) for line in lines] == [
        (prompt, sample) for prompt in ("one\ntwo", "é") for sample in range(3)
    ]
    assert [line["text"] for line in lines] == [
        f"{line['prompt']} {seed}" for seed, line in enumerate(lines, start=5)
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("word " * 20, "Prompt 1 has 21 tokens"),
        ('{"text": "a"}', "line 1, has no prompt"),
        ("[1", "line 1, has no prompt"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path, content, message):
    path = tmp_path / ("prompts.txt" if content.startswith("word") else "prompts.jsonl")
    path.write_text(content)
    model = SimpleNamespace(
        tokenizer=TOKENIZER, context=16, model=SimpleNamespace(vocab_size=TOKENIZER.vocab_size)
    )
    with pytest.raises(UserError, match=message):
        write_file(Writer(model), read_prompts(str(path)), batch=1, samples=1, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 2}, "--temperature above 0"),
        ({"prompt": "a", "interactive": True}, "Give one of"),
        ({"prompts": "a", "interactive": True}, "Give one of"),
        (
            {"run": "a", "expert_slots": 2, "form": "int8"},
            "--form=int8 does not go with --expert_slots",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        generate.main(generate.Options(**options))
