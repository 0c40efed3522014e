"""`sd.prune` from a directory to a directory: one layer at a time, and on after an interrupt."""

import dataclasses
import inspect
import shutil
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.core.model import stacks
from sparse_dataflow.files import derived
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.interchange.pruned_directory import FACTS, PrunedDirectory
from sparse_dataflow.pruning import rebuild

LLAMA = {
    "model__norm": "rmsnorm", "model__positions": "rotary", "model__activation": "silu",
    "model__gated_mlp": True, "model__fused_qkv": False, "model__biases": (),
    "model__tied_embeddings": False, "model__num_kv_heads": 1,
}  # fmt: skip
GPT2 = {"model__positions": "learned"}
TOKENS = [np.random.default_rng(n).integers(0, 512, (8, 32)) for n in range(4)]


def directory(folder, layers=2, width=32, **change):
    """Writes drawn dense weights in Hugging Face's format."""
    shape = {"model__num_layers": layers, "model__d_model": width, "model__d_ff": 2 * width}
    config = sd.preset("pico").dense().change(**shape, model__num_heads=2, **change)
    model = sd.init(config, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 2, model.params)
    return sd.save(dataclasses.replace(model, params=params), folder, form="dense")


def arrays(folder):
    return jax.tree.leaves(stacks.map_arrays(np.asarray, sd.load(folder).params))


def equal(one, other):
    return all(np.array_equal(*pair) for pair in zip(arrays(one), arrays(other), strict=True))


@pytest.mark.parametrize("family", some({"llama": LLAMA, "gpt2": GPT2}, "llama"))
@pytest.mark.parametrize("block", some([8, "1x16", "2:4", "narrow"], 8, "narrow"))
def test_a_directory_has_the_bits_of_the_model_in_memory(block, family, tmp_path):
    place = directory(tmp_path / "dense", **family)
    where = None if block == "narrow" else lambda name, _: name not in ("k", "v")
    in_memory = sd.prune(sd.load(place), TOKENS, block=block, where=where)
    written = sd.prune(place, TOKENS, block=block, where=where, out=tmp_path / "pruned")
    assert written.model == tmp_path / "pruned"
    assert written.errors == in_memory.errors
    assert sd.load(written.model).model == in_memory.model.model
    assert equal(sd.save(in_memory.model, tmp_path / "saved"), written.model)


