"""Writes tests/interchange/peft_ARCHITECTURE: random adapters saved by PEFT, with their logits.

python tests/interchange/make_peft_fixture.py     those that are missing; needs peft, torch
"""

import json
import sys
from pathlib import Path

import numpy as np
from make_fixture import FOLDERS
from safetensors.numpy import save_file

MODULES = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
PEFT_FOLDERS = {name: Path(__file__).with_name(f"peft_{name}") for name in MODULES}
RANK, ALPHA = 3, 6.0


def library_logits(model, ids):
    """The logits of a model of transformers or PEFT."""
    import torch

    with torch.no_grad():
        return model.eval()(torch.from_numpy(np.asarray(ids)).long()).logits.numpy()


def write(name, folder):
    """Saves random adapters of the fixture of an architecture, and their logits."""
    import peft
    import torch
    import transformers

    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(FOLDERS[name])
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=MODULES[name],
        fan_in_fan_out=name == "gpt2",
    )
    model = peft.get_peft_model(base, config)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    ids = np.random.default_rng(0).integers(4, 260, (2, 12), np.int32)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text()) | {"base_model_name_or_path": name}
    path.write_text(json.dumps(fields, indent=1) + "\n")
    save_file({"ids": ids, "logits": library_logits(model, ids)}, folder / "expected.safetensors")
    versions = {m.__name__: m.__version__ for m in (peft, transformers, torch)}
    (folder / "made_with.json").write_text(json.dumps(versions, indent=1) + "\n")


def main():
    """Writes the fixtures that are missing."""
    for name, folder in PEFT_FOLDERS.items():
        if not folder.exists():
            write(name, folder)


if __name__ == "__main__":
    sys.exit(main())
