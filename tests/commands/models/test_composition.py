"""Several runs behind one router: the right one answers, as it does alone, after one switch."""

import gc
import io
import json
import os
import random
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from marks import some
from places import ROOT

import sparse_dataflow as sd
from experiments import generate
from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.models import composition
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.data import cache
from sparse_dataflow.data.corpora import corpus_of_texts
from sparse_dataflow.evaluation import decoded_form, kv_cache
from sparse_dataflow.evaluation.composition import Composition
from sparse_dataflow.evaluation.router import Router
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.variants import variant


def text(alphabet, seed):
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(alphabet, k=4)) for _ in range(60))


ALPHABETS = {"digits": "0123456789", "letters": "abcdefghij"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> (model in a directory, its text in a folder)."""
    folder, models = tmp_path_factory.mktemp("composed"), {}
    for number, (name, alphabet) in enumerate(ALPHABETS.items()):
        config = sd.preset("pico").change(sparsity__block=16, model__num_layers=number + 1)
        model = sd.init(config, jax.random.key(number))
        path = sd.save(model, folder / name)
        texts = folder / f"{name}_text"
        texts.mkdir()
        for document in range(12):
            (texts / f"{document}.txt").write_text(text(alphabet, document))
        models[name] = str(path), str(texts)
    return models


@pytest.fixture
def flags(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    runs, corpora = (",".join(each) for each in zip(*folders.values()))
    return {"runs": runs, "router_corpora": corpora, "max_new_tokens": 3}


def test_the_router_picks_the_text_that_a_held_out_prompt_resembles():
    corpora = {
        name: corpus_of_texts([text(alphabet, seed) for seed in range(12)])
        for name, alphabet in ALPHABETS.items()
    }
    prompts = [
        (name, text(a, seed)[:20]) for name, a in ALPHABETS.items() for seed in range(90, 99)
    ]
    assert Router(corpora)([prompt for _, prompt in prompts]) == [name for name, _ in prompts]


def test_each_prompt_is_answered_by_its_run_as_alone_after_one_switch(
    folders, flags, tmp_path, capsys
):
    path = tmp_path / "prompts.jsonl"
    named = {"prompt": "1234", "run": folders["letters"][0]}
    path.write_text("\n".join(map(json.dumps, ["1234 5678", "abcd efgh", "8765 4321", named])))
    generate.main(generate.Options(prompts=str(path), **flags))
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    chosen = ["digits", "letters", "digits", "letters"]
    assert [line["run"] for line in lines] == [folders[name][0] for name in chosen]
    assert [line["prompt"] for line in lines] == ["1234 5678", "abcd efgh", "8765 4321", "1234"]
    assert len(re.findall(r"MB moved to the device in [\d.]+ ms", err)) == 2
    for name in set(chosen):
        alone = generate.Options(run=folders[name][0], prompts=str(path), max_new_tokens=3)
        generate.main(alone)
        texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
        for line, expected, by in zip(lines, texts, chosen):
            assert by != name or line["text"] == expected


@pytest.mark.slow
def test_one_expert_is_on_the_device_and_all_are_in_host_memory(folders):
    experts = Composition()
    for name, (path, _) in folders.items():
        experts.add(name, sd.load(path))
    assert experts.bytes("digits") < experts.bytes("letters")

    def on_device():
        gc.collect()
        return sum(a.nbytes for a in jax.live_arrays() if a.sharding.memory_kind == "device")

    before = on_device()
    for name in ("digits", "letters", "digits"):
        weights, switch = experts.activate(name)
        assert switch.bytes == experts.bytes(name) and switch.seconds > 0
        assert on_device() - before == experts.bytes(name)
        assert experts.activate(name) == (weights, None)


def test_a_router_without_text_and_runs_that_are_not_legal_are_refused(folders, flags, tmp_path):
    with pytest.raises(UserError, match=r"needs the training text of .* --router_corpora"):
        generate.main(generate.Options(prompt="a", runs=flags["runs"]))
    with pytest.raises(UserError, match="has 1 names for 2 runs"):
        generate.main(generate.Options(prompt="a", **flags | {"router_corpora": "python_stdlib"}))
    path = folders["digits"][0]
    with pytest.raises(UserError, match="twice"):
        composition.run_names(f"{path},{path}/")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "run": "other"}')
    with pytest.raises(UserError, match="line 1, names the run 'other'; legal: "):
        generate.main(generate.Options(prompts=str(tmp_path / "p.jsonl"), **flags))


def test_a_tilde_in_the_list_of_runs_is_expanded(folders, monkeypatch):
    first, second = (str(folder) for folder, *_ in folders.values())
    monkeypatch.setenv("HOME", os.path.dirname(first))
    assert composition.run_names(f"~/{os.path.basename(first)}, {second}") == [first, second]


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], "bfloat16"))
def test_a_switch_moves_the_stored_parameters_and_the_index_tables(monkeypatch, dtype):
    # As on a GPU: rows of a CPU have padding, and another index.
    monkeypatch.setattr(decoded_form, "_refusal", lambda: "there is no kernel")
    config = sd.preset("pico").change(sparsity__block=16, model__compute_dtype=dtype)
    for name in ("sparse", "dense"):
        model = variant(config, name).model
        experts = Composition()
        experts.add_weights("it", kv_cache.random_weights(model, 0))
        tables = jax.tree.leaves(stacks.stored_layouts(model))
        stored = jnp.dtype(dtype).itemsize * sd.parameter_count(model)
        assert experts.bytes("it") == stored + sum(table.nbytes for table in tables)
        assert bool(tables) == (name == "sparse")


def test_the_page_has_the_bytes_of_a_switch_at_the_13b():
    config = sd.preset("13b").change(model__compute_dtype="bfloat16")
    moved = {}
    for name in ("dense", "sparse"):
        model = variant(config, name).model
        tables = stacks.stored_layouts(model)
        weights = jax.eval_shape(
            lambda key, model=model, tables=tables: kv_cache.prepare(
                model, merged(gpt.init(model, key), tables)
            ),
            jax.random.key(0),
        )
        moved[name] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
    page = (ROOT / "docs/evidence/performance.md").read_text()
    [(dense, sparse, ratio)] = re.findall(
        r"13B in bfloat16, a dense switch copies ([\d.]+) GB, and a sparse one ([\d.]+) GB, a\s"
        r"ratio of \*\*([\d.]+)\*\*",
        page,
    )
    assert (dense, sparse) == (f"{moved['dense'] / 1e9:.2f}", f"{moved['sparse'] / 1e9:.2f}")
    assert ratio == f"{moved['dense'] / moved['sparse']:.2f}"


@pytest.mark.slow
def test_the_command_routes_each_line_and_switches_when_the_expert_changes(
    folders, flags, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1234 5678\nabcd efgh\nabce efgi\n"))
    argv = ["generate", "--interactive", *(f"--{name}={value}" for name, value in flags.items())]
    with pytest.raises(SystemExit) as left:
        command_line.run_main(generate.main, generate.__doc__, options=generate.Options, argv=argv)
    out, err = capsys.readouterr()
    assert not left.value.code
    assert re.findall("1234 5678|abcd efgh|abce efgi", out) == [
        "1234 5678",
        "abcd efgh",
        "abce efgi",
    ]
    digits, letters = (re.escape(path) for path, _ in folders.values())
    moved = r"[\d.,]+ MB moved to the device in [\d.,]+ ms"
    lines = [f"{digits}: {moved}", f"{letters}: {moved}", f"{letters}: on the device"]
    assert re.search(r".*\n.*".join(lines), err), err
