"""Reads exports with the transformers that is imported, and prints what it makes of them as JSON.

Imports nothing of this project, since other releases of its dependencies may be in front of it.

Arguments: prompts, separated by |; families with eager attention, by commas; FAMILY=FOLDER, ...
"""

import json
import sys
import warnings

import torch
import transformers

TOKENS = 6


def read(folder, prompts, **options):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, **options
    ).eval()
    rows = []
    for prompt in prompts:
        ids = tokenizer(prompt).input_ids
        batch = torch.tensor([ids])
        with torch.no_grad():
            logits = model(batch).logits[0, -1]
            output = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=TOKENS,
                do_sample=False,
            )[0, len(ids) :].tolist()
        text = tokenizer.decode(
            output, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        rows.append({"ids": ids, "logits": logits.tolist(), "output": output, "text": text})
    return rows


def main(prompts, eager, *folders):
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    results = {}
    for family, folder in (argument.split("=", 1) for argument in folders):
        options = {"attn_implementation": "eager"} if family in eager.split(",") else {}
        try:
            results[family] = read(folder, prompts.split("|"), **options)
        except Exception as error:  # An unknown family is one of several kinds.
            results[family] = f"{type(error).__name__}: {error}"
    print(json.dumps({"version": transformers.__version__, "exports": results}))


main(*sys.argv[1:])
