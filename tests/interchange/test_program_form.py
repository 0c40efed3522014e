"""The program form: jax alone continues prompts as the model does, whatever its weights are."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import export as jax_export
from marks import some
from models import READABLE, export
from test_masked_form import SPECS, drawn

import sparse_dataflow as sd
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.serving import program_form, run_in_jax
from sparse_dataflow.interchange.serving.readers import write_reader

PICO = sd.preset("pico").change(sparsity__block=16)


def program(folder):
    """Returns the model that the reader in a folder makes, as another program would."""
    spec = importlib.util.spec_from_file_location("run_in_jax", folder / "run_in_jax.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model(folder)


def greedy(logits, prompt, count):
    """Continues ids by the logits of complete texts."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.argmax(logits(np.array([ids]))[0, -1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("config", some(READABLE, "gemma3"))
def test_prompts_of_any_number_and_length_continue_as_in_the_model(tmp_path, config):
    params, tables = export(tmp_path / "model", "program", config)
    model, weights = program(tmp_path / "model"), weights_of(config, params, tables)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (3, config.max_len), np.int32)
    ours = np.asarray(jax.jit(lambda ids: whole.logits(config, weights, ids))(ids))
    for rows, length in ((1, 5), (3, 9)):
        tokens = ids[:rows, : length + 2]
        at = np.full(rows, length, np.int32)
        logits, caches = model.prefill(model.arrays, tokens, at)
        np.testing.assert_allclose(logits, ours[:rows, length - 1], rtol=0, atol=1e-4)
        # Prompts are padded: the next token is written over the padding.
        logits, _ = model.decode(model.arrays, caches, tokens[:, length], at)
        np.testing.assert_allclose(logits, ours[:rows, length], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", some(SPECS, "2 of 4"))
def test_masked_weights_are_those_under_the_mask(name, tmp_path):
    model = drawn(SPECS[name] if isinstance(name, str) else name)
    folder = sd.save(model, tmp_path / "model", form="program")
    prompt = [3, 1, 4, 1, 5]
    written = program(folder).generate([prompt], 4)[0].tolist()
    assert written == greedy(lambda ids: np.asarray(sd.logits(model, ids)), prompt, 4)


def test_masks_of_rows_are_whole_matrices_in_a_program(tmp_path):
    """Also where this machine would decode by the rows."""
    config = PICO.change(sparsity__pattern="masked", sparsity__density=0.5, sparsity__block="1x16")
    model = sd.init(config, jax.random.key(0))
    served = program(sd.save(model, tmp_path / "model", form="program"))
    [ours] = sd.generate(model, [[5, 8, 300]], max_new_tokens=6)
    assert served.generate([[5, 8, 300]], 6)[0].tolist() == ours.tokens


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ids", "2 512"], "--ids takes numbers from 0 to 511"),
        (["--ids", "2 x"], "--ids takes numbers from 0 to 511"),
        (["--ids", " "], "a prompt of 0 tokens and 20 new ones; legal: 1 or more of each, and 64"),
        (["--ids", "1 " * 64], "a prompt of 64 tokens"),
        (["--ids", "7", "0"], "a prompt of 1 tokens and 0 new ones"),
        (["--ids", "7", "b"], "invalid int value: 'b'"),
        ([], "the following arguments are required: prompt"),
    ],
)
def test_what_a_reader_cannot_continue_is_named(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["run_in_jax.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        run_in_jax.arguments(Path(), {"model": {"vocab_size": 512}}, 64)
    assert said in capsys.readouterr().err


def test_a_text_fills_the_context_at_most(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_in_jax.py", "5 6 7", "90", "--ids"])
    given, text = run_in_jax.arguments(Path(), {"model": {"vocab_size": 512}}, 64)
    assert (given.tokens, given.count, text) == ([5, 6, 7], 61, None)
    assert "context of 64 tokens will be full" in capsys.readouterr().err


@pytest.mark.slow
def test_low_rank_weights_have_programs(tmp_path):
    config = READABLE["dense"].with_linears(LinearSpec("low_rank", density=0.5))
    params, tables = export(tmp_path / "model", "program", config)
    prompt = [3, 1, 4, 1, 5]
    weights = weights_of(config, params, tables)
    ours = greedy(lambda ids: np.asarray(whole.logits(config, weights, ids)), prompt, 4)
    assert program(tmp_path / "model").generate([prompt], 4)[0].tolist() == ours


def test_a_python_without_this_package_continues_text(tmp_path):
    model = sd.init(PICO, jax.random.key(2))
    folder = sd.save(model, tmp_path / "model", form="program")
    site = str(Path(np.__file__).parents[1])
    paths = [site, *(path for path in sys.path if Path(path, "flatbuffers").is_dir())]
    prompt = "def main(x):"
    done = subprocess.run(
        [sys.executable, "-S", folder / "run_in_jax.py", prompt, "6"],
        env={"PATH": "", "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"},
        cwd="/", capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    [ours] = sd.generate(model, [prompt], max_new_tokens=6)
    assert done.stdout == prompt + ours.text + "\n"


@pytest.mark.parametrize("name", ["run_in_jax", "run_in_torch"])
def test_readers_import_nothing_of_this_package(name, tmp_path):
    write_reader(tmp_path, f"{name}.py")
    tree = ast.parse((tmp_path / f"{name}.py").read_text())
    nodes = list(ast.walk(tree))
    imports = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    own = {"run_in_jax": {"jax", "jax.numpy", "numpy"}}
    torch_modules = {"torch", "torch.nn", "safetensors.torch"}
    assert imports == {"argparse", "json", "sys", "pathlib", "tokenizers"} | own.get(
        name, torch_modules
    )


def test_temperature_draws_by_the_softmax(tmp_path):
    model = sd.init(PICO, jax.random.key(3))
    served = program(sd.save(model, tmp_path / "model", form="program"))
    prompts = [[7, 8, 9]] * 32
    ids = np.concatenate([served.generate(prompts, 1, 0.5, seed)[:, 0] for seed in range(20)])
    shares = np.bincount(ids, minlength=model.model.vocab_size) / len(ids)
    logits = np.asarray(sd.logits(model, np.array(prompts[:1])))[0, -1]
    expected = np.exp(logits / 0.5) / np.exp(logits / 0.5).sum()
    spread = np.sqrt(expected * (1 - expected) / len(ids))
    assert (np.abs(shares - expected) < 6 * spread + 1 / len(ids)).all()
    assert len({tuple(served.generate(prompts[:2], 5, 1.0, seed)[0]) for seed in range(4)}) > 1


def test_one_program_runs_on_all_platforms_whatever_machine_wrote_it(tmp_path):
    model = sd.init(PICO.change(sparsity__pattern="random"), jax.random.key(0))
    with dispatch.tracing_for("tpu"):
        folder = sd.save(model, tmp_path / "model", form="program", dtype="bfloat16")
    for name in (program_form.PREFILL, program_form.DECODE):
        exported = jax_export.deserialize(bytearray((folder / name).read_bytes()))
        assert exported.platforms == ("cpu", "cuda", "tpu")
        # Kernels would be calls of other names.
        calls = set(re.findall(r"custom_call @(\w+)", exported.mlir_module()))
        assert calls == {"shape_assertion"}
    assert {str(array.dtype) for array in program(folder).arrays} == {"bfloat16", "int32"}
    assert program(folder).generate([[1, 2]], 3).shape == (1, 3)


def test_text_longer_than_the_positions_is_refused(tmp_path):
    model = sd.init(PICO, jax.random.key(0))
    served = program(sd.save(model, tmp_path / "model", form="program"))
    most = json.loads((tmp_path / "model" / "config.json").read_text())["most"]["tokens"]
    assert served.generate([[1] * (most - 2)], 2).shape == (1, 2)
    with pytest.raises(ValueError, match=rf"1 prompts, {most - 1} \+ 2 tokens; legal: .* {most}"):
        served.generate([[1] * (most - 1)], 2)
    with pytest.raises(ValueError, match="33 prompts"):
        served.generate([[1]] * 33, 2)


def test_experts_are_refused(tmp_path):
    model = sd.init(PICO.change(model__experts=2), jax.random.key(0))
    with pytest.raises(UserError, match=r"program form with model\.experts=2 is not supported"):
        sd.save(model, tmp_path / "model", form="program")
    assert not (tmp_path / "model").exists()


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(UserError, match=r"flatbuffers: pip install 'sparse_dataflow\[train\]'"):
        sd.save(sd.init(PICO, jax.random.key(0)), tmp_path / "model", form="program")
    assert not (tmp_path / "model").exists()


def test_a_program_is_no_model_to_load(tmp_path):
    folder = sd.save(sd.init(PICO, jax.random.key(0)), tmp_path / "model", form="program")
    with pytest.raises(UserError, match="sparse_dataflow_program"):
        sd.load(folder)
