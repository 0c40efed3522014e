"""README.md of an exported model: its sizes, training data, losses and task scores."""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.evaluation.activation_sparsity import share_words
from sparse_dataflow.evaluation.significance import is_share, share_interval
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files import console, json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.output import markdown
from sparse_dataflow.monitoring.metrics import read_metrics

EVALUATION = "evaluation.json"
_NO_TASK = f"None was evaluated; `{console.command('evaluate')} --run=RUN` does."

_READERS = {
    "dense": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")
```
Blocks that are not stored are zeros here: this is a dense model's size and speed.""",
    "sparse": """```python
from sparse_dataflow.interchange import sparse_form

config, params, tables = sparse_form.read("THIS FOLDER")
```
Without that package, with torch and safetensors: the file `run_in_torch.py` of this folder
multiplies by the stored blocks alone; `tokenizer.json` is for `tokenizers.Tokenizer.from_file`.""",
    "gguf": """```sh
llama-cli --model model.gguf --prompt "A prompt"
```
The weights are dense: those that are not stored are zeros here.""",
    "program": """```sh
python run_in_jax.py "A prompt" 20
```
That needs jax, flatbuffers and tokenizers. `run_in_jax.Model(folder).generate` continues lists of
token ids.""",
    "adapter": """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "THIS FOLDER")
```
These are adapters alone. The weights that they are for had the sha256 {weights}.""",
}


def model_card(trained: Model, form: str, versions: Mapping[str, str]) -> str:
    """Returns the Markdown of a trained model's card.

    Args:
      trained: trained model; its losses and scores are read from its run folder.
      form: form of the export, one of `huggingface.FORMS`, or "adapter".
      versions: versions of the exporting packages, by name.
    """
    record = trained.saved_record
    name = f"{Path(trained.folder).name}, {trained.variant}"
    return "\n\n".join(
        [
            _metadata(trained, record, form),
            f"# {name}",
            _sentence(trained, record),
            markdown(("", ""), _shape(trained)),
            f"## Use\n{_use(form, record, trained.tokenizer.has_text)}",
            f"## Held-out loss\n{_losses(trained)}",
            f"## Tasks\n{_tasks(trained)}",
            _provenance(record, versions),
        ]
    ).lstrip("\n")


_LIBRARIES = {
    "dense": "transformers",
    "sparse": "sparse_dataflow",
    "gguf": "gguf",
    "program": "jax",
    "adapter": "peft",
}


def _metadata(trained, record, form):
    """The YAML by which the hub lists a model."""
    kinds = trained.model.weight_words or ("dense weights",)
    lines = [f"library_name: {_LIBRARIES[form]}", "pipeline_tag: text-generation"]
    source = _on_hub((record.init_from or {}).get("path"))
    if source:
        lines.append(f"base_model: {source}")
        lines.append(f"base_model_relation: {'adapter' if form == 'adapter' else 'finetune'}")
    if corpus := _on_hub(record.corpus):
        lines += ["datasets:", f"- {'/'.join(corpus.split('/')[:2])}"]
    tags = ["sparse_dataflow", *(words.removesuffix(" weights") for words in kinds)]
    lines += ["tags:", *(f"- {tag}" for tag in (*tags, record.experiment))]
    return "\n".join(["---", *lines, "---"])


def _on_hub(place):
    """OWNER/NAME of a model or dataset on the hub; "" for any other place."""
    match = re.fullmatch(r"hf:([\w.-]+(?:/[\w.-]+)*)(?:@\S+)?", str(place or ""))
    return match[1] if match else ""


_FOLDERS = re.compile(r"(^|[=,])((?:~[^/=,]*|\.{1,2})?/[^,]*)")


def _public(word: str) -> str:
    """Returns a word of a command with the last names of its paths, which say nothing about the
    machine that it ran on."""
    return _FOLDERS.sub(lambda m: m[1] + m[2].rstrip("/").rpartition("/")[2], word)


_PATHS = re.compile(r"(?<==['\"])((?:~[^/'\"]*|\.{1,2})?/[^'\"]*)(?=['\"])")
"""Paths among the arguments of a Python call."""


def _name_of(match):
    return match[1].rstrip("/").rpartition("/")[2]


def _public_command(command: str) -> str:
    return console.with_commands(shlex.join(map(_public, shlex.split(command))))


def _use(form, record, has_text):
    """Returns how the form is read; a program of bare ids takes ids."""
    source = record.init_from or {}
    words = {
        "base": _on_hub(source.get("path")) or _public(str(source.get("path"))),
        "weights": str(source.get("weights")),
    }
    text = _READERS[form] if has_text else _READERS[form].replace('py "A prompt"', 'py --ids "1 2"')
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", word)
    return text


def _sentence(trained, record):
    seen = trained.step * trained.training.batch * trained.training.sequence
    words = " and ".join(trained.model.weight_words) or "dense weights"
    start = record.init_from
    began = f" It began with the weights of {_public(str(start['path']))}." if start else ""
    if rank := trained.training.adapter_rank:
        began += f" Adapters of rank {rank} were trained, and these weights were frozen."
    corpus = _public(record.corpus)
    return (
        f"A GPT of {words}, trained on {seen:,} tokens of the corpus `{corpus}` (content "
        f"{record.corpus_hash[:12]}) by sparse_dataflow.{began}"
    )


def _shape(trained):
    model = trained.model
    dense = cost.parameter_count(dataclasses.replace(model, linears=()))
    flops = cost.flops_per_token(model, trained.context, training=False)
    rows = [
        ("layers, width, heads", f"{model.num_layers}, {model.d_model}, {model.num_heads}"),
        ("MLP width, activation", f"{model.d_ff}, {model.activation}"),
        ("positions, norm", f"{model.positions}, {model.norm}"),
        ("parametrization", model.parametrization),
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("context it was trained with", f"{trained.context} tokens"),
        ("parameters stored", f"{cost.parameter_count(model):,} (dense: {dense:,})"),
        ("forward FLOPs a token", f"{flops.total:.3g}"),
        ("optimizer steps", f"{trained.step:,} of {trained.training.steps:,}"),
    ]
    return rows + _stored(model)


def _stored(model):
    """Returns a row for each projection that is not dense."""
    rows = []
    for name, spec in model.linears:
        if words := spec.weight.describe(spec, model.projection_shape(name)):
            rows.append((name, words))
    if model.density_by_depth:
        times = ", ".join(f"{number:g}" for number in model.density_by_depth)
        rows.append(("density of each layer", f"these times {times}"))
    return rows


def short_card(name: str, sentence: str, model: ModelConfig) -> str:
    """Returns the Markdown of the card of a model without a run."""
    rows = [("parameters", f"{cost.parameter_count(model):,}"), *_stored(model)]
    return f"# {name}\n\n{sentence}\n\n{markdown(('', ''), rows)}\n"


def _losses(trained):
    rows = read_metrics(trained.folder / trained.variant / "metrics.jsonl")
    kinds = {"eval": "a part of the held-out text", "final": "all held-out windows"}
    numbers = ("step", "loss", "bits_per_byte")
    whole = (row for row in rows if all(isinstance(row.get(n), int | float) for n in numbers))
    last = {row["kind"]: row for row in whole if row.get("kind") in kinds}
    if not last:
        return "None was measured."
    return markdown(
        ("measured on", "step", "loss, nats a token", "bits per byte"),
        [
            (kinds[kind], f"{row['step']:,}", f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}")
            for kind, row in last.items()
        ],
    )


def _tasks(trained):
    """Returns the scores in RUN/evaluation.json, if they are of this checkpoint."""
    path = trained.folder / EVALUATION
    if not path.exists():
        return _NO_TASK
    try:
        return _scores(trained, json_files.load(path))
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}).") from None


def _scores(trained, result):
    judged = result["models"].get(trained.variant)
    if judged is None or not trained.record or judged.get("id") != trained.record.identity:
        return _NO_TASK
    if judged["step"] != trained.step:
        return f"They were evaluated after step {judged['step']:,} only, not of these weights."
    if share := result.get("activation_sparsity"):
        return f"They were evaluated with {share_words(share)} as zeros only, not exactly."
    rows = []
    for row in result["rows"]:
        model = row["models"][trained.variant]
        baselines = (row["baselines"].get(name) for name in ("unigram", "bigram"))
        shots = "" if row["shots"] is None else row["shots"]
        text = lambda number: "" if number is None else f"{number:.4g}"  # noqa: E731
        error = "" if model["error"] is None else f"± {text(model['error'])}"
        if error and is_share(row["metric"]):
            sizes = row["items"], row["documents"]
            interval = share_interval(model["value"], model["error"], *sizes)
            error = " to ".join(map(text, interval))
        cells = text(model["value"]), error, text(row["chance"]), *map(text, baselines)
        rows.append((row["task"], shots, row["metric"], f"{row['items']:,}", *cells))
    head = "task, shots, metric, items, value, error, chance, unigram, bigram"
    words = "± is a standard error; shares have their 95% interval by Wilson."
    return (
        f"{markdown(head.split(', '), rows)}\n\n{words}\n\n`{_public_command(result['command'])}`"
    )


def _command(record):
    python_call = len(record.command) == 1 and record.replay == record.command[0]
    return _PATHS.sub(_name_of, record.replay) if python_call else _public_command(record.replay)


def _provenance(record, versions):
    code = f" Code: {record.code_in_words}." if record.code_in_words else ""
    seed = f" Seed: {record.seed}." if record.seed is not None else ""
    trained_with = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    exported = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"## How it was made\n`{_command(record)}`\n\n"
        f"Trained {record.date} on {record.machine} with {trained_with}. "
        f"Exported with {exported}.{code}{seed}\n"
    )
