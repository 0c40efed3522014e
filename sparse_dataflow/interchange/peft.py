"""Adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained(base, folder)` adds them to the model that `transformers` loads from
the directory that the run began with.  PEFT stores A as [rank, in] and B as [out, rank], and names
them by the module whose weight they belong to.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.interchange.architectures import ARCHITECTURES, Architecture
from sparse_dataflow.interchange.equivalent_forms import QKV, split_qkv
from sparse_dataflow.interchange.tensors import write_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def refuse_other(trained: Model) -> None:
    """Raises UserError unless PEFT can have the adapters of a trained model."""
    legal = "legal: a run of training.adapter_rank that began with a Hugging Face directory."
    if not trained.training.adapter_rank:
        raise UserError(f"{trained.folder} trained no adapters; {legal}")
    if trained.training.frozen_dtype != "compute":
        raise UserError(
            f"The adapters of {trained.folder} are for weights that training.frozen_dtype="
            f"{trained.training.frozen_dtype} rounded, and PEFT would add them to those before "
            "rounding; legal: form=dense, which has the rounded weights and the adapters."
        )
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
    # Joined projections have the sum of their ranks. PEFT divides alpha by the rank, so alpha grows
    # too.
    ranks = {n.split(".")[-3]: len(a) for n, a in tensors.items() if n.endswith("lora_A.weight")}
    others = {n: r / trained.training.adapter_rank for n, r in ranks.items()}
    others = {module: times for module, times in others.items() if times != 1}
    fields: JsonObject = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source["path"],
        "r": trained.training.adapter_rank,
        "lora_alpha": trained.training.adapter_alpha,
        "rank_pattern": {module: ranks[module] for module in others},
        "alpha_pattern": {m: times * trained.training.adapter_alpha for m, times in others.items()},
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        # Whether modules store kernels as [in, out], as GPT-2's do.
        "fan_in_fan_out": not architecture.transposed,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(fields, indent=1) + "\n")
    write_file(folder / WEIGHTS, tensors, {})
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
        names = list(dict.fromkeys(names))
        kernels = [outputs[name]["b_kernel"] for name in names]
        a_kernel = inputs[names[0]]
        if model.fused_qkv or len(names) == 1:  # q, k and v side by side in one module share A.
            b_kernel = np.concatenate(kernels, axis=-1)
        else:
            a_kernel = np.concatenate([inputs[name] for name in names], axis=-1)
            b_kernel = _block_diagonal(kernels)
        for layer in range(model.num_layers):
            prefix = f"base_model.model.{architecture.prefixes[0]}{module.format(layer)}"
            a, b = a_kernel[layer], b_kernel[layer]
            yield f"{prefix}.lora_A.weight", np.ascontiguousarray(a.T, np.float32)
            yield f"{prefix}.lora_B.weight", np.ascontiguousarray(b.T, np.float32)


def _block_diagonal(kernels):
    """Returns [layers, sum of rows, sum of columns] with the kernels [layers, rows, columns]."""
    rows, columns = (sum(kernel.shape[axis] for kernel in kernels) for axis in (1, 2))
    result = np.zeros((len(kernels[0]), rows, columns), kernels[0].dtype)
    row = column = 0
    for kernel in kernels:
        end, last = row + kernel.shape[1], column + kernel.shape[2]
        result[:, row:end, column:last] = kernel
        row, column = end, last
    return result
