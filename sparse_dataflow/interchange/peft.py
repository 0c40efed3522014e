"""Adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained(base, folder)` adds them to the model that `transformers` loads from
the directory that the run began with.  PEFT stores A as [rank, in] and B as [out, rank], and names
them by the module whose weight they belong to.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.architectures import ARCHITECTURES, Architecture
from sparse_dataflow.interchange.equivalent_forms import QKV, split_qkv

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def refuse_other(trained: Model) -> None:
    """Raises UserError unless PEFT can have the adapters of a trained model."""
    legal = "legal: a run of training.adapter_rank that began with a Hugging Face directory."
    if not trained.training.adapter_rank:
        raise UserError(f"{trained.folder} trained no adapters; {legal}")
    architecture = (trained.saved_record.init_from or {}).get("architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"The adapters of {trained.folder} are for weights that transformers does not load; "
            f"{legal} Or export the forms dense or sparse, which hold weights and adapters."
        )


def write(folder: Path, trained: Model) -> list[Path]:
    """Writes the adapters of a trained model into an existing folder; returns the files."""
    source = trained.saved_record.init_from or {}
    architecture = ARCHITECTURES[source["architecture"]]
    tensors = dict(_tensors(architecture, trained.model, trained.params))
    modules = sorted({name.split(".")[-3] for name in tensors})
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source["path"],
        "r": trained.training.adapter_rank,
        "lora_alpha": trained.training.adapter_alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        # Whether modules store kernels as [in, out], as GPT-2's do.
        "fan_in_fan_out": not architecture.transposed,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(fields, indent=1) + "\n")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return [folder / WEIGHTS]


def _tensors(
    architecture: Architecture, model: ModelConfig, params: dict
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the tensor of each factor."""
    by_module: dict[str, list[str]] = {}
    factors = {name: params["blocks"][name] for name in model.projections}
    inputs = {name: np.asarray(factors[name]["a_kernel"]) for name in factors}
    outputs = {"blocks": {n: {"b_kernel": np.asarray(f["b_kernel"])} for n, f in factors.items()}}
    outputs = split_qkv(model, outputs)["blocks"]
    if model.fused_qkv:
        inputs |= dict.fromkeys(QKV, inputs.pop("qkv"))
    for name in outputs:
        by_module.setdefault(architecture.tensors[f"blocks.{name}"], []).append(name)
    for module, names in by_module.items():
        names = [name for name in (*QKV, *names) if name in names]
        names = list(dict.fromkeys(names))  # q, k and v side by side in one module share A.
        stacked = np.concatenate([outputs[name]["b_kernel"] for name in names], axis=-1)
        for layer in range(model.num_layers):
            prefix = f"base_model.model.{architecture.prefixes[0]}{module.format(layer)}"
            a, b = inputs[names[0]][layer], stacked[layer]
            yield f"{prefix}.lora_A.weight", np.ascontiguousarray(a.T, np.float32)
            yield f"{prefix}.lora_B.weight", np.ascontiguousarray(b.T, np.float32)
