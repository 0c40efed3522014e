import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.commands import command_line, train
from sparse_dataflow.commands.job.run import Run
from sparse_dataflow.commands.request import NAMED, resume_flags
from sparse_dataflow.core.config import settings
from sparse_dataflow.evaluation.run_files import RunRecord, to_bytes
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.runs.run_config import LAPTOP_SCALES, RunConfig, preset

RECORD = RunRecord(
    "toy", ("python -m experiments.toy",), "today", {}, "a chip", "texts", "0", "0", 512,
    {"sparse": 20, "dense": 20},
)  # fmt: skip


def parse(*arguments):
    [request] = command_line.arguments(["toy", *arguments], tuple(NAMED), None)
    return request


@pytest.fixture
def saved_run(tmp_path):
    """A run of 20 steps at density 1/4, of qkv alone."""
    config = preset("nano").change(
        training__steps=20, sparsity__density=0.25, sparsity__projections=("qkv",)
    )
    config = config.change(parallel__mesh="data:8", run__eval_every=5)
    folder = tmp_path / "runs" / "toy"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(to_bytes(config.to_json()))
    (folder / "run.json").write_bytes(to_bytes(RECORD.to_json()))
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps=3", "--minutes=2"], ["--steps", "--minutes", "one of them"]),
        (["--set=run.scale=bogus"], ["--set run.scale=bogus", "unknown", "pico"]),
        (["--set=run.scale=3m", "--scale=pico"], ["run.scale", "--scale", "one of them"]),
        (["--density=1.5"], ["--density=1.5", "in (0, 1]"]),
        (["--density=0"], ["--density=0", "in (0, 1]"]),
        (["--set=training.warmup=1"], ["--set training.warmup=1", "in [0, 1)"]),
        (["--set", "training.final_rate=2"], ["--set training.final_rate=2", "in [0, 1]"]),
        (["--set=training.warmup"], ["no value", "path=value"]),
        (["--set=trainig.warmup=1"], ["did you mean training.warmup?"]),
        (["--minutes=0"], ["--minutes=0", "above 0"]),
        (["--block=0"], ["--block=0", "from 1 to"]),
        (["--batch=1000000007"], ["--batch=1000000007", "from 1 to 4,194,304"]),
        (["--seed=4294967296"], ["--seed=4294967296", "from 0 to 4,294,967,295"]),
        (["--set=training.weight_decay=1e6"], ["weight_decay=1e6", "from 0 to 100"]),
        (["--set=model.vocab_size=256"], ["model.vocab_size=256", "257 or more"]),
        (["--set=sparsity.projections=", "--density=0.5"], ["--density", "qkv,q,k,v,attn_out"]),
        (["--set=sparsity.projections=none", "--twin"], ["--twin"]),
        (["--set=sparsity.projections=none", "--evolution=rigl"], ["--evolution", "qkv"]),
        (["--evolution=static:every=5"], ["--evolution=static:every", "set or rigl"]),
        (["--evolution=gradual", "--set=evolution.every=5"], ["gradual", "set or rigl"]),
        (["--evolution=set:every=0"], ["--evolution=set:every=0", "from 1 to"]),
        (["--evolution=set:evry=5"], ["evolution.evry", "did you mean evolution.every?"]),
        (["--evolution=set:every"], ["rigl:every=100"]),
        (["--evolution=sett"], ["--evolution=sett", "did you mean set?"]),
        (["--set=evolution.at=0.5"], ["evolution.at", "evolution.method"]),
        (["--evolution=rigl:at=1"], ["--evolution=rigl:at=1", "[0, 1)"]),
        (["--evolution=rigl:first=qkv"], ["first", "sparse_to_dense"]),
        (["--evolution=rigl:every=5", "--set=evolution.every=6"], ["set the same"]),
        (["--pattern=dense", "--density=0.5"], ["--pattern=dense", "--density=0.5"]),
        (["--set=data.tokenizer=gpt2", "--set=model.vocab_size=2048"], ["gpt2", "50257"]),
        (["--set=parallel.stash=host"], ["parallel.stash", "parallel.executor=relay"]),
        (["--init_from=x", "--scale=pico"], ["--scale", "whose weights bring"]),
        (["--init_from=x", "--set=model.norm=rmsnorm"], ["model.norm", "whose weights bring"]),
        (["--corpus="], ["data.corpus is empty"]),
        (["--batch=12", "--set=training.micro_batches=5"], ["1, 2, 3, 4, 6, 12"]),
    ],
)
def test_contradictions_are_refused_by_name(arguments, words):
    with pytest.raises(UserError) as refused:
        parse(*arguments).config()
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--steps=0", "--minutes=1"], {"training__steps": 0, "run__minutes": 1.0}),
        (["--set=sparsity.projections=none"], {"sparsity__projections": ()}),
        (
            ["--pattern=dense", "--density=1"],
            {"sparsity__pattern": "dense", "sparsity__density": 1},
        ),
        (
            ["--evolution=rigl:every=5,at=0.5"],
            {"evolution__method": "rigl", "evolution__every": 5, "evolution__at": 0.5},
        ),
        (
            ["--evolution=sparse_to_dense:first=qkv+attn_out"],
            {"evolution__method": "sparse_to_dense", "evolution__first": ("qkv", "attn_out")},
        ),
        (["--set=data.tokenizer=gpt2"], {"data__tokenizer": "gpt2", "model__vocab_size": 50257}),
        (["--set=accumulation=2"], {"training__micro_batches": 2}),
        (["--notwin"], {"run__twin": "no"}),
        (["--twin"], {"run__twin": "yes"}),
        (["--twin=true"], {"run__twin": "yes"}),
        (["--twin=Narrow"], {"run__twin": "narrow"}),
    ],
)
def test_what_agrees_changes_the_preset_and_nothing_else(arguments, changes):
    assert parse("--scale=pico", *arguments).config() == preset("pico").change(**changes)