@pytest.mark.parametrize(
    ("block", "dtype", "finished"),
    some(
        {
            "blocks": (8, "float32", 1), "rounded": (8, "bfloat16", 2),
            "rows": ("1x16", "bfloat16", 1), "narrow": ("narrow", "float32", 2),
        },
        "rounded", "narrow",
    ),
)  # fmt: skip
def test_an_interrupted_pruning_goes_on(block, dtype, finished, tmp_path, monkeypatch):
    place = directory(tmp_path / "dense", layers=3, **LLAMA)
    where = None if block == "narrow" else lambda name, _: name in ("mlp_in", "mlp_out")
    sites, options = 2 if where else 7, {"block": block, "dtype": dtype, "where": where}
    whole = sd.prune(place, TOKENS, out=tmp_path / "whole", **options)
    layers = []

    def interrupted(fit, held_out, kernel, target, real=rebuild.prune):
        if len(layers) == sites * finished:
            raise KeyboardInterrupt
        layers.append(kernel.shape)
        return real(fit, held_out, kernel, target)

    with monkeypatch.context() as patch:
        patch.setattr(rebuild, "prune", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sd.prune(place, TOKENS, out=tmp_path / "pruned", **options)
    assert not (tmp_path / "pruned").exists()
    with pytest.raises(sd.UserError, match=r"pruned with other tokens; legal: the same ones"):
        sd.prune(place, TOKENS[:2], out=tmp_path / "pruned", **options)
    with pytest.raises(sd.UserError, match=r"pruned with other rounds; legal: the same ones"):
        sd.prune(place, TOKENS, out=tmp_path / "pruned", rounds=3, **options)
    count = [0]

    def counted(*args, real=rebuild.prune):
        count[0] += 1
        return real(*args)

    monkeypatch.setattr(rebuild, "prune", counted)
    later = sd.prune(place, TOKENS, out=tmp_path / "pruned", **options)
    assert count[0] == sites * (3 - finished)
    assert later.errors == pytest.approx(whole.errors, rel=1e-5)
    if block == "narrow":  # Smaller products add in another order.
        for pair in zip(arrays(whole.model), arrays(later.model), strict=True):
            np.testing.assert_allclose(*pair, rtol=1e-3, atol=1e-4)
    else:
        assert equal(whole.model, later.model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "pruned", "whole"]


@pytest.mark.parametrize("change", some([LLAMA, GPT2], LLAMA))
def test_memory_does_not_grow_with_layers(change, tmp_path, monkeypatch):
    peaks = []
    for layers in (3, 10):
        place = directory(tmp_path / f"dense{layers}", layers, 64, **change)
        monkeypatch.setattr(rebuild, "prune", _first_groups)
        tracemalloc.start()
        mlp_in = lambda name, _: name == "mlp_in"  # noqa: E731
        sd.prune(place, [TOKENS[0]], block=16, where=mlp_in, out=tmp_path / f"pruned{layers}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    opened = huggingface.open_dense(place)
    layer = sum(leaf.nbytes for leaf in jax.tree.leaves(opened.layer(0)))
    assert peaks[1] - peaks[0] < 2 * layer


def _first_groups(fit, held_out, kernel, target):
    """Prunes to the groups of one diagonal, which takes no time."""
    rows, columns = target.groups.grid(kernel.shape)
    mask = np.add.outer(np.arange(rows), np.arange(columns)) % 2 == 0
    weights = np.kron(mask, np.ones((target.groups.rows, target.groups.cols))) * kernel
    return rebuild.Pruned(weights, mask, 0.0, held_out.error(weights))


@pytest.mark.slow
def test_weights_of_a_bfloat16_directory_are_those_of_its_float32_values(tmp_path):
    place = directory(tmp_path / "dense", **LLAMA)
    half = sd.save(sd.load(place), tmp_path / "half", form="dense", dtype="bfloat16")
    one = sd.prune(half, TOKENS, block=8, out=tmp_path / "one")
    other = sd.prune(sd.load(half), TOKENS, block=8, out=tmp_path / "other")
    assert equal(one.model, other.model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"out": "there"}, r"exists already; name a new folder"),
        ({"out": "new", "dtype": "float16"}, r"dtype='float16' is unknown; legal: float32"),
        ({"dtype": "bfloat16"}, r"dtype=bfloat16 without out; legal: float32"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(options, words, tmp_path):
    (tmp_path / "there").mkdir()
    place = directory(tmp_path / "dense", **LLAMA)
    if "out" in options:
        options = {**options, "out": tmp_path / options["out"]}
    with pytest.raises(sd.UserError, match=words):
        sd.prune(place, TOKENS, block=8, **options)
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*"))


def test_one_process_at_a_time_prunes_into_a_folder(tmp_path):
    place = directory(tmp_path / "dense", **LLAMA)
    hidden = tmp_path / ".pruned.pruning"
    hidden.mkdir()
    code = f"""
import pathlib, sys
from sparse_dataflow.files.folders import FolderLock
with FolderLock(pathlib.Path({str(hidden)!r})):
    print("owns", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as owner:
        owner.stdout.readline()
        with pytest.raises(sd.UserError, match=f"is in use by process {owner.pid} "):
            sd.prune(place, TOKENS, block=8, out=tmp_path / "pruned")
        owner.communicate(b"")
    assert sd.prune(place, TOKENS, block=8, out=tmp_path / "pruned").model.is_dir()


def _stopped(place, folder, layers):
    """Prunes until some layers are finished."""

    def put(self, *arguments, real=PrunedDirectory.put, done=[]):  # noqa: B006
        done.append(real(self, *arguments))
        if len(done) == layers:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrunedDirectory, "put", put)
        with pytest.raises(KeyboardInterrupt):
            sd.prune(place, TOKENS, out=folder, **SMALL)


SMALL = {"block": 8, "dtype": "float32", "where": lambda name, _: name == "mlp_in"}


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def test_what_was_damaged_while_a_pruning_stood_still_is_pruned_again(tmp_path):
    place = directory(tmp_path / "dense", layers=3, **LLAMA)
    whole = sd.prune(place, TOKENS, out=tmp_path / "whole", **SMALL)
    for number, damage in enumerate((_flip, lambda path: path.write_bytes(b""))):
        folder = tmp_path / f"pruned{number}"
        _stopped(place, folder, 2)
        work = folder.with_name(f".{folder.name}.pruning")
        damage(next(work.glob("model-00002*.safetensors")))
        damage(work / FACTS)
        assert equal(whole.model, sd.prune(place, TOKENS, out=folder, **SMALL).model)
        assert not list(folder.glob("*.record")) and not (folder / FACTS).exists()


def test_a_name_that_was_taken_meanwhile_loses_no_layer(tmp_path):
    place = directory(tmp_path / "dense", layers=2, **LLAMA)
    whole = sd.prune(place, TOKENS, out=tmp_path / "whole", **SMALL)
    folder = tmp_path / "pruned"
    _stopped(place, folder, 1)

    def put(self, *arguments, real=PrunedDirectory.put):
        folder.mkdir()
        (folder / "notes").write_text("of another program")
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrunedDirectory, "put", put)
        with pytest.raises(sd.UserError, match="by another program meanwhile"):
            sd.prune(place, TOKENS, out=folder, **SMALL)
    shutil.rmtree(folder)
    with pytest.raises(sd.UserError, match="pruned with other tokens"):
        sd.prune(place, TOKENS[:2], out=folder, **SMALL)
    assert equal(whole.model, sd.prune(place, TOKENS, out=folder, **SMALL).model)
    names = [sorted(path.name for path in each.iterdir()) for each in (folder, tmp_path / "whole")]
    assert names[0] == names[1]


ARGUMENTS = [
    n for n in inspect.signature(sd.prune).parameters if n not in ("out", "call", "tokens")
]
"""Arguments of the pruning of a language model that decide its weights; `tokens` is a part of the
batches that texts become."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_argument_is_a_part_of_what_made_a_layer(name, tmp_path):
    place = directory(tmp_path / "dense", layers=1, **LLAMA)
    other = directory(tmp_path / "other", layers=1, **LLAMA)
    changed = {
        "model": dataclasses.replace(sd.load(other), params=jax.tree.map(
            lambda leaf: leaf + 1, sd.load(other).params
        )),
        "batches": TOKENS[1:], "density": 0.25, "block": 4, "rounds": 1, "pattern": "monarch",
        "where": lambda name, _: name == "mlp_out", "dtype": "bfloat16",
    }  # fmt: skip
    origins = []

    def noted(self, number):
        origins.append({**self._facts, "layer": number})
        raise KeyboardInterrupt

    before = {"model": sd.load(place), "batches": TOKENS, **SMALL}
    for number, arguments in enumerate((before, before | {name: changed[name]})):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(PrunedDirectory, "restored", noted)
            sd.prune(**arguments, out=tmp_path / f"out{number}")
    assert derived.key(origins[0]) != derived.key(origins[1])
