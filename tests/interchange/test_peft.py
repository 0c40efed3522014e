"""Adapters in PEFT's format: its names and its logits, and a model with them merged."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from make_fixture import BYTES, FOLDERS, MIXTURES
from make_peft_fixture import ALPHA, MODULES, PEFT_FOLDERS, RANK, library_logits
from marks import some
from models import logits
from safetensors.numpy import load_file, save_file
from test_architectures import order_of

from sparse_dataflow.commands.library import save
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model import adapters
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface, peft, starting_point
from sparse_dataflow.interchange.architectures import ARCHITECTURES
from sparse_dataflow.interchange.equivalent_forms import QKV, fuse_qkv
from sparse_dataflow.runs import adapted_model

TRAINING = TrainingConfig(adapter_rank=RANK, adapter_alpha=ALPHA, sequence=16, batch=2)
IDS = np.random.default_rng(0).integers(0, BYTES.vocab_size, (2, 12), np.int32)
each_fixture = pytest.mark.parametrize("name", PEFT_FOLDERS)
LINEAR = [name for name in ARCHITECTURES if name not in MIXTURES]  # Those have no adapters.
each_architecture = pytest.mark.parametrize("name", LINEAR)


def trained_model(name, folder, factors=None, training=TRAINING):
    """A model as a run of adapters on a fixture gives it, with random factors if None."""
    start = starting_point.read(str(FOLDERS[name]))
    model = adapted_model.with_adapters(start.model, training.adapter_rank, training.frozen_dtype)
    state = starting_point.adapter_state_from(start, model, training)
    rng = np.random.default_rng(2)
    draw = lambda leaf: rng.normal(size=leaf.shape, scale=0.3).astype("f4")  # noqa: E731
    state = state._replace(params=factors or jax.tree.map(draw, state.params))
    record = RunRecord(
        "gpt13b_dense", ("python",), "2026-01-01", {}, "CPU", "qa", "", "", 260, {"dense": 1},
        start.provenance,
    )  # fmt: skip
    (folder / "dense").mkdir(parents=True)
    (folder / "dense" / "metrics.jsonl").touch()
    model, weights = adapters.dequantised(model, jax.device_get(state.merged))
    return Model(folder, "dense", model, weights, start.tokenizer, 1, training, record, {})


def factors_of_fixture(name):
    """The factors that PEFT saved, as a tree of parameters."""
    tensors = load_file(PEFT_FOLDERS[name] / peft.WEIGHTS)
    model = starting_point.read(str(FOLDERS[name])).model
    architecture = ARCHITECTURES[name]

    def stacked(module, factor):
        names = [
            f"base_model.model.{architecture.prefixes[0]}{module.format(i)}.lora_{factor}.weight"
            for i in range(model.num_layers)
        ]
        return np.stack([tensors[n].T for n in names])

    blocks = {}
    for projection in model.projections:
        module = architecture.tensors[f"blocks.{'q' if projection == 'qkv' else projection}"]
        a, b = stacked(module, "A"), stacked(module, "B")
        if projection == "qkv":  # GPT-2's c_attn has all queries, then all keys, then all values.
            columns = {n: {"b": b_of_n} for n, b_of_n in zip(QKV, np.split(b, 3, axis=-1))}
            b = fuse_qkv(model, {"blocks": columns})["blocks"]["qkv"]["b"]
        blocks[projection] = {"a_kernel": a, "b_kernel": b}
    return {"blocks": blocks}


@each_fixture
def test_adapters_of_peft_have_its_logits_here_and_are_written_with_its_names(name, tmp_path):
    trained = trained_model(name, tmp_path / "run", factors_of_fixture(name))
    saved = load_file(PEFT_FOLDERS[name] / "expected.safetensors")
    actual = logits(trained.model, trained.params, {}, saved["ids"])
    np.testing.assert_allclose(actual, saved["logits"], rtol=0, atol=1e-4)
    save(trained, tmp_path / "adapter", "adapter")
    theirs, ours = (load_file(f / peft.WEIGHTS) for f in (PEFT_FOLDERS[name], tmp_path / "adapter"))
    assert sorted(theirs) == sorted(ours)
    for tensor, value in theirs.items():
        np.testing.assert_array_equal(ours[tensor], value)
    folders = (PEFT_FOLDERS[name], tmp_path / "adapter")
    their_config, config = (json.loads((f / peft.CONFIG).read_text()) for f in folders)
    assert set(config) <= set(their_config)
    for key in ("peft_type", "task_type", "r", "lora_alpha", "bias", "fan_in_fan_out"):
        assert config[key] == their_config[key]
    assert set(config["target_modules"]) == set(MODULES[name])
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert trained.saved_record.init_from["weights"] in card and "PeftModel" in card


@pytest.mark.parametrize("name", some(LINEAR, "gpt2"))
def test_merged_weights_have_the_logits_of_weights_and_adapters(name, tmp_path):
    trained = trained_model(name, tmp_path / "run")
    expected = logits(trained.model, trained.params, {}, IDS)
    save(trained, tmp_path / "dense", "dense")
    merged = huggingface.read(tmp_path / "dense")
    assert merged.architecture == name and not any(spec.rank for _, spec in merged.model.linears)
    actual = logits(merged.model, merged.params, {}, IDS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    base = starting_point.read(str(FOLDERS[name]))
    assert np.abs(logits(base.model, base.params, {}, IDS) - expected).max() > 0.1


@each_architecture
def test_peft_adds_an_export_to_the_base_and_has_the_same_logits(name, tmp_path):
    library = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    trained = trained_model(name, tmp_path / "run")
    save(trained, tmp_path / "adapter", "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(FOLDERS[name])
    model = library.PeftModel.from_pretrained(base, tmp_path / "adapter")
    order = order_of(name)
    actual = library_logits(model, order[IDS])[..., order]
    expected = logits(trained.model, trained.params, {}, IDS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def logits_of_export(folder, form):
    """The logits of an export; adapters are added to the weights of the base that it names."""
    if form != "adapter":
        read = huggingface.read(folder)
        return logits(read.model, read.params, (), IDS)
    fields = json.loads((folder / peft.CONFIG).read_text())
    base = Path(fields["base_model_name_or_path"])
    weights, factors = load_file(base / "model.safetensors"), load_file(folder / peft.WEIGHTS)
    for a in [name for name in factors if name.endswith("lora_A.weight")]:
        target = a.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        module = target.split(".")[-2]
        rank = fields["rank_pattern"].get(module, fields["r"])
        scale = fields["alpha_pattern"].get(module, fields["lora_alpha"]) / rank
        weights[target] = weights[target] + scale * factors[a.replace("_A.", "_B.")] @ factors[a]
    added = folder.parent / f"added-{folder.name}"
    shutil.copytree(base, added)
    save_file(weights, added / "model.safetensors", metadata={"format": "pt"})
    return logits_of_export(added, "dense")


@pytest.mark.parametrize("form", some(["dense", "sparse", "adapter"], "sparse", "adapter"))
@pytest.mark.parametrize(
    "options",
    some(
        {str(fields): fields for fields in (
            {}, {"adapter_alpha": 3.0}, {"adapter_rank": 5}, {"frozen_dtype": "int8"},
            {"frozen_dtype": "int8", "adapter_alpha": 40.0},
        )},
        "{'adapter_alpha': 3.0}", "{'frozen_dtype': 'int8', 'adapter_alpha': 40.0}",
    ),
)  # fmt: skip
def test_each_option_of_adapters_is_in_each_export_or_refuses_it(form, options, tmp_path):
    trained = trained_model("llama", tmp_path / "run", None, replace(TRAINING, **options))
    expected = logits(trained.model, trained.params, {}, IDS)
    if form == "adapter" and "frozen_dtype" in options:
        with pytest.raises(UserError, match=r"int8 rounded, .* legal: form=dense"):
            save(trained, tmp_path / form, form)
        assert not (tmp_path / form).exists()
        return
    actual = logits_of_export(save(trained, tmp_path / form, form), form)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_run_without_adapters_or_of_other_weights_has_none_for_peft(tmp_path):
    trained = trained_model("llama", tmp_path / "run")
    whole = Model(**{**vars(trained), "training": TrainingConfig()})
    with pytest.raises(UserError, match=r"trained no adapters; legal: a run of training\.adapter"):
        save(whole, tmp_path / "adapter", "adapter")
    fields = {**trained.saved_record.to_json(), "init_from": {"path": "runs/one", "weights": ""}}
    other = Model(**{**vars(trained), "record": RunRecord(**fields)})
    with pytest.raises(UserError, match="that transformers does not load; legal"):
        save(other, tmp_path / "adapter", "adapter")
    assert not Path(tmp_path / "adapter").exists()
