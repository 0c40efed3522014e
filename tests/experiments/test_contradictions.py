import json

import pytest
from absl import flags as absl_flags

from experiments import command_line, contradictions, flags
from sparse_dataflow.files.errors import UserError


def parse(*arguments, groups=flags.GROUPS):
    values = absl_flags.FlagValues()
    flags.define(groups, values)
    command_line.parse(["toy", *arguments], groups, values)
    return values


@pytest.fixture
def saved_run(tmp_path):
    """A run of `--steps=20 --density=0.25 --sparse_projections=qkv` at the scale it chose."""
    values = parse("--steps=20", "--density=0.25", "--sparse_projections=qkv")
    values.scale = "nano"
    folder = tmp_path / "runs" / "toy"
    folder.mkdir(parents=True)
    config = {"experiment": "toy", "flags": flags.as_dict(values)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps=3", "--minutes=2"], ["--steps", "--minutes", "one of them"]),
        (["--density=0"], ["--density", "in (0, 1]"]),
        (["--density=1.5"], ["--density", "in (0, 1]"]),
        (["--density=-1"], ["--density", "in (0, 1]"]),
        (["--warmup=1"], ["--warmup", "in [0, 1)"]),
        (["--final_rate=2"], ["--final_rate", "in [0, 1]"]),
        (["--minutes=0"], ["--minutes", "above 0"]),
        (["--block=0"], ["--block", "1 or more"]),
        (["--vocab_size=256"], ["--vocab_size", "at least 257"]),
        (["--sparse_projections=", "--density=0.5"], ["--density", "qkv,attn_out,mlp_in,mlp_out"]),
        (["--sparse_projections=none", "--block=8", "--rank=4"], ["--block, --rank"]),
        (["--sparse_projections=none", "--twin"], ["--twin"]),
        (["--sparse_projections=none", "--evolution=rigl"], ["--evolution", "qkv"]),
        (["--evolve_every=5"], ["--evolve_every=5", "--evolution=static", "set or rigl"]),
        (["--evolve_every=5", "--evolution=gradual"], ["--evolution=gradual", "set or rigl"]),
        (["--evolve_every=0", "--evolution=set"], ["--evolve_every=0", "1 or more"]),
        (["--evolve_at=0.5"], ["--evolve_at=0.5", "--evolution"]),
        (["--evolve_at=1", "--evolution=rigl"], ["--evolve_at=1", "[0, 1)"]),
        (["--evolution=low_rank_tail"], ["low_rank_tail", "--rank", "1 or more"]),
        (["--pattern=dense", "--density=0.5"], ["--pattern=dense", "--density=0.5"]),
        (["--batch=12", "--accumulation=5"], ["legal", "1, 2, 3, 4, 6, 12"]),
        (["--tokenizer=gpt2", "--vocab_size=2048"], ["--tokenizer=gpt2", "50257"]),
    ],
)
def test_contradictions_are_refused_by_name(arguments, words):
    with pytest.raises(UserError) as refused:
        flags.check(parse(*arguments))
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps=3"],
        ["--minutes=1"],
        ["--steps=0", "--minutes=1"],
        ["--sparse_projections=none"],
        ["--sparse_projections=mlp_in,mlp_out", "--density=0.25"],
        ["--pattern=dense"],
        ["--pattern=dense", "--density=1"],
        ["--evolution=rigl", "--evolve_every=5", "--evolve_at=0.5"],
        ["--evolution=low_rank_tail", "--rank=4"],
        ["--batch=12", "--accumulation=4"],
        ["--tokenizer=gpt2"],
        ["--tokenizer=gpt2", "--vocab_size=50257"],
    ],
)
def test_what_agrees_is_accepted(arguments):
    flags.check(parse(*arguments))


def test_an_experiment_may_lack_any_flag(saved_run, tmp_path):
    lines = {"batch": "--batch=4", "density": "--density=0.5", "out": f"--out={tmp_path / 'new'}"}
    for flag in [flag for group in flags.GROUPS for flag in group.flags]:
        groups = flags.without(flag.name)
        for drop in lines:
            values = parse(*[lines[n] for n in lines if n not in (drop, flag.name)], groups=groups)
            flags.check(values, groups)
            contradictions.adopt(values)
    groups = flags.without("out")
    contradictions.adopt(parse(f"--resume={saved_run}", groups=groups))


def test_resume_takes_the_saved_flags(saved_run):
    values = parse(f"--resume={saved_run}", "--eval_every=7")
    flags.check(values)
    contradictions.adopt(values)
    assert (values.steps, values.density, values.scale) == (20, 0.25, "nano")
    assert values.sparse_projections == ("qkv",)
    assert values.eval_every == 7
    assert values.out == str(saved_run)
    assert flags.as_dict(values)["sparse_projections"] == ["qkv"]


def test_resume_accepts_the_same_flags_again(saved_run):
    again = ["--steps=20", "--density=0.25", "--sparse_projections=qkv", "--scale=nano"]
    flags.check(parse(f"--resume={saved_run}", *again))


def test_resume_names_every_flag_that_contradicts(saved_run):
    wrong = ["--density=0.5", "--sparse_projections=all", "--seed=0", "--corpus=sotu"]
    with pytest.raises(UserError) as refused:
        flags.check(parse(f"--resume={saved_run}", *wrong))
    text = str(refused.value)
    assert "--density=0.5 (saved: 0.25)" in text
    assert "--sparse_projections=qkv,attn_out,mlp_in,mlp_out (saved: qkv)" in text
    assert "--corpus=sotu (saved: python_stdlib)" in text
    assert "--seed" not in text and "--steps" not in text


def test_resume_of_another_experiment_is_refused(saved_run):
    groups = flags.without("pattern", "density", "block", "rank", "sparse_projections", "twin")
    with pytest.raises(UserError, match="another experiment"):
        flags.check(parse(f"--resume={saved_run}", groups=groups), groups)


def test_resume_of_nothing_names_the_runs_there(saved_run):
    with pytest.raises(UserError) as refused:
        flags.check(parse(f"--resume={saved_run.parent / 'tyo'}"))
    assert str(saved_run) in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"flags": 3}', "{"])
def test_resume_of_a_damaged_configuration_is_refused(saved_run, text):
    (saved_run / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        flags.check(parse(f"--resume={saved_run}"))


def test_out_and_resume_contradict(saved_run):
    with pytest.raises(UserError, match="--out and --resume"):
        flags.check(parse(f"--resume={saved_run}", "--out=elsewhere"))


def test_out_never_lands_on_a_run(saved_run, tmp_path):
    with pytest.raises(UserError, match="--resume="):
        flags.check(parse(f"--out={saved_run}"))
    flags.check(parse(f"--out={tmp_path / 'new'}"))