def test_a_cpu_runs_nano_in_float32_and_an_accelerator_what_fits_in_bfloat16():
    assert parse().config("cpu", 16 * GIB) == preset("nano")
    config = parse().config("gpu", 80 * GIB)
    assert config.run.scale not in LAPTOP_SCALES and config.model.compute_dtype == "bfloat16"
    config = parse("--scale=pico", "--set=model.compute_dtype=float32").config("gpu", 80 * GIB)
    assert config.model.compute_dtype == "float32"


def test_supar_brings_its_rates_unless_they_are_given():
    config = parse("--set=model.parametrization=supar", "--learning_rate=0.25").config()
    assert (config.training.sparse_rate, config.training.learning_rate) == (1.0, 0.25)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "sparsity.density": st.floats(1e-3, 1),
            "sparsity.block": st.integers(1, 512),
            "sparsity.pattern": st.sampled_from(["pixelfly", "random"]),
            "training.seed": st.integers(0, 2**31),
            "run.twin": st.sampled_from(["no", "yes", "narrow"]),
            "training.warmup": st.floats(0, 0.99),
            "evolution.first": st.just(()),
        },
    )
)
def test_settings_survive_the_command_line_and_json(chosen):
    arguments = [f"--set={path}={settings.text(value)}" for path, value in chosen.items()]
    config = parse("--scale=nano", *arguments).config()
    assert config == settings.changed(preset("nano"), chosen)
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_resume_takes_the_saved_settings_but_not_the_saved_devices(saved_run):
    config = parse(f"--resume={saved_run}", "--set=run.checkpoint_every=7").config()
    assert (config.training.steps, config.sparsity.density, config.run.scale) == (20, 0.25, "nano")
    assert config.sparsity.projections == ("qkv",)
    assert (config.run.eval_every, config.run.checkpoint_every) == (5, 7)
    assert config.parallel.mesh == "auto"
    assert config.run.out == str(saved_run)


def test_resume_accepts_the_same_settings_again(saved_run):
    again = ["--steps=20", "--density=0.25", "--set=sparsity.projections=qkv", "--scale=nano"]
    parse(f"--resume={saved_run}", *again)


def test_resume_names_every_setting_that_contradicts(saved_run):
    wrong = ["--density=0.5", "--set=sparsity.projections=all", "--seed=0", "--corpus=lm1b"]
    with pytest.raises(UserError) as refused:
        parse(f"--resume={saved_run}", *wrong, "--scale=pico")
    text = str(refused.value)
    assert "--scale=pico (saved: nano)" in text
    assert "--density=0.5 (saved: 0.25)" in text
    every = "qkv,q,k,v,attn_out,mlp_gate,mlp_in,mlp_out"
    assert f"--set sparsity.projections={every} (saved: qkv)" in text
    assert "--corpus=lm1b (saved: python_stdlib)" in text
    assert "--seed" not in text and "--steps" not in text


PLACES = {
    "run.mirror": ("/elsewhere/mirror", "s3://bucket/run", "a folder with spaces"),
    "parallel.server_dir": ("/elsewhere/server", "server", "/tmp/it's"),
}


def with_places(saved_run, **places):
    config = RunConfig.from_json(json.loads((saved_run / "config.json").read_text()))
    if "parallel__server_dir" in places:
        config = config.change(parallel__executor="relay")
    (saved_run / "config.json").write_bytes(to_bytes(config.change(**places).to_json()))


@pytest.mark.parametrize(
    ("path", "place"), [(path, place) for path, places in PLACES.items() for place in places]
)
def test_a_place_that_only_the_resumed_folder_names_is_asked_for(saved_run, path, place):
    with_places(saved_run, **{path.replace(".", "__"): place})
    with pytest.raises(UserError) as refused:
        parse(f"--resume={saved_run}")
    flags = re.findall(r"add (.*) to --resume=|or (.*) to leave", str(refused.value))
    [again], [without] = shlex.split(flags[0][0]), shlex.split(flags[1][1])
    assert again == f"--set={path}={place}" and without == f"--set={path}="
    for flag, value in ((again, place), (without, ""), (f"--set={path}=other", "other")):
        config = parse(f"--resume={saved_run}", flag).config()
        assert settings.to_json(config)[path.partition(".")[0]][path.partition(".")[2]] == value


def test_the_flags_that_resume_a_run_name_its_places(saved_run):
    with_places(saved_run, run__mirror="/else where", parallel__server_dir="server")
    config = RunConfig.from_json(json.loads((saved_run / "config.json").read_text()))
    flags = resume_flags(config, str(saved_run))
    assert parse(*flags).config().run.mirror == "/else where"
    assert parse(*flags).config().parallel.server_dir == "server"


def test_a_mirror_names_itself_and_is_not_asked_for(saved_run):
    with_places(saved_run, run__mirror=str(saved_run / ".." / "toy"))
    assert parse(f"--resume={saved_run}").config().run.mirror
    with_places(saved_run, run__mirror="/elsewhere")
    with pytest.raises(UserError):
        parse(f"--resume={saved_run}")


def test_resume_of_nothing_names_the_runs_beside_it(saved_run):
    with pytest.raises(UserError) as refused:
        parse(f"--resume={saved_run.parent / 'tyo'}").config()
    assert str(saved_run) in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"flags": 3}', "{"])
def test_resume_of_a_damaged_config_is_refused(saved_run, text):
    (saved_run / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        parse(f"--resume={saved_run}").config()


def test_a_run_of_an_older_version_is_refused_in_one_sentence(saved_run):
    (saved_run / "config.json").write_text('{"flags": {}, "variants": {}}')
    with pytest.raises(UserError, match="older sparse_dataflow"):
        parse(f"--resume={saved_run}").config()


def test_another_folder_for_a_resumed_run_needs_a_level_learning_rate(saved_run):
    with pytest.raises(UserError, match=r"trained with training\.schedule=cosine; legal: "):
        parse(f"--resume={saved_run}", "--out=elsewhere").config()


def test_processes_are_compared_by_all_but_their_own_number():
    one = parse("--steps=3", "--set=parallel.process=0")
    other = parse("--steps=3", "--set=parallel.process=1")
    assert one.facts == other.facts and one.parallel.process == 0
    assert one.facts != parse("--steps=4").facts


def test_run_scale_is_the_flag_scale():
    assert parse("--set=run.scale=3m").config() == parse("--scale=3m").config()


@pytest.mark.parametrize("scale", ["bogus", "auto", "3M", None, 3])
def test_a_config_has_a_scale_that_exists(scale):
    with pytest.raises(UserError, match=r"^run\.scale="):
        preset("pico").change(run__scale=scale)


@pytest.mark.parametrize(
    ("flags", "units", "dtype"),
    [
        ([], True, "bfloat16"),
        ([], False, "float32"),
        (["--scale=nano"], True, "float32"),
        (["--set=model.compute_dtype=float32"], True, "float32"),
        (["--set=model.compute_dtype=bfloat16"], False, "bfloat16"),
    ],
)
def test_where_the_machine_chooses_the_scale_it_chooses_the_dtype(monkeypatch, flags, units, dtype):
    configs = []

    def trained(config, **_):
        configs.append(config)
        return Run(Path(), config, finished=True)

    monkeypatch.setattr(train, "train", trained)
    monkeypatch.setattr(train.hardware, "has_bfloat16_units", lambda: units)
    assert train.train_experiment(parse(*flags), "gpt13b_sparse") == 0
    assert configs[0].run.scale == "nano" and configs[0].model.compute_dtype == dtype


def test_ids_may_have_a_smaller_vocabulary_than_bpe_learns():
    request = parse("--set=data.tokenizer=none", "--set=model.vocab_size=20")
    assert request.changes["model.vocab_size"] == 20
